"""What the page needs of traces, as small tables: the traces of a 30-layer model on 24 questions are half a gigabyte.

    measured(model, samples, Path("runs/pair/traces/mdm"), prompt="instruct", new_tokens=16)
    read_table(Path("runs/pair/traces/mdm"), "absorption")                  # a row per sample, layer and set
    read_table(Path("runs/pair/traces/mdm/untrained"), "absorption")        # of the control, on the same questions

The traces are thrown away once they are measured. run.json is that of the traces.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd

import floatscope as fs
from floatscope.analysis import anchors, depth, floating, retrieval
from floatscope.analysis.absorption import of
from floatscope.analysis.look import TraceView, trace_views
from floatscope.errors import UserError
from floatscope.tasks.sample import Sample
from floatscope.tasks.template import template
from floatscope.traces.record import RECORD
from floatscope.traces.run import control_path

CONTROL = "untrained"
FIELDS = (
    "received", "uniform", "seen", "eligible", "contribution", "top_key", "top", "head_stats", "row_key", "row_regions",
)  # fmt: skip
TABLES: dict[str, Callable[[TraceView], pd.DataFrame]] = {
    "absorption": of,
    "concentration": anchors.concentration,
    "identity": anchors.identity,
    "sinks": anchors.sinks,
    "tops": floating.tops,
    "drift": floating.drift,
    "over_layers": floating.over_layers,
    "structure": depth.structure,
    "answer_rows": lambda look: depth.answer_rows(answering(look)),
    "retrieval": retrieval.retrieval,
}


def answering(look: TraceView) -> TraceView:
    """The same with only those commits that are the answer: models that are done write ends of text."""
    arrays, special = look.trace.arrays, look.trace.meta["special"]
    position, ends = arrays["commit_position"], [special[role] for role in ("eos", "eot") if role in special]
    end = position[np.isin(arrays["commit_token"], ends)].min(initial=position.max() + 1)
    chosen = position < max(end, position.min() + 1)
    cut = {name: array[chosen] if name.startswith(("commit_", "row_")) else array for name, array in arrays.items()}
    return TraceView(replace(look.trace, arrays=cut))


def measured(model: fs.Model, samples: Sequence[Sample], out: Path, *, prompt: str | Path, **how: Any) -> Path:
    if (out / RECORD).exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        runs, watch = Path(folder), fs.Watch(fields=FIELDS)
        written = template(prompt).prompt
        for traced in fs.plan_trace(model, samples, runs, watch=watch, controls=(0,), write=written, **how):
            print(out, traced.run.name if traced.run != runs else "", traced.done, traced.total, flush=True)
        _write(control_path(runs, 0), out / CONTROL)
        _write(runs, out)
    return out


def read_table(folder: Path, name: str) -> pd.DataFrame:
    if not (folder / RECORD).exists():
        raise UserError(f"{folder} is not finished; studies/pair/run.py goes on with it")
    return pd.read_parquet(folder / f"{name}.parquet")


def _write(run: Path, out: Path) -> None:
    """Every table, and the record last: where it is, all are."""
    out.mkdir(exist_ok=True)
    found: dict[str, list[pd.DataFrame]] = {name: [] for name in TABLES}
    for look in trace_views(fs.open_run(run)):
        for name, table in TABLES.items():
            try:
                found[name].append(table(look))
            except UserError as error:
                print(f"{out} {name}: {error}", flush=True)
    tables = {name: pd.concat(parts, ignore_index=True) for name, parts in found.items() if parts}
    tables["floating"] = floating.floating_index(tables.pop("tops"))
    for name, table in tables.items():
        table.to_parquet(out / f"{name}.parquet", index=False)
    shutil.copy(run / RECORD, out / RECORD)
