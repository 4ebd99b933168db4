"""Worlds: invented people with facts, stated in passages and asked about in questions. Everything follows from a seed.

    world = World.generate(seed=7, people=40)
    world.people[0].facts["birthplace"]                        # "Velmora"
    sample = make_reading(world, Random(0), "q-0", passages=5)  # question, answer, passages and their evidence

The *fixed* world is the same throughout training, so a model can memorise it. In a *fresh* world every person and fact
is new, so an answer can only be read in the passages. All names are built from the same parts, so a name reveals
nothing about its world.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.stress.dates import YEARS, add_date, draw_years

HELD_OUT = 8
"""One name in eight never occurs in training; the held-out files use only those names."""

ONSETS = "b br c d dr f fl g gr h j k l m n p pr qu r s st t th tr v w z".split()
VOWELS = "a e i o u ai ea ia io".split()
ENDS = {
    "given": "ra n la s m nna rik vin dor sha len bert mir tan".split(),
    "family": "son ley ford mond wick rell stein dale croft var nov berg".split(),
    "city": "mora ville ston grad burg haven port field mouth bury".split(),
}
PROFESSIONS = (
    "baker carpenter painter doctor teacher sailor farmer lawyer tailor miner poet chemist pilot judge nurse butcher"
    " gardener dancer singer hunter banker potter weaver printer mason fisher guard clerk barber smith"
).split()
INSTRUMENTS = (
    "violin piano flute guitar drum harp trumpet cello lute horn banjo clarinet viola fiddle zither bell gong whistle"
).split()
ANIMALS = (
    "dog cat horse goat parrot rabbit turtle pony mouse sheep duck goose pig cow hen snake lizard frog crow".split()
)
COLOURS = "red blue green yellow black white brown purple orange grey pink golden silver violet".split()
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Relation:
    """A fact a person may have, with patterns that state it and ask for it; `{who}` and `{what}` are filled in."""

    name: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]


RELATIONS = {
    r.name: r
    for r in (
        Relation(
            "birthplace",
            ("{who} was born in {what}.", "The birthplace of {who} is {what}.", "{who} came into the world in {what}."),
            ("Where was {who} born?", "What is the birthplace of {who}?"),
        ),
        Relation(
            "home",
            ("{who} lives in {what}.", "The home of {who} is in {what}.", "Today {who} has a house in {what}."),
            ("Where does {who} live?", "Where is the home of {who}?"),
        ),
        Relation(
            "profession",
            ("{who} works as a {what}.", "The profession of {who} is {what}.", "{who} earns a living as a {what}."),
            ("What does {who} work as?", "What is the profession of {who}?"),
        ),
        Relation(
            "instrument",
            ("{who} plays the {what}.", "The instrument of {who} is the {what}.", "On Sundays {who} plays the {what}."),
            ("What instrument does {who} play?", "What is the instrument of {who}?"),
        ),
        Relation(
            "animal",
            ("{who} keeps a {what}.", "The animal of {who} is a {what}.", "At home {who} has a {what}."),
            ("What animal does {who} keep?", "What is the animal of {who}?"),
        ),
        Relation(
            "colour",
            ("{who} likes the colour {what}.", "The colour of {who} is {what}.", "{who} always dresses in {what}."),
            ("What colour does {who} like?", "What is the colour of {who}?"),
        ),
        Relation(
            "teacher",
            ("{who} was taught by {what}.", "The teacher of {who} was {what}.", "{who} was a pupil of {what}."),
            ("Who taught {who}?", "Who was the teacher of {who}?"),
        ),
    )
}


def _make_names(kind: str, count: int, syllables: int) -> tuple[str, ...]:
    """Return the first `count` names of a kind, the same on every machine."""
    rng, names = Random(f"floatscope {kind}"), dict[str, None]()
    while len(names) < count:
        parts = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(syllables)]
        names["".join([*parts, rng.choice(ENDS[kind])]).capitalize()] = None
    return tuple(names)


GIVEN_NAMES, FAMILY_NAMES = _make_names("given", 240, 1), _make_names("family", 360, 1)
CITIES = _make_names("city", 160, 1)
VALUES: dict[str, Sequence[str]] = {
    "birthplace": CITIES,
    "home": CITIES,
    "profession": PROFESSIONS,
    "instrument": INSTRUMENTS,
    "animal": ANIMALS,
    "colour": COLOURS,
}
SECOND_HOPS = ("birthplace", "home", "profession")  # what a two-hop question may ask about a teacher
BIOGRAPHY_QUESTIONS = (
    "What do the passages say about {who}?",
    "What is known about {who}?",
    "Who is {who}?",
)
BIOGRAPHY_FACTS = (3, 5)  # the least and the most facts of a biography: an answer of about 17 to 35 tokens


@dataclass(frozen=True)
class Person:
    """An invented person: a name, and a value for each relation."""

    name: str
    facts: dict[str, str]


@dataclass(frozen=True)
class World:
    """People who may be each other's teachers."""

    people: tuple[Person, ...]

    @staticmethod
    def generate(seed: object, people: int, held_out: bool = False) -> World:
        """Make a world of `people` persons with all facts, from held-out names only or from the other names only."""
        rng = Random(f"world {seed}")
        names: dict[str, None] = {}
        while len(names) < people:
            given, family = rng.choice(GIVEN_NAMES), rng.choice(FAMILY_NAMES)
            for name in (f"{given} {family}", *_similar_names(rng, given, family)):
                if is_held_out(name) == held_out and len(names) < people:
                    names[name] = None
        everyone = list(names)
        persons = []
        for name in everyone:
            facts = {relation: rng.choice(values) for relation, values in VALUES.items()}
            others = [other for other in rng.sample(everyone, min(2, len(everyone))) if other != name]
            persons.append(Person(name, facts | {"teacher": others[0]} if others else facts))
        return World(tuple(persons))

    def person(self, name: str) -> Person:
        """Return the person of this name."""
        return next(person for person in self.people if person.name == name)


