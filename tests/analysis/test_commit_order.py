"""The order of decoding: orders known beforehand, worked examples, and the same numbers by loops."""

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
from dense_decodings import BOS, COMMA, END, LINE, STOP, WORDS, Decoding, attend, canvas, causal, growing, build_trace

from floatscope.analysis import TraceView
from floatscope.analysis.commit_order import arness, commits, coupling, kendall, order, trajectory
from floatscope.errors import UserError
from floatscope.schema import State

pytestmark = pytest.mark.filterwarnings("error")
PROMPT = 20
W = WORDS[0]


def even(n: int, steps: int) -> np.ndarray:
    return np.full((steps, 2, 1, n, n), 1 / n)


def filled(when: Sequence[int], answer: Sequence[int] | None = None, sample: str = "hand") -> TraceView:
    """A canvas whose i-th mask is filled at step `when[i]`, by `answer[i]`."""
    tokens = np.array([BOS, *[W] * (PROMPT - 1), *(answer or [W] * len(when))])
    decoding = canvas(even(PROMPT + len(when), max(when) + 1), PROMPT, when=when, tokens=tokens)
    return TraceView(build_trace(decoding, sample))


def written(new: int = 8) -> TraceView:
    """An autoregressive model's text."""
    total = PROMPT + new - 1
    whole = np.broadcast_to(causal(total) / causal(total).sum(1, keepdims=True), (2, 1, total, total))
    return TraceView(build_trace(growing(whole, PROMPT)))


def one(view: TraceView) -> pd.Series:
    table = order(view)
    assert len(table) == 1
    return table.iloc[0]


# Orders known beforehand


@pytest.mark.parametrize("view", [filled(range(8)), written()], ids=["masked", "autoregressive"])
def test_from_left_to_right(view):
    told = one(view)
    assert told[["steps", "tokens_per_step"]].tolist() == [8, 1]
    assert told["kendall"] == 1
    assert told["u_shape"] == pytest.approx(0)
    table = arness(view)
    assert table["k"].tolist() == [1, 2, 4, 8]
    np.testing.assert_array_equal(table["local"], [1, 1, 1, np.nan])  # the eighth has seven before it
    assert table["global"].tolist() == [1, 1, 1, 1]


def test_from_right_to_left():
    view = filled([7, 6, 5, 4, 3, 2, 1, 0])
    assert one(view)["kendall"] == -1
    table = arness(view)
    np.testing.assert_array_equal(table["local"], [0, 0, 0, np.nan])
    assert table["global"].tolist() == [1 / 8, 2 / 8, 4 / 8, 1]


def test_ends_first():
    """The middle third is filled at 6, 8 and 7 of 8, the outer ones at 0 to 5."""
    view = filled([0, 2, 4, 6, 8, 7, 5, 3, 1])
    assert one(view)["u_shape"] == pytest.approx((7 - 2.5) / 8)
    inside_out = filled([8, 6, 4, 2, 0, 1, 3, 5, 7])
    assert one(inside_out)["u_shape"] == pytest.approx((1 - 5.5) / 8)


@pytest.mark.parametrize(
    ("positions", "middle"),
    [(3, [1]), (4, [1, 2]), (5, [2]), (6, [2, 3]), (8, [3, 4]), (9, [3, 4, 5]), (10, [3, 4, 5, 6])],
)
def test_the_middle_third_is_what_has_its_centre_there(positions, middle):
    view = filled([int(i in middle) for i in range(positions)])
    assert one(view)["u_shape"] == 1


@pytest.mark.parametrize("when", [[0], [0, 1]])
def test_what_has_no_middle_or_no_ends_has_no_shape(when):
    assert np.isnan(one(filled(when))["u_shape"])


def test_the_leftmost_at_once_is_as_autoregressive():
    """Two a step from the left: of 28 pairs of positions 4 are tied in time, and the rest in order."""
    view = filled([0, 0, 1, 1, 2, 2, 3, 3])
    told = one(view)
    assert told[["steps", "tokens_per_step"]].tolist() == [4, 2]
    assert told["kendall"] == pytest.approx(24 / np.sqrt(24 * 28))
    table = arness(view, ks=(1, 3, 7))
    assert table[["k", "local", "global"]].to_numpy().tolist() == [[1, 1, 1], [3, 1, 1], [7, 1, 1]]


