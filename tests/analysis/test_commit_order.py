"""The order of decoding: known orders, worked examples, and loops as a slow reference."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from inspect import unwrap
from itertools import combinations, pairwise
from statistics import fmean

import dense_decodings
import numpy as np
import pandas as pd
import pytest
import slow_reference as slow
from dense_decodings import (
    BOS,
    COMMA,
    END,
    LINE,
    STOP,
    WITH_END,
    WORDS,
    Decoding,
    attend,
    build_trace,
    canvas,
    causal,
    end_answer,
    growing,
    shift_rows,
)

from floatscope.analysis import TraceView
from floatscope.analysis.commit_order import arness, commits, coupling, kendall, order, trajectory
from floatscope.errors import UserError
from floatscope.schema import State
from floatscope.traces import Trace

pytestmark = pytest.mark.filterwarnings("error")
PROMPT = 20
W = WORDS[0]


def uniform_attention(n: int, steps: int) -> np.ndarray:
    return np.full((steps, 2, 1, n, n), 1 / n)


def view_of_order(when: Sequence[int], answer: Sequence[int] | None = None, sample: str = "hand") -> TraceView:
    """A canvas whose i-th mask is filled at step `when[i]` with `answer[i]`."""
    tokens = np.array([BOS, *[W] * (PROMPT - 1), *(answer or [W] * len(when))])
    decoding = canvas(uniform_attention(PROMPT + len(when), max(when) + 1), PROMPT, when=when, tokens=tokens)
    return TraceView(build_trace(decoding, sample))


def autoregressive_view(new: int = 8) -> TraceView:
    """An autoregressive model's text."""
    total = PROMPT + new - 1
    whole = np.broadcast_to(causal(total) / causal(total).sum(1, keepdims=True), (2, 1, total, total))
    return TraceView(build_trace(growing(whole, PROMPT)))


def order_row(view: TraceView) -> pd.Series:
    table = order(view)
    assert len(table) == 1
    return table.iloc[0]


# Known orders


@pytest.mark.parametrize("view", [view_of_order(range(8)), autoregressive_view()], ids=["masked", "autoregressive"])
def test_from_left_to_right(view):
    row = order_row(view)
    assert row[["steps", "tokens_per_step"]].tolist() == [8, 1]
    assert row["kendall"] == 1
    assert row["u_shape"] == pytest.approx(0)
    table = arness(view)
    assert table["k"].tolist() == [1, 2, 4, 8]
    np.testing.assert_array_equal(table["local"], [1, 1, 1, np.nan])  # the eighth commit has seven before it
    assert table["global"].tolist() == [1, 1, 1, 1]


def test_from_right_to_left():
    view = view_of_order([7, 6, 5, 4, 3, 2, 1, 0])
    assert order_row(view)["kendall"] == -1
    table = arness(view)
    np.testing.assert_array_equal(table["local"], [0, 0, 0, np.nan])
    assert table["global"].tolist() == [1 / 8, 2 / 8, 4 / 8, 1]


def test_ends_first():
    """The middle third is filled at steps 6, 8 and 7 of 8, the outer thirds at 0 to 5."""
    view = view_of_order([0, 2, 4, 6, 8, 7, 5, 3, 1])
    assert order_row(view)["u_shape"] == pytest.approx((7 - 2.5) / 8)
    inside_out = view_of_order([8, 6, 4, 2, 0, 1, 3, 5, 7])
    assert order_row(inside_out)["u_shape"] == pytest.approx((1 - 5.5) / 8)


@pytest.mark.parametrize(
    ("positions", "middle"),
    [(3, [1]), (4, [1, 2]), (5, [2]), (6, [2, 3]), (8, [3, 4]), (9, [3, 4, 5]), (10, [3, 4, 5, 6])],
)
def test_the_middle_third_has_the_positions_with_their_centre_in_it(positions, middle):
    view = view_of_order([int(i in middle) for i in range(positions)])
    assert order_row(view)["u_shape"] == 1


@pytest.mark.parametrize("when", [[0], [0, 1]])
def test_u_shape_is_nan_without_a_middle_or_ends(when):
    assert np.isnan(order_row(view_of_order(when))["u_shape"])


