"""The tables that the page needs from traces; the traces of a 30-layer model on 24 questions are half a gigabyte.

    build_trace_tables(model, samples, Path("runs/pair/traces/mdm"), template="instruct", new_tokens=16)
    read_table(Path("runs/pair/traces/mdm"), "absorption")                  # a row per sample, layer and set
    read_table(Path("runs/pair/traces/mdm/untrained"), "absorption")        # of the control, on the same questions

The traces are deleted once their tables are written; run.json is that of the traces.
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
from floatscope.analysis import anchor_movement, anchor_tables, depth, retrieval_heads
from floatscope.analysis.trace_view import TraceView, trace_views
from floatscope.errors import UserError
from floatscope.pipelines.trace import plan_trace
from floatscope.tasks.sample import Sample
from floatscope.tasks.template import load_template
from floatscope.traces.run import control_path
from floatscope.traces.run_record import RECORD_FILE

CONTROL = "untrained"
FIELDS = (
    "received", "uniform", "visible_rows", "eligible", "contribution", "top_key", "top", "head_stats", "row_key",
    "row_regions",
)  # fmt: skip
TABLES: dict[str, Callable[[TraceView], pd.DataFrame]] = {
    "absorption": anchor_tables.absorption,
    "concentration": anchor_tables.concentration,
    "anchor_classes": anchor_tables.anchor_classes,
    "sinks": anchor_tables.sinks,
    "top_keys": anchor_movement.top_keys,
    "drift": anchor_movement.drift,
    "layer_drift": anchor_movement.layer_drift,
    "structure": depth.structure,
    "predicting_rows": lambda view: depth.predicting_rows(cut_after_answer(view)),
    "retrieval": retrieval_heads.retrieval,
}
OLD_TABLES = {"anchor_classes": "identity", "layer_drift": "over_layers", "predicting_rows": "answer_rows"}
OLD_COLUMNS = {"moved": "contribution", "moved_ratio": "contribution_ratio"}
"""Tables and columns of folders that floatscope 0.6 wrote."""


def cut_after_answer(view: TraceView) -> TraceView:
    """Return the view with the commits of the answer only: a model that is done commits ends of text."""
    arrays, special = view.trace.arrays, view.trace.meta["special"]
    position, ends = arrays["commit_position"], [special[role] for role in ("eos", "eot") if role in special]
    end = position[np.isin(arrays["commit_token"], ends)].min(initial=position.max() + 1)
    is_answer = position < max(end, position.min() + 1)
    cut = {name: array[is_answer] if name.startswith(("commit_", "row_")) else array for name, array in arrays.items()}
    return TraceView(replace(view.trace, arrays=cut))


def build_trace_tables(
    model: fs.Model, samples: Sequence[Sample], out: Path, *, template: str | Path, **settings: Any
) -> Path:
    """Trace the samples and an untrained control, and write their tables to `out`, unless they are there."""
    if (out / RECORD_FILE).exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        run, watch = Path(folder), fs.Watch(fields=FIELDS)
        build_prompt = load_template(template).prompt
        for event in plan_trace(model, samples, run, watch=watch, controls=(0,), build_prompt=build_prompt, **settings):
            print(out, event.run.name if event.run != run else "", event.done, event.total, flush=True)
        _write_tables(control_path(run, 0), out / CONTROL)
        _write_tables(run, out)
    return out


def read_table(folder: Path, name: str) -> pd.DataFrame:
    """Read a table; refuse a folder that is not finished."""
    if not (folder / RECORD_FILE).exists():
        raise UserError(f"{folder} is not finished; run studies/pair/run.py again to resume it")
    file = folder / f"{name}.parquet"
    if not file.exists():
        file = folder / f"{OLD_TABLES.get(name, name)}.parquet"
    return pd.read_parquet(file).rename(columns=OLD_COLUMNS)


def _write_tables(run: Path, out: Path) -> None:
    """Write all tables, and run.json last, so that it marks a complete folder."""
    out.mkdir(exist_ok=True)
    parts: dict[str, list[pd.DataFrame]] = {name: [] for name in TABLES}
    for view in trace_views(fs.open_run(run)):
        for name, build_table in TABLES.items():
            try:
                parts[name].append(build_table(view))
            except UserError as error:
                print(f"{out} {name}: {error}", flush=True)
    tables = {name: pd.concat(rows, ignore_index=True) for name, rows in parts.items() if rows}
    tables["floating"] = anchor_movement.floating_index(tables.pop("top_keys"))
    for name, table in tables.items():
        table.to_parquet(out / f"{name}.parquet", index=False)
    shutil.copy(run / RECORD_FILE, out / RECORD_FILE)
