"""Sections about anchors: how much attention they absorb, which tokens they are, what makes them, what they add."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from floatscope.analysis.detectors import Detector
from floatscope.models.token_classes import CLASSES
from floatscope.reports.charts import Chart, Section, Table
from floatscope.reports.report_runs import ReportRun
from floatscope.reports.sections.chart_builders import (
    LIFT,
    Row,
    build_dots,
    build_lines,
    build_section,
    format_number,
    runs_with,
)

MAX_TOKENS = 5  # anchor tokens listed per model
PERCENT = "% of the layer's attention"
STANDARD_DEVIATIONS = "standard deviations of the other keys"
LOST = "share of the advantage lost without it"
NORMS = {"key_norm": "Key norm", "value_norm": "Value norm", "residual": "Residual-stream norm"}
TO_OTHER_KEYS: dict[str, Any] = {"reference": 1.0, "reference_label": "same as other keys", "log": True}


def build_absorption_section(runs: Sequence[ReportRun], detector: Detector) -> Section:
    """How much attention the first key, the top key and the anchors absorb."""
    charts: list[Chart] = []
    for keys in ("first", "top"):
        title, where = f"Attention on the {keys} key", {"set": keys}
        charts.append(build_lines(runs, title, LIFT, "absorption", "lift", where, reference=1.0, log=True))
        charts.append(build_lines(runs, title, PERCENT, "absorption", "percent", where))
    rows: list[Row] = []
    for run in runs_with(runs, "absorption"):
        for keys in run.table("absorption")["set"].unique():
            where = {"set": keys}
            percent, uniform, lift = (run.estimate("absorption", v, where) for v in ("percent", "uniform", "lift"))
            control = "" if lift.control is None else lift.control.format()
            uniform_percent = f"{uniform.model.mean:.2f}"
            rows.append([run.label, keys, percent.model.format(), uniform_percent, lift.model.format(), control])
    columns = ["model", "keys", "received (%)", "uniform (%)", "lift", "lift, untrained"]
    charts.append(Table(columns, rows, "Mean over layers and steps"))
    return build_section(
        "absorption",
        "How much attention a few keys absorb",
        "A sink takes the same large share in every text. A floating anchor takes a smaller share, and not at the first"
        " key. Percentages are not comparable between models with different attention masks: under a causal mask, more"
        " rows see the early keys. Lift is comparable. The top key is the key of largest lift; another key may have a"
        " larger percentage.",
        f"Attention that each key receives from all rows, mean over heads and steps. The top key has the largest lift"
        f" among keys that at least 16 rows see. Anchors: {detector}. Lift is the percentage divided by the percentage"
        f" under uniform attention with the same mask.",
        runs,
        charts,
        "absorption",
    )


def build_anchors_section(runs: Sequence[ReportRun], detector: Detector) -> Section:
    """How many anchors there are, and which tokens they are."""
    charts: list[Chart] = [
        build_lines(runs, "Anchors per layer", "anchors per step (on the mean over heads)", "anchors", "anchors"),
        build_lines(runs, "Anchors of single heads", "anchors per step and head", "anchors", "per_head"),
        build_dots(
            runs,
            "Which tokens are anchors",
            "share among anchors / share in the canvas",
            [(name, "anchor_classes", "ratio", {"class": name}) for name in CLASSES],
            reference=1.0,
            reference_label="as frequent as in the canvas",
        ),
        build_lines(runs, "Concentration", "row entropy (1 = uniform)", "concentration", "row_entropy"),
        build_lines(
            runs,
            "Keys that are not anchors",
            "share of keys",
            "eps_sweep",
            "share",
            along="eps",
            x_label="threshold eps, in lift",
        ),
        build_dots(
            runs,
            "Heads with a sink",
            "share of (layer, head) pairs in which the average row that sees the key gives it more than 0.3",
            [("at the first key", "sinks", "first", {}), ("at any key", "sinks", "anywhere", {})],
        ),
    ]
    charts.append(_list_anchor_tokens(runs))
    return build_section(
        "anchors",
        "Anchors: how many, and which tokens",
        "Anchors are keys that stand out from the other keys of their layer. The chart of token classes compares how"
        " often a class is an anchor with how often it occurs in the canvas: a class that fills most of the canvas is"
        " often an anchor by chance.",
        f"Detector {detector} on the mean over heads. In single heads it considers the 16 keys of largest lift, at"
        f" steps whose forward computed all rows. In the threshold chart, a key is an anchor if its lift exceeds the"
        f" mean of the other keys by more than eps.",
        runs,
        charts,
        "anchors",
    )


def _list_anchor_tokens(runs: Sequence[ReportRun]) -> Table:
    """The most frequent anchor tokens; a sample in which a token is never an anchor counts as 0."""
    rows: list[Row] = []
    for run in runs_with(runs, "anchor_tokens"):
        mean = run.table("anchor_tokens").groupby("token")[["share", "base"]].sum() / len(run.run.finished)
        for token, row in mean.nlargest(MAX_TOKENS, "share").iterrows():
            rows.append([run.label, json.dumps(token, ensure_ascii=False), f"{row['share']:.3f}", f"{row['base']:.3f}"])
    columns = ["model", "token", "share among anchors", "share in the canvas"]
    return Table(columns, rows, "The most frequent anchor tokens")


def build_qk_section(runs: Sequence[ReportRun], detector: Detector) -> Section:
    """Whether the angle or the norm of a key makes it an anchor."""
    charts: list[Chart] = [
        build_lines(runs, "Score advantage of anchors", "q·k of anchors − q·k of other keys", "qk", "qk"),
        build_lines(runs, "Score advantage of anchors, standardised", STANDARD_DEVIATIONS, "qk", "qk_z"),
        build_lines(runs, "Cosine advantage of anchors, standardised", STANDARD_DEVIATIONS, "qk", "cos_z"),
        build_lines(runs, "Norm advantage of anchors, standardised", STANDARD_DEVIATIONS, "qk", "norm_z"),
        build_lines(runs, "Score advantage due to the angle", LOST, "attribution", "angle"),
        build_lines(runs, "Score advantage due to the norm", LOST, "attribution", "norm"),
    ]
    rows: list[Row] = []
    for run in runs_with(runs, "attribution"):
        with_anchors = format_number((run.table("qk")["anchors"] > 0).mean())
        shares = [run.estimate("attribution", name).format() for name in ("angle", "norm")]
        rows.append([run.label, with_anchors, run.estimate("qk", "qk").format(), *shares])
    columns = ["model", "heads with anchors", "score advantage", "due to the angle", "due to the norm"]
    charts.append(Table(columns, rows, "Score advantage of anchors, mean over layers"))
    return build_section(
        "qk",
        "What makes an anchor: angle or norm?",
        "A key gets a high score because queries point in its direction (angle) or because it is long (norm). The"
        " charts compare anchors with the other keys of their head. Then each anchor is rotated to the mean direction"
        " of the other keys, or rescaled to their mean norm, and the loss of score is measured. The two shares need not"
        " add up to 1, and can be negative. Where scores are nearly flat, as in an untrained model, few heads have"
        " anchors; their advantage is large in standard deviations but small in absolute terms.",
        f"Scores, cosines and norms after the rotary embedding, mean over the queries that see the key. Anchors of a"
        f" head: {detector} among its 16 keys of largest lift, at steps whose forward computed all rows. Means over"
        f" steps and over heads with anchors.",
        runs,
        charts,
        "qk",
    )


def build_contribution_section(runs: Sequence[ReportRun], detector: Detector) -> Section:
    """How much anchors add to the residual stream."""
    charts: list[Chart] = []
    for keys, title in (("first", "the first key"), ("anchors", "anchors")):
        for value, norm in NORMS.items():
            label = "relative to the median of other keys"
            charts.append(
                build_lines(runs, f"{norm} of {title}", label, "norms", value, {"set": keys}, **TO_OTHER_KEYS)
            )
    first = {"set": "first"}
    charts += [
        build_lines(runs, "Attention on the first key", PERCENT, "absorption", "percent", first),
        build_lines(
            runs, "Contribution of the first key", "% of all contributions", "absorption", "contribution", first
        ),
    ]
    charts += [
        build_lines(runs, f"Contribution of {name} tokens", "relative to their share under uniform attention",
                    "structure", "contribution_ratio", {"set": name}, 1.0)
        for name in ("structure", "content")
    ]  # fmt: skip
    return build_section(
        "contribution",
        "What anchors add to the residual stream",
        "Much attention on a small value adds little. A drain has a norm below that of other keys, a peak one above it."
        " If a sink only takes attention that has nowhere else to go, its share of the contributions is far below its"
        " share of the attention.",
        f"Norms: mean over heads, divided by the median over the eligible keys that are neither anchors nor the first"
        f" key. Anchors: {detector} on the mean over heads. Contribution: attention times the norm of W_O v, the size"
        f" of what a value adds to the residual stream.",
        runs,
        charts,
        "norms",
    )
