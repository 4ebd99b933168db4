"""How many anchors there are, and what they are."""

from __future__ import annotations

import json
from collections.abc import Sequence

from floatscope.analysis.detectors import Detector
from floatscope.analysis.tokens import CLASSES
from floatscope.reports.charts import Chart, Section, Table
from floatscope.reports.compared import Compared
from floatscope.reports.sections.parts import Cells, dots, having, lines, section

STRINGS = 5  # tokens shown for each model


def anchors(runs: Sequence[Compared], detector: Detector) -> Section:
    charts: list[Chart] = [
        lines(runs, "Anchors by layer", "anchors per step (mean over heads)", "anchors", "anchors"),
        lines(runs, "Anchors of a single head", "anchors per step and head", "anchors", "per_head"),
        dots(
            runs,
            "What anchors are",
            "share among anchors over share in the canvas",
            [(name, "identity", "ratio", {"class": name}) for name in CLASSES],
            reference=1.0,
            reference_label="as often as in the canvas",
        ),
        lines(runs, "Concentration", "row entropy (1 = uniform)", "concentration", "row_entropy"),
        lines(runs, "Keys that are no anchors", "share of keys", "sweep", "share", along="eps", x_label="eps on lift"),
        dots(
            runs,
            "Heads with a sink",
            "share of (layer, head) where a key gets more than .3 of the rows that see it",
            [("at the first key", "sinks", "first", {}), ("at any key", "sinks", "anywhere", {})],
        ),
    ]
    charts.append(_strings(runs))
    return section(
        "anchors",
        "Anchors: how many, and what they are",
        "Anchors are keys that stand out from the others of their layer. What they are is told beside how often such"
        " tokens stand in the canvas: a class that fills the canvas is found often without being sought.",
        f"Detector {detector} on the mean over heads; in single heads among the 16 keys of largest lift, at steps whose"
        f" forward had all rows. The sweep counts keys above the mean of the others plus eps.",
        runs,
        charts,
        "anchors",
    )


def _strings(runs: Sequence[Compared]) -> Table:
    """The tokens that are anchors most often; a sample without one counts as none."""
    rows: list[Cells] = []
    for run in having(runs, "tokens"):
        mean = run.table("tokens").groupby("token")[["share", "base"]].sum() / len(run.run.done)
        for token, row in mean.nlargest(STRINGS, "share").iterrows():
            rows.append([run.label, json.dumps(token, ensure_ascii=False), f"{row['share']:.3f}", f"{row['base']:.3f}"])
    return Table(["model", "token", "share among anchors", "share in the canvas"], rows, "The most frequent anchors")