def test_filling_the_leftmost_masks_at_once_is_autoregressive():
    """Two per step from the left: 4 of 28 pairs of positions are tied in time, the rest are in order."""
    view = view_of_order([0, 0, 1, 1, 2, 2, 3, 3])
    row = order_row(view)
    assert row[["steps", "tokens_per_step"]].tolist() == [4, 2]
    assert row["kendall"] == pytest.approx(24 / np.sqrt(24 * 28))
    table = arness(view, ks=(1, 3, 7))
    assert table[["k", "local", "global"]].to_numpy().tolist() == [[1, 1, 1], [3, 1, 1], [7, 1, 1]]


def test_filling_everything_at_once_has_no_order():
    row = order_row(view_of_order([0] * 6))
    assert np.isnan(row["kendall"])
    assert row["u_shape"] == 0
    assert row["tokens_per_step"] == 6


def test_arness_of_a_worked_example():
    """Filled at consecutive steps: 3; 0 and 1; 2; 5; 4. The path is 3 0 1 2 5 4."""
    table = arness(view_of_order([1, 1, 2, 0, 4, 3]), ks=(1, 2, 3, 5)).set_index("k")
    assert table["local"].tolist() == [2 / 5, 1 / 4, 0, 0]  # 0-1, 1-2; 0-1-2
    assert table["global"].tolist() == [4 / 6, 5 / 6, 5 / 6, 1]  # masks to the left: 3 0 0 0 1 0


@pytest.mark.parametrize(("ks", "got"), [((0,), "0"), ((1, -1), "-1"), ([1.5], "1.5"), (["2"], "'2'")])
def test_an_invalid_k_is_refused(ks, got):
    with pytest.raises(UserError, match=f"k of AR-ness must be a whole number of at least 1, got {got}"):
        unwrap(arness)(view_of_order([0, 1]), ks=ks)  # without the type checks of the tests


# Trivial tokens


def test_trivial_tokens_first():
    """The first quarter of eight tokens is a comma and an end. Half of all are trivial."""
    view = view_of_order([2, 0, 3, 4, 1, 5, 6, 7], [W, COMMA, LINE, W, END, W, STOP, W])
    assert order_row(view)[["trivial_first", "trivial", "trivial_ratio"]].tolist() == [1, 0.5, 2]


def test_a_step_across_the_quarter_counts_in_part():
    """The quarter is two of eight: the first commit, and a quarter of each of the next four."""
    view = view_of_order([0, 1, 1, 1, 1, 2, 2, 2], [STOP, W, STOP, STOP, W, W, W, W])
    row = order_row(view)
    assert row["trivial_first"] == pytest.approx((1 + 2 / 4) / 2)
    assert row["trivial"] == 3 / 8
    assert row["trivial_ratio"] == pytest.approx(0.75 / (3 / 8))


def test_a_quarter_may_include_part_of_a_commit():
    """The quarter of six commits is one and a half."""
    assert order_row(view_of_order(range(6), [STOP, W, W, W, W, W]))["trivial_first"] == pytest.approx(1 / 1.5)
    assert order_row(view_of_order(range(6), [W, STOP, W, W, W, W]))["trivial_first"] == pytest.approx(0.5 / 1.5)


def test_the_trivial_ratio_is_nan_without_trivial_tokens():
    row = order_row(view_of_order(range(6)))
    assert row[["trivial_first", "trivial"]].tolist() == [0, 0]
    assert np.isnan(row["trivial_ratio"])


# Commits and trajectories


def test_commits():
    table = commits(view_of_order([0, 2, 2, 4], [LINE, W, BOS, END]))
    assert table["commit"].tolist() == [0, 1, 2, 3]
    assert table["step"].tolist() == [0, 2, 2, 4]
    assert table["position"].tolist() == [0, 2, 1, 3]  # the commits of a step are listed from the right
    assert (table["positions"] == 4).all()
    assert table["relative_position"].tolist() == pytest.approx([0, 2 / 3, 1 / 3, 1])
    assert table["relative_step"].tolist() == [0, 0.5, 0.5, 1]
    assert table["class"].tolist() == ["newline", "special", "content", "special"]  # a bos inside a text is special
    assert table["confidence"].tolist() == [1] * 4
    assert (table["sample"] == "hand").all()


