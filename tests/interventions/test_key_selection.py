"""The keys of a rule equal those of sorted lists, whatever the batch and the padding."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from example_counts import examples
from floatscope.canvas import Regions, build_canvas
from floatscope.capture.edit_tensors import NO_KEY
from floatscope.interventions.edits import (
    Anchors,
    FirstKey,
    KeyRule,
    LeastKeys,
    MiddleKeys,
    PositionKeys,
    RandomKeys,
    RandomSameCount,
    RegionKeys,
)
from floatscope.interventions.key_selection import Ranking, SelectionContext, select_keys, to_mask

few = examples(30)
HEADS = 3


def build_context(
    lengths: list[int], seed: int, step: int = 0, layer: int = 0, names: str = "abcdef"
) -> tuple[SelectionContext, Ranking]:
    """Left-padded samples; the numbers of a sample do not depend on its place in the batch."""
    canvas = build_canvas([[1] * n for n in lengths], 0, None)
    T = canvas.tokens.shape[1]
    lift, eligible = torch.full((len(lengths), HEADS, T), math.nan), torch.zeros(len(lengths), T, dtype=torch.bool)
    for b, n in enumerate(lengths):
        noise = torch.Generator().manual_seed(seed * 100 + ord(names[b]))
        lift[b, :, T - n :] = torch.rand(HEADS, n, generator=noise)
        eligible[b, T - n :] = torch.rand(n, generator=noise) < 0.8
    canvas = type(canvas)(canvas.tokens, canvas.states, step=step)
    return SelectionContext(canvas, layer, HEADS, list(names[: len(lengths)])), Ranking(eligible, lift)


def select_positions(keys: KeyRule, ranking: Ranking | None, context: SelectionContext) -> list[list[list[int]]]:
    """Keys counted from a sample's start, in their order."""
    first = context.first.tolist()
    return [
        [[j - first[b] for j in head if j != NO_KEY] for head in heads]
        for b, heads in enumerate(select_keys(keys, ranking, context).tolist())
    ]


def by_lift(ranking: Ranking, b: int, h: int, first: int) -> list[int]:
    there = ranking.eligible[b].nonzero()[:, 0].tolist()
    return [j - first for j in sorted(there, key=lambda j: -float(ranking.lift[b, h, j]))]


RANKED = (Anchors, MiddleKeys, LeastKeys, RandomKeys)
lengths = st.lists(st.integers(1, 30), min_size=1, max_size=4)


@few
@given(lengths, st.integers(0, 99), st.integers(1, 12), st.integers(1, 99))
def test_rules_by_rank_equal_sorted_lists(lengths, seed, k, percent):
    context, ranking = build_context(lengths, seed)
    largest, middle, least, rest = (
        select_positions(keys, ranking, context)
        for keys in (Anchors(k), MiddleKeys(k), LeastKeys(k), LeastKeys(percent / 100))
    )
    for b in range(len(lengths)):
        for h in range(HEADS):
            order = by_lift(ranking, b, h, int(context.first[b]))
            centre = Fraction(len(order) - 1, 2)
            near = sorted(range(len(order)), key=lambda place: (abs(place - centre), place))
            assert largest[b][h] == order[:k]
            assert middle[b][h] == [order[place] for place in near[:k]]
            assert sorted(least[b][h]) == sorted(order[k:])
            assert sorted(rest[b][h]) == sorted(order[math.ceil(Fraction(percent, 100) * len(order)) :])


def test_a_share_is_rounded_exactly():
    """100 · 0.07 is slightly more than 7 in floating point."""
    for count, share, keep in (
        (50, 0.3, 15),
        (100, 0.07, 7),
        (25, 0.6, 15),
        (75, 0.72, 54),
        (3, 0.5, 2),
        (1000, 0.001, 1),
    ):
        canvas = build_canvas([[1] * count], 0, None)
        ranking = Ranking(torch.ones(1, count, dtype=torch.bool), torch.rand(1, 1, count))
        (((*evicted,),),) = select_positions(LeastKeys(share), ranking, SelectionContext(canvas, 0, 1, ["a"]))
        assert len(evicted) == count - keep


