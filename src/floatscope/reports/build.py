"""From run folders to a report: tables, comparisons, explanations, and a few canvases to explore.

report(["runs/arm", "runs/mdm"], "report.html")            # the page, in one call

contents, runs = build_report([Path("runs/arm"), Path("runs/mdm")], detector="zscore", explore=2)
write_page(contents, "report.html")
write_tables(runs, Path("tables"))                         # CSV and Parquet, a row per sample
write_figures(contents, Path("figures"), ["png", "pdf"])
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from floatscope import __version__
from floatscope.analysis.detectors import parse_detector
from floatscope.errors import UserError, unknown_choice
from floatscope.reports.charts import Model, Report, Table
from floatscope.reports.explorer import build_payload
from floatscope.reports.intervals import UNTRAINED
from floatscope.reports.page import write_page
from floatscope.reports.paper import build_paper_introduction, build_paper_sections
from floatscope.reports.report_runs import ReportRun
from floatscope.reports.sections import build_sections, build_summary
from floatscope.reports.sections.chart_builders import join_words
from floatscope.reports.sections.decoding import find_shared_sample
from floatscope.schema import State
from floatscope.traces import Run, find_controls, open_run

FIGURE_FORMATS = ("png", "pdf", "svg")
MIN_SAMPLES = 5  # the report warns about runs with fewer
MAX_EXPLORER_BYTES = 6_000_000  # of all canvases on a page
SHOWN_SETTINGS = ("revision", "dtype", "sampler", "new_tokens", "steps", "block", "temperature", "chat")


@dataclass(frozen=True)
class ReportFiles:
    """The files of a report, and the sentences of its summary."""

    page: Path
    summary: list[str]  # results and notes; `**words**` are bold
    tables: list[Path]
    figures: list[Path]


def report(
    runs: Sequence[str | Path | Run],
    out: str | Path = "report.html",
    *,
    detector: str = "zscore",
    commits: str = "answer",
    explore: int = 2,
    tables: str | Path | None = None,
    figures: str | Path | None = None,
    figure_formats: Sequence[str] = ("png", "pdf"),
    paper: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Compare runs on one HTML page that needs no network and no other file; return its path.

    Untrained controls beside a run (`fs.trace(..., controls=(0,))`) are measured with it. `write_report` does the
    same and also returns the summary and the other files.

    Args:
        runs: run folders of `fs.trace` or `floatscope trace`, or opened runs.
        out: the page, a path that ends in .html.
        detector: the rule for anchors, such as "rulli(eps=3)".
        commits: "answer" or "all": the commits that count for reading, retrieval, order and floating; "all" includes
            the end-of-text tokens after the answer.
        explore: number of samples per run to explore step by step.
        tables: a folder for the numbers, one CSV and one Parquet file per table; the page links them.
        figures: a folder for the charts as figures.
        figure_formats: png, pdf, svg.
        paper: draw the figures of the attention floating paper instead of the standard sections.
        on_progress: called as on_progress(done, total) after each trace.

    Returns:
        The path of the page.

    Example:
        run = fs.trace(fs.load("twin:mdm"), fs.read_samples("twin:reading-5", limit=2), "runs/mdm", new_tokens=4)
        fs.report([run], "report.html")
    """
    return write_report(
        runs,
        out,
        detector=detector,
        commits=commits,
        explore=explore,
        tables=tables,
        figures=figures,
        figure_formats=figure_formats,
        paper=paper,
        on_progress=on_progress,
    ).page


def write_report(
    runs: Sequence[str | Path | Run],
    out: str | Path = "report.html",
    *,
    detector: str = "zscore",
    commits: str = "answer",
    explore: int = 2,
    tables: str | Path | None = None,
    figures: str | Path | None = None,
    figure_formats: Sequence[str] = ("png", "pdf"),
    paper: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> ReportFiles:
    """Do what `report` does, and return the summary and the paths of all files."""
    out = Path(out)
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"the page must end in .html, such as report.html, got {out}")
    for format in figure_formats:
        if format not in FIGURE_FORMATS:
            raise unknown_choice("figure format", format, FIGURE_FORMATS)
    paths = [run.path if isinstance(run, Run) else Path(run) for run in runs]
    contents, report_runs = build_report(paths, detector, explore, _count_traces(paths, on_progress), paper, commits)
    table_files, figure_files = list[Path](), list[Path]()
    if tables is not None:
        table_files = write_tables(report_runs, Path(tables))
        contents = link_tables(contents, Path(tables), out)
    if figures is not None:
        figure_files = write_figures(contents, Path(figures), figure_formats)
    return ReportFiles(write_page(contents, out), contents.summary, table_files, figure_files)


