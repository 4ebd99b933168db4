"""What every section is made with: charts of estimates, and the words around them.

lines(runs, "Attention on the first key", LIFT, "absorption", "lift", {"set": "first"}, reference=1.0)
dots(runs, "Floating index", "share of steps", [("within", "floating", "within", {})])
section("floating", "Does the anchor move?", "What it shows.", "How it was computed.", runs, charts, "floating")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from floatscope.reports import compared
from floatscope.reports.charts import Chart, Dots, Lines, Section, Series, Table
from floatscope.reports.compared import Category, Compared, Number

INTERVALS = "Intervals are 95 %, bootstrapped over samples; for the untrained control over its seeds as well."
LIFT = "lift (1 = uniform attention)"
Cells = list[str | float | int | None]


def section(
    id: str, title: str, shows: str, computed: str, runs: Sequence[Compared], charts: Sequence[Chart], table: str
) -> Section:
    """Empty charts are left out; what a run lacks is said."""
    reasons = {f"{run.label}: {run.measured.missing[table]}" for run in runs if table in run.measured.missing}
    lacking = "".join(f"\n\nNot shown for {reason}." for reason in sorted(reasons))
    n = ", ".join(f"{run.label} {len(run.run.done)}" for run in runs)
    kept = [chart for chart in charts if not _empty(chart)]
    return Section(id, title, shows + lacking, f"{computed} Samples: {n}. {INTERVALS}", kept, f"{table}.csv")


def _empty(chart: Chart) -> bool:
    if isinstance(chart, Dots) and not chart.categories:
        return True
    return (isinstance(chart, Lines | Dots) and not chart.series) or (isinstance(chart, Table) and not chart.rows)


def lines(
    runs: Sequence[Compared],
    title: str,
    y_label: str,
    table: str,
    value: str,
    where: Mapping[str, Any] | None = None,
    reference: float | None = None,
    log: bool = False,
    along: str = "layer",
    x_label: str = "layer",
    reference_label: str = "uniform",
) -> Lines:
    """By layer where all models have the same ones, else by relative depth."""
    those = having(runs, table)
    places = [run.table(table, where)[along].drop_duplicates().tolist() for run in those]
    alike = all(each == places[0] for each in places)
    axis, label = (along, x_label) if alike else ("depth", "relative depth")
    series = [each for run in those for each in run.series(table, value, axis, where, own_x=not alike)]
    shown = [each for each in series if any(y is not None for y in each.y)]
    x = [float(place) for place in places[0]] if alike and places else [0.0, 1.0]
    return Lines(title, label, y_label, x, shown, reference, reference_label, log)


def dots(
    runs: Sequence[Compared],
    title: str,
    x_label: str,
    categories: Sequence[Category],
    reference: float | None = None,
    reference_label: str = "",
) -> Dots:
    series = list(compared.dots(having(runs, categories[0][1]), categories)) if categories else []
    kept = [i for i in range(len(categories)) if any(each.y[i] is not None for each in series)]
    shown = [_kept(each, kept) for each in series]
    return Dots(title, [categories[i][0] for i in kept], x_label, shown, reference, reference_label)


def _kept(series: Series, at: Sequence[int]) -> Series:
    y, low, high = ([values[i] for i in at] if values else None for values in (series.y, series.low, series.high))
    return Series(series.name, series.model, y or [], low, high, series.control)


def having(runs: Sequence[Compared], table: str) -> list[Compared]:
    return [run for run in runs if run.has(table)]


def cell(number: Number) -> str:
    return number.own.said() if number.control is None else f"{number.own.said()} · untrained {number.control.said()}"


def region_order(region: str) -> tuple[int, int, str]:
    """The question, the passages in their order, what lies in them, the rest."""
    kind, _, number = region.partition(" ")
    ranks = {"question": 0, "document": 1, "gold": 2, "evidence": 3}
    return ranks.get(kind, 4), int(number) if number.isdigit() else 0, region


def share(value: float) -> str:
    return "–" if value != value else f"{value:.2f}".replace("-", "−")


def listed(parts: Iterable[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last
