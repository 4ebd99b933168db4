"""Sections about regions of the canvas: structure and content, predicting rows, flow between regions, influence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from floatscope.analysis.depth import find_crossing
from floatscope.analysis.detectors import Detector
from floatscope.reports.charts import Chart, Map, Section, Table
from floatscope.reports.report_runs import Category, ReportRun
from floatscope.reports.sections.chart_builders import (
    LIFT,
    STEPS_THAT_COUNT,
    Row,
    build_dots,
    build_lines,
    build_section,
    join_words,
    map_values,
    region_sort_key,
    runs_with,
)

READ_REGIONS = {
    "evidence": "the evidence",
    "gold": "the gold passage",
    "other documents": "other documents",
    "question": "the question",
    "template": "the template",
}
ROLLOUTS = {"token": "token rollout", "pooled": "region rollout"}
CORRELATION = "Spearman correlation with influence"
NO_CORRELATION: dict[str, Any] = {"reference": 0.0, "reference_label": "no correlation"}


def build_depth_section(runs: Sequence[ReportRun], detector: Detector) -> Section:
    """Attention on structure and on content, by layer."""
    charts: list[Chart] = [
        build_lines(runs, f"Attention on {name} tokens", LIFT, "structure", "ratio", {"set": name}, 1.0)
        for name in ("structure", "content")
    ]
    rows: list[Row] = [[run.label, _describe_crossing(run)] for run in runs_with(runs, "structure")]
    charts.append(Table(["model", "content exceeds structure"], rows, "Where content exceeds structure"))
    return build_section(
        "depth",
        "Structure and content, by depth",
        "If shallow layers build structure and deep layers read content, attention on structure falls with depth and"
        " attention on content rises above it.",
        "Structure: the beginning of the text, masks, special tokens, template words, line breaks, punctuation."
        " Content: all other tokens. Lift is the share of the received attention divided by the share under uniform"
        " attention, mean over steps.",
        runs,
        charts,
        "structure",
    )


def _describe_crossing(run: ReportRun) -> str:
    layer = find_crossing(run.table("structure"))
    if layer is None:
        return "nowhere: structure is ahead in the last layer"
    return "in every layer" if layer == int(run.table("structure")["layer"].min()) else f"from layer {layer} on"


def build_predicting_rows_section(runs: Sequence[ReportRun], detector: Detector) -> Section:
    """Which regions the predicting rows attend to."""
    charts: list[Chart] = []
    for region, name in READ_REGIONS.items():
        with_region = [run for run in runs if _has_region(run, region)]
        if with_region:
            title, where = f"Attention of predicting rows on {name}", {"region": region}
            charts.append(build_lines(with_region, title, LIFT, "predicting_rows", "ratio", where, 1.0, log=True))
    return build_section(
        "predicting-rows",
        "Where the predicting rows look",
        "The row that predicts an answer token must find that token: in the gold passage, if the model reads.",
        f"Mean over the predicting rows, each at the step that commits its token, and over heads."
        f" {STEPS_THAT_COUNT[runs[0].commits]} Lift is relative to uniform attention of the same rows.",
        runs,
        charts,
        "predicting_rows",
    )


def _has_region(run: ReportRun, region: str) -> bool:
    return run.has_table("predicting_rows") and not run.table("predicting_rows", {"region": region}).empty


def build_flow_section(runs: Sequence[ReportRun], detector: Detector) -> Section:
    """Attention between regions, in each layer and through all layers."""
    tables = [run.table("region_importance") for run in runs_with(runs, "region_importance")]
    regions = list(dict.fromkeys(name for table in tables for name in table["key_region"]))
    charts: list[Chart] = [*_build_region_maps(runs_with(runs, "flow"))]
    for column, rollout in ROLLOUTS.items():
        shares: list[Category] = [
            (name, "region_importance", f"{column}_ratio", {"key_region": name}) for name in regions
        ]
        label = "relative to a rollout of uniform attention"
        charts.append(build_dots(runs, f"What reaches the last layer: {rollout}", label, shares, 1.0, "uniform"))
    for column, rollout in ROLLOUTS.items():
        title, label = f"Do regions still differ? {rollout.capitalize()}", "largest distance between two regions"
        charts.append(build_lines(runs, title, label, "rollout_distance", column))
    return build_section(
        "flow",
        "Flow between regions",
        "Rows are regions that attend, columns are regions that receive attention. A rollout follows attention through"
        " all layers: how much of each region reaches each position. Long products of attention matrices lose the"
        " dependence on the row. Where the distance approaches 0, a rollout is the same for every region and says"
        " nothing about any of them.",
        "Maps: attention relative to uniform attention, mean over heads, layers and steps; grey where a region cannot"
        " see the other. Both rollouts multiply ½·attention + ½·identity over the layers. The token rollout multiplies"
        " token matrices and pools the product to regions; the region rollout pools each layer first. The two give"
        " different numbers. Distance: total variation, from 0 (identical) to 1 (disjoint).",
        runs,
        charts,
        "flow",
    )


def _build_region_maps(runs: Sequence[ReportRun]) -> list[Map]:
    """Attention of each region on each region, mean over layers; all maps share one colour scale."""
    ratios = []
    for run in runs:
        ratio = run.table("flow").groupby(["region", "key_region"])["ratio"].mean().unstack("key_region")
        names = sorted(ratio.index, key=region_sort_key)
        ratios.append(ratio.reindex(names, columns=names))
    bounds = (0.1, max(10.0, *(float(ratio.max(axis=None)) for ratio in ratios))) if ratios else (0.1, 10.0)
    return [
        Map(f"{run.label}: attention between regions", "key region", "query region", map_values(ratio, 2),
            list(ratio.columns), list(ratio.index), [], "lift", run.label, log=True, bounds=bounds)
        for run, ratio in zip(runs, ratios, strict=True)
    ]  # fmt: skip


def build_influence_section(runs: Sequence[ReportRun], detector: Detector) -> Section:
    """Whether attention ranks the keys as their influence on the output does."""
    titles = {
        "received": "Influence and the attention of predicting rows",
        "contribution": "Influence and the contribution to predicting rows",
        "received_all": "Influence and the attention of all rows",
    }
    charts: list[Chart] = [
        build_lines(runs, title, CORRELATION, "influence", value, **NO_CORRELATION) for value, title in titles.items()
    ]
    without = [run.label for run in runs if not run.has_table("influence") and "influence" not in run.tables.missing]
    note = f"\n\nNot shown for {join_words(without)}: traced without --influence." if without else ""
    return build_section(
        "influence",
        "Does attention match influence?",
        "Attention says where a head looks. Influence says how much the committed token would change with the token at"
        f" a position. If both rank the keys alike, attention matters for the output.{note}",
        "Influence: norm of the gradient of the committed token's logit with respect to the embedding at a position,"
        " mean over the commits of a step. Spearman correlation over the keys of a step, mean over steps.",
        runs,
        charts,
        "influence",
    )
