"""The demo: the three twins and their untrained controls answer a few questions, watched; then the report.

job = plan_demo("demo")                  # opens the twins and forecasts the size of their runs
for event in job: print(event)           # the events of `job`
result = write_demo_report(job)          # the page, and one line per published claim
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from floatscope.errors import UserError
from floatscope.models.loader import load
from floatscope.pipelines.job import Job
from floatscope.pipelines.trace import TraceJob, plan_trace
from floatscope.reports.build import build_report
from floatscope.reports.claim_tables import describe_claims, judge_pairs
from floatscope.reports.page import write_page
from floatscope.tasks.sample import Sample
from floatscope.tasks.sample_files import read_samples

TWINS = ("arm", "mdm", "mdm-adapted")
QUESTIONS = 12
NEW_TOKENS = STEPS = 40
CONTROL_SEEDS = (0,)
MARKER = "floatscope-demo"


@dataclass(frozen=True, eq=False, repr=False)
class DemoJob(Job):
    """The runs of the twins and of their untrained controls."""

    traces: Mapping[str, TraceJob] = field(default_factory=dict)  # by twin

    @property
    def max_bytes(self) -> int:
        """The size of all runs, at most."""
        return sum(job.forecast.total for job in self.traces.values() if job.forecast)


@dataclass(frozen=True)
class DemoResult:
    """The report, the scores of the twins, and a line per published claim with its verdict on these runs."""

    page: Path
    runs: dict[str, Path]
    acc: dict[str, float]  # by twin: share of right answers, complete and in order
    claims: list[str]
    summary: list[str]

    @property
    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        runs = {name: str(path) for name, path in self.runs.items()}
        return {"page": str(self.page), "runs": runs, "acc": self.acc, "claims": self.claims, "summary": self.summary}


def select_questions(count: int = QUESTIONS) -> list[Sample]:
    """Held-out questions for everything that five passages tell of a person: answers of several sentences."""
    return read_samples("twin:biography")[:count]


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
    return DemoJob(folder, [part for job in traces.values() for part in job.parts], traces=traces)


def write_demo_report(job: DemoJob) -> DemoResult:
    """Write the report of the finished runs, and return its main numbers."""
    paths = {twin: trace_job.path for twin, trace_job in job.traces.items()}
    report, runs = build_report(list(paths.values()))
    page = job.path / "report.html"
    write_page(report, page)
    acc = {twin: trace_job.summaries()[0].acc or 0.0 for twin, trace_job in job.traces.items()}
    return DemoResult(page, paths, acc, describe_claims(judge_pairs(runs)), report.summary)


def _claim(folder: Path) -> None:
    """Mark a new or empty folder as the demo's; refuse a folder with other files, which the demo might overwrite."""
    marker = folder / MARKER
    if folder.is_dir() and any(folder.iterdir()) and not marker.exists():
        raise UserError(f"{folder} has other files, which the demo might overwrite; give another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    marker.touch()