def test_commits_of_an_autoregressive_model():
    table = commits(autoregressive_view(5))
    assert table["step"].tolist() == table["position"].tolist() == [0, 1, 2, 3, 4]
    assert (table["positions"] == 5).all()


def test_a_single_commit():
    table = commits(view_of_order([0]))
    assert table[["relative_position", "relative_step"]].to_numpy().tolist() == [[0, 0]]


def test_the_template_region_does_not_affect_commits():
    """Commits are classified by their own text."""
    decoding = canvas(uniform_attention(PROMPT + 3, 3), PROMPT, when=[0, 1, 2], regions={"template": range(6)})
    assert commits(TraceView(build_trace(decoding)))["class"].tolist() == ["content"] * 3


def with_given_tokens(decoding: Decoding, given: Sequence[int]) -> Decoding:
    """The decoding with some of the masks given from the start."""
    text = decoding.tokens[-1].copy()
    for _, p, _, token in decoding.commits:
        text[p] = token
    given = list(given)
    states, tokens = [s.copy() for s in decoding.states], [t.copy() for t in decoding.tokens]
    for state, row in zip(states, tokens, strict=True):
        state[given], row[given] = State.PROMPT, text[given]
    return replace(decoding, states=states, tokens=tokens, commits=[c for c in decoding.commits if c[1] not in given])


def test_positions_are_counted_among_the_masks():
    decoding = canvas(uniform_attention(PROMPT + 6, 6), PROMPT, when=range(6))
    view = TraceView(build_trace(with_given_tokens(decoding, [PROMPT + 1, PROMPT + 4])))
    assert commits(view)["position"].tolist() == [0, 1, 2, 3]
    assert arness(view, ks=(1, 3))["local"].tolist() == [1, 1]


def test_with_all_commits_a_mask_that_is_never_filled_counts_as_a_mask_to_the_left():
    decoding = canvas(uniform_attention(PROMPT + 4, 4), PROMPT, when=range(4))
    trace = build_trace(replace(decoding, commits=decoding.commits[1:]))
    assert commits(trace)[["position", "positions"]].to_numpy().tolist() == [[0, 3], [1, 3], [2, 3]]
    assert arness(trace, ks=(1, 2))["global"].tolist() == [1, 1]
    view = TraceView(trace, counted="all")
    assert commits(view)[["position", "positions"]].to_numpy().tolist() == [[1, 4], [2, 4], [3, 4]]
    assert arness(view, ks=(1, 2))["global"].tolist() == [0, 1]


def test_the_trajectory_of_a_run():
    table = pd.concat(
        [commits(view_of_order([0, 2], sample="short")), commits(view_of_order([1, 0, 1], sample="long"))]
    )
    result = trajectory(table)
    assert result.columns.tolist() == ["step", "position", "share"]
    shares = result.pivot(index="step", columns="position", values="share")
    assert shares.to_numpy().tolist() == [[0.5, 0.5, 0], [1, 0.5, 1], [1, 1, 1]]


def test_the_trajectory_of_positions_that_are_never_filled():
    decoding = canvas(uniform_attention(PROMPT + 3, 3), PROMPT, when=[0, 1, 2])
    trace = build_trace(replace(decoding, commits=decoding.commits[:2]))
    shares = trajectory(commits(trace)).pivot(index="step", columns="position", values="share")
    assert shares.to_numpy().tolist() == [[1, 0], [1, 1]]
    shares = trajectory(commits(trace, commits="all")).pivot(index="step", columns="position", values="share")
    assert shares.to_numpy().tolist() == [[1, 0, 0], [1, 1, 0]]


# The answer and what comes after it


def trace_with_ends() -> Trace:
    """Positions 2 to 5 are end-of-text tokens and are filled first, from the right; then the answer, 1 before 0."""
    tokens = np.array([BOS, *[W] * (PROMPT - 1), STOP, W, *[END] * 4])
    decoding = canvas(uniform_attention(PROMPT + 6, 6), PROMPT, when=[5, 4, 3, 2, 1, 0], tokens=tokens)
    return build_trace(decoding, special=WITH_END)


