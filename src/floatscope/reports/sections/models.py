"""The models side by side."""

from __future__ import annotations

from collections.abc import Sequence

from floatscope.analysis.detectors import Detector
from floatscope.reports.charts import Section, Table
from floatscope.reports.compared import Category, Compared
from floatscope.reports.sections.parts import INTERVALS, Cells, cell

CARRYING: list[Category] = [
    ("lift of the first key", "absorption", "lift", {"set": "first"}),
    ("lift of the top key", "absorption", "lift", {"set": "top"}),
    ("row entropy (1 = uniform)", "concentration", "row_entropy", {}),
    ("heads with a sink at the first key", "sinks", "first", {}),
    ("floating within a text", "floating", "within", {}),
    ("floating across texts", "floating", "across", {}),
    ("Jaccard of anchors, step to step", "drift", "jaccard_next", {}),
]


def between(runs: Sequence[Compared], detector: Detector) -> Section:
    """Every number that carries the report: each model, its control, and the models against the first."""
    rows: list[Cells] = []
    for name, table, value, where in CARRYING:
        if all(run.has(table) for run in runs):
            cells = [cell(run.number(table, value, where)) for run in runs]
            rows.append([name, *cells, *(run.apart(runs[0], table, value, where).said(2, True) for run in runs[1:])])
    labels = [run.label for run in runs]
    columns = ["", *labels, *(f"{label} − {labels[0]}" for label in labels[1:])]
    return Section(
        "models",
        "The models side by side",
        "One rule for every model. Differences are taken sample by sample; an interval that leaves out zero is a"
        " difference that would likely be seen again on other samples like these.",
        f"Means over layers and steps. Anchors: {detector}. {INTERVALS}",
        [Table(columns, rows)],
    )
