"""An experiment as a page: baseline, edited and control side by side, and what the edit does beyond its control.

report = intervened([Path("runs/mask/arm"), Path("runs/mask/mdm")])
write_page(report, Path("runs/mask/report.html"))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from floatscope import __version__
from floatscope.errors import UserError
from floatscope.evaluating import open_predictions
from floatscope.intervene.recipes import RECIPES
from floatscope.intervening import effects, read_experiment
from floatscope.report.charts import Chart, Dots, Lines, Model, Report, Section, Series, Table
from floatscope.report.compared import Interval
from floatscope.spelling import spelled

COMPUTED = (
    "Score: a right answer, normalised, is part of the prediction. NLL: mean of −log p over the tokens of the first"
    " right answer and its end, forced on the model in its own order. Floating: 1 − share of steps whose top key is the"
    " sample's most frequent one, mean over layers, of the attention as edited. Order: Kendall's τ of the step and the"
    " position of each commit, 1 from left to right. Intervals are 95 %, bootstrapped over questions; changes and"
    " effects are question by question."
)


@dataclass(frozen=True)
class Measure:
    title: str
    short: str
    axis: str
    scale: float
    digits: int
    said: str  # in a sentence

    def of(self, row: Any, column: str) -> Interval:
        return Interval(*(self.scale * float(row.get(f"{column}{end}", math.nan)) for end in ("", "_low", "_high")))


MEASURES = {
    "acc": Measure("Score", "acc (%)", "right answers (%)", 100.0, 1, "the score (%)"),
    "nll": Measure("Unlikeliness of the right answer", "NLL", "NLL (nats per token)", 1.0, 2, "the NLL"),
    "floating": Measure("Floating", "floating", "floating index", 1.0, 2, "floating"),
    "order": Measure("Order of the commits", "order", "Kendall's τ of step and position", 1.0, 2, "the order"),
}


def intervened(paths: Sequence[Path]) -> Report:
    told, table = [read_experiment(path) for path in paths], effects(paths)
    names = [each["model"] for each in told]
    if len(set(names)) < len(names):
        raise UserError("two of these experiments are of one model; show them one at a time")
    models, sections = list[Model](), list[Section]()
    for path, each in zip(paths, told, strict=True):
        first = each["arms"][0]
        settings = open_predictions(path / first["condition"] / first["name"]).settings
        own = table[table["model"] == each["model"]]
        about = "".join(f"{sentence[0].upper()}{sentence[1:]}. " for sentence in each["told"]).strip()
        models.append(Model(each["model"], str(settings["family"]), int(own["n"].max()), about=about))
        for condition, some in own.groupby("condition", sort=False):
            sections.append(_section(len(sections), each["model"], str(condition), some))
    title = next((each["title"] for each in told if each["title"]), "Changed, and seen")
    summary = [sentence for model in models for sentence in _summary(table[table["model"] == model.label])]
    provenance = {"floatscope": __version__, **{each["model"]: each for each in told}}
    return Report(title, summary, models, sections, [], provenance)


def arms_table(table: pd.DataFrame, intervals: bool = True) -> Table:
    """Every arm with its means."""
    measures = [(name, measure) for name, measure in MEASURES.items() if name in table]
    rows = []
    for _, row in table.iterrows():
        told = [measure.of(row, name) for name, measure in measures]
        told = told if intervals else [Interval(each.mean, math.nan, math.nan) for each in told]
        said = [each.said(measure.digits) for each, (_, measure) in zip(told, measures, strict=True)]
        rows.append([*row[_whose(table)], row["arm"], int(row["n"]), *said])
    return Table([*_whose(table), "arm", "n", *(measure.short for _, measure in measures)], rows, "All arms")


def effects_table(table: pd.DataFrame) -> Table:
    """Every edited arm less the baseline and less its control, with intervals."""
    rows: list[list[str | float | int | None]] = []
    for _, row in table[_edited(table)].iterrows():
        for name, measure in MEASURES.items():
            if name in table and not math.isnan(row[name]):
                said = [measure.of(row, f"{name}_{part}").said(measure.digits, True) for part in ("change", "effect")]
                rows.append([*row[_whose(table)], row["arm"], measure.short, *said])
    columns = [*_whose(table), "arm", "of", "less the baseline", "less its control"]
    return Table(columns, rows, "What the edit does, question by question")


def _whose(table: pd.DataFrame) -> list[str]:
    return ["model", "condition"] if table["condition"].any() else ["model"]


def _section(number: int, model: str, condition: str, some: pd.DataFrame) -> Section:
    title = f"{model}, {condition}" if condition else model
    charts = [*_charts(model, some), effects_table(some), arms_table(some)]
    return Section(f"experiment-{number}", title, _shows(some), COMPUTED, charts)


def _charts(model: str, some: pd.DataFrame) -> Iterator[Chart]:
    baseline, edited = some.iloc[0], some[_edited(some)]
    placed, unplaced = edited[edited["value"].notna()], edited[edited["value"].isna()]
    for name, measure in MEASURES.items():
        if name not in some or some[name].isna().all():
            continue
        reference = _known(measure.of(baseline, name).mean)
        if len(unplaced):
            rows = pd.concat([some.iloc[:1], unplaced])
            series = [_series("as it is", model, rows, measure, name)]
            if _any(rows, "effect"):
                series.append(_series("control", model, rows, measure, f"{name}_control"))
            yield Dots(measure.title, list(rows["arm"]), measure.axis, series, reference, "baseline")
        if len(placed):
            x = sorted({float(v) for v in placed["value"]})
            series = []
            for line, rows in placed.groupby("series", sort=False):
                rows, called = rows.sort_values("value"), str(line) or "edited"
                series.append(_series(called, model, rows, measure, name, placed=True))
                if _any(rows, "effect"):
                    series.append(_series("control", model, rows, measure, f"{name}_control", placed=True))
            yield Lines(measure.title, "value", measure.axis, x, series, reference, "baseline")


def _series(name: str, model: str, rows: pd.DataFrame, measure: Measure, column: str, placed: bool = False) -> Series:
    intervals = [measure.of(row, column) for _, row in rows.iterrows()]
    y, low, high = ([_known(getattr(i, end)) for i in intervals] for end in ("mean", "low", "high"))
    x = [float(v) for v in rows["value"]] if placed else None
    return Series(name, model, y, low, high, column.endswith("_control"), x)


def _shows(some: pd.DataFrame) -> str:
    """What each edit is, what its control is, and what came of it."""
    parts = []
    for _, row in some[_edited(some) & some["value"].isna()].iterrows():
        parts.append(f"**{row['arm']}**: {_edits(row['edits'])}. {_control(some, row)} {_effect(row)}")
    for line, rows in some[_edited(some) & some["value"].notna()].groupby("series", sort=False):
        first, last = rows.iloc[0], rows.iloc[-1]
        parts.append(f"**{line or 'edited'}**: {first['edits']} to {last['edits']}. {_control(some, first)}")
    return "\n\n".join(parts) or "The baseline alone."


def _edits(told: str) -> str:
    """Each edit as it was written, with what the recipe means."""
    found = []
    for edit in told.split("; "):
        about = RECIPES[name].about if (name := spelled(edit)[0]) in RECIPES else ""
        found.append(f"{edit}, {about}" if about else edit)
    return "; and ".join(found)


def _control(some: pd.DataFrame, row: Any) -> str:
    controls = some[some["control_of"] == row["arm"]]
    if controls.empty:
        return "It has no control: what any edit of this size would do is not told apart."
    if "middle" in controls.iloc[0]["edits"].rpartition(", ")[2]:
        return "Control: the same on as many keys of middling lift."
    what = "heads of the same layers" if "zero_heads" in row["edits"] else "keys that could be anchors"
    drawn = "once" if len(controls) == 1 else f"{len(controls)} times"
    return f"Control: the same on as many random {what}, drawn {drawn}."


def _effect(row: Any) -> str:
    """What the edit does beyond its control, or without one against the baseline."""
    part, beyond = ("effect", "its control") if _has(row, "effect") else ("change", "the baseline")
    sure, unsure = [], []
    for name, measure in MEASURES.items():
        told = measure.of(row, f"{name}_{part}")
        if math.isnan(told.mean):
            continue
        if told.sure:
            sure.append(f"{measure.said} {'rises' if told.mean > 0 else 'falls'}, {told.said(measure.digits, True)}")
        else:
            unsure.append(f"{measure.said} ({told.said(measure.digits, True)})")
    said = [f"Less {beyond}, {'; '.join(sure)}." if sure else ""]
    said.append(f"Not told apart from {beyond}: {'; '.join(unsure)}." if unsure else "")
    return " ".join(filter(None, said))


def _summary(some: pd.DataFrame) -> list[str]:
    sentences = []
    for _, row in some[_edited(some) & some["value"].isna()].iterrows():
        where = ", ".join(filter(None, (row["condition"], row["arm"])))
        sentences.append(f"**{row['model']}**, {where}: {_effect(row)}")
    placed = some[_edited(some) & some["value"].notna()]
    for (condition, line), rows in placed.groupby(["condition", "series"], sort=False):
        part = "effect" if _has(rows.iloc[0], "effect") else "change"
        name = "acc" if "acc" in rows else "nll"
        sure = [f"{row['value']:g}" for _, row in rows.iterrows() if MEASURES[name].of(row, f"{name}_{part}").sure]
        where = ", ".join(filter(None, (condition, line)))
        found = f"surely apart from zero at {', '.join(sure)}" if sure else "nowhere surely apart from zero"
        sentences.append(f"**{rows.iloc[0]['model']}**, {where}: the {part} on {MEASURES[name].said} is {found}.")
    return sentences


def _edited(table: pd.DataFrame) -> pd.Series:
    """Rows that are neither a baseline nor a control."""
    return (table["edits"] != "") & (table["control_of"] == "")


def _any(table: pd.DataFrame, part: str) -> bool:
    return any(_has(row, part) for _, row in table.iterrows())


def _has(row: Any, part: str) -> bool:
    return any(not math.isnan(row.get(f"{name}_{part}", math.nan)) for name in MEASURES)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
