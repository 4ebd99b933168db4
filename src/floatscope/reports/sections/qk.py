"""What makes an anchor, and how much it carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from floatscope.analysis.detectors import Detector
from floatscope.reports.charts import Chart, Section, Table
from floatscope.reports.compared import Compared
from floatscope.reports.sections.parts import Cells, cell, having, lines, section, share

EVEN = "over the even share"
APART = "standard deviations of the other keys"
LOST = "share of the advantage lost without it"
MEDIAN = "over the median of the other keys"
NORMS = {"key_norm": "|k| of", "value_norm": "|v| of", "residual": "Norm of the residual stream at"}
LIKE: dict[str, Any] = {"reference": 1.0, "reference_label": "as the others", "log": True}


def qk(runs: Sequence[Compared], detector: Detector) -> Section:
    charts: list[Chart] = [
        lines(runs, "Advantage of anchors in the score", "qk of anchors less that of other keys", "qk", "qk"),
        lines(runs, "Advantage of anchors in the score, relative", APART, "qk", "qk_z"),
        lines(runs, "Advantage of anchors in the angle", APART, "qk", "cos_z"),
        lines(runs, "Advantage of anchors in the norm", APART, "qk", "norm_z"),
        lines(runs, "What the angle of anchors accounts for", LOST, "attribution", "angle"),
        lines(runs, "What the norm of anchors accounts for", LOST, "attribution", "norm"),
    ]
    rows: list[Cells] = []
    for run in having(runs, "attribution"):
        shares = [cell(run.number("attribution", name)) for name in ("angle", "norm")]
        rows.append([run.label, share((run.table("qk")["anchors"] > 0).mean()), cell(run.number("qk", "qk")), *shares])
    columns = ["model", "heads with anchors", "advantage in qk", "angle", "norm"]
    charts.append(Table(columns, rows, "Advantage of anchors, mean over layers"))
    return section(
        "qk",
        "What makes an anchor: angle or norm?",
        "A key is looked at because queries point its way, or because it is long. Anchors are compared with the other"
        " keys of their head; then each is turned to where the others point, or cut to their length, and what its"
        " score loses is counted. The two shares need not add up to 1, and may be negative. Where scores are nearly"
        " flat, as in an untrained model, few heads have anchors, and those that have stand out in the score by as"
        " much as in the lift: its advantage is large in standard deviations and small as it is.",
        f"Scores, cosines and norms after the rotary embedding, means over the queries that see the key. A head's"
        f" anchors: {detector} among its 16 keys of largest lift, at steps whose forward had all rows; means over"
        f" steps and heads that have some.",
        runs,
        charts,
        "qk",
    )


def carried(runs: Sequence[Compared], detector: Detector) -> Section:
    charts: list[Chart] = []
    for name, what in (("first", "the first key"), ("anchors", "anchors")):
        where = {"set": name}
        for value, called in NORMS.items():
            charts.append(lines(runs, f"{called} {what}", MEDIAN, "norms", value, where, **LIKE))
    charts += [
        lines(runs, "Attention on the first key", "percent", "absorption", "percent", {"set": "first"}),
        lines(
            runs, "What moves by the first key", "percent of all that moves", "absorption", "moved", {"set": "first"}
        ),
    ]
    charts += [
        lines(runs, f"What moves by {name}", EVEN, "structure", "moved_ratio", {"set": name}, 1.0)
        for name in ("structure", "content")
    ]
    return section(
        "carried",
        "What anchors carry",
        "Much attention on a small value moves nothing: a drain has a norm below that of other keys, a peak one above"
        " it. If a sink is a place to put attention that has nowhere to go, its share of what moves is far below its"
        " share of the attention.",
        f"Norms are means over heads, over the median of the eligible keys that are neither anchors nor first. Anchors:"
        f" {detector} on the mean over heads. What moves is attention times the norm of W_O v, the size of what a value"
        f" adds to the residual stream.",
        runs,
        charts,
        "norms",
    )
