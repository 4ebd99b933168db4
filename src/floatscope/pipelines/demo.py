"""The demo: the three twins and their untrained controls answer a few questions, watched; then the report.

ready = prepare("demo")                  # opens the twins, says how large the runs will be
for traced in watch(ready): ...          # one sample after the other, each on disk when it is named
seen = look(ready)                       # the page, and a row of numbers for each twin
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from floatscope.errors import UserError
from floatscope.lab.twins.heldout import read
from floatscope.models.load import load
from floatscope.pipelines.trace import SampleTraced, TraceJob, plan_trace
from floatscope.reports.build import build
from floatscope.reports.compared import Compared
from floatscope.reports.page import write_page
from floatscope.tasks.sample import Sample

TWINS = ("arm", "mdm", "mdm-adapted")
NEW_TOKENS = STEPS = 16
SEEDS = (0,)  # of the untrained controls
PLACES = {0: "first", 2: "middle", 4: "last"}  # of the gold passage among five


@dataclass(frozen=True)
class Ready:
    folder: Path
    tracings: dict[str, TraceJob]  # by twin

    @property
    def total(self) -> int:
        return sum(tracing.total for tracing in self.tracings.values())

    @property
    def finished(self) -> int:
        return sum(tracing.finished for tracing in self.tracings.values())

    @property
    def size(self) -> int:
        """Bytes, at most."""
        return sum(tracing.size.total for tracing in self.tracings.values() if tracing.size)


@dataclass(frozen=True)
class Row:
    """A twin in a line; what stands in brackets is its control."""

    twin: str
    right: float
    first: str
    top: str
    within: str
    across: str


@dataclass(frozen=True)
class Seen:
    page: Path
    runs: dict[str, Path]
    rows: list[Row]
    summary: list[str]

    @property
    def as_json(self) -> dict[str, Any]:
        runs = {name: str(path) for name, path in self.runs.items()}
        return {"page": str(self.page), "runs": runs, "summary": self.summary, "twins": [vars(r) for r in self.rows]}


def questions(count: int = 12) -> list[Sample]:
    """Held-out reading questions: the gold passage first, in the middle and last, as often as one another."""
    of_place = [[s for s in read("reading-5") if s.meta["gold_at"] == place] for place in PLACES]
    return [of_place[i % len(PLACES)][i // len(PLACES)] for i in range(count)]


def prepare(folder: str | Path, count: int = 12) -> Ready:
    folder = Path(folder)
    try:
        _claim(folder)
    except OSError as error:
        raise UserError(
            f"cannot write the demo to {folder}: {error.strerror}; give another folder with --out"
        ) from error
    tracings = {}
    for twin in TWINS:
        model = load(f"twin:{twin}", device="cpu")
        tracings[twin] = plan_trace(
            model, questions(count), folder / "runs" / twin, controls=SEEDS, new_tokens=NEW_TOKENS, steps=STEPS
        )
    return Ready(folder, tracings)


def watch(ready: Ready) -> Iterator[SampleTraced]:
    """Trace what is missing; a sample is named once its file is whole."""
    for tracing in ready.tracings.values():
        yield from tracing


def look(ready: Ready) -> Seen:
    """The report of the finished runs, and the numbers that carry it."""
    paths = {twin: tracing.path for twin, tracing in ready.tracings.items()}
    report, runs = build(list(paths.values()))
    page = ready.folder / "report.html"
    write_page(report, page)
    right = [tracing.summaries()[0].acc or 0.0 for tracing in ready.tracings.values()]
    return Seen(page, paths, [_row(run, acc) for run, acc in zip(runs, right, strict=True)], report.summary)


def _row(run: Compared, right: float) -> Row:
    def beside(table: str, value: str, **where: str) -> str:
        number = run.number(table, value, where)
        return f"{number.own.mean:.2f} ({number.control.mean:.2f})" if number.control else f"{number.own.mean:.2f}"

    return Row(
        run.label,
        right,
        beside("absorption", "lift", set="first"),
        beside("absorption", "lift", set="top"),
        beside("floating", "within"),
        beside("floating", "across"),
    )


def _claim(folder: Path) -> None:
    """The demo writes under names of its own, so it takes a new or empty folder, or one it took before."""
    mark = folder / "floatscope-demo"
    if folder.is_dir() and any(folder.iterdir()) and not mark.exists():
        raise UserError(f"{folder} holds other files, which the demo might overwrite; give another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()
