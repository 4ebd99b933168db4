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
from floatscope.analysis.evaluations import open_predictions
from floatscope.analysis.experiments import effects, read_experiment
from floatscope.errors import UserError
from floatscope.interventions.recipes import RECIPES
from floatscope.reports.charts import Chart, Dots, Lines, Model, Report, Section, Series, Table
from floatscope.reports.compared import Interval
from floatscope.syntax import parse_call

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
    return [name for name in ("model", "condition") if table[name].nunique() > 1]


def _section(number: int, model: str, condition: str, some: pd.DataFrame) -> Section:
    title = f"{model}, {condition}" if condition else model
    charts = [*_charts(model, some), effects_table(some), arms_table(some)]
    return Section(f"experiment-{number}", title, _shows(some), COMPUTED, charts)


def _charts(model: str, some: pd.DataFrame) -> Iterator[Chart]:
    """Arms that have a place on the axis lie on lines, the others stand side by side."""
    edited = some[_edited(some)]
    measures = [(name, measure) for name, measure in MEASURES.items() if name in some and some[name].notna().any()]
    reference = {name: _known(measure.of(some.iloc[0], name).mean) for name, measure in measures}
    rows = pd.concat([some.iloc[:1], edited[edited["value"].isna()]])
    for name, measure in measures if len(rows) > 1 else ():
        series = _beside(model, rows, measure, name, "as it is")
        yield Dots(measure.title, list(rows["arm"]), measure.axis, series, reference[name], "baseline")
    for line, on_it in edited[edited["value"].notna()].groupby("series", sort=False):
        rows = on_it.sort_values("value")
        x = [float(value) for value in rows["value"]]
        for name, measure in measures:
            series = _beside(model, rows, measure, name, str(line) or "edited")
            title = f"{measure.title}, {line}" if line else measure.title
            yield Lines(title, "value", measure.axis, x, series, reference[name], "baseline")


def _beside(model: str, rows: pd.DataFrame, measure: Measure, name: str, called: str) -> list[Series]:
    """The arms, and their controls if there are any."""
    found = [_series(called, model, rows, measure, name)]
    if any(_has(row, "effect") for _, row in rows.iterrows()):
        found.append(_series("control", model, rows, measure, f"{name}_control", control=True))
    return found


def _series(
    called: str, model: str, rows: pd.DataFrame, measure: Measure, column: str, control: bool = False
) -> Series:
    intervals = [measure.of(row, column) for _, row in rows.iterrows()]
    y, low, high = ([_known(getattr(i, end)) for i in intervals] for end in ("mean", "low", "high"))
    return Series(called, model, y, low, high, control)


def _shows(some: pd.DataFrame) -> str:
    """What each edit is, what its control is, and what came of it."""
    parts = []
    for _, row in some[_edited(some) & some["value"].isna()].iterrows():
        parts.append(f"**{row['arm']}**: {_edits(row['edits'])}. {_control(some, row)} {_effect(row)}")
    for line, rows in some[_edited(some) & some["value"].notna()].groupby("series", sort=False):
        first, last = rows.iloc[0], rows.iloc[-1]
        edits = " to ".join(dict.fromkeys((first["edits"], last["edits"])))
        parts.append(f"**{line or 'edited'}**: {edits}. {_control(some, first)}")
    return "\n\n".join(parts) or "The baseline alone."


def _edits(told: str) -> str:
    """Each edit as it was written, with what the recipe means."""
    found = []
    for edit in told.split("; "):
        about = RECIPES[name].about if (name := parse_call(edit)[0]) in RECIPES else ""
        found.append(f"{edit}, {about}" if about else edit)
    return "; and ".join(found)


def _control(some: pd.DataFrame, row: Any) -> str:
    controls = some[some["control_of"] == row["arm"]]
    if controls.empty:
        return "It has no control: what any edit of this size would do is not told apart."
    if "middle" in controls.iloc[0]["edits"].rpartition(", ")[2]:
        return "Control: the same on as many keys of middling lift."
    what = "keys that could be anchors"
    if "zero_heads" in row["edits"]:
        what = "heads of the same layers"
    elif "knock_out" in row["edits"] or "blank" in row["edits"]:
        what = "positions of the prompt"
    drawn = "once" if len(controls) == 1 else f"{len(controls)} times"
    return f"Control: the same on as many random {what}, drawn {drawn}."


def _effect(row: Any) -> str:
    """What the edit does beyond its control, or without one against the baseline."""
    sure, unsure = _moved(row)
    than = _than(row)[1]
    said = [f"Less {than}, {'; '.join(sure)}."] if sure else []
    said += [f"Not told apart from {than}: {'; '.join(unsure)}."] if unsure else []
    return " ".join(said) or f"Nothing is other than in {than}."


def _moved(row: Any) -> tuple[list[str], list[str]]:
    """The measures that surely rise or fall, and those of which it is not known; not those that nothing changes."""
    sure, unsure = list[str](), list[str]()
    for name, measure in MEASURES.items():
        told = measure.of(row, f"{name}_{_than(row)[0]}")
        if told.sure:
            sure.append(f"{measure.said} {'rises' if told.mean > 0 else 'falls'}, {told.said(measure.digits, True)}")
        elif not (math.isnan(told.mean) or told.mean == told.low == told.high == 0):
            unsure.append(f"{measure.said} ({told.said(measure.digits, True)})")
    return sure, unsure


def _than(row: Any) -> tuple[str, str]:
    return ("effect", "its control") if _has(row, "effect") else ("change", "the baseline")


def _summary(some: pd.DataFrame) -> list[str]:
    """Where the effect is sure, of every edit or along every line."""
    sentences = []
    edited = some[_edited(some)]
    for _, row in edited[edited["value"].isna()].iterrows():
        where = ", ".join(filter(None, (row["model"], row["condition"])))
        than, sure = _than(row)[1], "; ".join(_moved(row)[0])
        found = f"less {than}, {sure}." if sure else f"nothing is told apart from {than}."
        sentences.append(f"**{where}**, {row['arm']}: {found}")
    for (condition, line), rows in edited[edited["value"].notna()].groupby(["condition", "series"], sort=False):
        part, than = _than(rows.iloc[0])
        where = ", ".join(filter(None, (rows.iloc[0]["model"], condition)))
        name = "acc" if "acc" in rows else "nll"
        at = [f"{row['value']:g}" for _, row in rows.iterrows() if MEASURES[name].of(row, f"{name}_{part}").sure]
        found = f"surely other than in {than} at {', '.join(at)}" if at else f"nowhere told apart from {than}"
        sentences.append(f"**{where}**, {line or 'edited'}: {MEASURES[name].said} is {found}.")
    return sentences


def _edited(table: pd.DataFrame) -> pd.Series:
    """Rows that are neither a baseline nor a control."""
    return (table["edits"] != "") & (table["control_of"] == "")


def _has(row: Any, part: str) -> bool:
    return any(not math.isnan(row.get(f"{name}_{part}", math.nan)) for name in MEASURES)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
