"""Whether what is attended to moves what is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from floatscope.analysis.detectors import Detector
from floatscope.reports.charts import Chart, Section
from floatscope.reports.compared import Compared
from floatscope.reports.sections.parts import lines, listed, section

RANKS = "rank correlation with influence"
NONE: dict[str, Any] = {"reference": 0.0, "reference_label": "none"}


def influence(runs: Sequence[Compared], detector: Detector) -> Section:
    charts: list[Chart] = [
        lines(runs, "Influence and the attention of deciding rows", RANKS, "influence", "received", **NONE),
        lines(runs, "Influence and what deciding rows take", RANKS, "influence", "contribution", **NONE),
        lines(runs, "Influence and the attention of all rows", RANKS, "influence", "received_all", **NONE),
    ]
    without = [run.label for run in runs if not run.has("influence") and "influence" not in run.measured.missing]
    left_out = f"\n\nNot shown for {listed(without)}: traced without --influence." if without else ""
    return section(
        "influence",
        "Does attention move what is written?",
        "Attention is where a head looks; influence is how much the token that is written would change with the token"
        f" at a place. If they rank the keys alike, looking matters.{left_out}",
        "Influence: norm of the gradient of the committed token's logit with respect to the embedding at a position,"
        " mean over the commits of a step. Spearman's correlation over the keys of a step, mean over steps.",
        runs,
        charts,
        "influence",
    )
