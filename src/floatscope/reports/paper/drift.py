"""What each key receives, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from floatscope.analysis.detectors import Detector
from floatscope.analysis.look import TraceView
from floatscope.reports.charts import Chart, Map, Section
from floatscope.reports.paper.parts import Read, anchors_of, ends, notes, shared_sample
from floatscope.reports.sections.floating import map_of_steps
from floatscope.reports.sections.parts import listed, section


def temporal_drift(read: Sequence[Read], detector: Detector) -> Section:
    """The canvas of the first shared sample over time, and the mean of canvases of one length."""
    runs, charts = [each.run for each in read], list[Chart]()
    sample = shared_sample(runs)
    for each in read:
        if each.run.has("tops"):
            look = TraceView(each.run.run.trace(sample or each.run.run.done[0]), detector)
            charts += [_with_anchors(look, each.run.label, layer) for layer in ends(look.layers)]
            charts += each.means
    lone = [each.run.label for each in read if not each.means and each.run.has("tops")]
    single = f" No two samples of {listed(lone)} have the same length, so there is no mean of theirs." if lone else ""
    return section(
        "temporal-drift",
        "Temporal drift of attention",
        "Steps run down, keys run right. Triangles are the top key of each step, frames the anchors, dots the commits."
        f" A vertical line is a sink, a wandering one floats. A mean shows what is left where texts differ.{single}"
        + notes(
            "**In the paper** anchors are keys three standard deviations above the mean of what keys receive; here maps"
            f" show lift, and anchors are found by {detector}, because under a causal mask early keys are seen by more"
            " rows: perfectly uniform attention over 512 keys already puts the first of them at z = 5.9. Their rule is"
            " --detector \"zscore(k=3, scale='mean')\"."
            if detector.scale == "lift"
            else "**In the paper** maps show what keys receive; here they show lift, because under a causal mask early"
            f" keys are seen by more rows. Anchors are found by {detector}.",
            "**In the paper's scripts** Dream is analysed in one forward over the finished sequence, and what the plot"
            " reads is written by none of them; here every model is watched in the forwards that decoded it, because in"
            " a finished text no time passes.",
        ),
        "Lift of the mean over heads, each map on logarithmic colours of its own; the first and the last layer of the"
        " first sample all runs have. Of a model with a cache each step shows its whole prefix. Means are over samples"
        " of equal length, the most frequent one, and of keys that enough rows see.",
        runs,
        charts,
        "tops",
    )


def _with_anchors(look: TraceView, label: str, layer: int) -> Map:
    """The map of a canvas, and its anchors where the detector can fire."""
    drawn = map_of_steps(look.trace, label, layer)
    found = np.argwhere(anchors_of(look)[:, look.layers.tolist().index(layer)])
    return replace(drawn, marks=[*((int(t), int(k), "anchor") for t, k in found), *drawn.marks])
