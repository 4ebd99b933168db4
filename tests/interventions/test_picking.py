"""Which keys a rule picks: the same as sorted lists, whatever the batch and the padding."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from floatscope.canvas import Regions, build_canvas
from floatscope.capture.changes import NOWHERE
from floatscope.interventions.edits import Keys
from floatscope.interventions.picking import Ranking, Scene, as_mask, pick

few = settings(max_examples=30)
HEADS = 3


def scene_of(
    lengths: list[int], seed: int, step: int = 0, layer: int = 0, names: str = "abcdef"
) -> tuple[Scene, Ranking]:
    """Samples of some lengths, left-padded, each with numbers of its own wherever it stands in the batch."""
    canvas = build_canvas([[1] * n for n in lengths], 0, None)
    T = canvas.tokens.shape[1]
    lift, eligible = torch.full((len(lengths), HEADS, T), math.nan), torch.zeros(len(lengths), T, dtype=torch.bool)
    for b, n in enumerate(lengths):
        noise = torch.Generator().manual_seed(seed * 100 + ord(names[b]))
        lift[b, :, T - n :] = torch.rand(HEADS, n, generator=noise)
        eligible[b, T - n :] = torch.rand(n, generator=noise) < 0.8
    canvas = type(canvas)(canvas.tokens, canvas.states, step=step)
    return Scene(canvas, layer, HEADS, list(names[: len(lengths)])), Ranking(eligible, lift)


def picked(keys: Keys, ranking: Ranking | None, scene: Scene) -> list[list[list[int]]]:
    """Keys counted from a sample's start, in their order."""
    first = scene.first.tolist()
    return [
        [[j - first[b] for j in head if j != NOWHERE] for head in heads]
        for b, heads in enumerate(pick(keys, ranking, scene).tolist())
    ]


def by_lift(ranking: Ranking, b: int, h: int, first: int) -> list[int]:
    there = ranking.eligible[b].nonzero()[:, 0].tolist()
    return [j - first for j in sorted(there, key=lambda j: -float(ranking.lift[b, h, j]))]


lengths = st.lists(st.integers(1, 30), min_size=1, max_size=4)


@few
@given(lengths, st.integers(0, 99), st.integers(1, 12), st.integers(1, 99))
def test_rules_of_rank_are_sorted_lists(lengths, seed, k, percent):
    scene, ranking = scene_of(lengths, seed)
    largest, middle, least, rest = (
        picked(keys, ranking, scene)
        for keys in (Keys("anchors", k), Keys("middle", k), Keys("least", k), Keys("least", percent / 100))
    )
    for b in range(len(lengths)):
        for h in range(HEADS):
            order = by_lift(ranking, b, h, int(scene.first[b]))
            centre = Fraction(len(order) - 1, 2)
            near = sorted(range(len(order)), key=lambda place: (abs(place - centre), place))
            assert largest[b][h] == order[:k]
            assert middle[b][h] == [order[place] for place in near[:k]]
            assert sorted(least[b][h]) == sorted(order[k:])
            assert sorted(rest[b][h]) == sorted(order[math.ceil(Fraction(percent, 100) * len(order)) :])


def test_a_share_is_exact():
    """100 · 0.07 is a little more than 7 to a computer."""
    for count, share, kept in (
        (50, 0.3, 15),
        (100, 0.07, 7),
        (25, 0.6, 15),
        (75, 0.72, 54),
        (3, 0.5, 2),
        (1000, 0.001, 1),
    ):
        canvas = build_canvas([[1] * count], 0, None)
        ranking = Ranking(torch.ones(1, count, dtype=torch.bool), torch.rand(1, 1, count))
        (((*gone,),),) = picked(Keys("least", share), ranking, Scene(canvas, 0, 1, ["a"]))
        assert len(gone) == count - kept


