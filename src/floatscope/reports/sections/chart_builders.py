"""Building blocks of every section: charts of estimates, and the text around them.

build_lines(runs, "Attention on the first key", LIFT, "absorption", "lift", {"set": "first"}, reference=1.0)
build_dots(runs, "Floating index", "share of steps", [("within", "floating", "within", {})])
build_section("floating", "Do anchors move?", "What it shows.", "How it was computed.", runs, charts, "floating")
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from floatscope.reports.charts import Cell, Chart, Dots, Lines, Section, Series, Table
from floatscope.reports.intervals import describe_intervals
from floatscope.reports.report_runs import Category, ReportRun, Where, build_dot_series

INTERVALS = describe_intervals((), "samples; for untrained controls, over samples and seeds")
STEPS_THAT_COUNT = {
    "answer": "Steps and commits are those of the answer, without the end-of-text tokens after it.",
    "all": "All steps and commits count, also those of end-of-text tokens.",
}
"""Which commits count → the sentence about them."""
LIFT = "lift (1 = uniform attention)"
Row = list[Cell]


def build_section(
    id: str, title: str, text: str, method: str, runs: Sequence[ReportRun], charts: Sequence[Chart], table: str
) -> Section:
    """A section with its non-empty charts. It says which runs lack `table`, and why."""
    reasons = {f"{run.label}: {run.tables.missing[table]}" for run in runs if table in run.tables.missing}
    missing = "".join(f"\n\nNot shown for {reason}." for reason in sorted(reasons))
    n = ", ".join(f"{run.label} n = {len(run.run.finished)}" for run in runs)
    filled = [chart for chart in charts if not _is_empty(chart)]
    return Section(id, title, text + missing, f"{method} Samples: {n}. {INTERVALS}", filled, f"{table}.csv")


def _is_empty(chart: Chart) -> bool:
    if isinstance(chart, Dots) and not chart.categories:
        return True
    return (isinstance(chart, Lines | Dots) and not chart.series) or (isinstance(chart, Table) and not chart.rows)


def build_lines(
    runs: Sequence[ReportRun],
    title: str,
    y_label: str,
    table: str,
    value: str,
    where: Where = None,
    reference: float | None = None,
    log: bool = False,
    along: str = "layer",
    x_label: str = "layer",
    reference_label: str = "uniform",
) -> Lines:
    """Estimates of a column along layers (or another column), of every run that has the table.

    If the models have different layers, the axis is the relative depth.
    """
    runs = runs_with(runs, table)
    positions = [run.table(table, where)[along].drop_duplicates().tolist() for run in runs]
    is_shared = all(each == positions[0] for each in positions)
    axis, label = (along, x_label) if is_shared else ("depth", "relative depth")
    series = [each for run in runs for each in run.build_series(table, value, axis, where, own_x=not is_shared)]
    measured = [each for each in series if any(y is not None for y in each.y)]
    x = [float(position) for position in positions[0]] if is_shared and positions else [0.0, 1.0]
    return Lines(title, label, y_label, x, measured, reference, reference_label, log)


def build_dots(
    runs: Sequence[ReportRun],
    title: str,
    x_label: str,
    categories: Sequence[Category],
    reference: float | None = None,
    reference_label: str = "",
) -> Dots:
    """A value per category and run. Categories that no run has are left out."""
    series = list(build_dot_series(runs_with(runs, categories[0][1]), categories)) if categories else []
    measured = [i for i in range(len(categories)) if any(each.y[i] is not None for each in series)]
    selected = [_select_values(each, measured) for each in series]
    return Dots(title, [categories[i][0] for i in measured], x_label, selected, reference, reference_label)


def _select_values(series: Series, indices: Sequence[int]) -> Series:
    y, low, high = ([values[i] for i in indices] if values else None for values in (series.y, series.low, series.high))
    return Series(series.name, series.model, y or [], low, high, series.control)


def runs_with(runs: Sequence[ReportRun], table: str) -> list[ReportRun]:
    """The runs that have a table."""
    return [run for run in runs if run.has_table(table)]


def region_sort_key(region: str) -> tuple[int, int, str]:
    """The order of regions: the question, the documents by number, the regions inside them, the rest."""
    kind, _, number = region.partition(" ")
    ranks = {"question": 0, "document": 1, "gold": 2, "evidence": 3}
    return ranks.get(kind, 4), int(number) if number.isdigit() else 0, region


def map_values(table: pd.DataFrame, digits: int) -> list[list[float | int | None]]:
    """The values of a wide table for a `Map`, rounded; NaN becomes None."""
    return [[None if v != v else round(float(v), digits) for v in row] for row in table.to_numpy()]


def format_number(value: float) -> str:
    """Two decimals; `–` for NaN."""
    return "–" if value != value else f"{value:.2f}".replace("-", "−")


def join_words(words: Iterable[str]) -> str:
    """`a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
