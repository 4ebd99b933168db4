"""A study as a page: what it found in a sentence per model, then the page of its experiment, on the study's own axis.

report = studied("sinks", [Path("runs/sinks/arm"), Path("runs/sinks/mdm")])
write_page(report, Path("runs/sinks/report.html"))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from floatscope.analysis.experiments import effects
from floatscope.analysis.studies import EPSILON, STUDIES, is_dormant
from floatscope.reports.charts import Chart, Lines, Map, Report, Section, Table
from floatscope.reports.intervened import MEASURES, intervened


def studied(name: str, paths: Sequence[Path], told: Mapping[str, Sequence[str]] | None = None) -> Report:
    """`told` are the sentences of each model's plan."""
    study, table, report = STUDIES[name], effects(paths), intervened(paths)
    found = [f"{sentence[0].upper()}{sentence[1:]}." for sentence in study.summarise(table)]
    models = []
    for model in report.models:
        sentences = [f"{each[0].upper()}{each[1:]}." for each in (told or {}).get(model.label, ())]
        models.append(replace(model, about=" ".join(filter(None, (model.about, *sentences)))))
    sections = [replace(section, charts=_on_axis(section.charts, study.axis)) for section in report.sections]
    if name == "dormant":
        sections = [_heads(table), *map(_in_numbers, sections)]
    return replace(report, title=study.title, summary=[study.about, *found], models=models, sections=sections)


def results(name: str, table: pd.DataFrame) -> Table:
    """Every edited arm in a row: its mean, less the baseline, less its control; of single heads a row per layer."""
    if name == "dormant":
        return _by_layer(table)
    value, digits = ("nll", 2) if STUDIES[name].nll_only else ("acc", 0)
    measure, whose = MEASURES[value], ["model", *(["condition"] if table["condition"].any() else [])]
    rows: list[list[str | float | int | None]] = []
    for _, row in table[table["control_of"] == ""].iterrows():
        apart = [measure.of(row, f"{value}_{part}").said(digits, True) for part in ("change", "effect")]
        mean = f"{measure.of(row, value).mean:.{digits}f}"
        rows.append([*row[whose], row["arm"], int(row["n"]), mean, *apart])
    return Table([*whose, "arm", "n", value, "change", "effect"], rows, "All arms")


def _by_layer(table: pd.DataFrame) -> Table:
    rows: list[list[str | float | int | None]] = []
    for (model, layer), some in table[table["value"].notna()].groupby(["model", "series"], sort=False):
        most = some.loc[some["nll_change"].idxmax()]
        change = MEASURES["nll"].of(most, "nll_change").said(3, True)
        rows.append([model, layer, len(some), int(is_dormant(some).sum()), int(most["value"]), change])
    return Table(["model", "arm", "heads", "dormant", "most missed", "nll change"], rows, "Heads by layer")


def _on_axis(charts: Sequence[Chart], axis: str) -> list[Chart]:
    return [replace(chart, x_label=axis) if isinstance(chart, Lines) else chart for chart in charts]


def _in_numbers(section: Section) -> Section:
    """The tables alone: a line for each layer says nothing."""
    shows = "Each head zero in turn; there is no control, so the change is read, not an effect."
    return replace(section, shows=shows, charts=[chart for chart in section.charts if isinstance(chart, Table)])


def _heads(table: pd.DataFrame) -> Section:
    """Layers down, heads across: the change of the NLL without the head, and which are dormant by loss."""
    charts: list[Chart] = []
    for model, some in table[table["value"].notna()].groupby("model", sort=False):
        layers = some["series"].str.removeprefix("layer ").astype(int)
        told = some.assign(layer=layers, head=some["value"].astype(int), dormant=is_dormant(some))
        change, asleep = (told.pivot(index="layer", columns="head", values=v) for v in ("nll_change", "dormant"))
        y, x = list(change.index), list(change.columns)
        for title, values, more in (
            ("Change of the NLL without the head", change, {"unit": "nats"}),
            ("Dormant by loss: 1", asleep, {"bounds": (0, 1)}),
        ):
            cells = values.to_numpy(float).tolist()
            charts.append(Map(f"{title}, {model}", "head", "layer", cells, x, y, model=str(model), **more))
    return Section(
        "heads",
        "What each head is for the answer",
        f"A head is dormant by loss where the interval of the change lies within ±{EPSILON} nats per token.",
        "Change of the NLL of the right answer when the head's output is zero, question by question; ε is ours.",
        charts,
    )