def test_everything_at_once_has_no_order():
    told = one(filled([0] * 6))
    assert np.isnan(told["kendall"])
    assert told["u_shape"] == 0
    assert told["tokens_per_step"] == 6


def test_ar_ness_by_hand():
    """Filled: 3; 0 and 1; 2; 5; 4. So the path is 3 0 1 2 5 4."""
    table = arness(filled([1, 1, 2, 0, 4, 3]), ks=(1, 2, 3, 5)).set_index("k")
    assert table["local"].tolist() == [2 / 5, 1 / 4, 0, 0]  # 0-1, 1-2; 0-1-2
    assert table["global"].tolist() == [4 / 6, 5 / 6, 5 / 6, 1]  # masks to the left: 3 0 0 0 1 0


@pytest.mark.parametrize(("ks", "got"), [((0,), "0"), ((1, -1), "-1"), ([1.5], "1.5"), (["2"], "'2'")])
def test_ar_ness_at_nothing(ks, got):
    with pytest.raises(UserError, match=f"k of AR-ness must be a whole number of at least 1, got {got}"):
        unwrap(arness)(filled([0, 1]), ks)  # the tests' own checks of types come first


# Trivial tokens


def test_trivial_tokens_first():
    """Of eight the first quarter is two: a comma and an end. Half of all are trivial."""
    view = filled([2, 0, 3, 4, 1, 5, 6, 7], [W, COMMA, LINE, W, END, W, STOP, W])
    assert one(view)[["trivial_first", "trivial", "trivial_ratio"]].tolist() == [1, 0.5, 2]


def test_a_step_across_the_quarter_counts_in_part():
    """The quarter is two of eight. The first step fills one of them, the next four one together, a quarter each."""
    view = filled([0, 1, 1, 1, 1, 2, 2, 2], [STOP, W, STOP, STOP, W, W, W, W])
    told = one(view)
    assert told["trivial_first"] == pytest.approx((1 + 2 / 4) / 2)
    assert told["trivial"] == 3 / 8
    assert told["trivial_ratio"] == pytest.approx(0.75 / (3 / 8))


def test_a_quarter_need_not_be_whole():
    """One and a half of six."""
    assert one(filled(range(6), [STOP, W, W, W, W, W]))["trivial_first"] == pytest.approx(1 / 1.5)
    assert one(filled(range(6), [W, STOP, W, W, W, W]))["trivial_first"] == pytest.approx(0.5 / 1.5)


def test_without_trivial_tokens():
    told = one(filled(range(6)))
    assert told[["trivial_first", "trivial"]].tolist() == [0, 0]
    assert np.isnan(told["trivial_ratio"])


# Commits and trajectories


def test_commits():
    table = commits(filled([0, 2, 2, 4], [LINE, W, BOS, END]))
    assert table["commit"].tolist() == [0, 1, 2, 3]
    assert table["step"].tolist() == [0, 2, 2, 4]
    assert table["position"].tolist() == [0, 2, 1, 3]  # those of a step were listed from the right
    assert (table["positions"] == 4).all()
    assert table["place"].tolist() == pytest.approx([0, 2 / 3, 1 / 3, 1])
    assert table["time"].tolist() == [0, 0.5, 0.5, 1]
    assert table["class"].tolist() == ["newline", "special", "content", "special"]  # no text begins here
    assert table["confidence"].tolist() == [1] * 4
    assert (table["sample"] == "hand").all()


def test_commits_of_an_autoregressive_model():
    table = commits(written(5))
    assert table["step"].tolist() == table["position"].tolist() == [0, 1, 2, 3, 4]
    assert (table["positions"] == 5).all()


def test_a_single_commit():
    table = commits(filled([0]))
    assert table[["place", "time"]].to_numpy().tolist() == [[0, 0]]


def test_the_template_says_nothing_of_what_is_written():
    """Its words may stand at the first positions of the canvas; commits are classed by their own text."""
    decoding = canvas(even(PROMPT + 3, 3), PROMPT, when=[0, 1, 2], regions={"template": range(6)})
    assert commits(TraceView(build_trace(decoding)))["class"].tolist() == ["content"] * 3


