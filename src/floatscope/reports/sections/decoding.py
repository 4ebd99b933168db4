"""Sections about the steps of decoding: whether anchors move, one canvas over time, the order of commits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from floatscope.analysis.anchor_movement import FRONTIERS, LIFETIME_CLASSES
from floatscope.analysis.commit_order import trajectory
from floatscope.analysis.detectors import Detector
from floatscope.analysis.floating import THIRDS
from floatscope.reports.charts import Chart, Map, Mark, Section, Table
from floatscope.reports.report_runs import Category, ReportRun
from floatscope.reports.sections.chart_builders import (
    STEPS_THAT_COUNT,
    Row,
    build_dots,
    build_lines,
    build_section,
    map_values,
    runs_with,
)
from floatscope.traces import Trace

ROWS = {"all": "all rows", "predicting": "predicting rows"}
DIRECTIONS: list[Category] = [
    ("Kendall's τ: left to right", "order", "kendall", {}),
    ("U-shape: ends first", "order", "u_shape", {}),
]


def build_floating_section(runs: Sequence[ReportRun], detector: Detector) -> Section:
    """Whether the anchors move, in numbers."""
    thirds: list[tuple[str, dict[str, str]]] = [("all layers", {}), *((third, {"third": third}) for third in THIRDS)]
    moved: dict[str, list[Category]] = {
        group: [(name, "floating", "moved", {"group": group, **where}) for name, where in thirds] for group in ROWS
    }
    leader: list[Category] = [
        (f"{name}, {rows}", "floating", column, {"group": group})
        for column, name in (("within", "within a text"), ("across", "across texts"))
        for group, rows in ROWS.items()
    ]
    lifetimes: list[Category] = [(name, "lifetimes", name, {}) for name in LIFETIME_CLASSES]
    frontiers: list[Category] = [(name, "drift", name, {}) for name in FRONTIERS]
    charts: list[Chart] = [
        *(
            build_lines(runs, f"Attention moved, {rows}", "attention moved per step", "floating", "moved",
                        {"group": group})
            for group, rows in ROWS.items()
        ),
        *(
            build_dots(runs, f"Attention moved by depth, {rows}", "attention moved per step", moved[group])
            for group, rows in ROWS.items()
        ),
        build_dots(runs, "Does the leader change?", "share of the steps with an anchor", leader),
        *(
            build_lines(runs, f"Does the leader change within a text? {rows}", "share of the steps with an anchor",
                        "floating", "within", {"group": group})
            for group, rows in ROWS.items()
        ),
        Table(
            ["model", "rows", "steps with an anchor", "lift of the leader", "lead over the second key",
             "moved on the modal key", "moved elsewhere"],
            _list_leaders(runs),
            "How clear the leader is",
        ),
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
        "Floating: does attention move, and does the leader change?",
        "These are two questions. Attention moved is how much of the attention goes to other keys from one step to the"
        " next: 0 if nothing moves, 1 if everything does. It is about 0 for a fixed sink, and for an untrained network,"
        " whose attention is nearly uniform. The leader is the key of largest lift: within a text, is another key in"
        " the lead than usual? Across texts, is it at the same position in every text? The leader of an untrained"
        " network is a coin toss, ahead of the second key by a fraction of a percent, so steps without an anchor do not"
        " count. A predicting row is a new row at each step, also in a model with a fixed sink: it moves over the"
        " content, while the sink keeps its share.",
        f"{STEPS_THAT_COUNT[runs[0].commits]} Attention moved: total variation distance between the attention received"
        " at consecutive steps, over the keys present at both. Keys are eligible if enough rows see them at every step."
        " A leader is an anchor from a lift of 2 on. Within a text: 1 − the share of these steps at the modal key of"
        " that sample and layer. Across texts: the same with the modal key of the layer over all samples. A lifetime is"
        f" a run of steps in which a key is an anchor by {detector}: static lasts at least 90 % of the steps, flash one"
        " step, vanishing ends in a step without anchors, moving is any other.",
        runs,
        charts,
        "floating",
    )


def _list_leaders(runs: Sequence[ReportRun]) -> list[Row]:
    digits = {"anchor_steps": 2, "lift": 2, "lead": 3, "moved_modal": 4, "moved_rest": 4}
    return [
        [run.label, rows, *(run.estimate("floating", name, {"group": group}).format(n) for name, n in digits.items())]
        for run in runs_with(runs, "floating")
        for group, rows in ROWS.items()
    ]


def build_canvas_section(runs: Sequence[ReportRun], detector: Detector) -> Section:
    """The layers of the first sample that all runs share in which most and least attention moves."""
    sample = find_shared_sample(runs)
    charts: list[Chart] = []
    for run in runs:
        trace = run.run.trace(sample or run.run.finished[0])
        charts += [build_step_map(trace, run.label, layer, note) for layer, note in _select_layers(run, trace)]
    return Section(
        "maps",
        "One canvas over time",
        "Rows are steps, columns are keys. Triangles mark the top key of each step with an anchor, the path that the"
        " floating index counts: a vertical line is a sink, a wandering line is a floating anchor. Dots mark commits."
        " Each model is shown in the layer where most of its attention moves, and in the one where least does.",
        "Lift on the mean over heads, with logarithmic colours. For a model with a cache, each step shows the whole"
        " prefix; keys that join a growing text have values but are never the top key. The layers are those of largest"
        " and smallest attention moved, all rows, mean over samples; without a number for it, the first and the last.",
        charts,
    )


def find_shared_sample(runs: Sequence[ReportRun]) -> str | None:
    """The first finished sample that all runs share; None if there is none."""
    return next((name for name in runs[0].run.finished if all(name in run.run.finished for run in runs)), None)


def first_and_last(layers: np.ndarray) -> list[int]:
    """The numbers of the first and the last traced layer; one number if they are the same layer."""
    return sorted({int(layers[0]), int(layers[-1])})


def _select_layers(run: ReportRun, trace: Trace) -> list[tuple[int, str]]:
    """The layers to show, with a note: where most and where least attention moves."""
    if run.has_table("floating"):
        moved = run.table("floating", {"group": "all"}).groupby("layer")["moved"].mean().dropna()
        if len(moved) > 1:
            return [(int(moved.idxmax()), "moves most"), (int(moved.idxmin()), "moves least")]
    return [(layer, "") for layer in first_and_last(trace.arrays["layers"])]


def build_step_map(trace: Trace, label: str, layer: int, note: str = "") -> Map:
    """Lift, steps × keys, with the anchor path and the commits of each step."""
    lift = trace.received(layer, scale="lift")
    marks = [(step, int(key), "top") for step, key in enumerate(trace.anchor_path(layer)) if key >= 0]
    commits = zip(trace.arrays["commit_step"].tolist(), trace.arrays["commit_position"].tolist(), strict=True)
    marks += [(step, key, "commit") for step, key in commits if key < lift.shape[1]]
    name = f"layer {layer}, {note}" if note else f"layer {layer}"
    return build_lift_map(f"{label}, {name}: {trace.sample}", label, lift, marks)


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
    columns = ["model", "commits of", "steps that count", "at the top key", "at a random mask",
               "within 4 of the top key", "within 4 of a random mask", "distance to the top key",
               "distance to a random mask"]  # fmt: skip
    charts.append(Table(columns, _list_distances(runs), "Distance of the commits from the top key"))
    return build_section(
        "order",
        "In which order the canvas is filled",
        "Left to right, from the ends inwards, or easy tokens first? Each map shows by which step each position is"
        " filled: a diagonal from the upper left means left to right. If attention leads the order, the next commits"
        " are closer to the top key than to a random mask.",
        f"{STEPS_THAT_COUNT[runs[0].commits]} Positions are those of these commits. Kendall's τ of step and position"
        " is 1 for left to right. U-shape: mean time of the middle third − mean time of the outer thirds. Trivial:"
        " every token class except content. Local AR-ness at k: share of commits that end a run of k + 1 adjacent"
        " positions. Global AR-ness at k: share of commits that fill one of the k leftmost masks. The commits of one"
        " step are ordered from left to right, so a step that fills everything counts as left to right. Distances count"
        " the steps and layers whose top key is an anchor and a mask; a random mask is drawn from the masks of the same"
        " steps. Models without masks are left out.",
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
            where = {"lag": lag}
            steps = f"{run.table('coupling', where)['steps'].sum():.0f}"
            values = ("hit", "hit_chance", "hit_4", "hit_4_chance", "distance", "distance_chance")
            cells = [
                run.estimate("coupling", value, where).model.format(1 if "distance" in value else 2) for value in values
            ]
            rows.append([run.label, step, steps, *cells])
    return rows
