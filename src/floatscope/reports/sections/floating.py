"""Whether the anchor moves, in numbers and on a canvas."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from floatscope.analysis.detectors import Detector
from floatscope.analysis.floating import FRONTIERS, LIVES, THIRDS
from floatscope.reports.charts import Chart, Map, Mark, Section
from floatscope.reports.compared import Category, Compared
from floatscope.reports.sections.parts import dots, lines, section
from floatscope.traces import Trace


def floating(runs: Sequence[Compared], detector: Detector) -> Section:
    index = [
        (f"{kind}, {third}" if third else f"{kind}, all layers", "floating", kind, {"third": third} if third else {})
        for kind in ("within", "across")
        for third in ("", *THIRDS)
    ]
    lives: list[Category] = [(life, "lifetimes", life, {}) for life in LIVES]
    fronts: list[Category] = [(name, "drift", name, {}) for name in FRONTIERS]
    charts: list[Chart] = [
        dots(runs, "Floating index", "share of steps", index),
        lines(runs, "Floating within a text, by layer", "share of steps away from the usual key", "floating", "within"),
        dots(runs, "Lives of anchors", "runs per sample and layer", lives),
        lines(runs, "Do anchors stay?", "Jaccard of the anchors of two steps in a row", "drift", "jaccard_next"),
        dots(runs, "Does the top key follow the frontier?", "correlation over steps", fronts, reference=0.0),
        lines(runs, "Movement of the centroid", "variance over steps / length²", "drift", "temporal_variance_relative"),
    ]
    return section(
        "floating",
        "Floating: does the anchor move?",
        "Within: does the top key move while one canvas is decoded? Across: is it at the same place in every text? A"
        " model may be high in one and low in the other, and an untrained bidirectional model is high in both: only the"
        " difference from the control means anything.",
        f"The top key of a step is the eligible key of largest lift, mean over heads. Within = 1 − share of steps at"
        f" the most usual key of that sample and layer; across = the same with the most usual key of the layer over all"
        f" samples. Lives are runs of steps in which a key stays an anchor by {detector}: static at least 90 % of the"
        f" steps, flash one, vanishing with no anchor after it, moving the rest.",
        runs,
        charts,
        "floating",
    )


def maps(runs: Sequence[Compared], detector: Detector) -> Section:
    """The first and the last layer of the first sample all runs have."""
    shared = [name for name in runs[0].run.done if all(name in run.run.done for run in runs)]
    charts: list[Chart] = []
    for run in runs:
        trace = run.run.trace(shared[0] if shared else run.run.done[0])
        layers = trace.arrays["layers"]
        charts += [map_of_steps(trace, run.label, int(layer)) for layer in sorted({int(layers[0]), int(layers[-1])})]
    return Section(
        "maps",
        "One canvas over time",
        "Steps run down, keys run right. The triangles are the top key of each step: a vertical line is a sink, a"
        " wandering one floats. Dots are commits.",
        "Lift of the mean over heads, logarithmic colours. Of a model with a cache each step shows its whole prefix.",
        charts,
    )


def map_of_steps(trace: Trace, label: str, layer: int) -> Map:
    """Steps down, keys across: lift, the top key of each step, what it commits."""
    lift = trace.received(layer, scale="lift")
    marks = [(t, int(k), "top") for t, k in enumerate(trace.top_key(layer)) if k >= 0]
    places = zip(trace.arrays["commit_step"].tolist(), trace.arrays["commit_position"].tolist(), strict=True)
    marks += [(t, k, "commit") for t, k in places if k < lift.shape[1]]
    return map_of_lift(f"{label}, layer {layer}: {trace.sample}", label, lift, marks)


def map_of_lift(title: str, label: str, lift: Float[np.ndarray, "step key"], marks: list[Mark]) -> Map:
    """On logarithmic colours from uniform attention up."""
    steps, keys = lift.shape
    values = [[None if np.isnan(v) else round(float(v), 2) for v in row] for row in lift]
    x, y = ([float(i) for i in range(n)] for n in (keys, steps))
    bounds = (1.0, max(1.1, float(np.nanmax(lift, initial=1.0))))
    return Map(title, "key", "step", values, x, y, marks, unit="lift", model=label, log=True, bounds=bounds)
