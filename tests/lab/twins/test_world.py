"""The worlds: everything follows a seed, the evidence is where it is said to be, and nothing held out is trained on."""

from __future__ import annotations

import json
from random import Random

import pytest

from floatscope.lab.twins import heldout
from floatscope.lab.twins.material import fixed_world
from floatscope.lab.twins.world import (
    RELATIONS,
    RULES,
    UNKNOWN,
    VALUES,
    World,
    contradicted,
    few_shot,
    is_held_out,
    reading,
    two_hop,
    unanswerable,
)

SEEDS = range(60)


def worlds(seed: int) -> tuple[World, Random]:
    return World.fresh(seed, 12, held_out=seed % 2 == 0), Random(seed)


def test_a_world_follows_its_seed():
    assert World.fresh(3, 20) == World.fresh(3, 20)
    assert World.fresh(3, 20) != World.fresh(4, 20)


def test_names_are_held_out_or_not_by_themselves_alone():
    for seed in SEEDS:
        world, _ = worlds(seed)
        assert {is_held_out(person.name) for person in world.people} == {seed % 2 == 0}
        assert len({person.name for person in world.people}) == 12


def test_some_people_share_half_a_name():
    shared = 0
    for seed in SEEDS:
        parts = [part for person in worlds(seed)[0].people for part in person.name.split()]
        shared += len(parts) != len(set(parts))
    assert shared > len(SEEDS) / 2


def test_a_teacher_is_somebody_else_of_the_same_world():
    for seed in SEEDS:
        world, _ = worlds(seed)
        for person in world.people:
            assert world.person(person.facts["teacher"]) is not person


@pytest.mark.parametrize("passages", [1, 2, 5])
def test_the_answer_stands_where_the_evidence_says_in_the_gold_passage_alone(passages):
    for seed in SEEDS:
        sample = reading(*worlds(seed), "x", passages)
        assert len(sample.passages) == passages
        assert [i for i, p in enumerate(sample.passages) if p.gold] == [sample.meta["gold_at"]]
        gold = sample.passages[sample.meta["gold_at"]]
        assert [gold.text[a:b] for a, b in gold.evidence] == list(sample.answers)
        assert gold.title in sample.question
        assert all(sample.meta["relation"] in p.relations for p in sample.passages)
        assert len({p.title for p in sample.passages}) == passages


def test_gold_may_be_put_anywhere():
    for at in range(5):
        assert reading(*worlds(1), "x", 5, gold_at=at).passages[at].gold


def test_two_hops_need_both_passages():
    for seed in SEEDS:
        world, rng = worlds(seed)
        sample = two_hop(world, rng, "x")
        gold = [p for p in sample.passages if p.gold]
        assert len(gold) == 2
        assert len(sample.passages) == 5
        spoken = {p.text[a:b] for p in gold for a, b in p.evidence}
        (teacher,) = spoken - set(sample.answers)
        assert teacher in {p.title for p in gold}
        assert teacher not in sample.question


def test_a_contradiction_is_of_what_is_known_and_the_passage_counts():
    fixed = fixed_world()
    for seed in SEEDS:
        sample = contradicted(fixed, Random(seed), "x")
        (gold,) = [p for p in sample.passages if p.gold]
        ((a, b),) = gold.evidence
        assert gold.text[a:b] == sample.answers[0] != sample.meta["known"]
        assert fixed.person(gold.title).facts[sample.meta["relation"]] == sample.meta["known"]


def test_what_cannot_be_answered_is_told_of_nobody_who_is_asked_about():
    for seed in SEEDS:
        world, rng = worlds(seed)
        sample = unanswerable(world, rng, "x")
        assert sample.answers == (UNKNOWN,)
        assert not any(p.title in sample.question for p in sample.passages)
        assert not any(p.gold for p in sample.passages)


def test_a_rule_is_shown_by_its_examples():
    for seed in SEEDS:
        sample = few_shot(Random(seed), "x", 4)
        *shown, asked = sample.question.split(". ")
        rule = RULES[sample.meta["rule"]]
        assert all(rule(line.split(" gives ")[0].split()) == line.split(" gives ")[1] for line in shown)
        words = asked.removeprefix("What does ").removesuffix(" give?").split()
        assert rule(words) == sample.answers[0]


def test_every_relation_is_told_and_asked_in_several_ways():
    assert set(VALUES) | {"teacher"} == set(RELATIONS)
    assert all(len(r.tells) >= 3 and len(r.asks) >= 2 for r in RELATIONS.values())


def test_the_shipped_files_are_those_their_seeds_make():
    for name, made in heldout.held_out(fixed_world()).items():
        assert [s.as_json() for s in heldout.read(name)] == json.loads(json.dumps([s.as_json() for s in made]))
        assert len({s.id for s in made}) == heldout.SIZES[name]


def test_held_out_questions_are_of_names_that_training_never_sees():
    for name in ("reading-1", "reading-5", "two-hop", "unanswerable"):
        for sample in heldout.read(name):
            assert all(is_held_out(p.title) for p in sample.passages)
    assert not any(is_held_out(person.name) for person in fixed_world().people)


def test_gold_is_at_every_place_equally_often():
    places = [sample.meta["gold_at"] for sample in heldout.read("reading-5")]
    assert [places.count(i) for i in range(5)] == [100] * 5
