"""The tables that the claims need from traces; the traces of a 30-layer model on 64 questions are over a gigabyte.

    build_trace_tables(model, samples, Path("runs/claims/twins/traces/mdm"), new_tokens=40)

The traces of the model and of three untrained controls are analysed and deleted, sample by sample; run.json is that of
the traces.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from runs import print_event

import floatscope as fs
from floatscope.analysis.claims.measures import UNTRAINED
from floatscope.files.locks import acquire_lock
from floatscope.pipelines.job import run_job
from floatscope.pipelines.trace import plan_trace
from floatscope.tasks.sample import Sample
from floatscope.tasks.template import load_template
from floatscope.traces.run import LOCK_FILE, control_path
from floatscope.traces.run_record import RECORD_FILE

SEEDS = (0, 1, 2)
TABLES = (
    "absorption", "anchors", "attribution", "concentration", "coupling", "drift", "floating", "head_activity",
    "layer_drift", "norms", "order", "position_profile", "predicting_rows", "qk", "retrieval", "samples", "sinks",
    "structure",
)  # fmt: skip
FIELDS = (
    "received", "uniform", "visible_rows", "eligible", "contribution", "top_key", "top", "moments",
    "score_at_mean_direction", "key_stats", "head_stats", "residual", "row_key", "row_regions",
)  # fmt: skip
"""The fields of a trace behind these tables; without them a trace is several times as large."""


def build_trace_tables(
    model: fs.Model,
    samples: Sequence[Sample],
    out: Path,
    *,
    template: str | Path = "default",
    tables: Sequence[str] = TABLES,
    **settings: Any,
) -> Path:
    """Trace the samples and the untrained controls, and write their tables to `out`, unless they are there."""
    out.mkdir(parents=True, exist_ok=True)
    with acquire_lock(out / LOCK_FILE), TemporaryDirectory() as folder:
        if (out / RECORD_FILE).exists():
            return out
        run, watch = Path(folder), fs.Watch(fields=FIELDS)
        build_prompt = load_template(template).prompt
        job = plan_trace(model, samples, run, watch=watch, controls=SEEDS, build_prompt=build_prompt, **settings)
        run_job(job, print_event)
        for seed in SEEDS:
            _write_tables(control_path(run, seed), out / f"{UNTRAINED}-{seed}", tables)
        _write_tables(run, out, tables)
    return out


def _write_tables(run: Path, out: Path, names: Sequence[str]) -> None:
    """Write the tables, and run.json last, so that it marks a complete folder."""
    out.mkdir(exist_ok=True)
    tables = fs.analyse(run)
    for name in names:
        if name in tables:
            tables[name].to_parquet(out / f"{name}.parquet", index=False)
        else:
            print(f"{out} has no {name}: {tables.missing.get(name, 'not measured')}", flush=True)
    shutil.copy(run / RECORD_FILE, out / RECORD_FILE)
