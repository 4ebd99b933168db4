"""Figures of single canvases: the attention on each key at each step, and the score, angle and norm of each key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from floatscope.analysis.detectors import Detector
from floatscope.analysis.qk_decomposition import COMPARED_STATS, key_zscores
from floatscope.analysis.trace_view import TraceView
from floatscope.errors import UserError
from floatscope.reports.charts import Chart, Map, Mark, Section
from floatscope.reports.paper.runs import PaperRun, format_notes, sort_charts
from floatscope.reports.report_runs import ReportRun
from floatscope.reports.sections.anchors import build_qk_section
from floatscope.reports.sections.chart_builders import build_section, join_words
from floatscope.reports.sections.decoding import build_step_map, find_shared_sample, first_and_last

MAX_NAMED = 3  # anchors named in a title
MAX_Z = 4.0  # z-score at the ends of the colour scale


def build_drift_section(paper_runs: Sequence[PaperRun], detector: Detector) -> Section:
    """One canvas over time, and the mean of equally long canvases."""
    runs, charts = [each.run for each in paper_runs], list[Chart]()
    sample = find_shared_sample(runs)
    for each in paper_runs:
        if each.run.has_table("top_keys"):
            view = TraceView(each.run.run.trace(sample or each.run.run.finished[0]), detector)
            charts += [_build_map_with_anchors(view, each.run.label, layer) for layer in first_and_last(view.layers)]
            charts += each.mean_maps
    without_mean = [each.run.label for each in paper_runs if not each.mean_maps and each.run.has_table("top_keys")]
    note = ""
    if without_mean:
        note = f" No two samples of {join_words(without_mean)} have the same length, so there is no mean map."
    if detector.scale == "lift":
        scale_note = (
            "**In the paper**, anchors are keys whose received attention is three standard deviations above the mean."
            f" **Here**, maps show lift and anchors are found by {detector}, because under a causal mask more rows see"
            " the early keys: uniform attention over 512 keys already gives the first key z = 5.9. Use --detector"
            " \"zscore(k=3, scale='mean')\" for the paper's rule."
        )
    else:
        scale_note = (
            "**In the paper**, maps show received attention. **Here**, they show lift, because under a causal mask more"
            f" rows see the early keys. Anchors are found by {detector}."
        )
    return build_section(
        "temporal-drift",
        "Temporal drift of attention",
        "Rows are steps, columns are keys. Triangles mark the top key of each step, frames the anchors, dots the"
        " commits. A vertical line is a sink, a wandering line is a floating anchor. A mean over samples shows what"
        f" remains when texts differ.{note}"
        + format_notes(
            scale_note,
            "**In the paper's scripts**, Dream is analysed in one forward over the finished sequence, and no script"
            " writes the data that the plot reads. **Here**, every model is traced in the forwards that decode it,"
            " because a finished text has no time axis.",
        ),
        "Lift on the mean over heads; each map has its own logarithmic colour scale. The first and the last layer of"
        " the first sample that all runs share. For a model with a cache, each step shows the whole prefix. Means are"
        " over the samples of the most frequent length, and over keys that enough rows see.",
        runs,
        charts,
        "top_keys",
    )


def _build_map_with_anchors(view: TraceView, label: str, layer: int) -> Map:
    chart = build_step_map(view.trace, label, layer)
    anchors = np.argwhere(_find_anchors(view)[:, view.layers.tolist().index(layer)])
    return replace(chart, marks=[*((int(step), int(key), "anchor") for step, key in anchors), *chart.marks])


def _find_anchors(view: TraceView) -> np.ndarray:
    """The anchors; no key where the detector cannot fire. The page says why elsewhere."""
    try:
        return view.anchors
    except UserError:
        return np.zeros(view.lift.shape, bool)


def build_decomposition_section(runs: Sequence[ReportRun], detector: Detector) -> Section:
    """Score, angle and norm: of each key of one canvas, then of anchors and other keys in every sample."""
    sample = find_shared_sample(runs)
    charts, too_short = list[Chart](), list[str]()
    for run in runs:
        view = TraceView(run.run.trace(sample or run.run.finished[0]), detector)
        if "key_stats" in view.trace.arrays and run.has_table("top_keys"):
            maps = list(_build_key_maps(view, run.label))
            charts += maps
            too_short += [] if maps else [run.label]
    note = ""
    if too_short:
        note = f" The first text of {join_words(too_short)} is too short: enough rows see too few of its keys."
    return build_section(
        "qk-decomposition",
        "QK decomposition: angle or norm?",
        "A key gets a high score (qk) because queries point in its direction (cos) or because it is long (norm). Dark"
        " cells are above the other keys, light cells below them. Where an anchor, framed, stands out in the score, the"
        f" quantity that stands out with it is the reason.{note}"
        + format_notes(
            "**In the paper**, middle layers of LLaDA raise their anchors by angle and norm together, deep layers by"
            " angle alone, where the norm is among the lowest. **Here**, the charts by layer test this over all samples"
            " and heads, because one canvas and a mean over heads are only an example.",
            "**In the paper**, anchors are found in the mean received attention, and no published script writes the"
            " data that the plot reads, so how its z-scores were computed is unknown. **Here**, anchors are found by"
            f" {detector} and z-scores are over the keys that enough rows see, because under a causal mask the values"
            " of the last keys are means over few rows.",
        ),
        "One canvas: the first sample that all runs share, at its middle step (for a model with a cache, the prompt),"
        " in the first, the middle and the last layer; σ·q·k, cosine and |q||k| after the rotary embedding, mean over"
        " the queries that see the key and over heads, as z-scores over the eligible keys. By layer: the anchors of a"
        f" head by {detector} among its 16 keys of largest lift against its other keys, mean over steps and heads.",
        runs,
        sort_charts([*charts, *build_qk_section(runs, detector).charts]),
        "qk",
    )


def _build_key_maps(view: TraceView, label: str) -> Iterator[Map]:
    """Score, angle and norm of each key as z-scores, at the middle of the steps that have all rows.

    One map for each of the first, the middle and the last layer, if the layer has z-scores.
    """
    steps = np.flatnonzero(view.has_all_rows)
    step = int(steps[len(steps) // 2])
    z, anchors, keys = key_zscores(view, step), _find_anchors(view)[step], int(view.keys[step])
    x = [float(key) for key in range(keys)]
    for index in sorted({0, len(view.layers) // 2, len(view.layers) - 1}):
        if np.isnan(z[index]).all():
            continue
        anchor_keys = np.flatnonzero(anchors[index])
        values = [[None if np.isnan(v) else round(float(v), 3) for v in row[:keys]] for row in z[index]]
        marks: list[Mark] = [(row, int(key), "anchor") for row in range(len(COMPARED_STATS)) for key in anchor_keys]
        title = f"{label}, layer {view.layers[index]}, step {step}\n({_name_anchors(view, step, anchor_keys)})"
        yield Map(
            title, "key", "z-score of", values, x, list(COMPARED_STATS), marks, "z", label, bounds=(-MAX_Z, MAX_Z)
        )


def _name_anchors(view: TraceView, step: int, keys: np.ndarray) -> str:
    """The positions and tokens of the first anchors."""
    if not len(keys):
        return "no anchors"
    pieces, tokens = view.trace.meta.get("pieces", {}), view.trace.arrays["tokens"][step]
    names = [f"{k} {json.dumps(pieces.get(str(tokens[k]), '?'), ensure_ascii=False)}" for k in keys[:MAX_NAMED]]
    more = f" and {len(keys) - MAX_NAMED} more" if len(keys) > MAX_NAMED else ""
    return f"anchor{'s' if len(keys) > 1 else ''} {', '.join(names)}{more}"
