"""From run folders to a report: measured, compared, explained, with a few canvases to look into.

report, runs = build([Path("runs/arm"), Path("runs/mdm")], detector="zscore", explore=2)
write_page(report, Path("report.html"))
write_tables(runs, Path("tables"))              # CSV and Parquet, a row per sample
write_figures(report, Path("figures"), ["png", "pdf"])
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from floatscope import __version__
from floatscope.analysis import detectors
from floatscope.errors import UserError
from floatscope.reports.charts import Model, Report, Table
from floatscope.reports.compared import Compared
from floatscope.reports.explorer import payload
from floatscope.reports.figures import draw
from floatscope.reports.paper import foreword, paper
from floatscope.reports.sections import sections, summary
from floatscope.reports.sections.parts import listed
from floatscope.schema import State
from floatscope.traces import open_run

FEW = 5  # samples
BUDGET = 6_000_000  # bytes of the page that canvases may take together
SHOWN = ("revision", "dtype", "sampler", "new_tokens", "steps", "block", "temperature", "template")


def build(
    paths: Sequence[Path],
    detector: str = "zscore",
    explore: int = 2,
    told: Callable[[str], None] = lambda _: None,
    as_paper: bool = False,
) -> tuple[Report, list[Compared]]:
    """The report of these runs, or `as_paper` the paper's figures of them; `told` hears of each trace that was read."""
    by = detectors.detector(detector)
    labels = _labels(paths)
    runs = [Compared.of(path, label, str(by), told) for path, label in zip(paths, labels, strict=True)]
    models = [Model(run.label, run.family, len(run.run.done), _about(run), _facts(run)) for run in runs]
    embedded = list(_canvases(runs, explore))
    who = listed(labels) if len(labels) < 4 else f"{len(labels)} models"
    title = f"Attention floating, the paper's figures from {who}" if as_paper else f"Where {who} look"
    first, shown = (foreword(runs), paper(runs, by)) if as_paper else ([], sections(runs, by))
    said = [*first, *summary(runs), *_notes(runs)]
    return Report(title, said, models, shown, embedded, _provenance(runs, str(by))), runs


def write_tables(runs: Sequence[Compared], folder: Path) -> list[Path]:
    """Every table of every run and control, one file each as CSV and Parquet."""
    names = dict.fromkeys(name for run in runs for name in run.measured.tables)
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            parts = [
                table.assign(model=run.label, control=control)
                for run in runs
                for control, table in _with_controls(run, name)
            ]
            table = pd.concat(parts, ignore_index=True)
            table = table[["model", "control", *(c for c in table.columns if c not in ("model", "control"))]]
            table.to_csv(folder / f"{name}.csv", index=False)
            table.to_parquet(folder / f"{name}.parquet", index=False)
            written.append(folder / f"{name}.csv")
    except OSError as error:
        raise UserError(f"cannot write tables to {folder} ({error.strerror or error}); give another folder") from error
    return written


def linked(report: Report, tables: Path, page: Path) -> Report:
    """The report with its sections naming their tables as seen from the page."""
    where = os.path.relpath(tables, page.parent)
    named = [replace(s, table_name=f"{where}/{s.table_name}") if s.table_name else s for s in report.sections]
    return replace(report, sections=named)


