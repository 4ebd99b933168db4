"""A stress test as a page: the score over what was changed, and where the attention was.

report = stressed([Path("runs/position/arm"), Path("runs/position/mdm")])
write_page(report, Path("runs/position/report.html"))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from floatscope import __version__
from floatscope.analysis.evaluations import open_evaluation
from floatscope.analysis.stress_tests import curve, gap, read_stress
from floatscope.errors import UserError
from floatscope.reports.charts import Chart, Lines, Model, Report, Section, Series, Table
from floatscope.reports.compared import Interval
from floatscope.tasks.stress import KINDS

Y = {"acc": "right answers (%)", "gold_lift": "over its share of the canvas", "other_lift": "over their share"}


def stressed(paths: Sequence[Path]) -> Report:
    told = [read_stress(path) for path in paths]
    kinds = {each["kind"] for each in told}
    if len(kinds) > 1:
        raise UserError(f"these are stress tests of different kinds, {', '.join(sorted(kinds))}; show one at a time")
    kind, table = kinds.pop(), curve(paths)
    models = []
    for path, each in zip(paths, told, strict=True):
        settings = open_evaluation(path / each["points"][0]["asked"]).settings
        n = int(table.loc[table["model"] == each["model"], "n"].max())
        models.append(Model(each["model"], str(settings["family"]), n, about=_sentence(each["told"])))
    section = Section(
        kind,
        KINDS[kind].title,
        f"{KINDS[kind].about} Does the score fall where the attention leaves the gold passage?",
        "acc: a right answer, normalised, is part of the prediction. Attention: of the rows that decide the answer,"
        " each at the step that commits its token, mean over layers and heads, over the share of the canvas. Intervals"
        " are 95 %, bootstrapped over questions; changes are question by question.",
        charts(table, KINDS[kind].axis),
    )
    return Report(f"Under stress: {KINDS[kind].title.lower()}", _summary(table), models, [section], [],
                  {"floatscope": __version__, **{each["model"]: each for each in told}})  # fmt: skip


def _sentence(told: Sequence[str]) -> str:
    """Who is left out, beside the model's name."""
    return "".join(f"{each[0].upper()}{each[1:]}. " for each in told).strip()


def charts(table: pd.DataFrame, axis: str = "") -> list[Chart]:
    """Curves for each series of points that have a place, and a table of all."""
    found: list[Chart] = []
    placed = table[table["value"].notna()]
    for series, some in placed.groupby("series", sort=False):
        named = f", {series}" if series else ""
        found.append(_lines(some, f"Score{named}", axis, "acc", ("low", "high"), 100.0))
        if "gold_lift" in some and some["gold_lift"].notna().any():
            found.append(_lines(some, f"Attention on gold{named}", axis, "gold_lift", ("gold_low", "gold_high")))
            found.append(
                _lines(some, f"Attention on other passages{named}", axis, "other_lift", ("other_low", "other_high"))
            )
    rows = [_cells(row) for row in table.itertuples()]
    columns = ["model", "point", "n", "acc", "change from the first", "gold", "gold, right", "gold, wrong", "others"]
    found.append(Table(columns, rows, "All points; attention as lift"))
    gaps = [[r.model, r.series, *(f"{100 * x:.1f}" for x in (r.best, r.worst, r.gap)), _number(100 * r.dip)]
            for r in gap(table).itertuples()]  # fmt: skip
    if gaps:
        found.append(Table(["model", "series", "best", "worst", "gap", "middle dip"], gaps, "Best and worst, percent"))
    return found


def _cells(row: Any) -> list[str | float | int | None]:
    looks = (getattr(row, name, math.nan) for name in ("gold_lift", "gold_right", "gold_wrong", "other_lift"))
    change = _percent(row, "change", "change_low", "change_high", sign=True)
    return [row.model, row.name, row.n, _percent(row, "acc", "low", "high"), change, *map(_number, looks)]


def _lines(some: pd.DataFrame, title: str, axis: str, value: str, ends: tuple[str, str], scale: float = 1.0) -> Lines:
    series = []
    for model, rows in some.groupby("model", sort=False):
        rows = rows.sort_values("value")
        y, low, high = ([None if v != v else scale * float(v) for v in rows[name]] for name in (value, *ends))
        series.append(Series(str(model), str(model), y, low, high, x=[float(v) for v in rows["value"]]))
    x = sorted({float(v) for v in some["value"]})
    return Lines(title, axis, Y[value], x, series)


def _summary(table: pd.DataFrame) -> list[str]:
    sentences = []
    for row in gap(table).itertuples():
        series = f" ({row.series})" if row.series else ""
        sentences.append(f"**{row.model}**{series}: {100 * row.best:.1f} % at best, {100 * row.worst:.1f} % at worst.")
    return sentences


def _percent(row: object, mean: str, low: str, high: str, sign: bool = False) -> str:
    ends = [100 * float(getattr(row, name)) for name in (mean, low, high)]
    return Interval(*ends).said(1, sign)


def _number(value: float) -> str:
    return "–" if value != value else f"{value:.2f}".replace("-", "−")