def gapped(decoding: Decoding, given: Sequence[int]) -> Decoding:
    """The same, with some of what was to be filled given from the beginning."""
    text = decoding.tokens[-1].copy()
    for _, p, _, token in decoding.commits:
        text[p] = token
    given = list(given)
    states, tokens = [s.copy() for s in decoding.states], [t.copy() for t in decoding.tokens]
    for state, row in zip(states, tokens, strict=True):
        state[given], row[given] = State.PROMPT, text[given]
    return replace(decoding, states=states, tokens=tokens, commits=[c for c in decoding.commits if c[1] not in given])


def test_positions_are_counted_among_those_to_be_filled():
    decoding = canvas(even(PROMPT + 6, 6), PROMPT, when=range(6))
    view = TraceView(build_trace(gapped(decoding, [PROMPT + 1, PROMPT + 4])))
    assert commits(view)["position"].tolist() == [0, 1, 2, 3]
    assert arness(view, (1, 3))["local"].tolist() == [1, 1]


def test_what_was_never_filled_is_a_mask_to_the_left():
    decoding = canvas(even(PROMPT + 4, 4), PROMPT, when=range(4))
    view = TraceView(build_trace(replace(decoding, commits=decoding.commits[1:])))
    assert commits(view)[["position", "positions"]].to_numpy().tolist() == [[1, 4], [2, 4], [3, 4]]
    assert arness(view, (1, 2))["global"].tolist() == [0, 1]


def test_the_trajectory_of_a_run():
    table = pd.concat([commits(filled([0, 2], sample="short")), commits(filled([1, 0, 1], sample="long"))])
    told = trajectory(table)
    assert told.columns.tolist() == ["step", "position", "share"]
    shares = told.pivot(index="step", columns="position", values="share")
    assert shares.to_numpy().tolist() == [[0.5, 0.5, 0], [1, 0.5, 1], [1, 1, 1]]


def test_the_trajectory_of_what_is_never_filled():
    decoding = canvas(even(PROMPT + 3, 3), PROMPT, when=[0, 1, 2])
    table = commits(TraceView(build_trace(replace(decoding, commits=decoding.commits[:2]))))
    shares = trajectory(table).pivot(index="step", columns="position", values="share")
    assert shares.to_numpy().tolist() == [[1, 0, 0], [1, 1, 0]]


# Coupling


def anchored(path: Sequence[int], when: Sequence[int]) -> Decoding:
    """The second of two layers gives half of its attention to a key at each step; the first half of it to the bos."""
    n = PROMPT + len(when)
    A = even(n, len(path)) / 2
    A[:, 0, :, :, 0] += 0.5
    for t, key in enumerate(path):
        A[t, 1, :, :, key] += 0.5
    return canvas(A, PROMPT, when=when)


def coupled(decoding: Decoding) -> pd.DataFrame:
    return coupling(TraceView(build_trace(decoding))).set_index(["layer", "lag"])


def test_the_top_key_is_where_the_next_commit_falls():
    """Positions 2, 0, 3, 1 are filled in turn, and the key is a step ahead."""
    table = coupled(anchored([20, 23, 21, 5], [1, 3, 0, 2]))
    assert table.loc[(1, 1), ["hit", "hit_4", "distance"]].tolist() == [1, 1, 0]
    assert table.loc[(1, 0), ["hit", "hit_4", "distance"]].tolist() == [0, 0.75, (2 + 3 + 2 + 16) / 4]
    assert table.loc[(0, 0), ["hit", "hit_4", "distance"]].tolist() == [0, 0, 21.5]
    assert table.loc[(0, 1), "distance"] == (20 + 23 + 21) / 3


