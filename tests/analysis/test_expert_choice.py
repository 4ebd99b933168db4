"""Experts of anchors: against a slow restatement on random decodings, and on decodings with known results."""

from __future__ import annotations

from dataclasses import replace
from math import log2

import numpy as np
import pytest
from dense_decodings import KINDS, attend, build_trace, canvas, random_decoding

import floatscope as fs
from floatscope.analysis import TraceView
from floatscope.analysis.expert_choice import SHUFFLES, experts
from floatscope.errors import UserError
from floatscope.traces import Trace
from pairs import every_pair

pytestmark = pytest.mark.filterwarnings("error")
EXPERTS, K = 6, 2
AXES = ("step", "layer", "key", "expert_rank")
COMPARED = ["share", "share_rest", "entropy", "entropy_rest", "distance"]
NULLS = ["share_null", "entropy_null", "distance_null"]


def with_experts(trace: Trace, ids: np.ndarray, weights: np.ndarray) -> Trace:
    """The trace with a choice [step, layer, key, k]; only the new rows of each step have one."""
    keys, queries, at = trace.arrays["keys"], trace.arrays["queries"], np.arange(ids.shape[2])
    is_new = (at < keys[:, None]) & (at >= (keys - queries)[:, None])  # [step, key]
    has_row = is_new[:, None, :, None]
    arrays = {
        **trace.arrays,
        "expert_ids": np.where(has_row, ids, -1).astype(np.int16),
        "expert_weights": np.where(has_row, weights, np.nan).astype(np.float16),
    }
    return replace(trace, arrays=arrays, axes={**trace.axes, "expert_ids": AXES, "expert_weights": AXES})


def random_choice(trace: Trace, seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    shape = trace.arrays["received"].shape
    shape = (shape[0], shape[1], shape[3])
    ids = np.argsort(rng.random((*shape, EXPERTS)), -1)[..., :K]
    return with_experts(trace, ids, rng.uniform(0.1, 2, (*shape, K)))


def distribution(choices: list[dict[int, float]]) -> list[float]:
    return [sum(choice.get(e, 0.0) for choice in choices) / len(choices) for e in range(EXPERTS)]


def slow_values(anchors: set, compared: dict) -> list[float]:
    """`compared`: (step, key) → {expert: share}."""
    if not 0 < len(anchors) < len(compared):
        return [np.nan] * 5
    a = distribution([compared[place] for place in compared if place in anchors])
    b = distribution([compared[place] for place in compared if place not in anchors])
    top = sorted(range(EXPERTS), key=lambda e: (-a[e], e))[:K]
    top = [e for e in top if a[e] > 0]
    entropies = [-sum(p * log2(p) for p in d if p > 0) for d in (a, b)]
    distance = sum(abs(x - y) for x, y in zip(a, b, strict=True)) / 2
    return [sum(a[e] for e in top), sum(b[e] for e in top), *entropies, distance]


def slow_row(trace: Trace, layer: int, detector: str) -> tuple[list[float], list[float]]:
    view = TraceView(trace, detector)
    compared, anchors = {}, set()
    for t in range(view.steps):
        for j in range(view.keys[t]):
            if np.isnan(view.lift[t, layer, j]):
                continue
            step = max(s for s in range(t + 1) if trace.arrays["expert_ids"][s, layer, j, 0] >= 0)
            ids, weights = (trace.arrays[name][step, layer, j] for name in ("expert_ids", "expert_weights"))
            total = sum(map(float, weights))
            compared[t, j] = {int(e): float(w) / total for e, w in zip(ids, weights, strict=True)}
            if view.anchors[t, layer, j]:
                anchors.add((t, j))
    positions = sorted({j for _, j in compared})
    rng, nulls = np.random.default_rng(0), []
    for _ in range(SHUFFLES):
        order = rng.permutation(len(positions))
        source = {positions[i]: positions[order[i]] for i in range(len(positions))}
        shuffled = {(t, j) for t, j in compared if (t, source[j]) in anchors}
        nulls.append(slow_values(shuffled, compared))
    columns = [[null[COMPARED.index(name.removesuffix("_null"))] for null in nulls] for name in NULLS]
    defined = [[value for value in column if value == value] for column in columns]
    return slow_values(anchors, compared), [sum(each) / len(each) if each else np.nan for each in defined]


@every_pair(seed=[0, 1, 2], kind=KINDS, detector=["topk(k=2)", "rulli(eps=0.5)"])
def test_the_table_equals_the_slow_restatement(seed, kind, detector):
    trace = random_choice(build_trace(random_decoding(seed, kind)), seed)
    table = experts(trace, detector=detector)
    assert list(table) == ["sample", "layer", "depth", *COMPARED, *NULLS]
    assert table["layer"].tolist() == trace.arrays["layers"].tolist()
    for layer in range(len(table)):
        values, nulls = slow_row(trace, layer, detector)
        np.testing.assert_allclose(table[COMPARED].iloc[layer], values, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(table[NULLS].iloc[layer], nulls, rtol=1e-4, atol=1e-5)


N, PROMPT, STEPS = 30, 24, 4


def sink_trace() -> Trace:
    """Every row prefers key 3 in two layers."""
    scores = np.zeros((STEPS, 2, 1, N, N))
    scores[..., 3] = 4
    return build_trace(canvas(attend(scores), PROMPT))


def test_an_anchor_with_an_expert_of_its_own():
    """In layer 0 the anchor goes to expert 5 alone and the others to 0 and 1; in layer 1 all keys agree."""
    ids = np.broadcast_to([0, 1], (STEPS, 2, N, 2)).copy()
    weights = np.broadcast_to([1.5, 1.5], ids.shape).copy()
    ids[:, 0, 3], weights[:, 0, 3] = [5, 4], [3, 0]
    table = experts(with_experts(sink_trace(), ids, weights))
    np.testing.assert_allclose(table[COMPARED].iloc[0], [1, 0, 0, 1, 1], atol=1e-6)
    np.testing.assert_allclose(table[COMPARED].iloc[1], [1, 1, 1, 1, 0], atol=1e-6)
    assert table["distance_null"].iloc[0] < 0.3
    assert table["distance_null"].iloc[1] == 0


def test_layers_without_experts_have_no_row_and_layers_without_anchors_no_values():
    trace = random_choice(build_trace(canvas(attend(np.zeros((STEPS, 2, 1, N, N))), PROMPT)), 0)
    for name, fill in (("expert_ids", -1), ("expert_weights", np.nan)):
        trace.arrays[name][:, 0] = fill
    table = experts(trace)
    assert table["layer"].tolist() == [1]
    assert table[COMPARED + NULLS].isna().all(axis=None)


def test_the_table_is_part_of_a_run_with_experts_only():
    trace = sink_trace()
    with pytest.raises(UserError, match="does not store 'expert_ids': trace with --experts"):
        experts(trace)
    tables = fs.analyse(trace)
    assert "experts" not in tables
    assert "experts" not in tables.missing
    assert len(fs.analyse(random_choice(trace, 0))["experts"]) == 2
