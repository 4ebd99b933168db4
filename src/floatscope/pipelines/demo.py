"""The demo: the three twins and their untrained controls answer a few questions, watched; then the report.

job = plan_demo("demo")                  # opens the twins and forecasts the size of their runs
for event in job: ...                    # one sample after the other, each on disk when its event comes
result = write_demo_report(job)          # the page, and one row of numbers per twin
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from floatscope.errors import UserError
from floatscope.models.loader import load
from floatscope.pipelines.trace import SampleTraced, TraceJob, plan_trace
from floatscope.reports.build import build_report
from floatscope.reports.page import write_page
from floatscope.reports.report_runs import ReportRun
from floatscope.tasks.sample import Sample
from floatscope.tasks.sample_files import read_samples

TWINS = ("arm", "mdm", "mdm-adapted")
QUESTIONS = 12
NEW_TOKENS = STEPS = 16
CONTROL_SEEDS = (0,)
GOLD_POSITIONS = (0, 2, 4)  # of the gold passage among five
MARKER = "floatscope-demo"


@dataclass(frozen=True)
class DemoJob:
    """The planned runs. Iterating it traces the samples that are missing; again, and it resumes."""

    folder: Path
    traces: dict[str, TraceJob]  # by twin

    def __iter__(self) -> Iterator[SampleTraced]:
        for job in self.traces.values():
            yield from job

    @property
    def total(self) -> int:
        """The number of samples over all runs."""
        return sum(job.total for job in self.traces.values())

    @property
    def finished(self) -> int:
        """The number of samples on disk."""
        return sum(job.finished for job in self.traces.values())

    @property
    def max_bytes(self) -> int:
        """The size of all runs, at most."""
        return sum(job.forecast.total for job in self.traces.values() if job.forecast)


@dataclass(frozen=True)
class TwinRow:
    """The numbers of one twin; those of its untrained control are in brackets."""

    twin: str
    acc: float
    first_key: str  # mean lift of the first key
    top_key: str  # mean lift of the top key
    within: str  # how often a layer's top key is away from its usual position, in one text
    across: str  # the same over all texts


@dataclass(frozen=True)
class DemoResult:
    """The report and the numbers behind it."""

    page: Path
    runs: dict[str, Path]
    rows: list[TwinRow]
    summary: list[str]

    @property
    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        runs = {name: str(path) for name, path in self.runs.items()}
        return {"page": str(self.page), "runs": runs, "summary": self.summary, "twins": [vars(r) for r in self.rows]}


def select_questions(count: int = QUESTIONS) -> list[Sample]:
    """Held-out reading questions with the gold passage first, in the middle and last, equally often."""
    samples = read_samples("twin:reading-5")
    by_position = [[s for s in samples if s.meta["gold_at"] == position] for position in GOLD_POSITIONS]
    return [by_position[i % len(GOLD_POSITIONS)][i // len(GOLD_POSITIONS)] for i in range(count)]


def plan_demo(folder: str | Path, count: int = QUESTIONS) -> DemoJob:
    """Claim the folder, open the twins and plan their runs; nothing is decoded yet."""
    folder = Path(folder)
    try:
        _claim(folder)
    except OSError as error:
        raise UserError(
            f"cannot write the demo to {folder}: {error.strerror}; give another folder with --out"
        ) from error
    traces = {}
    for twin in TWINS:
        traces[twin] = plan_trace(
            load(f"twin:{twin}", device="cpu"),
            select_questions(count),
            folder / "runs" / twin,
            controls=CONTROL_SEEDS,
            new_tokens=NEW_TOKENS,
            steps=STEPS,
        )
    return DemoJob(folder, traces)


def write_demo_report(job: DemoJob) -> DemoResult:
    """Write the report of the finished runs, and return its main numbers."""
    paths = {twin: trace_job.path for twin, trace_job in job.traces.items()}
    report, runs = build_report(list(paths.values()))
    page = job.folder / "report.html"
    write_page(report, page)
    accs = [trace_job.summaries()[0].acc or 0.0 for trace_job in job.traces.values()]
    return DemoResult(page, paths, [_row(run, acc) for run, acc in zip(runs, accs, strict=True)], report.summary)


def _row(run: ReportRun, acc: float) -> TwinRow:
    def with_control(table: str, value: str, **where: str) -> str:
        estimate = run.estimate(table, value, where)
        control = f" ({estimate.control.mean:.2f})" if estimate.control else ""
        return f"{estimate.model.mean:.2f}{control}"

    return TwinRow(
        run.label,
        acc,
        with_control("absorption", "lift", set="first"),
        with_control("absorption", "lift", set="top"),
        with_control("floating", "within"),
        with_control("floating", "across"),
    )


def _claim(folder: Path) -> None:
    """Mark a new or empty folder as the demo's; refuse a folder with other files, which the demo might overwrite."""
    marker = folder / MARKER
    if folder.is_dir() and any(folder.iterdir()) and not marker.exists():
        raise UserError(f"{folder} has other files, which the demo might overwrite; give another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    marker.touch()