def test_the_same_by_chance():
    """Masks of the steps: 20 to 23, then without 22, then 21 and 23, then 21."""
    table = coupled(anchored([20, 23, 21, 5], [1, 3, 0, 2]))
    for layer in (0, 1):
        chance = table.loc[(layer, 0), ["hit_chance", "hit_4_chance", "distance_chance"]].tolist()
        assert chance == pytest.approx([(1 / 4 + 1 / 3 + 1 / 2 + 1) / 4, 1, (4 / 4 + 4 / 3 + 2 / 2 + 0) / 4])
        chance = table.loc[(layer, 1), ["hit_chance", "hit_4_chance", "distance_chance"]].tolist()
        assert chance == pytest.approx([(1 / 4 + 1 / 3 + 1 / 2) / 3, 1, (6 / 4 + 5 / 3 + 2 / 2) / 3])


def test_a_commit_is_where_its_token_stands():
    """Not where the row that decided it does."""
    decoding = anchored([22, 20, 23, 21], [1, 3, 0, 2])
    shifted = replace(decoding, commits=[(t, p, p - 1, token) for t, p, _, token in decoding.commits])
    assert coupled(decoding).loc[(1, 0), "hit"] == coupled(shifted).loc[(1, 0), "hit"] == 1


def test_steps_that_commit_nothing_are_left_out():
    """Steps 0 and 3 commit: for lag 1 there is step 2 alone."""
    table = coupled(anchored([20, 5, 24, 5], [0, 3, 0, 3, 3]))
    assert table.loc[(1, 0), ["hit", "distance"]].tolist() == [0.5, 8]
    assert table.loc[(1, 1), ["hit", "hit_4", "distance"]].tolist() == [1, 1, 0]
    assert table.loc[(1, 1), ["hit_chance", "distance_chance"]].tolist() == [1, 0]


def test_a_single_step_has_none_after_it():
    table = coupled(anchored([20], [0, 0]))
    assert table.loc[(1, 0), ["hit", "hit_chance"]].tolist() == [1, 1]
    assert table.loc[(1, 1)].drop("depth").drop("sample").isna().all()


def test_a_model_without_masks_has_no_chance():
    table = coupling(written())
    assert table[["hit", "hit_4"]].to_numpy().max() == 0
    assert table["distance"].notna().all()
    assert table[["hit_chance", "hit_4_chance", "distance_chance"]].isna().all(axis=None)


# The same by loops

KINDS = (*dense_decodings.KINDS, "shifted", "gapped", "broken off")
decodings = pytest.mark.parametrize(("seed", "kind"), [(seed, kind) for kind in KINDS for seed in range(4)])


def random_decoding(seed: int, kind: str) -> Decoding:
    if kind in dense_decodings.KINDS:
        return dense_decodings.random_decoding(seed, kind)
    decoding = dense_decodings.random_decoding(seed + 10, "full")
    if kind == "shifted":
        return replace(decoding, commits=[(t, p, p - 1, token) for t, p, _, token in decoding.commits])
    masked = np.flatnonzero(decoding.states[0] == State.MASKED)
    return gapped(decoding, masked[1::3]) if kind == "gapped" else replace(decoding, commits=decoding.commits[:-2])


@functools.cache
def case(seed: int, kind: str) -> tuple[Decoding, TraceView]:
    decoding = random_decoding(seed, kind)
    return decoding, TraceView(build_trace(decoding, f"{kind}-{seed}"))


def filling(decoding: Decoding) -> tuple[list[tuple[int, int, int]], int]:
    """Step, position and token of each commit, and how many positions there were."""
    to_fill = {p for p, state in enumerate(decoding.states[0]) if state == State.MASKED} | {
        c[1] for c in decoding.commits
    }
    ranked = sorted(to_fill)
    return [(t, ranked.index(p), token) for t, p, _, token in decoding.commits], len(ranked)


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
def test_order_by_loops(seed, kind):
    decoding, view = case(seed, kind)
    found, positions = filling(decoding)
    told = one(view)
    time = {p: t / (decoding.steps - 1) for t, p, _ in found}
    middle = [p for p in time if positions / 3 < p + 0.5 < 2 * positions / 3]
    trivial = {p: token not in WORDS for _, p, token in found}
    left, some, all_of_them = len(found) / 4, 0.0, len(found) / 4
    for step in range(decoding.steps):
        here = [p for t, p, _ in found if t == step]
        if here:
            taken = min(left, len(here))
            some += taken * fmean(trivial[p] for p in here)
            left -= taken
    share = fmean(trivial.values())
    expected = {
        "steps": decoding.steps,
        "tokens_per_step": len(found) / decoding.steps,
        "kendall": pair_count([t for t, _, _ in found], [p for _, p, _ in found]),
        "u_shape": fmean(time[p] for p in middle) - fmean(time[p] for p in time if p not in middle),
        "trivial_first": some / all_of_them,
        "trivial": share,
        "trivial_ratio": some / all_of_them / share if share else np.nan,
    }
    for name, value in expected.items():
        assert told[name] == pytest.approx(value, nan_ok=True), name