def write_figures(report: Report, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Every chart as a figure, named after its section and its place in it, so that names sort as charts do."""
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for section in report.sections:
            drawn = [chart for chart in section.charts if not isinstance(chart, Table)]
            for number, chart in enumerate(drawn, 1):
                for ending in formats:
                    path = folder / f"{section.id}-{number:02}-{_slug(chart.title.partition(chr(10))[0])}.{ending}"
                    draw(chart, path, report.labels)
                    written.append(path)
    except OSError as error:
        raise UserError(f"cannot write figures to {folder} ({error.strerror or error}); give another folder") from error
    return written


def _labels(paths: Sequence[Path]) -> list[str]:
    """The models' names; runs of the same model are told apart by their folders."""
    names = [str(open_run(path).settings.get("model", path.name)) for path in paths]
    if len(set(map(str, paths))) != len(paths):
        raise UserError("a run is given twice; give each once")
    doubles = {name for name, times in Counter(names).items() if times > 1}
    return [f"{name} ({path.name})" if name in doubles else name for name, path in zip(names, paths, strict=True)]


def _about(run: Compared) -> str:
    count = len(run.controls)
    return f"beside {count} untrained control{'s' if count != 1 else ''}" if count else "without a control"


def _facts(run: Compared) -> dict[str, str]:
    return {name: str(run.run.settings[name]) for name in SHOWN if run.run.settings.get(name) is not None}


def _notes(runs: Sequence[Compared]) -> Iterator[str]:
    """What must be known before the models are compared."""
    for run in runs:
        if missing := run.run.missing:
            few = ", ".join(name if name.isprintable() else repr(name) for name in missing[:5]) + (
                " …" if len(missing) > 5 else ""
            )
            share = f"{len(missing)} of {len(run.run.samples)} samples are missing"
            yield f"**{run.label}** is not finished: {share} ({few})."
        if run.unfinished:
            which = f"{listed(run.unfinished)} of **{run.label}**"
            yield f"Left out: {which}, which lacks samples the model has; the same trace command goes on with it."
        reasons = dict.fromkeys(run.measured.missing.values())
        for reason in reasons:
            names = [name for name, why in run.measured.missing.items() if why == reason]
            yield f"Not measured for **{run.label}**: {listed(names)}, because {reason}."
        for reason in dict.fromkeys(run.measured.partial.values()):
            names = [name for name, why in run.measured.partial.items() if why == reason]
            yield f"Left out of {listed(names)} of **{run.label}**: {reason}."
    if scarce := [run.label for run in runs if len(run.run.done) < FEW]:
        yield f"{listed(scarce)}: fewer than {FEW} samples, too few for an interval to say much."
    if len({run.run.samples for run in runs}) > 1:
        yield "The runs were made on different samples, so differences between models are not paired."
    if _differently_tokenised(runs):
        yield "The models cut texts into different tokens: a position is each model's own."
    if len({len(run.table("absorption")["layer"].unique()) for run in runs if run.has("absorption")}) > 1:
        yield "The models have different numbers of layers; they are drawn by relative depth."


def _differently_tokenised(runs: Sequence[Compared]) -> bool:
    """Whether a prompt that all have is not the same tokens to all."""
    shared = [name for name in runs[0].run.done if all(name in run.run.done for run in runs)]
    traces = [run.run.trace(shared[0]) for run in runs] if shared else []
    prompts = {tuple(t.arrays["tokens"][0][t.arrays["states"][0] == State.PROMPT].tolist()) for t in traces}
    return len(prompts) > 1


def _canvases(runs: Sequence[Compared], explore: int) -> Iterator[dict[str, Any]]:
    """The first samples that all runs have, else each run's own."""
    done = [run.run.done for run in runs]
    shared = [name for name in done[0] if all(name in each for each in done)]
    for run in runs:
        for name in (shared or run.run.done)[:explore]:
            yield payload(run.run.trace(name), run.label, max_bytes=BUDGET // max(1, explore * len(runs)))


def _provenance(runs: Sequence[Compared], detector: str) -> dict[str, Any]:
    made = {run.label: {"settings": run.run.settings, "made": run.run.provenance} for run in runs}
    return {"floatscope": __version__, "detector": detector, **made}


def _with_controls(run: Compared, name: str) -> Iterator[tuple[str, pd.DataFrame]]:
    if name in run.measured.tables:
        yield "", run.measured.tables[name]
    for number, control in enumerate(run.controls):
        if name in control.tables:
            yield f"untrained {number}", control.tables[name]


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:48]