def is_held_out(name: str) -> bool:
    """Whether a name is reserved for the held-out files, by a hash of the name."""
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT == 0


def _similar_names(rng: Random, given: str, family: str) -> list[str]:
    """Return at times names that share a part, so that half a name does not identify a person."""
    similar = [f"{rng.choice(GIVEN_NAMES)} {family}", f"{given} {rng.choice(FAMILY_NAMES)}"]
    return [name for name in similar if rng.random() < 0.4]


def write_passage(person: Person, relations: Sequence[str], rng: Random) -> tuple[str, dict[str, tuple[int, int]]]:
    """Return a text that states the facts, and the character span of each relation's value in it."""
    text, spans = "", {}
    for relation in relations:
        pattern = rng.choice(RELATIONS[relation].statements)
        before, after = pattern.replace("{who}", person.name).split("{what}")
        value = person.facts[relation]
        text += (" " if text else "") + before
        spans[relation] = (len(text), len(text) + len(value))
        text += value + after
    return text, spans


def make_passage(person: Person, relations: Sequence[str], rng: Random, gold: str | None = None) -> Passage:
    """Return a passage about a person; `gold` names the relation whose value is the evidence, if there is one."""
    text, spans = write_passage(person, relations, rng)
    return Passage(person.name, text, gold is not None, (spans[gold],) if gold else (), tuple(relations))


def write_question(person: Person, relation: str, rng: Random, reference: str = "") -> str:
    """Return a question about a person, who is called by name or by `reference`."""
    return rng.choice(RELATIONS[relation].questions).replace("{who}", reference or person.name)


def sample_relations(rng: Random, include: Sequence[str] = (), at_most: int = 4) -> list[str]:
    """Return `include` and at least one random relation, `at_most` in all, shuffled."""
    others = [name for name in RELATIONS if name not in include]
    relations = [*include, *rng.sample(others, rng.randint(1, at_most - len(include)))]
    rng.shuffle(relations)
    return relations


