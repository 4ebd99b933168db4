"""Score, angle and norm of each key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from floatscope.analysis.detectors import Detector
from floatscope.analysis.look import TraceView
from floatscope.analysis.qk import COMPARED, key_z
from floatscope.reports.charts import Chart, Map, Mark, Section
from floatscope.reports.compared import Compared
from floatscope.reports.paper.parts import anchors_of, filled, notes, shared_sample
from floatscope.reports.sections.parts import listed, section
from floatscope.reports.sections.qk import qk as of_qk

NAMED = 3  # anchors named in a title
FAR = 4.0  # standard deviations at which the colours of z-scores end


def decomposition(runs: Sequence[Compared], detector: Detector) -> Section:
    """Score, angle and norm: key by key on one canvas, then anchors against other keys in every sample."""
    sample = shared_sample(runs)
    charts, short = list[Chart](), list[str]()
    for run in runs:
        look = TraceView(run.run.trace(sample or run.run.done[0]), detector)
        if "key_stats" in look.trace.arrays and run.has("tops"):
            maps = list(_maps_of_keys(look, run.label))
            charts += maps
            short += [] if maps else [run.label]
    few = (
        f" The first text of {listed(short)} is too short: too few of its keys are seen by enough rows."
        if short
        else ""
    )
    return section(
        "qk-decomposition",
        "QK decomposition: angle or norm?",
        "A key is looked at because queries point its way (cos) or because it is long (norm); the score (qk) is made of"
        " both. Dark is above the other keys, light below them. Where an anchor, framed, stands out in the score, what"
        f" stands out with it is the reason.{few}"
        + notes(
            "**In the paper** middle layers of LLaDA raise their anchors by angle and norm together, deep ones by angle"
            " alone, where the norm is among the lowest; here the charts by layer say how far that holds, over all"
            " samples and head by head, because one canvas and a mean over heads are an example only.",
            "**In the paper** anchors are found in the mean of what keys receive, and what the plot reads is written by"
            f" no published script, so how its z-scores were taken is not known; here anchors are found by {detector}"
            " and z-scores are over the keys that enough rows see, because under a causal mask the last keys are means"
            " over a few rows.",
        ),
        "One canvas: the first sample all runs have, at its middle step (of a model with a cache the prompt), in the"
        " first, the middle and the last layer; σ·q·k, cosine and |q||k| after the rotary embedding, mean over the"
        " queries that see the key and over heads, as z-scores over the eligible keys. By layer: a head's anchors by"
        f" {detector} among its 16 keys of largest lift against its other keys, mean over steps and heads.",
        runs,
        filled([*charts, *of_qk(runs, detector).charts]),
        "qk",
    )


def _maps_of_keys(look: TraceView, label: str) -> Iterator[Map]:
    """Keys across; score, angle and norm down, at the middle of the steps that have all rows: a map for the first, the
    middle and the last layer that has a z-score."""
    whole = np.flatnonzero(look.whole)
    step = int(whole[len(whole) // 2])
    z, anchors, keys = key_z(look, step), anchors_of(look)[step], int(look.keys[step])
    x = [float(key) for key in range(keys)]
    for at in sorted({0, len(look.layers) // 2, len(look.layers) - 1}):
        if np.isnan(z[at]).all():
            continue
        found = np.flatnonzero(anchors[at])
        values = [[None if np.isnan(v) else round(float(v), 3) for v in row[:keys]] for row in z[at]]
        marks: list[Mark] = [(row, int(key), "anchor") for row in range(len(COMPARED)) for key in found]
        title = f"{label}, layer {look.layers[at]}, step {step}\n({_named(look, step, found)})"
        yield Map(title, "key", "z-score of", values, x, list(COMPARED), marks, "z", label, bounds=(-FAR, FAR))


def _named(look: TraceView, step: int, keys: np.ndarray) -> str:
    """The anchors by place and token, the first of many."""
    if not len(keys):
        return "no anchors"
    pieces, tokens = look.trace.meta.get("pieces", {}), look.trace.arrays["tokens"][step]
    words = [f"{k} {json.dumps(pieces.get(str(tokens[k]), '?'), ensure_ascii=False)}" for k in keys[:NAMED]]
    more = f" and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
    return f"anchor{'s' if len(keys) > 1 else ''} {', '.join(words)}{more}"