def test_the_order_is_that_of_the_answer():
    trace = trace_with_ends()
    table = commits(trace)
    assert table[["commit", "step", "position", "positions"]].to_numpy().tolist() == [[4, 4, 1, 2], [5, 5, 0, 2]]
    assert table["relative_step"].tolist() == [0, 1]  # among the steps that write the answer
    assert table["relative_position"].tolist() == [1, 0]
    assert table["class"].tolist() == ["content", "punctuation"]
    row = order(trace).iloc[0]
    assert row[["steps", "tokens_per_step", "kendall", "trivial", "trivial_first"]].tolist() == [2, 1, -1, 0.5, 0]
    assert arness(trace, ks=(1, 2))["global"].tolist() == [0.5, 1]
    assert len(trajectory(table)) == 6 * 2


def test_the_order_of_all_commits_includes_the_end_of_text_tokens():
    trace = trace_with_ends()
    assert commits(trace, commits="all")["position"].tolist() == [5, 4, 3, 2, 1, 0]
    row = order(trace, commits="all").iloc[0]
    assert row[["steps", "trivial", "trivial_first"]].tolist() == [6, pytest.approx(5 / 6), 1]
    assert arness(trace, ks=(1,), commits="all")["global"].tolist() == [1 / 6]


# Coupling


def decode_with_anchors(path: Sequence[int], when: Sequence[int], share: float = 0.5) -> Decoding:
    """The second of two layers gives a share of its attention to a key of each step, the first layer to the bos."""
    n = PROMPT + len(when)
    A = uniform_attention(n, len(path)) * (1 - share)
    A[:, 0, :, :, 0] += share
    for t, key in enumerate(path):
        A[t, 1, :, :, key] += share
    return canvas(A, PROMPT, when=when)


def coupling_table(decoding: Decoding) -> pd.DataFrame:
    return coupling(TraceView(build_trace(decoding))).set_index(["layer", "lag"])


VALUES = ["hit", "hit_4", "distance"]
CHANCES = ["hit_chance", "hit_4_chance", "distance_chance"]


def test_the_top_key_is_where_the_next_commit_falls():
    """Positions 2, 0, 3, 1 are filled in turn, and the top key is one step early. At the last step it is in the
    prompt."""
    table = coupling_table(decode_with_anchors([20, 23, 21, 5], [1, 3, 0, 2]))
    assert table.loc[(1, 1), ["steps", *VALUES]].tolist() == [3, 1, 1, 0]
    assert table.loc[(1, 0), ["steps", *VALUES]].tolist() == [3, 0, 1, (2 + 3 + 2) / 3]
    for lag in (0, 1):  # the first layer leads with the bos
        assert table.loc[(0, lag), "steps"] == 0
        assert table.loc[(0, lag), [*VALUES, *CHANCES]].isna().all()


def test_coupling_by_chance():
    """The masks of the steps that count are 20 to 23; without 22; 21 and 23."""
    table = coupling_table(decode_with_anchors([20, 23, 21, 5], [1, 3, 0, 2]))
    expected = [(1 / 4 + 1 / 3 + 1 / 2) / 3, 1, (4 / 4 + 4 / 3 + 2 / 2) / 3]
    assert table.loc[(1, 0), CHANCES].tolist() == pytest.approx(expected)
    expected = [(1 / 4 + 1 / 3 + 1 / 2) / 3, 1, (6 / 4 + 5 / 3 + 2 / 2) / 3]
    assert table.loc[(1, 1), CHANCES].tolist() == pytest.approx(expected)


def test_chance_is_that_of_the_steps_that_count():
    """Only at step 1, with masks 20, 21 and 23, the top key is a mask; 20 is committed."""
    table = coupling_table(decode_with_anchors([5, 21, 6, 5], [1, 3, 0, 2]))
    assert table.loc[(1, 0), ["steps", *VALUES]].tolist() == [1, 0, 1, 1]
    assert table.loc[(1, 0), CHANCES].tolist() == pytest.approx([1 / 3, 1, 4 / 3])


def test_a_far_mask_is_not_a_hit_within_four():
    table = coupling_table(decode_with_anchors([20, 20], [1, *[0] * 4, *[1] * 4, 0]))
    assert table.loc[(1, 0), ["steps", *VALUES]].tolist() == [2, 0.5, 1, 0.5]
    table = coupling_table(decode_with_anchors([20], [*[1] * 5, 0]))
    assert table.loc[(1, 0), ["steps", *VALUES]].tolist() == [1, 0, 0, 5]
    assert table.loc[(1, 0), CHANCES].tolist() == pytest.approx([1 / 6, 5 / 6, 15 / 6])