def _count_traces(paths: Sequence[Path], on_progress: Callable[[int, int], None] | None) -> Callable[[str], None]:
    """From the name of each trace to the number of traces so far."""
    if on_progress is None:
        return lambda _: None
    total = sum(len(open_run(folder).finished) for path in paths for folder in (path, *find_controls(path)))
    done = 0

    def count(_: str) -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    return count


def build_report(
    paths: Sequence[Path],
    detector: str = "zscore",
    explore: int = 2,
    on_progress: Callable[[str], None] = lambda _: None,
    paper: bool = False,
    commits: str = "answer",
) -> tuple[Report, list[ReportRun]]:
    """The contents of a report, and its runs with their tables.

    With `paper`, the sections are the figures of the paper. `on_progress` gets the name of each sample that was read.
    `commits` says which commits count.
    """
    parsed = parse_detector(detector)
    labels = _label_runs(paths)
    runs = [
        ReportRun.open(path, label, str(parsed), on_progress, commits)
        for path, label in zip(paths, labels, strict=True)
    ]
    models = [
        Model(run.label, run.paradigm, len(run.run.finished), _describe_controls(run), _facts(run)) for run in runs
    ]
    payloads = list(_build_payloads(runs, explore))
    names = join_words(labels) if len(labels) < 4 else f"{len(labels)} models"
    summary = [*build_summary(runs), *_list_notes(runs)]
    if paper:
        title = f"Attention floating: the paper's figures, drawn from {names}"
        summary, sections = [*build_paper_introduction(runs), *summary], build_paper_sections(runs, parsed)
    else:
        title, sections = f"Where {names} look", build_sections(runs, parsed)
    return Report(title, summary, models, sections, payloads, _provenance(runs, str(parsed))), runs


def write_tables(runs: Sequence[ReportRun], folder: Path) -> list[Path]:
    """Write every table of every run and control as CSV and Parquet; return the CSV files.

    The columns `model` and `control` say where a row comes from; `control` is empty for the model itself.
    """
    names = dict.fromkeys(name for run in runs for name in run.tables.tables)
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            parts = [
                table.assign(model=run.label, control=control)
                for run in runs
                for control, table in _tables_with_controls(run, name)
            ]
            table = pd.concat(parts, ignore_index=True)
            table = table[["model", "control", *(c for c in table.columns if c not in ("model", "control"))]]
            table.to_csv(folder / f"{name}.csv", index=False)
            table.to_parquet(folder / f"{name}.parquet", index=False)
            files.append(folder / f"{name}.csv")
    except OSError as error:
        raise UserError(f"cannot write tables to {folder} ({error.strerror or error}); give another folder") from error
    return files


def link_tables(report: Report, tables: Path, page: Path) -> Report:
    """The report with the table files of its sections relative to the page."""
    folder = os.path.relpath(tables, page.parent)
    sections = [replace(s, table_file=f"{folder}/{s.table_file}") if s.table_file else s for s in report.sections]
    return replace(report, sections=sections)


