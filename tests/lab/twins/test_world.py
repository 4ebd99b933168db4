"""Worlds: everything follows from a seed, evidence spans are exact, and held-out names are not trained on."""

from __future__ import annotations

import json
from random import Random

import pytest

from floatscope.lab.twins.corpus import fixed_world
from floatscope.lab.twins.held_out import SIZES, make_held_out
from floatscope.lab.twins.world import (
    RELATIONS,
    RULES,
    UNKNOWN,
    VALUES,
    World,
    is_held_out,
    make_contradicted,
    make_few_shot,
    make_reading,
    make_two_hop,
    make_unanswerable,
)
from floatscope.tasks.sample_files import read_shipped

SEEDS = range(60)


def make_world(seed: int) -> tuple[World, Random]:
    return World.generate(seed, 12, held_out=seed % 2 == 0), Random(seed)


def test_world_follows_from_its_seed():
    assert World.generate(3, 20) == World.generate(3, 20)
    assert World.generate(3, 20) != World.generate(4, 20)


def test_held_out_depends_on_the_name_alone():
    for seed in SEEDS:
        world, _ = make_world(seed)
        assert {is_held_out(person.name) for person in world.people} == {seed % 2 == 0}
        assert len({person.name for person in world.people}) == 12


def test_some_people_share_part_of_a_name():
    shared = 0
    for seed in SEEDS:
        parts = [part for person in make_world(seed)[0].people for part in person.name.split()]
        shared += len(parts) != len(set(parts))
    assert shared > len(SEEDS) / 2


def test_teacher_is_another_person_of_the_same_world():
    for seed in SEEDS:
        world, _ = make_world(seed)
        for person in world.people:
            assert world.person(person.facts["teacher"]) is not person


@pytest.mark.parametrize("passages", [1, 2, 5])
def test_evidence_is_the_answer_in_the_only_gold_passage(passages):
    for seed in SEEDS:
        sample = make_reading(*make_world(seed), "x", passages)
        assert len(sample.passages) == passages
        assert [i for i, p in enumerate(sample.passages) if p.gold] == [sample.meta["gold_at"]]
        gold = sample.passages[sample.meta["gold_at"]]
        assert [gold.text[a:b] for a, b in gold.evidence] == list(sample.answers)
        assert gold.title in sample.question
        assert all(sample.meta["relation"] in p.relations for p in sample.passages)
        assert len({p.title for p in sample.passages}) == passages


def test_gold_passage_can_be_at_any_position():
    for at in range(5):
        assert make_reading(*make_world(1), "x", 5, gold_at=at).passages[at].gold


def test_two_hop_questions_need_both_gold_passages():
    for seed in SEEDS:
        world, rng = make_world(seed)
        sample = make_two_hop(world, rng, "x")
        gold = [p for p in sample.passages if p.gold]
        assert len(gold) == 2
        assert len(sample.passages) == 5
        stated = {p.text[a:b] for p in gold for a, b in p.evidence}
        (teacher,) = stated - set(sample.answers)
        assert teacher in {p.title for p in gold}
        assert teacher not in sample.question


def test_contradicted_answer_is_that_of_the_passage():
    fixed = fixed_world()
    for seed in SEEDS:
        sample = make_contradicted(fixed, Random(seed), "x")
        (gold,) = [p for p in sample.passages if p.gold]
        ((a, b),) = gold.evidence
        assert gold.text[a:b] == sample.answers[0] != sample.meta["known"]
        assert fixed.person(gold.title).facts[sample.meta["relation"]] == sample.meta["known"]


def test_unanswerable_questions_have_no_passage_about_the_person():
    for seed in SEEDS:
        world, rng = make_world(seed)
        sample = make_unanswerable(world, rng, "x")
        assert sample.answers == (UNKNOWN,)
        assert not any(p.title in sample.question for p in sample.passages)
        assert not any(p.gold for p in sample.passages)


def test_few_shot_examples_follow_the_rule():
    for seed in SEEDS:
        sample = make_few_shot(Random(seed), "x", 4)
        *examples, question = sample.question.split(". ")
        rule = RULES[sample.meta["rule"]]
        assert all(rule(line.split(" gives ")[0].split()) == line.split(" gives ")[1] for line in examples)
        words = question.removeprefix("What does ").removesuffix(" give?").split()
        assert rule(words) == sample.answers[0]


def test_every_relation_has_several_statements_and_questions():
    assert set(VALUES) | {"teacher"} == set(RELATIONS)
    assert all(len(r.statements) >= 3 and len(r.questions) >= 2 for r in RELATIONS.values())


def test_shipped_files_follow_from_their_seeds():
    for name, samples in make_held_out(fixed_world()).items():
        assert [s.as_json() for s in read_shipped(name)] == json.loads(json.dumps([s.as_json() for s in samples]))
        assert len({s.id for s in samples}) == SIZES[name]


def test_held_out_questions_use_held_out_names_only():
    for name in ("reading-1", "reading-5", "two-hop", "unanswerable"):
        for sample in read_shipped(name):
            assert all(is_held_out(p.title) for p in sample.passages)
    assert not any(is_held_out(person.name) for person in fixed_world().people)


def test_gold_passage_is_at_each_position_equally_often():
    positions = [sample.meta["gold_at"] for sample in read_shipped("reading-5")]
    assert [positions.count(i) for i in range(5)] == [100] * 5