@pytest.mark.parametrize(("share", "steps"), [(0.02, 0), (0.2, 4)])
def test_only_a_top_key_that_is_an_anchor_counts(share, steps):
    """Of 24 keys a share of .02 is a lift of 1.5, one of .2 a lift of 5.6."""
    table = coupling_table(decode_with_anchors([22, 20, 23, 21], [1, 3, 0, 2], share))
    assert table.loc[(1, 0), "steps"] == steps
    assert table.loc[(1, 0), "hit"] == pytest.approx(1 if steps else np.nan, nan_ok=True)


def test_commits_after_the_answer_are_not_coupled():
    """The answer is at 20 and 21, filled at steps 2 and 3. The top key is at the end-of-text token of steps 0 and 1."""
    decoding = end_answer(decode_with_anchors([22, 23, 21, 21], [2, 3, 0, 1]), 2)
    trace = build_trace(decoding, special=WITH_END)
    answer, every = (coupling(trace, commits=which).set_index(["layer", "lag"]) for which in ("answer", "all"))
    assert answer.loc[(1, 0), ["steps", *VALUES]].tolist() == [2, 0.5, 1, 0.5]
    assert every.loc[(1, 0), ["steps", *VALUES]].tolist() == [4, 0.75, 1, 0.25]
    assert answer.loc[(1, 1), ["steps", *VALUES]].tolist() == [2, 0.5, 1, 1.5]  # from 23 to 20, and at 21


def test_a_commit_is_where_its_token_is():
    """Not at its predicting row."""
    decoding = decode_with_anchors([22, 20, 23, 21], [1, 3, 0, 2])
    shifted = shift_rows(decoding)
    assert coupling_table(decoding).loc[(1, 0), "hit"] == coupling_table(shifted).loc[(1, 0), "hit"] == 1


def test_steps_that_commit_nothing_are_left_out():
    """Steps 0 and 3 commit. For lag 0 step 0 counts, because at step 3 the top key is no mask; for lag 1 step 2."""
    table = coupling_table(decode_with_anchors([20, 5, 24, 5], [0, 3, 0, 3, 3]))
    assert table.loc[(1, 0), ["steps", *VALUES]].tolist() == [1, 1, 1, 0]
    assert table.loc[(1, 0), ["hit_chance", "distance_chance"]].tolist() == [2 / 5, (0 + 1 + 0 + 1 + 2) / 5]
    assert table.loc[(1, 1), ["steps", *VALUES]].tolist() == [1, 1, 1, 0]
    assert table.loc[(1, 1), ["hit_chance", "distance_chance"]].tolist() == [1, 0]


def test_a_single_step_has_no_lag_one():
    table = coupling_table(decode_with_anchors([20], [0, 0]))
    assert table.loc[(1, 0), ["steps", "hit", "hit_chance"]].tolist() == [1, 1, 1]
    assert table.loc[(1, 1), "steps"] == 0
    assert table.loc[(1, 1), [*VALUES, *CHANCES]].isna().all()


def test_a_model_without_masks_is_not_coupled():
    """Although it has an anchor at every step."""
    A = causal(40) / causal(40).sum(1, keepdims=True) / 2
    A[:, 0] += 0.5
    trace = build_trace(growing(np.broadcast_to(A, (2, 1, 40, 40)), PROMPT))
    assert (trace.anchor_path() == 0).all()
    table = coupling(trace)
    assert (table["steps"] == 0).all()
    assert table[[*VALUES, *CHANCES]].isna().all(axis=None)


# Loops as a slow reference

KINDS = (*dense_decodings.KINDS, "shifted", "gapped", "interrupted")
decodings = pytest.mark.parametrize(("seed", "kind"), [(seed, kind) for kind in KINDS for seed in range(4)])


def random_decoding(seed: int, kind: str) -> Decoding:
    if kind in dense_decodings.KINDS:
        return dense_decodings.random_decoding(seed, kind)
    decoding = dense_decodings.random_decoding(seed + 10, "full")
    if kind == "shifted":
        return shift_rows(decoding)
    masked = np.flatnonzero(decoding.states[0] == State.MASKED)
    return (
        with_given_tokens(decoding, masked[1::3])
        if kind == "gapped"
        else replace(decoding, commits=decoding.commits[:-2])
    )