@few
@given(lengths, st.integers(0, 99), st.sampled_from(RANKED), st.integers(1, 5))
def test_the_keys_of_a_sample_do_not_depend_on_the_batch(lengths, seed, kind, k):
    rule = RandomKeys(k, seed=seed) if kind is RandomKeys else kind(k)
    batched = select_positions(rule, *build_context(lengths, seed)[::-1])
    for b, n in enumerate(lengths):
        context, ranking = build_context([n], seed, names="abcdef"[b])
        (alone,) = select_positions(rule, ranking, context)
        assert [sorted(head) for head in alone] == [sorted(head) for head in batched[b]]


@few
@given(lengths, st.integers(0, 99), st.integers(1, 6))
def test_random_keys_are_distinct_and_eligible(lengths, seed, k):
    context, ranking = build_context(lengths, seed)
    random = select_keys(RandomKeys(k, seed=seed), ranking, context)
    matched = select_keys(RandomSameCount(LeastKeys(k), seed=seed), ranking, context)
    for b in range(len(lengths)):
        available = int(ranking.eligible[b].sum())
        for got, count in ((random, min(k, available)), (matched, max(0, available - k))):
            for head in got[b].tolist():
                keys = [j for j in head if j != NO_KEY]
                assert len(set(keys)) == len(keys) == count
                assert ranking.eligible[b, keys].all()


def test_random_keys_differ_by_seed_sample_step_layer_and_head():
    def draw(seed=0, name="a", **given):
        context, _ = build_context([200], 1, names=name, **given)
        return tuple(
            select_positions(RandomKeys(8, seed=seed), Ranking(torch.ones(1, 200, dtype=torch.bool)), context)[0][0]
        )

    draws = [draw(), draw(seed=1), draw(name="b"), draw(step=1), draw(layer=1)]
    assert len(set(draws)) == 5
    assert draw() == draws[0]
    context, ranking = build_context([200], 1)
    assert len({tuple(head) for head in select_positions(RandomKeys(8), ranking, context)[0]}) == HEADS


def test_random_keys_are_uniform():
    counts = torch.zeros(20)
    for step in range(400):
        context, _ = build_context([20], 0, step=step)
        selected = select_keys(RandomKeys(5), Ranking(torch.ones(1, 20, dtype=torch.bool)), context)
        counts += to_mask(selected, 20)[0].sum(0)
    share = counts / (400 * HEADS)  # a quarter, ± 0.0125
    assert (share - 0.25).abs().max() < 0.06


def test_positions_count_from_the_first_token():
    context, _ = build_context([5, 2], 0)
    assert select_positions(PositionKeys((0, 3)), None, context) == [[[0, 3]] * HEADS, [[0]] * HEADS]
    assert select_positions(FirstKey(2), None, context) == [[[0, 0]] * HEADS] * 2


def test_a_region_excludes_padding():
    canvas = build_canvas(
        [[1] * 5, [1] * 2], 0, None, regions=Regions.from_spans([{"r": [(1, 3)]}, {"r": [(2, 4)]}], 5)
    )
    assert select_positions(RegionKeys("r"), None, SelectionContext(canvas, 0, 1, ["a", "b"])) in (
        [[[1, 2]], [[0]]],
        [[[2, 1]], [[0]]],
    )
    nothing = build_canvas([[1] * 5], 0, None, regions=Regions.from_spans([{"r": []}], 5))
    assert select_keys(RegionKeys("r"), None, SelectionContext(nothing, 0, 2, ["a"])).shape == (1, 2, 0)


@pytest.mark.parametrize("rule", RANKED)
def test_new_keys_have_no_rank_yet(rule):
    canvas = build_canvas([[1] * 9], 0, None)
    ranking = Ranking(torch.ones(1, 6, dtype=torch.bool), torch.rand(1, 1, 6))
    (((*keys,),),) = select_positions(rule(5), ranking, SelectionContext(canvas, 0, 1, ["a"]))
    assert keys
    assert max(keys) < 6
