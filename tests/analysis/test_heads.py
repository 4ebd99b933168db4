"""Heads that mostly attend to their anchors, and what masked rows attend to: by hand and against slow references."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import numpy as np
import pandas as pd
import pytest
import slow_reference as slow
from dense_decodings import KINDS, Decoding, attend, build_trace, canvas, causal, growing, random_decoding

from floatscope.analysis import TraceView, heads
from floatscope.analysis.detectors import parse_detector
from floatscope.errors import UserError
from floatscope.schema import HEAD_STATS, State
from floatscope.traces import Trace

pytestmark = pytest.mark.filterwarnings("error")
decodings = pytest.mark.parametrize(("seed", "kind"), [(seed, kind) for kind in KINDS for seed in range(4)])
MASKED = [kind for kind in KINDS if kind != "cached"]
NEAR = {"rtol": 2e-5, "atol": 1e-6, "check_dtype": False}
N, PROMPT = 40, 30
STATES = {"prompt": State.PROMPT, "masks": State.MASKED, "committed": State.COMMITTED}


def with_output_norms(trace: Trace, of: Callable[[int, int, int], float]) -> Trace:
    """The trace with the output norm of each step, layer and head, which dense decodings do not have."""
    stats = trace.arrays["head_stats"].copy()
    stats[..., HEAD_STATS.index("output_norm")] = np.vectorize(of)(*np.indices(stats.shape[:3]))
    return replace(trace, arrays={**trace.arrays, "head_stats": stats})


@functools.cache
def case(seed: int, kind: str) -> tuple[Decoding, Trace]:
    decoding = random_decoding(seed, kind)
    trace = with_output_norms(build_trace(decoding, f"{kind}-{seed}"), output_norm)
    return decoding, trace


def output_norm(t: int, layer: int, head: int) -> float:
    return 1 + (3 * t + 5 * layer + 7 * head) % 11


def attention_onto(key: int, mass: float) -> np.ndarray:
    A = np.full((N, N), (1 - mass) / (N - 1))
    A[:, key] = mass
    return A


# Active and dormant heads


def test_a_dormant_head():
    """Of four heads one gives .8 to key 7 and has a small output; one does the same with a large output; one attends
    uniformly; one gives the first key everything."""
    A = np.stack(
        [[[attention_onto(7, 0.8), attention_onto(7, 0.8)], [attention_onto(7, 1 / N), attention_onto(0, 1)]]] * 3
    )
    norms = [[0.2, 1.8], [0.3, 1.7]]
    trace = with_output_norms(build_trace(canvas(A, PROMPT)), lambda t, layer, head: (t + 1) * norms[layer][head])
    table = heads.head_activity(TraceView(trace))
    assert list(table.columns) == [
        "sample", "layer", "depth", "head", "anchor_mass", "first", "entropy", "output"
    ]  # fmt: skip
    assert table[["layer", "head"]].to_numpy().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert table["depth"].tolist() == [0, 0, 1, 1]
    assert table["anchor_mass"].tolist() == pytest.approx([0.8, 0.8, 0, 1], abs=1e-6)
    assert table["first"].tolist() == pytest.approx([0.2 / 39, 0.2 / 39, 1 / N, 1], rel=1e-5)
    assert table["output"].tolist() == pytest.approx([0.2, 1.8, 0.3, 1.7])
    assert table["entropy"].tolist()[2:] == pytest.approx([1, 0], abs=1e-6)
    assert heads.dormant_share(table) == 1 / 4
    assert heads.dormant_share(table, mass=0.8001) == 0
    assert heads.dormant_share(table, output=0.1) == 0
    assert heads.dormant_share(table, output=2.0) == 3 / 4
    assert heads.dormant_share(table[table["layer"] == 0]) == 1 / 2


def test_a_dormant_head_is_the_mean_over_samples():
    """A head that is dormant in one text and active in the other counts with its mean."""

    def texts(masses: list[float]) -> pd.DataFrame:
        rows = [(f"text {i}", 0, 0.0, head, m, 0.2) for i, m in enumerate(masses) for head in (0, 1)]
        return pd.DataFrame(rows, columns=["sample", "layer", "depth", "head", "anchor_mass", "output"])

    assert heads.dormant_share(texts([0.9, 0.3])) == 1
    assert heads.dormant_share(texts([0.9, 0.05])) == 0


def test_the_masses_of_several_anchors_add_up():
    A = np.full((N, N), 0.2 / 37)
    A[:, [3, 9, 20]] = [0.4, 0.3, 0.1]
    trace = with_output_norms(build_trace(canvas(A[None, None, None], PROMPT)), output_norm)
    for by, expected in {"topk(k=2)": 0.7, "topk(k=3)": 0.8, "rulli(eps=1)": 0.8, "rulli(eps=6)": 0.7}.items():
        assert heads.head_activity(TraceView(trace, by))["anchor_mass"].tolist() == pytest.approx(
            [expected], rel=1e-5
        ), by


def test_anchor_mass_is_nan_for_detectors_that_need_more_keys():
    table = heads.head_activity(TraceView(case(0, "full")[1], "gu(eps=0.1)"))
    assert table["anchor_mass"].isna().all()
    assert table["output"].notna().all()
    assert np.isnan(heads.dormant_share(table))


def test_output_is_nan_if_all_heads_write_nothing():
    table = heads.head_activity(
        TraceView(with_output_norms(build_trace(random_decoding(0, "full")), lambda t, layer, head: 0.0), "topk(k=2)")
    )
    assert table["output"].isna().all()


@decodings
@pytest.mark.parametrize("by", ["topk(k=2)", "rulli(eps=1)", "zscore(k=1)"])
def test_head_activity(seed, kind, by):
    decoding, trace = case(seed, kind)
    detector, steps = parse_detector(by), [0] if kind == "cached" else list(range(decoding.steps))
    rows = []
    for layer in range(decoding.layers):
        for head in range(decoding.heads):
            masses, firsts, outputs = [], [], []
            for t in steps:
                A = slow.attention_matrix(decoding, t, layer, head)
                anchors = slow.anchors(decoding, t, layer, detector.name, head, **detector.arguments)
                masses.append(sum(slow.mean_received(A, range(len(A)), j) for j in anchors))
                firsts.append(slow.mean_received(A, range(len(A)), 0))
                outputs.append(
                    output_norm(t, layer, head) / fmean(output_norm(t, layer, h) for h in range(decoding.heads))
                )
            rows.append([trace.sample, layer, head, fmean(masses), fmean(firsts), fmean(outputs)])
    table = heads.head_activity(TraceView(trace, by))
    expected = pd.DataFrame(rows, columns=["sample", "layer", "head", "anchor_mass", "first", "output"])
    pd.testing.assert_frame_equal(table[list(expected.columns)], expected, **NEAR)
    entropy = trace.arrays["head_stats"][steps][..., HEAD_STATS.index("entropy")].mean(0)
    np.testing.assert_allclose(table["entropy"], entropy.ravel(), rtol=1e-5)


# What masked rows attend to


def test_masked_rows_that_attend_to_each_other():
    """30 of 40 positions are prompt, and a mask is filled at each of ten steps. In one head, masked rows give .6 to the
    masks and the rest to the prompt; in the other they are uniform."""
    A = np.full((10, 1, 2, N, N), 1 / N)
    for t in range(10):
        A[t, 0, 0, PROMPT + t :] = 0
        A[t, 0, 0, PROMPT + t :, PROMPT + t :] = 0.6 / (10 - t)
        A[t, 0, 0, PROMPT + t :, :PROMPT] = 0.4 / PROMPT
    decoding = canvas(A, PROMPT)
    view = TraceView(build_trace(decoding))
    base = {"prompt": 30 / N, "masks": 5.5 / N, "committed": 4.5 / N}
    first = {"prompt": 0.4, "masks": 0.6, "committed": 0.0}
    table = heads.masked_rows(view)
    assert list(table.columns) == ["sample", "layer", "depth", "set", "mass", "base", "ratio"]
    assert table["set"].tolist() == list(base)
    for name, row in table.set_index("set").iterrows():
        mass = (first[name] + base[name]) / 2
        assert row[["mass", "base", "ratio"]].tolist() == pytest.approx([mass, base[name], mass / base[name]])


def test_a_set_without_keys_has_no_ratio():
    """Nothing is committed at the only step."""
    decoding = canvas(np.full((1, 2, 1, N, N), 1 / N), PROMPT)
    table = heads.masked_rows(TraceView(build_trace(decoding)))
    committed = table[table["set"] == "committed"]
    assert committed[["mass", "base"]].to_numpy().tolist() == [[0, 0]] * 2
    assert committed["ratio"].isna().all()
    np.testing.assert_allclose(table["ratio"].dropna(), 1, rtol=1e-6)


def test_steps_without_masked_rows_do_not_count():
    A = np.stack([np.broadcast_to(attention_onto(key, 1), (1, 1, N, N)) for key in (3, 3, N - 1)])
    table = heads.masked_rows(TraceView(build_trace(canvas(A, PROMPT, when=[1] * 10)))).set_index("set")
    assert table["mass"].to_dict() == pytest.approx({"prompt": 1, "masks": 0, "committed": 0})
    assert table["base"].to_dict() == pytest.approx({"prompt": 0.75, "masks": 0.25, "committed": 0})


@pytest.mark.parametrize(("seed", "kind"), [(seed, kind) for kind in MASKED for seed in range(4)])
def test_masked_rows_equal_the_slow_reference(seed, kind):
    decoding, trace = case(seed, kind)
    steps = [t for t, state in enumerate(decoding.states) if (state == State.MASKED).any()]
    expected = []
    for layer in range(decoding.layers):
        for name, value in STATES.items():
            bases, masses = [], []
            for t in steps:
                rows = tuple(i for i, state in enumerate(decoding.states[t]) if state == State.MASKED)
                keys = [j for j, state in enumerate(decoding.states[t]) if state == value]
                A = slow.attention_matrix(decoding, t, layer)
                bases.append(sum(slow.uniform_received(decoding, t, layer, rows, j) for j in keys))
                masses.append(sum(slow.mean_received(A, rows, j) for j in keys))
            mass, base = fmean(masses), fmean(bases)
            expected.append([layer, name, mass, base, mass / base if base else np.nan])
    table = heads.masked_rows(trace)[["layer", "set", "mass", "base", "ratio"]]
    pd.testing.assert_frame_equal(table, pd.DataFrame(expected, columns=table.columns), **NEAR)


# Refusals


@pytest.mark.parametrize("cached", [True, False])
def test_a_model_without_masks_has_no_masked_rows(cached):
    A = attend(np.zeros((1, 1, N, N)), causal(N))
    with pytest.raises(UserError, match="trace of 'hand' has no masked rows"):
        heads.masked_rows(build_trace(growing(A, PROMPT, cached=cached)))


@pytest.mark.parametrize("name", ["head_stats", "top", "top_key", "moments", "uniform"])
def test_a_field_that_is_not_stored_is_named(name):
    trace = case(0, "full")[1]
    trace = replace(trace, arrays={n: a for n, a in trace.arrays.items() if n != name})
    with pytest.raises(UserError, match=f"does not store '{name}'"):
        heads.head_activity(TraceView(trace, "topk(k=2)"))