@few
@given(lengths, st.integers(0, 99), st.sampled_from(["anchors", "middle", "least", "random"]), st.integers(1, 5))
def test_a_sample_gets_its_keys_whoever_stands_beside_it(lengths, seed, rule, k):
    together = picked(Keys(rule, k, seed=seed), *scene_of(lengths, seed)[::-1])
    for b, n in enumerate(lengths):
        scene, ranking = scene_of([n], seed, names="abcdef"[b])
        (alone,) = picked(Keys(rule, k, seed=seed), ranking, scene)
        assert [sorted(head) for head in alone] == [sorted(head) for head in together[b]]


@few
@given(lengths, st.integers(0, 99), st.integers(1, 6))
def test_random_keys_are_different_ones_of_the_eligible(lengths, seed, k):
    scene, ranking = scene_of(lengths, seed)
    chosen = pick(Keys("random", k, seed=seed), ranking, scene)
    like = pick(Keys("random", like=Keys("least", k), seed=seed), ranking, scene)
    for b in range(len(lengths)):
        among = int(ranking.eligible[b].sum())
        for got, count in ((chosen, min(k, among)), (like, max(0, among - k))):
            for head in got[b].tolist():
                keys = [j for j in head if j != NOWHERE]
                assert len(set(keys)) == len(keys) == count
                assert ranking.eligible[b, keys].all()


def test_random_keys_differ_by_seed_sample_step_layer_and_head():
    def draw(seed=0, name="a", **given):
        scene, _ = scene_of([200], 1, names=name, **given)
        return tuple(picked(Keys("random", 8, seed=seed), Ranking(torch.ones(1, 200, dtype=torch.bool)), scene)[0][0])

    draws = [draw(), draw(seed=1), draw(name="b"), draw(step=1), draw(layer=1)]
    assert len(set(draws)) == 5
    assert draw() == draws[0]
    scene, ranking = scene_of([200], 1)
    assert len({tuple(head) for head in picked(Keys("random", 8), ranking, scene)[0]}) == HEADS


def test_random_keys_are_drawn_evenly():
    counts = torch.zeros(20)
    for step in range(400):
        scene, _ = scene_of([20], 0, step=step)
        counts += as_mask(pick(Keys("random", 5), Ranking(torch.ones(1, 20, dtype=torch.bool)), scene), 20)[0].sum(0)
    share = counts / (400 * HEADS)  # a quarter, ± 0.0125
    assert (share - 0.25).abs().max() < 0.06


def test_places_count_from_the_first_token():
    scene, _ = scene_of([5, 2], 0)
    assert picked(Keys("positions", positions=(0, 3)), None, scene) == [[[0, 3]] * HEADS, [[0]] * HEADS]
    assert picked(Keys("first", 2), None, scene) == [[[0, 0]] * HEADS] * 2


def test_a_region_is_all_of_it_but_no_padding():
    canvas = build_canvas(
        [[1] * 5, [1] * 2], 0, None, regions=Regions.from_spans([{"r": [(1, 3)]}, {"r": [(2, 4)]}], 5)
    )
    assert picked(Keys("region", region="r"), None, Scene(canvas, 0, 1, ["a", "b"])) in (
        [[[1, 2]], [[0]]],
        [[[2, 1]], [[0]]],
    )
    nothing = build_canvas([[1] * 5], 0, None, regions=Regions.from_spans([{"r": []}], 5))
    assert pick(Keys("region", region="r"), None, Scene(nothing, 0, 2, ["a"])).shape == (1, 2, 0)


@pytest.mark.parametrize("rule", ["anchors", "middle", "least", "random"])
def test_keys_that_came_later_have_no_rank_yet(rule):
    canvas = build_canvas([[1] * 9], 0, None)
    ranking = Ranking(torch.ones(1, 6, dtype=torch.bool), torch.rand(1, 1, 6))
    (((*keys,),),) = picked(Keys(rule, 5), ranking, Scene(canvas, 0, 1, ["a"]))
    assert keys
    assert max(keys) < 6
