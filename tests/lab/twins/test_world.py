"""Worlds: everything follows from a seed, evidence spans are exact, and held-out names are not trained on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

import pytest

import floatscope
from floatscope.lab.twins.corpus import fixed_world
from floatscope.lab.twins.held_out import SIZES, make_held_out
from floatscope.lab.twins.world import (
    BIOGRAPHY_FACTS,
    BIOGRAPHY_QUESTIONS,
    RELATIONS,
    RULES,
    UNKNOWN,
    VALUES,
    World,
    is_held_out,
    make_biography,
    make_contradicted,
    make_dated,
    make_few_shot,
    make_reading,
    make_two_hop,
    make_unanswerable,
)
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.sample_files import read_shipped
from floatscope.tasks.stress.dates import YEARS

SEEDS = range(60)
TOKENIZER = Path(floatscope.__file__).parent / "assets" / "twins" / "mdm" / "tokenizer.json"
NAME, VALUE = r"(?P<who>\w+ \w+)", r"(?P<what>\w+(?: \w+)?)"
STATEMENTS = [
    (relation.name, re.compile(re.escape(text).replace(r"\{who\}", NAME).replace(r"\{what\}", VALUE)))
    for relation in RELATIONS.values()
    for text in relation.statements
]
Fact = tuple[str, str, str]


def make_world(seed: int) -> tuple[World, Random]:
    return World.generate(seed, 12, held_out=seed % 2 == 0), Random(seed)


def parse_facts(text: str) -> list[Fact]:
    """Read a text back into (who, relation, value), sentence by sentence; each sentence has one reading."""
    facts = []
    for sentence in re.findall(r"[^.]+\.", text):
        readings = [(name, match) for name, pattern in STATEMENTS if (match := pattern.fullmatch(sentence.strip()))]
        ((name, match),) = readings
        facts.append((match["who"], name, match["what"]))
    return facts


def parse_version(passage: Passage) -> tuple[int | None, list[Fact]]:
    """Return the year and the facts of a passage."""
    dated = re.fullmatch(r"Last updated in (\d{4})\. (.*)", passage.text)
    return (int(dated[1]), parse_facts(dated[2])) if dated else (None, parse_facts(passage.text))


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


def check_biography(sample: Sample) -> None:
    """Restate the answer: the facts of the person, read from the passages in their order, in the first wording."""
    (who,) = {p.title for p in sample.passages if p.gold}
    assert sample.question in [text.replace("{who}", who) for text in BIOGRAPHY_QUESTIONS]
    facts, given_name = [], who.split()[0]
    for passage in sample.passages:
        parsed = parse_facts(passage.text)
        assert {fact[0] for fact in parsed} == {passage.title}
        assert (passage.title == who) == passage.gold
        assert [passage.text[a:b] for a, b in passage.evidence] == [value for *_, value in parsed if passage.gold]
        facts += [(relation, value) for name, relation, value in parsed if name == who]
    assert len(facts) == len(dict(facts))
    assert BIOGRAPHY_FACTS[0] <= len(facts) <= BIOGRAPHY_FACTS[1]
    assert [relation for relation, _ in facts] == sample.meta["relations"]
    (answer,) = sample.answers
    sentences = answer.split(". ")
    assert len(sentences) == len(facts)
    for number, (sentence, (relation, value)) in enumerate(zip(sentences, facts, strict=True)):
        name = given_name if number else who
        stated = RELATIONS[relation].statements[0].replace("{who}", name).replace("{what}", value)
        assert sentence.removesuffix(".") == stated.removesuffix(".")
    assert answer.endswith(".")


@pytest.mark.parametrize("passages", [1, 2, 5])
def test_biography_states_every_fact_of_the_passages_once(passages):
    golds = []
    for seed in SEEDS:
        sample = make_biography(*make_world(seed), "x", passages)
        check_biography(sample)
        assert len(sample.passages) == passages
        golds.append(sum(p.gold for p in sample.passages))
    assert set(golds) == ({1} if passages == 1 else {1, 2})


def check_dated(sample: Sample, versions: int) -> None:
    """Restate the answer: of the passages about the person, the one of the latest year is right."""
    relation, found = sample.meta["relation"], []
    for at, passage in enumerate(sample.passages):
        year, facts = parse_version(passage)
        assert {who for who, *_ in facts} == {passage.title}
        if passage.title in sample.question:
            (value,) = [value for _, name, value in facts if name == relation]
            found.append((year, value, at))
    assert len(found) == versions
    (_, second, _), (year, value, at) = [(0, "", 0), *sorted(found)][-2:]
    assert year in YEARS
    assert len([other for other, *_ in found if other == year]) == 1
    assert second != value
    assert (sample.answers, sample.meta["year"], sample.meta["gold_at"]) == ((value,), year, at)
    assert sorted(sample.meta["stale"]) == sorted(value for older, value, _ in found if older != year)
    assert len({value for _, value, _ in found}) == versions
    gold = sample.passages[at]
    assert [passage.gold for passage in sample.passages] == [passage is gold for passage in sample.passages]
    assert [gold.text[a:b] for a, b in gold.evidence] == [value]


@pytest.mark.parametrize(("passages", "versions"), [(1, 1), (2, 1), (3, 3), (5, 3), (8, 6)])
def test_newest_version_is_right(passages, versions):
    differs = 0
    for seed in SEEDS:
        sample = make_dated(*make_world(seed), "x", passages, versions)
        check_dated(sample, versions)
        assert len(sample.passages) == passages
        others = [parse_version(p)[0] for p in sample.passages if p.title not in sample.question]
        assert all(others) or not any(others)
        differs += bool(others) and bool(others[0])
    assert passages == versions or 0 < differs < len(SEEDS)


def test_held_out_biographies_and_versions_are_right():
    for sample in read_shipped("biography"):
        check_biography(sample)
    for sample in read_shipped("dated"):
        check_dated(sample, 3)


def test_biographies_have_12_to_40_tokens():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    lengths = [
        len(tokenizer.encode(f" {sample.answers[0]}", add_special_tokens=False).ids)
        for sample in read_shipped("biography")
    ]
    assert len(lengths) == 200
    assert min(lengths) >= 12
    assert max(lengths) <= 40


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
    for name in ("reading-1", "reading-5", "two-hop", "unanswerable", "biography", "dated"):
        for sample in read_shipped(name):
            assert all(is_held_out(p.title) for p in sample.passages)
    assert not any(is_held_out(person.name) for person in fixed_world().people)


def test_gold_passage_is_at_each_position_equally_often():
    positions = [sample.meta["gold_at"] for sample in read_shipped("reading-5")]
    assert [positions.count(i) for i in range(5)] == [100] * 5
