"""The report of an experiment: baseline, edits and controls side by side, and the effect of each edit.

    report = build_intervention_report([Path("runs/mask/arm"), Path("runs/mask/mdm")])
    write_page(report, "runs/mask/report.html")

A change is the difference from the baseline, an effect the difference from the control; both are paired by question.
The dose is the share of the attention that an edit or a control moves.
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
from floatscope.analysis.experiments import COUNT, MASS, effects, read_experiment
from floatscope.analysis.studies import format_dose
from floatscope.errors import UserError
from floatscope.interventions.recipes import RECIPES
from floatscope.reports.charts import Cell, Chart, Dots, Lines, Model, Report, Section, Series, Table
from floatscope.reports.intervals import Interval, interval_series, nan_to_none
from floatscope.reports.sections.chart_builders import join_words
from floatscope.schema import Paradigm
from floatscope.syntax import parse_call

METHOD = (
    "Accuracy: the normalised prediction contains a right answer. NLL: mean of −log p over the tokens of the first"
    " right answer and its end token, teacher-forced in the model's own order. Floating: 1 − the share of steps at the"
    " modal top key of the sample, mean over layers, of the edited attention. Order: Kendall's τ of the step and the"
    " position of each commit; 1 is left to right. Dose: the share of the attention that an edit moves, in the"
    " attention before the edit; mean over the rows that are computed, heads, layers and steps. Changes and effects are"
    " paired by question."
)


@dataclass(frozen=True)
class Measure:
    """How a column of the table of effects is shown."""

    title: str
    short: str
    axis: str
    scale: float
    digits: int
    phrase: str  # its name in a sentence

    def interval(self, row: Any, column: str) -> Interval:
        """A column of a row with its interval, on the scale of the report."""
        return Interval(*(self.scale * float(row.get(f"{column}{end}", math.nan)) for end in ("", "_low", "_high")))

    def format(self, row: Any, column: str, sign: bool = False) -> str:
        """The same as text."""
        return self.interval(row, column).format(self.digits, sign)


MEASURES = {
    "acc": Measure("Accuracy", "acc (%)", "accuracy (%)", 100.0, 1, "accuracy (%)"),
    "nll": Measure("NLL of the right answer", "NLL", "NLL (nats per token)", 1.0, 2, "the NLL"),
    "moved": Measure("Attention moved", "moved", "attention moved per step (%)", 100.0, 2, "attention moved"),
    "order": Measure("Order of the commits", "order", "Kendall's τ of step and position", 1.0, 2, "Kendall's τ"),
}


def build_intervention_report(paths: Sequence[Path]) -> Report:
    """The report of experiment folders, one per model."""
    experiments, table = [read_experiment(path) for path in paths], effects(paths)
    names = [experiment["model"] for experiment in experiments]
    if len(set(names)) < len(names):
        raise UserError("two of these experiments have the same model; report them one at a time")
    models, sections = list[Model](), list[Section]()
    for path, experiment in zip(paths, experiments, strict=True):
        name, first = experiment["model"], experiment["conditions"][0]
        settings = open_predictions(path / first["subset"] / first["name"]).settings
        rows = table[table["model"] == name]
        about = join_sentences(experiment["notes"])
        models.append(Model(name, Paradigm(settings["paradigm"]), int(rows["n"].max()), about=about))
        for subset, subset_rows in rows.groupby("subset", sort=False):
            sections.append(_build_section(len(sections), name, str(subset), subset_rows))
    title = next((experiment["title"] for experiment in experiments if experiment["title"]), "Intervention")
    summary = [sentence for model in models for sentence in _summarise(table[table["model"] == model.label])]
    provenance = {"floatscope": __version__, **{experiment["model"]: experiment for experiment in experiments}}
    return Report(title, summary, models, sections, [], provenance)


def join_sentences(notes: Sequence[str]) -> str:
    """Notes as one paragraph of sentences."""
    return " ".join(f"{note[0].upper()}{note[1:]}." for note in notes)


def build_conditions_table(table: pd.DataFrame, intervals: bool = True) -> Table:
    """Every condition with its means, from the table of `effects`."""
    measures = [(name, measure) for name, measure in MEASURES.items() if name in table]
    rows: list[list[Cell]] = []
    for _, row in table.iterrows():
        cells = [measure.interval(row, name) for name, measure in measures]
        if not intervals:
            cells = [Interval(cell.mean, math.nan, math.nan) for cell in cells]
        texts = [cell.format(measure.digits) for cell, (_, measure) in zip(cells, measures, strict=True)]
        rows.append([*row[_group_columns(table)], row["condition"], int(row["n"]), format_dose(row["dose"]), *texts])
    columns = [*_group_columns(table), "condition", "n", "dose", *(measure.short for _, measure in measures)]
    return Table(columns, rows, "All conditions")


def build_effects_table(table: pd.DataFrame) -> Table:
    """The change and the effects of every edited condition, with intervals and doses, from the table of `effects`."""
    edited = table[_is_edited(table)]
    effects = {"": "effect (− control)"}
    if (edited["control"] == MASS).any():
        effects = {"": "effect (− equal mass)", "_count": "effect (− equal count)"}
    rows: list[list[Cell]] = []
    for _, row in edited.iterrows():
        for name, measure in MEASURES.items():
            if name in table and not math.isnan(row[name]):
                cells = [row["condition"], measure.short, format_dose(row["dose"])]
                cells.append(measure.format(row, f"{name}_change", sign=True))
                for suffix in effects:
                    dose = format_dose(row.get(f"dose_control{suffix}", math.nan))
                    cells += [measure.format(row, f"{name}_effect{suffix}", sign=True), dose]
                rows.append([*row[_group_columns(table)], *cells])
    titles = [title for effect in effects.values() for title in (effect, "its dose")]
    columns = [*_group_columns(table), "condition", "measure", "dose", "change (− baseline)", *titles]
    return Table(columns, rows, "Changes and effects, paired by question")


def build_comparison_table(table: pd.DataFrame, names: Sequence[str] = (), digits: int | None = None) -> Table:
    """The same in few columns, for a terminal: a row per edited condition, measure and comparison.

    names   the measures; all by default
    digits  the digits of all numbers; by default those of each measure
    """
    rows: list[list[Cell]] = []
    measures = [(name, MEASURES[name]) for name in names or MEASURES if name in table]
    is_single = len(measures) == 1
    for _, row in table[_is_edited(table)].iterrows():
        comparisons = {"baseline": ("change", 0.0), "control": ("effect", row.get("dose_control", math.nan))}
        if row["control"] == MASS:
            comparisons["equal mass"] = comparisons.pop("control")
            comparisons["equal count"] = ("effect_count", row.get("dose_control_count", math.nan))
        for name, measure in measures:
            for reference, (part, dose) in comparisons.items():
                interval = measure.interval(row, f"{name}_{part}")
                if not math.isnan(interval.mean):
                    cells = [row["condition"], *([] if is_single else [measure.short]), reference]
                    text = interval.format(measure.digits if digits is None else digits, True)
                    rows.append(
                        [*row[_group_columns(table)], *cells, text, format_dose(row["dose"]), format_dose(dose)]
                    )
    names_of_columns = ["condition", *([] if is_single else ["measure"]), "relative to"]
    difference = f"difference, {measures[0][1].short}" if is_single else "difference"
    columns = [*_group_columns(table), *names_of_columns, difference, "dose", "its dose"]
    return Table(columns, rows, "Changes and effects, paired by question")


def format_doses(row: Any) -> str:
    """The doses of an edit and of its main control; the dose alone without a control."""
    control = row.get("dose_control", math.nan)
    return format_dose(row["dose"]) + ("" if math.isnan(control) else f" (control {format_dose(control)})")


def _group_columns(table: pd.DataFrame) -> list[str]:
    """Which of `model` and `subset` differ between rows."""
    return [name for name in ("model", "subset") if table[name].nunique() > 1]


def _build_section(number: int, model: str, subset: str, rows: pd.DataFrame) -> Section:
    title = f"{model}, {subset}" if subset else model
    charts = [*_build_charts(model, rows), build_effects_table(rows), build_conditions_table(rows)]
    return Section(f"experiment-{number}", title, _describe_edits(rows), METHOD, charts)


def _build_charts(model: str, table: pd.DataFrame) -> Iterator[Chart]:
    """Dots for conditions without a value on the axis, a line for each series of conditions with one."""
    edited = table[_is_edited(table)]
    measures = [(name, measure) for name, measure in MEASURES.items() if name in table and table[name].notna().any()]
    baseline = {name: nan_to_none(measure.interval(table.iloc[0], name).mean) for name, measure in measures}
    rows = pd.concat([table.iloc[:1], edited[edited["value"].isna()]])
    for name, measure in measures if len(rows) > 1 else ():
        series = _build_series(model, rows, measure, name, "condition")
        yield Dots(measure.title, list(rows["condition"]), measure.axis, series, baseline[name], "baseline")
    for label, line_rows in edited[edited["value"].notna()].groupby("series", sort=False):
        rows = line_rows.sort_values("value")
        x = [float(value) for value in rows["value"]]
        for name, measure in measures:
            series = _build_series(model, rows, measure, name, str(label) or "edited")
            title = f"{measure.title}, {label}" if label else measure.title
            yield Lines(title, "value", measure.axis, x, series, baseline[name], "baseline")


def _build_series(model: str, rows: pd.DataFrame, measure: Measure, name: str, label: str) -> list[Series]:
    """A series of the conditions, and one of their controls if there are any."""
    series = [interval_series(label, model, [measure.interval(row, name) for _, row in rows.iterrows()])]
    if any(_has_measure(row, "effect") for _, row in rows.iterrows()):
        controls = [measure.interval(row, f"{name}_control") for _, row in rows.iterrows()]
        series.append(interval_series("control", model, controls, control=True))
    return series


def _describe_edits(table: pd.DataFrame) -> str:
    """For each edit: what it does, what its control is, and what the result is."""
    parts = []
    for _, row in table[_is_edited(table) & table["value"].isna()].iterrows():
        edit = f"**{row['condition']}**: {_explain_edits(row['edits'])}."
        parts.append(f"{edit} {_describe_control(table, row)} {_describe_effect(row)}")
    for label, rows in table[_is_edited(table) & table["value"].notna()].groupby("series", sort=False):
        first, last = rows.iloc[0], rows.iloc[-1]
        edits = " to ".join(dict.fromkeys((first["edits"], last["edits"])))
        parts.append(f"**{label or 'edited'}**: {edits}. {_describe_control(table, first)}")
    return "\n\n".join(parts) or "Only the baseline."


def _explain_edits(edits: str) -> str:
    """Each edit as written, with the description of its recipe."""
    parts = []
    for edit in edits.split("; "):
        description = RECIPES[name].description if (name := parse_call(edit)[0]) in RECIPES else ""
        parts.append(f"{edit} {description}" if description else edit)
    return "; and ".join(parts)


def _describe_control(table: pd.DataFrame, row: Any) -> str:
    """What the controls of a condition do, how many there are, and their doses."""
    controls = table[table["control_of"] == row["condition"]]
    if controls.empty:
        return "It has no control, so what any edit of this size would do is unknown."
    targets = "keys that could be anchors"
    if "zero_heads" in row["edits"]:
        targets = "heads of the same layers"
    elif "knock_out" in row["edits"] or "blank" in row["edits"]:
        targets = "positions of the prompt"
    phrases = {
        MASS: "other random keys that hold as much attention",
        COUNT: f"as many random {targets}",
        "middle": "as many keys of middle rank",
    }
    parts = []
    for kind, same in controls.groupby("control", sort=False):
        draws = f"{len(same)} draw{'s' if len(same) > 1 else ''}"
        dose = "" if same["dose"].isna().any() else f", dose {format_dose(same['dose'].mean())}"
        parts.append(f"{phrases[str(kind)]} ({draws}{dose})")
    dose = "" if math.isnan(row["dose"]) else f" The edit has a dose of {format_dose(row['dose'])}."
    return f"Control: the same edit on {', and on '.join(parts)}.{dose}"


def _describe_effect(row: Any) -> str:
    """The effect of an edit; without a control, its change."""
    conclusive, inconclusive = _split_measures(row)
    reference = _reference(row)[1]
    sentences = [f"Relative to {reference}, {join_words(conclusive)}."] if conclusive else []
    if inconclusive:
        sentences.append(f"Inconclusive relative to {reference}: {join_words(inconclusive)}.")
    return " ".join(sentences) or f"No measure differs from {reference}."


def _split_measures(row: Any) -> tuple[list[str], list[str]]:
    """The measures whose interval excludes zero, and the others; measures without any difference are left out."""
    conclusive, inconclusive = list[str](), list[str]()
    for name, measure in MEASURES.items():
        column = f"{name}_{_reference(row)[0]}"
        difference, text = measure.interval(row, column), measure.format(row, column, sign=True)
        if difference.excludes_zero:
            conclusive.append(f"{measure.phrase} {'rises' if difference.mean > 0 else 'falls'} ({text})")
        elif not (math.isnan(difference.mean) or difference.mean == difference.low == difference.high == 0):
            inconclusive.append(f"{measure.phrase} ({text})")
    return conclusive, inconclusive


def _reference(row: Any) -> tuple[str, str]:
    """What a condition is compared with: its control if it has one, else the baseline."""
    if not _has_measure(row, "effect"):
        return "change", "the baseline"
    return "effect", "its control of equal mass" if row["control"] == MASS else "its control"


def _summarise(table: pd.DataFrame) -> list[str]:
    """A sentence for every edit, and for every series of edits the values at which it has an effect."""
    sentences = []
    edited = table[_is_edited(table)]
    for _, row in edited[edited["value"].isna()].iterrows():
        name = ", ".join(filter(None, (row["model"], row["subset"])))
        conclusive, reference = _split_measures(row)[0], _reference(row)[1]
        result = f"inconclusive relative to {reference}"
        if conclusive:
            result = f"relative to {reference}, {join_words(conclusive)}"
        dose = "" if math.isnan(row["dose"]) else f" Dose {format_doses(row)}."
        sentences.append(f"**{name}**, {row['condition']}: {result}.{dose}")
    for (subset, label), rows in edited[edited["value"].notna()].groupby(["subset", "series"], sort=False):
        part, reference = _reference(rows.iloc[0])
        name = ", ".join(filter(None, (rows.iloc[0]["model"], subset)))
        column = "acc" if "acc" in rows else "nll"
        measure = MEASURES[column]
        values = [
            f"{row['value']:g}" for _, row in rows.iterrows() if measure.interval(row, f"{column}_{part}").excludes_zero
        ]
        result = f"differs from {reference} at {', '.join(values)}"
        if not values:
            result = f"is inconclusive relative to {reference}"
        doses = ", ".join(format_doses(row) for _, row in rows.iterrows())
        dose = "" if rows["dose"].isna().any() else f" Dose {doses}."
        sentences.append(f"**{name}**, {label or 'edited'}: {measure.phrase} {result}.{dose}")
    return sentences


def _is_edited(table: pd.DataFrame) -> pd.Series:
    """Rows that are neither a baseline nor a control."""
    return (table["edits"] != "") & (table["control_of"] == "")


def _has_measure(row: Any, part: str) -> bool:
    return any(not math.isnan(row.get(f"{name}_{part}", math.nan)) for name in MEASURES)