def sample_people(world: World, rng: Random, count: int, include: Sequence[Person] = ()) -> list[Person]:
    """Return `count` people for one prompt: `include` first, then up to half who share a name part with them."""
    name_parts = {part for person in include for part in person.name.split()}
    included = {person.name for person in include}  # names are unique in a world
    others = [p for p in world.people if p.name not in included]
    is_near = [not name_parts.isdisjoint(p.name.split()) for p in others]
    near, far = ([p for p, this in zip(others, is_near, strict=True) if this is wanted] for wanted in (True, False))
    rng.shuffle(near)
    rng.shuffle(far)
    half = max(0, count - len(include)) // 2
    return [*include, *near[:half], *far, *near[half:]][:count]


def make_reading(world: World, rng: Random, id: str, passages: int = 5, gold_at: int | None = None) -> Sample:
    """Make a question that one passage answers; the other passages state the same relation of other people."""
    person, relation = rng.choice(world.people), rng.choice(list(RELATIONS))
    gold, *others = [
        make_passage(p, sample_relations(rng, [relation]), rng, relation if p is person else None)
        for p in sample_people(world, rng, passages, [person])
    ]
    rng.shuffle(others)
    at = rng.randrange(1 + len(others)) if gold_at is None else gold_at
    others.insert(at, gold)
    meta = {"kind": "reading", "relation": relation, "gold_at": at}
    return Sample(id, write_question(person, relation, rng), (person.facts[relation],), tuple(others), meta)


def make_closed_book(world: World, rng: Random, id: str) -> Sample:
    """Make a question without passages."""
    person, relation = rng.choice(world.people), rng.choice(list(RELATIONS))
    meta = {"kind": "closed-book", "relation": relation}
    return Sample(id, write_question(person, relation, rng), (person.facts[relation],), (), meta)


def make_two_hop(world: World, rng: Random, id: str, passages: int = 5) -> Sample:
    """Make a question about someone's teacher: one passage names the teacher, another states the fact."""
    person, relation = rng.choice(world.people), rng.choice(SECOND_HOPS)
    teacher = world.person(person.facts["teacher"])
    context = [
        make_passage(person, sample_relations(rng, ["teacher"]), rng, "teacher"),
        make_passage(teacher, sample_relations(rng, [relation]), rng, relation),
        *(
            make_passage(p, sample_relations(rng, [relation]), rng)
            for p in sample_people(world, rng, passages, [person, teacher])[2:]
        ),
    ]
    rng.shuffle(context)
    question = write_question(teacher, relation, rng, f"the teacher of {person.name}")
    meta = {"kind": "two-hop", "relation": relation}
    return Sample(id, question, (teacher.facts[relation],), tuple(context), meta)


def make_contradicted(fixed: World, rng: Random, id: str, passages: int = 5) -> Sample:
    """Make a question whose gold passage contradicts the fixed world; the passage is right."""
    person, relation = rng.choice(fixed.people), rng.choice(list(VALUES))
    other = rng.choice([value for value in VALUES[relation] if value != person.facts[relation]])
    changed = Person(person.name, person.facts | {relation: other})
    context = [
        make_passage(
            changed if p is person else p, sample_relations(rng, [relation]), rng, relation if p is person else None
        )
        for p in sample_people(fixed, rng, passages, [person])
    ]
    rng.shuffle(context)
    meta = {"kind": "contradicted", "relation": relation, "known": person.facts[relation]}
    return Sample(id, write_question(person, relation, rng), (other,), tuple(context), meta)


def make_unanswerable(world: World, rng: Random, id: str, passages: int = 5) -> Sample:
    """Make a question about a person in none of the passages, which state the same relation of other people."""
    person, relation = rng.choice(world.people), rng.choice(list(RELATIONS))
    others = sample_people(world, rng, passages + 1, [person])[1:]
    context = [make_passage(p, sample_relations(rng, [relation]), rng) for p in others]
    rng.shuffle(context)
    meta = {"kind": "unanswerable", "relation": relation}
    return Sample(id, write_question(person, relation, rng), (UNKNOWN,), tuple(context), meta)


