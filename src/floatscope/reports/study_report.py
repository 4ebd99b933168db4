"""The report of a study: its finding in a sentence per model, then the report of its experiment on the study's axis.

report = build_study_report("sinks", [Path("runs/sinks/arm"), Path("runs/sinks/mdm")])
write_page(report, "runs/sinks/report.html")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from floatscope.analysis.experiments import effects
from floatscope.analysis.studies import DORMANT_NATS, STUDIES, is_dormant
from floatscope.reports.charts import Cell, Chart, Lines, Map, Report, Section, Table
from floatscope.reports.intervention_report import (
    MEASURES,
    build_comparison_table,
    build_conditions_table,
    build_intervention_report,
    join_sentences,
)


def build_study_report(name: str, paths: Sequence[Path], notes: Mapping[str, Sequence[str]] | None = None) -> Report:
    """The report of a study's folders, one per model. `notes` are sentences about each model's plan."""
    study, table, report = STUDIES[name], effects(paths), build_intervention_report(paths)
    findings = [join_sentences([sentence]) for sentence in study.summarise(table)]
    models = []
    for model in report.models:
        text = join_sentences((notes or {}).get(model.label, ()))
        models.append(replace(model, about=" ".join(filter(None, (model.about, text)))))
    sections = [replace(section, charts=_set_axis(section.charts, study.axis)) for section in report.sections]
    if name == "dormant":
        sections = [_build_heads_section(table), *map(_keep_tables, sections)]
    return replace(report, title=study.title, summary=[study.description, *findings], models=models, sections=sections)


def build_study_tables(name: str, table: pd.DataFrame) -> list[Table]:
    """What a study found, for a terminal: the conditions, and their differences with the doses.

    The study of single heads has a row per layer.
    """
    if name == "dormant":
        return [_build_layer_table(table)]
    measure, digits = ("nll", 2) if STUDIES[name].nll_only else ("acc", 0)
    conditions = build_conditions_table(table[table["control_of"] == ""], intervals=False)
    return [conditions, build_comparison_table(table, [measure], digits)]


def _build_layer_table(table: pd.DataFrame) -> Table:
    rows: list[list[Cell]] = []
    for (model, layer), heads in table[table["value"].notna()].groupby(["model", "series"], sort=False):
        top = heads.loc[heads["nll_change"].idxmax()]
        change = MEASURES["nll"].interval(top, "nll_change").format(3, True)
        rows.append([model, layer, len(heads), int(is_dormant(heads).sum()), int(top["value"]), change])
    columns = ["model", "condition", "heads", "dormant", "most important head", "its NLL change"]
    return Table(columns, rows, "Heads by layer")


def _set_axis(charts: Sequence[Chart], axis: str) -> list[Chart]:
    return [replace(chart, x_label=axis) if isinstance(chart, Lines) else chart for chart in charts]


def _keep_tables(section: Section) -> Section:
    """The section with its tables only: a line per layer is not informative."""
    text = "Each head is zeroed in turn. There is no control, so the table shows changes, not effects."
    return replace(section, text=text, charts=[chart for chart in section.charts if isinstance(chart, Table)])


def _build_heads_section(table: pd.DataFrame) -> Section:
    """Maps, layers × heads: the change of the NLL without the head, and which heads are dormant by loss."""
    charts: list[Chart] = []
    for model, rows in table[table["value"].notna()].groupby("model", sort=False):
        layers = rows["series"].str.removeprefix("layer ").astype(int)
        heads = rows.assign(layer=layers, head=rows["value"].astype(int), dormant=is_dormant(rows))
        change, dormant = (heads.pivot(index="layer", columns="head", values=v) for v in ("nll_change", "dormant"))
        y, x = list(change.index), list(change.columns)
        for title, values, more in (
            ("Change of the NLL without the head", change, {"unit": "nats"}),
            ("Dormant by loss (1 = dormant)", dormant, {"bounds": (0, 1)}),
        ):
            cells = values.to_numpy(float).tolist()
            charts.append(Map(f"{title}, {model}", "head", "layer", cells, x, y, model=str(model), **more))
    return Section(
        "heads",
        "Which heads the answer needs",
        f"A head is dormant by loss if the interval of its change lies within ±{DORMANT_NATS} nats per token.",
        "Change of the NLL of the right answer when the output of the head is zero, paired by question. The bound is"
        " our choice.",
        charts,
    )