COUNTED = ("answer", "all")
counted = pytest.mark.parametrize("which", COUNTED)


@functools.cache
def case(seed: int, kind: str, which: str) -> tuple[Decoding, TraceView, list[tuple[int, int, int, int]]]:
    """A decoding whose answer ends before its last commits, its view, and the commits that count."""
    decoding = random_decoding(seed, kind)
    decoding = end_answer(decoding, len(decoding.commits) - 1 - seed % 3)
    view = TraceView(build_trace(decoding, f"{kind}-{seed}", special=WITH_END), counted=which)
    return decoding, view, [decoding.commits[i] for i in slow.count_commits(decoding, which, [END])]


def fill_order(seed: int, kind: str, which: str) -> tuple[list[tuple[int, int, int]], int]:
    """Step, position and token of each commit that counts, and the number of positions."""
    decoding, _, own = case(seed, kind, which)
    to_fill = {p for _, p, _, _ in own}
    if which == "all":
        to_fill |= {p for p, state in enumerate(decoding.states[0]) if state == State.MASKED}
    ranked = sorted(to_fill)
    return [(t, ranked.index(p), token) for t, p, _, token in own], len(ranked)


def pair_count(a: Sequence[int], b: Sequence[int]) -> float:
    same = opposite = tied_a = tied_b = 0
    pairs = list(combinations(range(len(a)), 2))
    for i, j in pairs:
        tied_a += a[i] == a[j]
        tied_b += b[i] == b[j]
        same += (a[i] - a[j]) * (b[i] - b[j]) > 0
        opposite += (a[i] - a[j]) * (b[i] - b[j]) < 0
    if len(pairs) in (tied_a, tied_b):
        return float("nan")
    return (same - opposite) / ((len(pairs) - tied_a) * (len(pairs) - tied_b)) ** 0.5


@pytest.mark.parametrize("n", [2, 3, 7, 20])
@pytest.mark.parametrize("seed", range(6))
def test_kendall_counts_pairs(n, seed):
    rng = np.random.default_rng([n, seed])
    a, b = rng.integers(0, n // 2 + 1, n), rng.integers(0, n, n)
    assert kendall(a, b) == pytest.approx(pair_count(a.tolist(), b.tolist()), nan_ok=True)
    assert kendall(b, a) == pytest.approx(kendall(a, b), nan_ok=True)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_kendall_of_a_constant(n):
    assert np.isnan(kendall(np.zeros(n, int), np.arange(n)))


@decodings
@counted
def test_order_equals_the_slow_reference(seed, kind, which):
    _, view, own = case(seed, kind, which)
    filled, positions = fill_order(seed, kind, which)
    row = order_row(view)
    steps = sorted({t for t, _, _, _ in own})
    time = {p: steps.index(t) / max(1, len(steps) - 1) for t, p, _ in filled}
    middle = [p for p in time if positions / 3 < p + 0.5 < 2 * positions / 3]
    outside = [p for p in time if p not in middle]
    trivial = {p: token not in WORDS for _, p, token in filled}
    left, early_trivial, early = len(filled) / 4, 0.0, len(filled) / 4
    for step in steps:
        here = [p for t, p, _ in filled if t == step]
        taken = min(left, len(here))
        early_trivial += taken * fmean(trivial[p] for p in here)
        left -= taken
    share = fmean(trivial.values())
    expected = {
        "steps": len(steps),
        "tokens_per_step": len(filled) / len(steps),
        "kendall": pair_count([t for t, _, _ in filled], [p for _, p, _ in filled]),
        "u_shape": fmean(time[p] for p in middle) - fmean(time[p] for p in outside) if middle and outside else np.nan,
        "trivial_first": early_trivial / early,
        "trivial": share,
        "trivial_ratio": early_trivial / early / share if share else np.nan,
    }
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, nan_ok=True), name


