"""The report of a stress test: the score over what was varied, and the attention on the gold passage.

report = build_stress_report([Path("runs/position/arm"), Path("runs/position/mdm")])
write_page(report, "runs/position/report.html")
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from floatscope import __version__
from floatscope.analysis.evaluations import open_evaluation
from floatscope.analysis.stress_tests import position_gap, read_stress, stress_curve
from floatscope.errors import UserError
from floatscope.reports.charts import Cell, Chart, Lines, Model, Report, Section, Series, Table
from floatscope.reports.intervals import Interval, describe_intervals
from floatscope.reports.intervention_report import join_sentences
from floatscope.reports.sections.chart_builders import format_number
from floatscope.schema import Paradigm
from floatscope.tasks.stress import KINDS

Y_LABELS = {
    "acc": "accuracy (%)",
    "gold_lift": "relative to its share of the canvas",
    "other_lift": "relative to their share of the canvas",
}


def build_stress_report(paths: Sequence[Path]) -> Report:
    """The report of stress-test folders of one kind, one per model."""
    records = [read_stress(path) for path in paths]
    kinds = {record["kind"] for record in records}
    if len(kinds) > 1:
        raise UserError(
            f"these are stress tests of different kinds, {', '.join(sorted(kinds))}; report one kind at a time"
        )
    kind, table = kinds.pop(), stress_curve(paths)
    models = []
    for path, record in zip(paths, records, strict=True):
        settings = open_evaluation(path / record["points"][0]["folder"]).settings
        n = int(table.loc[table["model"] == record["model"], "n"].max())
        models.append(Model(record["model"], Paradigm(settings["paradigm"]), n, about=join_sentences(record["notes"])))
    title, about, axis = KINDS[kind].title, KINDS[kind].description, KINDS[kind].axis
    section = Section(
        kind,
        title,
        f"{about} Does the score fall where the attention leaves the gold passage?",
        "acc: the normalised prediction contains a right answer. Attention: of the predicting rows, each at the step"
        " that commits its token, mean over layers and heads, relative to the share of the canvas."
        f" {describe_intervals(table['n'].astype(int), 'questions')} Changes are paired by question.",
        build_stress_charts(table, axis),
    )
    provenance = {"floatscope": __version__, **{record["model"]: record for record in records}}
    return Report(f"Stress test: {title.lower()}", _summarise(table), models, [section], [], provenance)


def build_stress_charts(table: pd.DataFrame, axis: str = "") -> list[Chart]:
    """Curves for each series of points with a value on the axis, and tables of all points."""
    charts: list[Chart] = []
    for series, rows in table[table["value"].notna()].groupby("series", sort=False):
        suffix = f", {series}" if series else ""
        charts.append(_build_curves(rows, f"Accuracy{suffix}", axis, "acc", ("low", "high"), 100.0))
        if "gold_lift" in rows and rows["gold_lift"].notna().any():
            gold, other = f"Attention on the gold passage{suffix}", f"Attention on other passages{suffix}"
            charts.append(_build_curves(rows, gold, axis, "gold_lift", ("gold_low", "gold_high")))
            charts.append(_build_curves(rows, other, axis, "other_lift", ("other_low", "other_high")))
    columns = ["model", "point", "n", "acc", "change from the first", "gold", "gold, right", "gold, wrong", "others"]
    points = [_build_row(row) for row in table.itertuples()]
    charts.append(Table(columns, points, "All points; attention relative to the share of the canvas"))
    gaps: list[list[Cell]] = [
        [
            row.model,
            row.series,
            *(f"{100 * x:.1f}" for x in (row.best, row.worst, row.gap)),
            format_number(100 * row.dip),
        ]
        for row in position_gap(table).itertuples()
    ]
    if gaps:
        charts.append(Table(["model", "series", "best", "worst", "gap", "middle dip"], gaps, "Best and worst acc (%)"))
    return charts


def _build_row(row: Any) -> list[Cell]:
    attention = (getattr(row, name, math.nan) for name in ("gold_lift", "gold_right", "gold_wrong", "other_lift"))
    change = _format_percent(row, "change", "change_low", "change_high", sign=True)
    acc = _format_percent(row, "acc", "low", "high")
    return [row.model, row.name, row.n, acc, change, *map(format_number, attention)]


def _build_curves(
    table: pd.DataFrame, title: str, axis: str, value: str, ends: tuple[str, str], scale: float = 1.0
) -> Lines:
    """A column of the table over the axis, a line per model."""
    series = []
    for model, rows in table.groupby("model", sort=False):
        rows = rows.sort_values("value")
        y, low, high = ([None if v != v else scale * float(v) for v in rows[name]] for name in (value, *ends))
        series.append(Series(str(model), str(model), y, low, high, x=[float(v) for v in rows["value"]]))
    x = sorted({float(v) for v in table["value"]})
    return Lines(title, axis, Y_LABELS[value], x, series)


def _summarise(table: pd.DataFrame) -> list[str]:
    sentences = []
    for row in position_gap(table).itertuples():
        series = f" ({row.series})" if row.series else ""
        sentences.append(
            f"**{row.model}**{series}: accuracy is {100 * row.best:.1f} % at best and {100 * row.worst:.1f} % at worst."
        )
    return sentences


def _format_percent(row: object, mean: str, low: str, high: str, sign: bool = False) -> str:
    return Interval(*(100 * float(getattr(row, name)) for name in (mean, low, high))).format(1, sign)
