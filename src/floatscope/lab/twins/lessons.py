"""Rows to learn from: plain text, passages with questions, questions without passages, examples of a rule.

    rows = make_rows(words, text_ids, fixed, seed=0, count=1000, length=512, passages=6)
    rows.tokens, rows.roles                     # [1000, 512], what each token is

The same rows teach all three twins. A lesson is a few passages about fresh people and several questions on them. An
answer is followed by a few ends of text, so that its length cannot be read off the room it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from floatscope.lab.twins.words import Words
from floatscope.lab.twins.world import (
    HOPS,
    World,
    ask,
    closed_book,
    contradicted,
    few_shot,
    passage,
    reading,
    some_relations,
    two_hop,
    unanswerable,
)
from floatscope.tasks import prompt
from floatscope.tasks.sample import Sample

TEXT, CONTEXT, ANSWER, TAIL = range(4)
"""What a token is: of a text, of what an answer is asked from, of an answer, an end of text after it."""

SHARES = {"text": 0.19, "lesson": 0.56, "told": 0.03, "closed": 0.07, "contradicted": 0.06, "few-shot": 0.09}
TAIL_BELOW, LONG_TAIL_BELOW = 10, 33
LONG_TAIL = 0.15  # how often a tail is a long one
QUESTION_FIRST = 0.12  # how often a question stands before its passages


@dataclass(frozen=True)
class Rows:
    tokens: np.ndarray  # [row, length] uint16
    roles: np.ndarray  # [row, length] uint8


def prompt_of(sample: Sample, question_first: bool = False) -> str:
    """The prompt a question is asked with, here and in evaluation."""
    return prompt.prompt_of(sample, question_first).text


class Writer:
    """One row being filled."""

    def __init__(self, words: Words, rng: Random, length: int) -> None:
        self.words, self.rng, self.length = words, rng, length
        self.tokens: list[int] = []
        self.roles: list[int] = []

    @property
    def full(self) -> bool:
        return len(self.tokens) >= self.length

    def put(self, ids: list[int], role: int) -> None:
        self.tokens += ids
        self.roles += [role] * len(ids)

    def answer(self, text: str) -> None:
        self.put([*self.words(f" {text}"), self.words.eos], ANSWER)
        below = LONG_TAIL_BELOW if self.rng.random() < LONG_TAIL else TAIL_BELOW
        self.put([self.words.eos] * self.rng.randrange(below), TAIL)

    def ask(self, sample: Sample) -> None:
        self.put(self.words(prompt_of(sample)), CONTEXT)
        self.answer(sample.answers[0])


def make_rows(
    words: Words, text: np.ndarray, fixed: World, seed: object, count: int, length: int, passages: int
) -> Rows:
    """`text` is one long array of token ids; `passages` the most a lesson has."""
    rng = Random(f"rows {seed}")
    tokens, roles = np.zeros((count, length), np.uint16), np.zeros((count, length), np.uint8)
    kinds, weights = list(SHARES), list(SHARES.values())
    for row in range(count):
        writer = Writer(words, rng, length)
        while not writer.full:
            writer.put([words.bos], CONTEXT)
            KINDS[rng.choices(kinds, weights)[0]](writer, text, fixed, passages)
        tokens[row], roles[row] = writer.tokens[:length], writer.roles[:length]
    return Rows(tokens, roles)


def _text(writer: Writer, text: np.ndarray, fixed: World, passages: int) -> None:
    room = min(writer.length - len(writer.tokens), writer.rng.randint(min(64, writer.length), writer.length))
    start = writer.rng.randrange(max(1, len(text) - room))
    writer.put(text[start : start + room].tolist(), TEXT)


def _lesson(writer: Writer, text: np.ndarray, fixed: World, passages: int) -> None:
    """Passages of a world of their own, then questions: most are answered there, some in two hops, some not at all."""
    rng = writer.rng
    world = World.fresh(rng.getrandbits(64), people=passages + 3)
    maker = rng.choices((reading, two_hop, unanswerable), (0.7, 0.2, 0.1))[0]
    _taught(writer, world, maker(world, rng, "", rng.randint(min(2, passages) if maker is two_hop else 1, passages)))


def _contradicted(writer: Writer, text: np.ndarray, fixed: World, passages: int) -> None:
    sample = contradicted(fixed, writer.rng, "", writer.rng.randint(1, passages))
    writer.put(writer.words(prompt_of(sample)), CONTEXT)
    writer.answer(sample.answers[0])


def _taught(writer: Writer, world: World, first: Sample) -> None:
    """The sample, then questions on whatever else its passages tell."""
    rng = writer.rng
    writer.put(writer.words(prompt_of(first, rng.random() < QUESTION_FIRST)), CONTEXT)
    writer.answer(first.answers[0])
    told = {p.title: p.relations for p in first.passages}
    questions = [(world.person(name), relation, name) for name in told for relation in told[name]]
    for name in told:
        if "teacher" in told[name]:
            teacher = world.person(world.person(name).facts["teacher"])
            known = (relation for relation in told.get(teacher.name, ()) if relation in HOPS)
            questions += [(teacher, relation, f"the teacher of {name}") for relation in known]
    rng.shuffle(questions)
    for person, relation, called in questions[: rng.randint(1, 8)]:
        if writer.full:
            return
        writer.ask(Sample("", ask(person, relation, rng, called), (person.facts[relation],)))


def _told(writer: Writer, text: np.ndarray, fixed: World, passages: int) -> None:
    """The fixed world as prose."""
    people = writer.rng.sample(fixed.people, passages)
    told = (passage(person, some_relations(writer.rng, at_most=5), writer.rng).text for person in people)
    writer.put(writer.words("\n".join(told)), TEXT)


def _closed(writer: Writer, text: np.ndarray, fixed: World, passages: int) -> None:
    for _ in range(writer.rng.randint(1, 12)):
        if not writer.full:
            writer.ask(closed_book(fixed, writer.rng, ""))


def _few_shot(writer: Writer, text: np.ndarray, fixed: World, passages: int) -> None:
    """Examples of a rule, then several cases of it."""
    rng = writer.rng
    first = few_shot(rng, "", rng.randint(1, 6))
    writer.ask(first)
    for _ in range(rng.randrange(7)):
        if not writer.full:
            writer.ask(few_shot(rng, "", shots=0, rule=first.meta["rule"]))


KINDS: dict[str, Callable[[Writer, np.ndarray, World, int], None]] = {
    "text": _text,
    "lesson": _lesson,
    "told": _told,
    "closed": _closed,
    "contradicted": _contradicted,
    "few-shot": _few_shot,
}