@decodings
@counted
def test_arness_equals_the_slow_reference(seed, kind, which):
    filled, positions = fill_order(seed, kind, which)
    path = [p for _, p, _ in sorted(filled)]
    for _, k, local, earliest in arness(case(seed, kind, which)[1], ks=(1, 2, 3, 5, 50)).itertuples(index=False):
        spans = [path[i - k : i + 1] for i in range(k, len(path))]
        runs = [all(b == a + 1 for a, b in pairwise(span)) for span in spans]
        assert local == pytest.approx(fmean(runs) if runs else np.nan, nan_ok=True), k
        masks, among = list(range(positions)), []
        for p in path:
            among.append(p in masks[:k])
            masks.remove(p)
        assert earliest == pytest.approx(fmean(among)), k


def slow_coupling(seed: int, kind: str, which: str, layer: int, lag: int) -> dict[str, float]:
    """Over the steps whose top key is an anchor and a mask, and whose commits, or those of the next step, count."""
    decoding, _, own = case(seed, kind, which)
    at_top, at_masks = [], []
    for t, key in enumerate(slow.anchor_path(decoding, layer)):
        at = [p for step, p, _, _ in own if step == t + lag]
        masks = slow.masked(decoding, t)
        if at and key in masks:
            at_top.append(min(abs(key - p) for p in at))
            at_masks.append([min(abs(j - p) for p in at) for j in masks])
    expected: dict[str, float] = {"steps": len(at_top)}
    for name, of in {"hit": lambda d: d == 0, "hit_4": lambda d: d <= 4, "distance": lambda d: d}.items():
        expected[name] = fmean(map(of, at_top)) if at_top else np.nan
        expected[f"{name}_chance"] = fmean(fmean(map(of, each)) for each in at_masks) if at_masks else np.nan
    return expected


@decodings
@counted
def test_coupling_equals_the_slow_reference(seed, kind, which):
    decoding, view, _ = case(seed, kind, which)
    table = coupling(view).set_index(["layer", "lag"])
    assert len(table) == 2 * decoding.layers
    for layer in range(decoding.layers):
        for lag in (0, 1):
            for name, value in slow_coupling(seed, kind, which, layer, lag).items():
                assert table.loc[(layer, lag), name] == pytest.approx(value, nan_ok=True), (layer, lag, name)


def test_the_random_decodings_are_coupled_at_some_steps():
    steps = {
        which: [
            slow_coupling(seed, kind, which, layer, lag)["steps"]
            for kind in KINDS
            for seed in range(4)
            for layer in range(case(seed, kind, which)[0].layers)
            for lag in (0, 1)
        ]
        for which in COUNTED
    }
    assert sum(steps["all"]) > sum(steps["answer"]) > 20


@pytest.mark.parametrize("kind", KINDS)
@counted
def test_the_trajectory_equals_the_slow_reference(kind, which):
    table = pd.concat([commits(case(seed, kind, which)[1]) for seed in range(4)])
    shares = trajectory(table).set_index(["step", "position"])["share"]
    each = [fill_order(seed, kind, which) for seed in range(4)]
    assert len(shares) == (1 + max(t for filled, _ in each for t, _, _ in filled)) * max(n for _, n in each)
    for (step, position), share in shares.items():
        relevant = [filled for filled, n in each if position < n]
        is_filled = [any(p == position and t <= step for t, p, _ in filled) for filled in relevant]
        assert share == pytest.approx(fmean(is_filled)), (step, position)


# Refusals

ANALYSES = [commits, order, arness, coupling]


@pytest.mark.parametrize("analysis", ANALYSES)
def test_a_trace_without_commits_is_refused(analysis):
    decoding = canvas(attend(np.zeros((2, 1, 1, 24, 24))), PROMPT)
    with pytest.raises(UserError, match="'hand' has no commits; trace a decoding, step by step"):
        analysis(TraceView(build_trace(replace(decoding, commits=()))))


@pytest.mark.parametrize("analysis", ANALYSES)
def test_a_finished_text_has_no_order(analysis):
    with pytest.raises(UserError, match="'hand' is of the finished text only, so it has no order"):
        analysis(TraceView(build_trace(canvas(uniform_attention(24, 1), PROMPT), state="final")))


@pytest.mark.parametrize("analysis", [commits, order])
def test_a_trace_without_token_texts_is_refused(analysis):
    trace = build_trace(canvas(uniform_attention(24, 2), PROMPT))
    with pytest.raises(UserError, match="'hand' does not store the text of its tokens"):
        analysis(TraceView(replace(trace, meta={"paradigm": "mdm"})))
