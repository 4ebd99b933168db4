"""Heads that do little but view at their anchors, and what masked rows view at: by hand and by loops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import numpy as np
import pandas as pd
import pytest
import slow_reference as slow
from dense_decodings import KINDS, Decoding, random_decoding, attend, canvas, causal, growing, build_trace

from floatscope.analysis import TraceView, heads
from floatscope.analysis.detectors import parse_detector
from floatscope.errors import UserError
from floatscope.schema import FIELDS, GROUPS, HEAD_STATS, State
from floatscope.traces import Trace
from floatscope.traces.trace_fields import stored_axes

pytestmark = pytest.mark.filterwarnings("error")
decodings = pytest.mark.parametrize(("seed", "kind"), [(seed, kind) for kind in KINDS for seed in range(4)])
MASKED = [kind for kind in KINDS if kind != "cached"]
NEAR = {"rtol": 2e-5, "atol": 1e-6, "check_dtype": False}
N, PROMPT = 40, 30
STATES = {"prompt": State.PROMPT, "masks": State.MASKED, "committed": State.COMMITTED}


def with_stats(trace: Trace, of: Callable[[int, int, int], float]) -> Trace:
    """With the output norm of each step, layer and head, which traces by hand do not have."""
    stats = trace.arrays["head_stats"].copy()
    stats[..., HEAD_STATS.index("output_norm")] = np.vectorize(of)(*np.indices(stats.shape[:3]))
    return replace(trace, arrays={**trace.arrays, "head_stats": stats})


def with_heads(trace: Trace, decoding: Decoding) -> Trace:
    """As keep="heads" would have it, masked rows only."""
    steps, layers, count, width = decoding.steps, decoding.layers, decoding.heads, trace.arrays["states"].shape[1]
    received = np.full((steps, layers, count, len(GROUPS), width), np.nan, np.float32)
    for t, state in enumerate(decoding.states):
        rows = np.flatnonzero(state == State.MASKED)
        if len(rows):
            received[t, :, :, GROUPS.index("masked"), : len(state)] = decoding.attention[t][:, :, rows].mean(2)
    axes = stored_axes("received_heads", FIELDS["received_heads"].axes)
    return replace(
        trace,
        arrays={**trace.arrays, "received_heads": received},
        axes={**trace.axes, "received_heads": axes},
    )


@functools.cache
def case(seed: int, kind: str) -> tuple[Decoding, Trace]:
    decoding = random_decoding(seed, kind)
    trace = with_stats(build_trace(decoding, f"{kind}-{seed}"), size)
    return decoding, trace if kind == "cached" else with_heads(trace, decoding)


def size(t: int, layer: int, head: int) -> float:
    return 1 + (3 * t + 5 * layer + 7 * head) % 11


def onto(key: int, mass: float) -> np.ndarray:
    A = np.full((N, N), (1 - mass) / (N - 1))
    A[:, key] = mass
    return A


# Active and dormant


def test_a_dormant_head():
    """Of two layers' heads one gives .8 to key 7 and writes a fifth of what the mean does, one as much but writes; one
    spreads, and one gives the first key all."""
    A = np.stack([[[onto(7, 0.8), onto(7, 0.8)], [onto(7, 1 / N), onto(0, 1)]]] * 3)
    norms = [[0.2, 1.8], [0.3, 1.7]]
    trace = with_stats(build_trace(canvas(A, PROMPT)), lambda t, layer, head: (t + 1) * norms[layer][head])
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


def test_dormant_is_of_the_mean_over_samples():
    """A head that sleeps in one text and works in the other is judged by both together."""

    def texts(masses: list[float]) -> pd.DataFrame:
        rows = [(f"text {i}", 0, 0.0, head, m, 0.2) for i, m in enumerate(masses) for head in (0, 1)]
        return pd.DataFrame(rows, columns=["sample", "layer", "depth", "head", "anchor_mass", "output"])

    assert heads.dormant_share(texts([0.9, 0.3])) == 1
    assert heads.dormant_share(texts([0.9, 0.05])) == 0


def test_anchors_of_several_keys_add_up():
    A = np.full((N, N), 0.2 / 37)
    A[:, [3, 9, 20]] = [0.4, 0.3, 0.1]
    trace = with_stats(build_trace(canvas(A[None, None, None], PROMPT)), size)
    for by, expected in {"topk(k=2)": 0.7, "topk(k=3)": 0.8, "rulli(eps=1)": 0.8, "rulli(eps=6)": 0.7}.items():
        assert heads.head_activity(TraceView(trace, by))["anchor_mass"].tolist() == pytest.approx(
            [expected], rel=1e-5
        ), by


def test_detectors_that_need_more_than_sixteen_keys():
    table = heads.head_activity(TraceView(case(0, "full")[1], "gu(eps=0.1)"))
    assert table["anchor_mass"].isna().all()
    assert table["output"].notna().all()
    assert np.isnan(heads.dormant_share(table))


def test_heads_that_write_nothing():
    table = heads.head_activity(
        TraceView(with_stats(build_trace(random_decoding(0, "full")), lambda t, layer, head: 0.0), "topk(k=2)")
    )
    assert table["output"].isna().all()


@decodings
@pytest.mark.parametrize("by", ["topk(k=2)", "rulli(eps=1)", "zscore(k=1)"])
def test_activity(seed, kind, by):
    decoding, trace = case(seed, kind)
    chosen, steps = parse_detector(by), [0] if kind == "cached" else list(range(decoding.steps))
    rows = []
    for layer in range(decoding.layers):
        for head in range(decoding.heads):
            masses, firsts, outputs = [], [], []
            for t in steps:
                A = slow.attention_matrix(decoding, t, layer, head)
                found = slow.anchors(decoding, t, layer, chosen.name, head, **chosen.arguments)
                masses.append(sum(slow.mean_received(A, range(len(A)), j) for j in found))
                firsts.append(slow.mean_received(A, range(len(A)), 0))
                outputs.append(size(t, layer, head) / fmean(size(t, layer, h) for h in range(decoding.heads)))
            rows.append([trace.sample, layer, head, fmean(masses), fmean(firsts), fmean(outputs)])
    table = heads.head_activity(TraceView(trace, by))
    expected = pd.DataFrame(rows, columns=["sample", "layer", "head", "anchor_mass", "first", "output"])
    pd.testing.assert_frame_equal(table[list(expected.columns)], expected, **NEAR)
    entropy = trace.arrays["head_stats"][steps][..., HEAD_STATS.index("entropy")].mean(0)
    np.testing.assert_allclose(table["entropy"], entropy.ravel(), rtol=1e-5)


# What masked rows view at


def test_masked_rows_that_look_at_each_other():
    """Of 40 positions 30 are prompt; a mask is filled at each of ten steps. Masked rows give .6 to the masks and the
    rest to the prompt, in one head; in the other they are uniform."""
    A = np.full((10, 1, 2, N, N), 1 / N)
    for t in range(10):
        A[t, 0, 0, PROMPT + t :] = 0
        A[t, 0, 0, PROMPT + t :, PROMPT + t :] = 0.6 / (10 - t)
        A[t, 0, 0, PROMPT + t :, :PROMPT] = 0.4 / PROMPT
    decoding = canvas(A, PROMPT)
    view = TraceView(with_heads(build_trace(decoding), decoding))
    base = {"prompt": 30 / N, "masks": 5.5 / N, "committed": 4.5 / N}
    first = {"prompt": 0.4, "masks": 0.6, "committed": 0.0}
    table = heads.masked_rows(view)
    assert list(table.columns) == ["sample", "layer", "depth", "set", "mass", "base", "ratio"]
    assert table["set"].tolist() == list(base)
    for name, told in table.set_index("set").iterrows():
        mass = (first[name] + base[name]) / 2
        assert told[["mass", "base", "ratio"]].tolist() == pytest.approx([mass, base[name], mass / base[name]])
    table = heads.directed_heads(view)
    assert list(table.columns) == ["sample", "layer", "depth", "head", "set", "mass", "base", "ratio"]
    cells = table.set_index(["head", "set"])
    for name, even in base.items():
        assert cells.loc[(0, name), "mass"] == pytest.approx(first[name])
        assert cells.loc[(1, name), ["mass", "base", "ratio"]].tolist() == pytest.approx([even, even, 1])


def test_a_set_that_never_has_keys():
    """At the only step nothing is committed."""
    decoding = canvas(np.full((1, 2, 1, N, N), 1 / N), PROMPT)
    table = heads.masked_rows(TraceView(build_trace(decoding)))
    committed = table[table["set"] == "committed"]
    assert committed[["mass", "base"]].to_numpy().tolist() == [[0, 0]] * 2
    assert committed["ratio"].isna().all()
    np.testing.assert_allclose(table["ratio"].dropna(), 1, rtol=1e-6)


def test_steps_without_masked_rows_do_not_count():
    A = np.stack([np.broadcast_to(onto(key, 1), (1, 1, N, N)) for key in (3, 3, N - 1)])
    table = heads.masked_rows(TraceView(build_trace(canvas(A, PROMPT, when=[1] * 10)))).set_index("set")
    assert table["mass"].to_dict() == pytest.approx({"prompt": 1, "masks": 0, "committed": 0})
    assert table["base"].to_dict() == pytest.approx({"prompt": 0.75, "masks": 0.25, "committed": 0})


@pytest.mark.parametrize(("seed", "kind"), [(seed, kind) for kind in MASKED for seed in range(4)])
def test_directed(seed, kind):
    decoding, trace = case(seed, kind)
    steps = [t for t, state in enumerate(decoding.states) if (state == State.MASKED).any()]
    means, each = [], []
    for layer in range(decoding.layers):
        for name, value in STATES.items():
            base, masses = [], {None: [], **{head: [] for head in range(decoding.heads)}}
            for t in steps:
                rows = tuple(i for i, state in enumerate(decoding.states[t]) if state == State.MASKED)
                keys = [j for j, state in enumerate(decoding.states[t]) if state == value]
                base.append(sum(slow.uniform_received(decoding, t, layer, rows, j) for j in keys))
                for head, found in masses.items():
                    A = slow.attention_matrix(decoding, t, layer, head)
                    found.append(sum(slow.mean_received(A, rows, j) for j in keys))
            even = fmean(base)
            for head, found in masses.items():
                told = [fmean(found), even, fmean(found) / even if even else np.nan]
                (means if head is None else each).append([layer, 0 if head is None else head, name, *told])
    for table, rows in (
        (heads.masked_rows(TraceView(trace)).assign(head=0), means),
        (heads.directed_heads(TraceView(trace)), each),
    ):
        expected = pd.DataFrame(rows, columns=["layer", "head", "set", "mass", "base", "ratio"])
        by = ["layer", "head", "set"]
        told = table[list(expected.columns)].sort_values(by, ignore_index=True)
        pd.testing.assert_frame_equal(told, expected.sort_values(by, ignore_index=True), **NEAR)


# Refused


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("table", [heads.masked_rows, heads.directed_heads])
def test_models_without_masks(table, cached):
    A = attend(np.zeros((1, 1, N, N)), causal(N))
    with pytest.raises(UserError, match="trace of 'hand' has no masked rows"):
        table(TraceView(build_trace(growing(A, PROMPT, cached=cached))))


def test_heads_that_were_not_kept():
    with pytest.raises(UserError, match=r"does not keep 'received_heads', .* keep=.heads. or more"):
        heads.directed_heads(TraceView(build_trace(random_decoding(0, "full"))))


@pytest.mark.parametrize("name", ["head_stats", "top", "top_key", "moments", "uniform"])
def test_a_field_that_was_not_kept_is_named(name):
    trace = case(0, "full")[1]
    trace = replace(trace, arrays={n: a for n, a in trace.arrays.items() if n != name})
    with pytest.raises(UserError, match=f"does not keep '{name}'"):
        heads.head_activity(TraceView(trace, "topk(k=2)"))
