"""Worlds: invented people and facts about them, told in passages, asked about in questions. Everything follows a seed.

    world = World.fresh(seed=7, people=40)
    world.people[0].facts["birthplace"]                  # "Velmora"
    sample = reading(world, Random(0), passages=5)       # a question, its answer, the passages, where the evidence is

A *fixed* world is the same in every text, so a model can know it by heart. In a *fresh* world every person and fact is
new, so an answer can only be read. Names are made of the same parts everywhere: what a name is made of tells nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from floatscope.tasks.sample import Passage, Sample

HELD_OUT = 8
"""One name in this many is never trained on; held-out files are made of those alone."""

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
    """A fact a person may have: how it is told, and how it is asked. `{who}` and `{what}` are filled in."""

    name: str
    tells: tuple[str, ...]
    asks: tuple[str, ...]


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


def _names(kind: str, count: int, syllables: int) -> tuple[str, ...]:
    """The first `count` names of a kind; the same on every machine."""
    rng, found = Random(f"floatscope {kind}"), dict[str, None]()
    while len(found) < count:
        parts = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(syllables)]
        found["".join([*parts, rng.choice(ENDS[kind])]).capitalize()] = None
    return tuple(found)


GIVEN, FAMILY = _names("given", 240, 1), _names("family", 360, 1)
CITIES = _names("city", 160, 1)
VALUES: dict[str, Sequence[str]] = {
    "birthplace": CITIES,
    "home": CITIES,
    "profession": PROFESSIONS,
    "instrument": INSTRUMENTS,
    "animal": ANIMALS,
    "colour": COLOURS,
}
HOPS = ("birthplace", "home", "profession")  # what may be asked of a teacher


@dataclass(frozen=True)
class Person:
    name: str
    facts: dict[str, str]


@dataclass(frozen=True)
class World:
    people: tuple[Person, ...]

    @staticmethod
    def fresh(seed: object, people: int, held_out: bool = False) -> World:
        """So many people with all their facts. `held_out` takes the names that training never sees, else the others."""
        rng = Random(f"world {seed}")
        names: dict[str, None] = {}
        while len(names) < people:
            given, family = rng.choice(GIVEN), rng.choice(FAMILY)
            for name in (f"{given} {family}", *_relatives(rng, given, family)):
                if is_held_out(name) == held_out and len(names) < people:
                    names[name] = None
        everyone = list(names)
        made = []
        for name in everyone:
            facts = {relation: rng.choice(values) for relation, values in VALUES.items()}
            others = [other for other in rng.sample(everyone, min(2, len(everyone))) if other != name]
            made.append(Person(name, facts | {"teacher": others[0]} if others else facts))
        return World(tuple(made))

    def person(self, name: str) -> Person:
        return next(person for person in self.people if person.name == name)


def is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT == 0


def _relatives(rng: Random, given: str, family: str) -> list[str]:
    """Now and then people who share a name, so that half a name does not find a person."""
    shared = [f"{rng.choice(GIVEN)} {family}", f"{given} {rng.choice(FAMILY)}"]
    return [name for name in shared if rng.random() < 0.4]


def tell(person: Person, relations: Sequence[str], rng: Random) -> tuple[str, dict[str, tuple[int, int]]]:
    """A passage about a person, and where the value of each relation stands in it."""
    text, spans = "", {}
    for relation in relations:
        pattern = rng.choice(RELATIONS[relation].tells)
        before, after = pattern.replace("{who}", person.name).split("{what}")
        value = person.facts[relation]
        text += (" " if text else "") + before
        spans[relation] = (len(text), len(text) + len(value))
        text += value + after
    return text, spans


def passage(person: Person, relations: Sequence[str], rng: Random, gold: str | None = None) -> Passage:
    text, spans = tell(person, relations, rng)
    return Passage(person.name, text, gold is not None, (spans[gold],) if gold else (), tuple(relations))


def ask(person: Person, relation: str, rng: Random, called: str = "") -> str:
    return rng.choice(RELATIONS[relation].asks).replace("{who}", called or person.name)


def some_relations(rng: Random, include: Sequence[str] = (), at_most: int = 4) -> list[str]:
    others = [name for name in RELATIONS if name not in include]
    chosen = [*include, *rng.sample(others, rng.randint(1, at_most - len(include)))]
    rng.shuffle(chosen)
    return chosen


def cast(world: World, rng: Random, count: int, include: Sequence[Person] = ()) -> list[Person]:
    """So many people for one prompt; those who share a name with the included come first."""
    asked = {part for person in include for part in person.name.split()}
    near = [p for p in world.people if p not in include and asked & set(p.name.split())]
    far = [p for p in world.people if p not in include and p not in near]
    rng.shuffle(near)
    rng.shuffle(far)
    half = max(0, count - len(include)) // 2
    return [*include, *near[:half], *far, *near[half:]][:count]


def reading(world: World, rng: Random, id: str, passages: int = 5, gold_at: int | None = None) -> Sample:
    """One passage holds the answer; the others tell the same relation of other people."""
    person, relation = rng.choice(world.people), rng.choice(list(RELATIONS))
    told = [
        passage(p, some_relations(rng, [relation]), rng, relation if p is person else None)
        for p in cast(world, rng, passages, [person])
    ]
    gold, rest = told[0], told[1:]
    rng.shuffle(rest)
    at = rng.randrange(len(told)) if gold_at is None else gold_at
    rest.insert(at, gold)
    meta = {"kind": "reading", "relation": relation, "gold_at": at}
    return Sample(id, ask(person, relation, rng), (person.facts[relation],), tuple(rest), meta)


def closed_book(world: World, rng: Random, id: str) -> Sample:
    person, relation = rng.choice(world.people), rng.choice(list(RELATIONS))
    meta = {"kind": "closed-book", "relation": relation}
    return Sample(id, ask(person, relation, rng), (person.facts[relation],), (), meta)


def two_hop(world: World, rng: Random, id: str, passages: int = 5) -> Sample:
    """Who the teacher is stands in one passage, what is asked of the teacher in another."""
    person, relation = rng.choice(world.people), rng.choice(HOPS)
    teacher = world.person(person.facts["teacher"])
    told = [
        passage(person, some_relations(rng, ["teacher"]), rng, "teacher"),
        passage(teacher, some_relations(rng, [relation]), rng, relation),
        *(passage(p, some_relations(rng, [relation]), rng) for p in cast(world, rng, passages, [person, teacher])[2:]),
    ]
    rng.shuffle(told)
    question = ask(teacher, relation, rng, called=f"the teacher of {person.name}")
    meta = {"kind": "two-hop", "relation": relation}
    return Sample(id, question, (teacher.facts[relation],), tuple(told), meta)


def contradicted(fixed: World, rng: Random, id: str, passages: int = 5) -> Sample:
    """The passage says otherwise than what is known by heart; the passage counts."""
    person, relation = rng.choice(fixed.people), rng.choice(list(VALUES))
    other = rng.choice([value for value in VALUES[relation] if value != person.facts[relation]])
    changed = Person(person.name, person.facts | {relation: other})
    told = [
        passage(changed if p is person else p, some_relations(rng, [relation]), rng, relation if p is person else None)
        for p in cast(fixed, rng, passages, [person])
    ]
    rng.shuffle(told)
    meta = {"kind": "contradicted", "relation": relation, "known": person.facts[relation]}
    return Sample(id, ask(person, relation, rng), (other,), tuple(told), meta)


def unanswerable(world: World, rng: Random, id: str, passages: int = 5) -> Sample:
    """The person who is asked about is in no passage; others with the same relation, some with half the name, are."""
    person, relation = rng.choice(world.people), rng.choice(list(RELATIONS))
    others = cast(world, rng, passages + 1, [person])[1:]
    told = [passage(p, some_relations(rng, [relation]), rng) for p in others]
    rng.shuffle(told)
    return Sample(
        id, ask(person, relation, rng), (UNKNOWN,), tuple(told), {"kind": "unanswerable", "relation": relation}
    )


RULES = {
    "first": lambda words: words[0],
    "second": lambda words: words[1],
    "last": lambda words: words[-1],
}
WORDS = (*ANIMALS, *COLOURS, *INSTRUMENTS, *PROFESSIONS)


def few_shot(rng: Random, id: str, shots: int = 4, rule: str = "") -> Sample:
    """Examples of a rule, then a case: which of three words is meant must be seen from the examples."""
    rule = rule or rng.choice(list(RULES))
    lines = []
    for _ in range(shots + 1):
        words = rng.sample(WORDS, 3)
        lines.append((" ".join(words), RULES[rule](words)))
    shown = " ".join(f"{given} gives {result}." for given, result in lines[:-1])
    question = f"{shown} What does {lines[-1][0]} give?"
    return Sample(id, question.strip(), (lines[-1][1],), (), {"kind": "few-shot", "rule": rule, "shots": shots})