@decodings
def test_ar_ness_by_loops(seed, kind):
    decoding, view = case(seed, kind)
    found, positions = filling(decoding)
    path = [p for _, p, _ in sorted(found)]
    for _, k, local, earliest in arness(view, (1, 2, 3, 5, 50)).itertuples(index=False):
        spans = [path[i - k : i + 1] for i in range(k, len(path))]
        runs = [all(b == a + 1 for a, b in pairwise(span)) for span in spans]
        assert local == pytest.approx(fmean(runs) if runs else np.nan, nan_ok=True), k
        masks, among = list(range(positions)), []
        for p in path:
            among.append(p in masks[:k])
            masks.remove(p)
        assert earliest == pytest.approx(fmean(among)), k


@decodings
def test_coupling_by_loops(seed, kind):
    decoding, view = case(seed, kind)
    table = coupling(view).set_index(["layer", "lag"])
    assert len(table) == 2 * decoding.layers
    for layer in range(decoding.layers):
        for lag in (0, 1):
            found, drawn = [], []
            for t in range(decoding.steps):
                at = [p for step, p, _, _ in decoding.commits if step == t + lag]
                if at:
                    found.append(min(abs(int(view.top_key[t, layer]) - p) for p in at))
                    masks = [j for j, state in enumerate(decoding.states[t]) if state == State.MASKED]
                    drawn.append([min(abs(j - p) for p in at) for j in masks])
            row = table.loc[(layer, lag)]
            for name, of in {"hit": lambda d: d == 0, "hit_4": lambda d: d <= 4, "distance": lambda d: d}.items():
                assert row[name] == pytest.approx(fmean(map(of, found)) if found else np.nan, nan_ok=True), name
                chance = [fmean(map(of, each)) for each in drawn if each]
                expected = fmean(chance) if chance else np.nan
                assert row[f"{name}_chance"] == pytest.approx(expected, nan_ok=True), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_trajectory_by_loops(kind):
    texts = [case(seed, kind) for seed in range(4)]
    table = pd.concat([commits(view) for _, view in texts])
    told = trajectory(table).set_index(["step", "position"])["share"]
    each = [filling(decoding) for decoding, _ in texts]
    assert len(told) == (1 + max(t for found, _ in each for t, _, _ in found)) * max(n for _, n in each)
    for (step, position), share in told.items():
        having = [found for found, n in each if position < n]
        done = [any(p == position and t <= step for t, p, _ in found) for found in having]
        assert share == pytest.approx(fmean(done)), (step, position)


# What cannot be answered

ASKED = [commits, order, arness, coupling]


@pytest.mark.parametrize("ask", ASKED)
def test_without_commits(ask):
    decoding = canvas(attend(np.zeros((2, 1, 1, 24, 24))), PROMPT)
    with pytest.raises(UserError, match="'hand' has no commits, so it knows no order; trace a decoding, step by step"):
        ask(TraceView(build_trace(replace(decoding, commits=()))))


@pytest.mark.parametrize("ask", ASKED)
def test_a_finished_text_has_no_order(ask):
    with pytest.raises(UserError, match="'hand' is of the finished text alone, so it knows no order"):
        ask(TraceView(build_trace(canvas(even(24, 1), PROMPT), state="final")))


@pytest.mark.parametrize("ask", [commits, order])
def test_without_pieces(ask):
    trace = build_trace(canvas(even(24, 2), PROMPT))
    with pytest.raises(UserError, match="'hand' does not say what its tokens are"):
        ask(TraceView(replace(trace, meta={"paradigm": "mdm"})))
