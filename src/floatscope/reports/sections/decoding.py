"""Sections about the steps of decoding: whether anchors move, one canvas over time, the order of commits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from floatscope.analysis.anchor_movement import FRONTIERS, LIFETIME_CLASSES, THIRDS
from floatscope.analysis.commit_order import trajectory
from floatscope.analysis.detectors import Detector
from floatscope.reports.charts import Chart, Map, Mark, Section, Table
from floatscope.reports.report_runs import Category, ReportRun
from floatscope.reports.sections.chart_builders import (
    Row,
    build_dots,
    build_lines,
    build_section,
    map_values,
    runs_with,
)
from floatscope.traces import Trace

DIRECTIONS: list[Category] = [
    ("Kendall's τ: left to right", "order", "kendall", {}),
    ("U-shape: ends first", "order", "u_shape", {}),
]


def build_floating_section(runs: Sequence[ReportRun], detector: Detector) -> Section:
    """Whether the anchors move, in numbers."""
    index: list[Category] = [
        (f"{column}, {third or 'all layers'}", "floating", column, {"third": third} if third else {})
        for column in ("within", "across")
        for third in ("", *THIRDS)
    ]
    lifetimes: list[Category] = [(name, "lifetimes", name, {}) for name in LIFETIME_CLASSES]
    frontiers: list[Category] = [(name, "drift", name, {}) for name in FRONTIERS]
    charts: list[Chart] = [
        build_dots(runs, "Floating index", "share of steps", index),
        build_lines(runs, "Floating within a text, by layer", "share of steps away from the modal key", "floating",
                    "within"),
        build_dots(runs, "Lifetimes of anchors", "lifetimes per sample and layer", lifetimes),
        build_lines(runs, "Do anchors persist?", "Jaccard index of anchors at consecutive steps", "drift",
                    "jaccard_next"),
        build_dots(runs, "Does the top key follow the frontier?", "correlation over steps", frontiers, 0.0,
                   "no correlation"),
        build_lines(runs, "Movement of the centroid of anchors", "variance over steps / length²", "drift",
                    "temporal_variance_relative"),
    ]  # fmt: skip
    return build_section(
        "floating",
        "Floating: do anchors move?",
        "Within a text: does the top key move while one canvas is decoded? Across texts: is it at the same position in"
        " every text? A model can be high in one and low in the other. An untrained bidirectional model is high in"
        " both, so only the difference from the control is meaningful.",
        f"The top key of a step is the eligible key of largest lift, on the mean over heads. Within a text: 1 − the"
        f" share of steps at the modal key of that sample and layer. Across texts: the same with the modal key of the"
        f" layer over all samples. A lifetime is a run of steps in which a key is an anchor by {detector}: static lasts"
        f" at least 90 % of the steps, flash one step, vanishing ends in a step without anchors, moving is any other.",
        runs,
        charts,
        "floating",
    )


def build_canvas_section(runs: Sequence[ReportRun], detector: Detector) -> Section:
    """The first and the last layer of the first sample that all runs share."""
    sample = find_shared_sample(runs)
    charts: list[Chart] = []
    for run in runs:
        trace = run.run.trace(sample or run.run.finished[0])
        charts += [build_step_map(trace, run.label, layer) for layer in first_and_last(trace.arrays["layers"])]
    return Section(
        "maps",
        "One canvas over time",
        "Rows are steps, columns are keys. Triangles mark the top key of each step: a vertical line is a sink, a"
        " wandering line is a floating anchor. Dots mark commits.",
        "Lift on the mean over heads, with logarithmic colours. For a model with a cache, each step shows the whole"
        " prefix.",
        charts,
    )


def find_shared_sample(runs: Sequence[ReportRun]) -> str | None:
    """The first finished sample that all runs share; None if there is none."""
    return next((name for name in runs[0].run.finished if all(name in run.run.finished for run in runs)), None)


def first_and_last(layers: np.ndarray) -> list[int]:
    """The numbers of the first and the last traced layer; one number if they are the same layer."""
    return sorted({int(layers[0]), int(layers[-1])})


def build_step_map(trace: Trace, label: str, layer: int) -> Map:
    """Lift, steps × keys, with the top key and the commits of each step."""
    lift = trace.received(layer, scale="lift")
    marks = [(step, int(key), "top") for step, key in enumerate(trace.top_key(layer)) if key >= 0]
    commits = zip(trace.arrays["commit_step"].tolist(), trace.arrays["commit_position"].tolist(), strict=True)
    marks += [(step, key, "commit") for step, key in commits if key < lift.shape[1]]
    return build_lift_map(f"{label}, layer {layer}: {trace.sample}", label, lift, marks)


def build_lift_map(title: str, label: str, lift: Float[np.ndarray, "step key"], marks: list[Mark]) -> Map:
    """Lift with logarithmic colours that start at uniform attention."""
    steps, keys = lift.shape
    values = [[None if np.isnan(v) else round(float(v), 2) for v in row] for row in lift]
    x, y = ([float(i) for i in range(n)] for n in (keys, steps))
    bounds = (1.0, max(1.1, float(np.nanmax(lift, initial=1.0))))
    return Map(title, "key", "step", values, x, y, marks, unit="lift", model=label, log=True, bounds=bounds)


def build_order_section(runs: Sequence[ReportRun], detector: Detector) -> Section:
    """The order in which the canvas is filled, and whether attention leads it."""
    charts: list[Chart] = [_build_fill_map(run) for run in runs_with(runs, "commits")]
    charts += [
        build_dots(runs, "Left to right, or ends first?", "0 = neither", DIRECTIONS, 0.0, "neither"),
        build_lines(runs, "Local AR-ness", "share of commits", "arness", "local", along="k",
                    x_label="k preceding neighbours"),
        build_lines(runs, "Global AR-ness", "share of commits", "arness", "global", along="k",
                    x_label="k leftmost masks"),
    ]  # fmt: skip
    values = ("tokens_per_step", "trivial", "trivial_first")
    step_rows: list[Row] = [
        [run.label, *(run.estimate("order", value).format() for value in values)] for run in runs_with(runs, "order")
    ]
    columns = ["model", "tokens per step", "trivial tokens", "trivial tokens among the first quarter"]
    charts.append(Table(columns, step_rows, "What a step commits"))
    columns = ["model", "commits of", "within 4 of the top key", "within 4 of a random mask", "distance to the top key",
               "distance to a random mask"]  # fmt: skip
    charts.append(Table(columns, _list_distances(runs), "Distance of the commits from the top key"))
    return build_section(
        "order",
        "In which order the canvas is filled",
        "Left to right, from the ends inwards, or easy tokens first? Each map shows by which step each position is"
        " filled: a diagonal from the upper left means left to right. If attention leads the order, the next commits"
        " are closer to the top key than to a random mask.",
        "Positions are those to fill. Kendall's τ of step and position is 1 for left to right. U-shape: mean time of"
        " the middle third − mean time of the outer thirds. Trivial: every token class except content. Local AR-ness at"
        " k: share of commits that end a run of k + 1 adjacent positions. Global AR-ness at k: share of commits that"
        " fill one of the k leftmost masks. The commits of one step are ordered from left to right, so a step that"
        " fills everything counts as left to right. The top key can be anywhere, a random mask only in the answer; the"
        " table of distances omits models without masks.",
        runs,
        charts,
        "order",
    )


def _build_fill_map(run: ReportRun) -> Map:
    """Steps × positions: the share of samples in which the position is filled by the end of the step."""
    share = trajectory(run.table("commits")).pivot(index="step", columns="position", values="share")
    x, y = ([float(name) for name in names] for names in (share.columns, share.index))
    return Map(f"{run.label}: filled by the end of the step", "position", "step", map_values(share, 3), x, y,
               unit="share of samples", model=run.label, bounds=(0.0, 1.0))  # fmt: skip


def _list_distances(runs: Sequence[ReportRun]) -> list[Row]:
    rows: list[Row] = []
    for run in runs_with(runs, "coupling"):
        if run.table("coupling")["hit_chance"].isna().all():
            continue
        for lag, step in ((0, "the same step"), (1, "the next step")):
            hit, hit_chance, distance, distance_chance = (
                run.estimate("coupling", value, {"lag": lag})
                for value in ("hit_4", "hit_4_chance", "distance", "distance_chance")
            )
            distances = distance.model.format(1), distance_chance.model.format(1)
            rows.append([run.label, step, hit.format(), hit_chance.model.format(), *distances])
    return rows
