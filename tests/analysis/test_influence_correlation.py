"""Influence and attention: against a slow reference on random decodings, and on decodings with known results."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import slow_reference as slow
from dense_decodings import END, KINDS, WITH_END, Decoding, attend, build_trace, canvas, random_answer

from floatscope.analysis import TraceView
from floatscope.analysis.influence_correlation import influence, rank_correlation, ranks
from floatscope.errors import UserError
from floatscope.traces import Trace
from pairs import every_pair

pytestmark = pytest.mark.filterwarnings("error")
COLUMNS = ["received", "received_all", "contribution"]


def with_influence(trace: Trace, values: np.ndarray, contribution: np.ndarray | None = None) -> Trace:
    """The trace with an influence [commit, key]; NaN beyond the canvas of each commit's step."""
    keys = trace.arrays["keys"][trace.arrays["commit_step"]]
    values = np.where(np.arange(values.shape[1]) < keys[:, None], values, np.nan).astype(np.float32)
    arrays = {**trace.arrays, "influence": values}
    arrays.pop("contribution", None)
    axes = {**trace.axes, "influence": ("commit", "key"), "contribution": ("step", "layer", "group", "key")}
    if contribution is not None:
        arrays["contribution"] = contribution.astype(np.float32)
    return replace(trace, arrays=arrays, axes=axes)


def spearman(pairs: list[tuple[float, float]]) -> float:
    """By counting: a rank is 1 + the number of smaller values + half of the other equal ones."""
    if len(pairs) < 3:
        return np.nan
    x, y = ([sum(w < v for w in c) + (sum(w == v for w in c) + 1) / 2 for v in c] for c in zip(*pairs, strict=True))
    if len(set(x)) == 1 or len(set(y)) == 1:
        return np.nan
    return float(np.corrcoef(x, y)[0, 1])


def slow_correlations(decoding: Decoding, trace: Trace, layer: int, which: str) -> list[float]:
    """The influence is that of the commits that count; the trace has the attention of all predicting rows of a step."""
    correlations: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for t in range(decoding.steps):
        commits = [c for c in slow.count_commits(decoding, which, [END]) if decoding.commits[c][0] == t]
        if not commits:
            continue
        A, mask = decoding.attention[t][layer].mean(0).astype(np.float32), decoding.visible[t][layer]
        influence = trace.arrays["influence"][commits].astype(np.float64).mean(0)
        rows = list(slow.group_rows(decoding, t, "predicting"))
        received = trace.arrays["received"][t, layer, 3]
        np.testing.assert_allclose(received[: len(mask)], A[rows].mean(0), rtol=1e-5)
        every, even = trace.received(scale="lift")[t, layer], (mask / mask.sum(1, keepdims=True)).mean(0)
        np.testing.assert_allclose(every[: len(mask)], A.mean(0) / even, rtol=1e-5)
        given = trace.arrays["contribution"][t, layer, 3]
        own = [j for j in range(len(mask)) if mask[rows, j].any()]
        correlations["received"].append(spearman([(influence[j], received[j]) for j in own]))
        correlations["received_all"].append(
            spearman([(influence[j], every[j]) for j in slow.eligible(decoding, layer)])
        )
        correlations["contribution"].append(spearman([(influence[j], given[j]) for j in own]))
    return [fmean(r for r in correlations[name] if r == r) for name in COLUMNS]


@every_pair(commits=["answer", "all"], seed=[0, 1], kind=KINDS)
def test_the_table_equals_the_slow_reference(seed, kind, commits):
    decoding = random_answer(seed, kind)
    rng, plain = np.random.default_rng(seed), build_trace(decoding, special=WITH_END)
    keys = plain.arrays["tokens"].shape[1]
    values = rng.random((len(decoding.commits), keys)).round(1)  # with ties
    trace = with_influence(plain, values, rng.random(plain.arrays["received"].shape).round(1))
    table = influence(trace, commits=commits)
    assert list(table) == ["sample", "layer", "depth", *COLUMNS]
    assert table["layer"].tolist() == list(range(decoding.layers))
    expected = [slow_correlations(decoding, trace, layer, commits) for layer in range(decoding.layers)]
    np.testing.assert_allclose(table[COLUMNS].to_numpy(), expected, rtol=1e-6, atol=1e-9)


def test_equal_values_share_their_mean_rank():
    nan = np.nan
    given = np.array([[3.0, 1.0, 3.0, nan, 2.0], [nan] * 5, [7.0] * 5])
    assert np.array_equal(ranks(given), [[3.5, 1, 3.5, nan, 2], [nan] * 5, [3.0] * 5], equal_nan=True)


def test_a_correlation_needs_three_keys_and_different_values():
    nan, a = np.nan, np.array([1.0, 2.0, 3.0, 4.0])
    given = np.array([[10.0, 20, 30, 30.5], [4, 3, 2, 1], [nan, 2, 3, nan], [5, 5, 5, 5], [nan, 9, 7, 8]])
    got = rank_correlation(np.broadcast_to(a, given.shape), given)
    np.testing.assert_allclose(got, [1, -1, nan, nan, -0.5])


N, PROMPT, STEPS = 12, 8, 4
GRADIENT = np.linspace(0, 1, N)


def graded_trace(**more: object) -> Trace:
    """Every row prefers later keys in layer 0, earlier keys in layer 1, and none in layer 2."""
    scores = np.stack([GRADIENT, -GRADIENT, 0 * GRADIENT])[:, None, None]
    return build_trace(canvas(attend(np.broadcast_to(scores, (STEPS, 3, 2, N, N))), PROMPT, **more))


def test_attention_that_follows_or_opposes_the_influence():
    trace = with_influence(graded_trace(), np.tile(GRADIENT, (N - PROMPT, 1)))
    table = influence(TraceView(trace))
    assert table["depth"].tolist() == [0, 0.5, 1]
    for name in ("received", "received_all"):
        np.testing.assert_allclose(table[name], [1, -1, np.nan])
    assert table["contribution"].isna().all()


def test_the_mean_over_commits_counts_and_steps_without_commits_do_not():
    """The second step commits nothing, the third two tokens, and the last has no influence."""
    trace = graded_trace(when=[0, 2, 2, 3])
    values = np.arange(4 * N, dtype=float).reshape(4, N)
    values[3] = 0
    table = influence(with_influence(trace, values))  # the two steps with something to rank
    np.testing.assert_allclose(table["received"], [1, -1, np.nan])


def test_a_trace_without_influence_is_refused():
    with pytest.raises(UserError, match=r"the trace of 'hand' has no influence; trace it with --influence, or fs\."):
        influence(graded_trace())
