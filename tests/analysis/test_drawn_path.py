"""Temporal map, report and explorer draw the path that the floating index counts."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import numpy as np
import pytest
import slow_reference as slow
from dense_decodings import ALL_KINDS, WITH_END, Decoding, attend, build_trace, canvas, random_answer, with_joining_key

from floatscope.analysis import top_keys
from floatscope.reports.explorer import build_payload, unpack
from floatscope.reports.sections.decoding import build_step_map
from floatscope.traces import Trace
from floatscope.traces.temporal_map import TOP

pytestmark = pytest.mark.filterwarnings("error")
REGIONS = {"question": range(5)}


@functools.cache
def case(seed: int, kind: str) -> tuple[Decoding, Trace]:
    decoding = random_answer(seed, kind)
    return decoding, build_trace(decoding, f"{kind}-{seed}", special=WITH_END)


def drawn_path(trace: Trace, layer: int | None, **options: object) -> list[int]:
    """The key of each step on the line of top keys; −1 where it has no point."""
    lines = trace.plot(layer=layer, **options).axes[0].lines
    (line,) = (line for line in lines if line.get_color() == TOP)
    path = np.full(len(trace.arrays["keys"]), -1)
    path[np.asarray(line.get_ydata(), int)] = line.get_xdata()
    return path.tolist()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_picture_draws_the_path_that_the_index_counts(kind):
    for seed in range(3):
        decoding, trace = case(seed, kind)
        path = trace.anchor_path()
        shown = unpack(build_payload(trace, "model")["top_keys"]).astype(int) - 1
        np.testing.assert_array_equal(shown, path)
        table = top_keys(trace, commits="all").set_index(["group", "layer", "step"])["top_key"].sort_index()
        for layer in range(decoding.layers):
            own = trace.anchor_path(layer).tolist()
            assert own == path[:, layer].tolist() == slow.anchor_path(decoding, layer)
            for scale in ("lift", "percent"):
                assert drawn_path(trace, layer, scale=scale) == own
            assert drawn_path(trace, layer, group="predicting") == trace.anchor_path(layer, "predicting").tolist()
            marks = build_step_map(trace, "model", layer).marks
            drawn = dict.fromkeys(range(decoding.steps), -1) | {step: key for step, key, mark in marks if mark == "top"}
            assert list(drawn.values()) == own
            counted_steps = table["all", layer]
            assert counted_steps.tolist() == [own[t] for t in counted_steps.index]
        assert drawn_path(trace, None) == trace.anchor_path("mean").tolist()


def test_some_drawn_steps_have_an_anchor_and_some_do_not():
    paths = [trace.anchor_path() for kind in ALL_KINDS for _, trace in (case(seed, kind) for seed in range(3))]
    assert any((path >= 0).any() and (path < 0).any() for path in paths)


def test_a_reduced_explorer_draws_the_layers_that_it_keeps():
    """In layer l the anchor of step t is key l + 3 t."""
    A = attend(np.random.default_rng(0).normal(0, 2, (5, 8, 1, 40, 40))) / 2
    for t in range(5):
        for layer in range(8):
            A[t, layer, :, :, layer + 3 * t] += 0.5
    trace = build_trace(canvas(A, 30, regions=REGIONS))
    complete = build_payload(trace, "model") | {"heads": None}
    payload = build_payload(trace, "model", len(json.dumps(complete)) - 100)
    kept = payload["layers"]
    assert kept == [0, 2, 4, 6]
    assert trace.anchor_path().tolist() == [[layer + 3 * t for layer in range(8)] for t in range(5)]
    np.testing.assert_array_equal(unpack(payload["top_keys"]).astype(int) - 1, trace.anchor_path()[:, kept])


@pytest.mark.parametrize("cached", [True, False])
def test_a_key_that_joins_is_not_drawn(cached):
    trace = build_trace(replace(with_joining_key(cached), regions=REGIONS))
    assert drawn_path(trace, 1) == [0] * 31
    assert (unpack(build_payload(trace, "model")["top_keys"]) == 1).all()
    assert {key for _, key, mark in build_step_map(trace, "model", 1).marks if mark == "top"} == {0}