def write_figures(report: Report, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write every chart as a figure, in each format. Names begin with the section and the number of the chart."""
    from floatscope.reports.figures import draw  # loads matplotlib

    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for section in report.sections:
            charts = [chart for chart in section.charts if not isinstance(chart, Table)]
            for number, chart in enumerate(charts, 1):
                for format in formats:
                    title = chart.title.partition("\n")[0]
                    path = folder / f"{section.id}-{number:02}-{_slugify(title)}.{format}"
                    draw(chart, path, report.labels)
                    files.append(path)
    except OSError as error:
        raise UserError(f"cannot write figures to {folder} ({error.strerror or error}); give another folder") from error
    return files


def _label_runs(paths: Sequence[Path]) -> list[str]:
    """The names of the models; runs of the same model add their folder."""
    names = [str(open_run(path).settings.get("model", path.name)) for path in paths]
    if len(set(map(str, paths))) != len(paths):
        raise UserError("a run is given twice; give each run once")
    duplicates = {name for name, count in Counter(names).items() if count > 1}
    return [f"{name} ({path.name})" if name in duplicates else name for name, path in zip(names, paths, strict=True)]


def _describe_controls(run: ReportRun) -> str:
    count = len(run.controls)
    return f"with {count} untrained control{'s' if count != 1 else ''}" if count else "without an untrained control"


def _facts(run: ReportRun) -> dict[str, str]:
    settings = {name: run.run.settings.get(name) for name in SHOWN_SETTINGS}
    return {
        name: "yes" if value is True else str(value)
        for name, value in settings.items()
        if value is not None and value is not False
    }


def _list_notes(runs: Sequence[ReportRun]) -> Iterator[str]:
    """Sentences that a reader needs before comparing the models."""
    for run in runs:
        if missing := run.run.missing:
            names = ", ".join(name if name.isprintable() else repr(name) for name in missing[:5])
            more = " …" if len(missing) > 5 else ""
            share = f"{len(missing)} of {len(run.run.samples)} samples are missing"
            yield f"**{run.label}** is incomplete: {share} ({names}{more})."
        if run.incomplete_controls:
            yield (
                f"Left out: {join_words(run.incomplete_controls)} of **{run.label}**, because samples of the model are"
                " missing there; the same trace command resumes it."
            )
        for reason in dict.fromkeys(run.tables.missing.values()):
            tables = [name for name, why in run.tables.missing.items() if why == reason]
            yield f"Not measured for **{run.label}**: {join_words(tables)}, because {reason}."
        for reason in dict.fromkeys(run.tables.partial.values()):
            tables = [name for name, why in run.tables.partial.items() if why == reason]
            yield f"Left out of {join_words(tables)} of **{run.label}**: {reason}."
    if small := [run.label for run in runs if len(run.run.finished) < MIN_SAMPLES]:
        yield f"{join_words(small)}: fewer than {MIN_SAMPLES} samples, too few for a reliable interval."
    if len({run.run.samples for run in runs}) > 1:
        yield "The runs have different samples, so differences between models are not paired."
    if _have_different_tokens(runs):
        yield "The models tokenize the texts differently: positions are not comparable between models."
    if len({len(run.table("absorption")["layer"].unique()) for run in runs if run.has_table("absorption")}) > 1:
        yield "The models have different numbers of layers; the charts use relative depth."


def _have_different_tokens(runs: Sequence[ReportRun]) -> bool:
    """Whether the first shared prompt has different tokens in different runs."""
    sample = find_shared_sample(runs)
    traces = [run.run.trace(sample) for run in runs] if sample is not None else []
    prompts = {tuple(t.arrays["tokens"][0][t.arrays["states"][0] == State.PROMPT].tolist()) for t in traces}
    return len(prompts) > 1


def _build_payloads(runs: Sequence[ReportRun], explore: int) -> Iterator[dict[str, Any]]:
    """The first samples that all runs share; without any, the first samples of each run."""
    shared = [name for name in runs[0].run.finished if all(name in run.run.finished for run in runs)]
    max_bytes = MAX_EXPLORER_BYTES // max(1, explore * len(runs))
    for run in runs:
        for name in (shared or run.run.finished)[:explore]:
            yield build_payload(run.run.trace(name), run.label, max_bytes=max_bytes)


def _provenance(runs: Sequence[ReportRun], detector: str) -> dict[str, Any]:
    records = {run.label: {"settings": run.run.settings, "provenance": run.run.provenance} for run in runs}
    return {"floatscope": __version__, "detector": detector, **records}


def _tables_with_controls(run: ReportRun, name: str) -> Iterator[tuple[str, pd.DataFrame]]:
    if run.has_table(name):
        yield "", run.table(name)
    for number, table in enumerate(run.control_tables(name)):
        yield f"{UNTRAINED} {number}", table


def _slugify(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:48]