def write_biography(person: Person, relations: Sequence[str]) -> str:
    """Return one sentence per fact, in the first wording of its relation; the first sentence has the full name."""
    names = [person.name, *[person.name.split()[0]] * (len(relations) - 1)]
    return " ".join(
        RELATIONS[relation].statements[0].replace("{who}", name).replace("{what}", person.facts[relation])
        for name, relation in zip(names, relations, strict=True)
    )


def make_biography(world: World, rng: Random, id: str, passages: int = 5) -> Sample:
    """Make a question for all facts of a person, which one passage states, or two; the answer has their order."""
    person = rng.choice(world.people)
    relations = rng.sample(list(RELATIONS), rng.randint(*BIOGRAPHY_FACTS))
    cut = rng.randint(1, len(relations) - 1) if passages > 1 and rng.random() < 0.5 else len(relations)
    parts = [part for part in (relations[:cut], relations[cut:]) if part]
    context = []
    for part in parts:
        text, spans = write_passage(person, part, rng)
        context.append(Passage(person.name, text, True, tuple(spans.values()), tuple(part)))
    others = sample_people(world, rng, passages - len(parts) + 1, [person])[1:]
    context += [make_passage(p, sample_relations(rng), rng) for p in others]
    rng.shuffle(context)
    order = [relation for passage in context if passage.gold for relation in passage.relations]
    question = rng.choice(BIOGRAPHY_QUESTIONS).replace("{who}", person.name)
    meta = {"kind": "biography", "relations": order}
    return Sample(id, question, (write_biography(person, order),), tuple(context), meta)


def make_dated(world: World, rng: Random, id: str, passages: int = 5, versions: int = 3) -> Sample:
    """Make a question that `versions` versions of a passage answer differently; the one of the latest year is right.

    The versions have the same wording. Each begins with its year; in half the samples the other passages do so too. A
    stale version states another value for the relation of the question, and at times for its other relations.
    """
    person, relation = rng.choice(world.people), rng.choice(list(VALUES))
    relations, wording = sample_relations(rng, [relation]), rng.getrandbits(64)
    year, older_years = draw_years(rng, versions - 1)
    stale = rng.sample([value for value in VALUES[relation] if value != person.facts[relation]], versions - 1)
    context = [add_date(make_passage(person, relations, Random(wording), relation), year)]
    for value, older_year in zip(stale, older_years, strict=True):
        others = {name: rng.choice(VALUES[name]) for name in relations if name in VALUES and rng.random() < 0.5}
        old = Person(person.name, person.facts | others | {relation: value})
        context.append(add_date(make_passage(old, relations, Random(wording)), older_year))
    has_dates = rng.random() < 0.5
    for other in sample_people(world, rng, passages - versions + 1, [person])[1:]:
        passage = make_passage(other, sample_relations(rng, [relation]), rng)
        context.append(add_date(passage, rng.choice(YEARS)) if has_dates else passage)
    rng.shuffle(context)
    gold_at = next(at for at, passage in enumerate(context) if passage.gold)
    meta = {"kind": "dated", "relation": relation, "gold_at": gold_at, "year": year, "stale": stale}
    return Sample(id, write_question(person, relation, rng), (person.facts[relation],), tuple(context), meta)


RULES = {
    "first": lambda words: words[0],
    "second": lambda words: words[1],
    "last": lambda words: words[-1],
}
WORDS = (*ANIMALS, *COLOURS, *INSTRUMENTS, *PROFESSIONS)


def make_few_shot(rng: Random, id: str, shots: int = 4, rule: str = "") -> Sample:
    """Make a few-shot question: `shots` examples of a rule, then a case. Which of three words is meant?"""
    rule = rule or rng.choice(list(RULES))
    lines = []
    for _ in range(shots + 1):
        words = rng.sample(WORDS, 3)
        lines.append((" ".join(words), RULES[rule](words)))
    examples = " ".join(f"{words} gives {answer}." for words, answer in lines[:-1])
    question = f"{examples} What does {lines[-1][0]} give?"
    return Sample(id, question.strip(), (lines[-1][1],), (), {"kind": "few-shot", "rule": rule, "shots": shots})
