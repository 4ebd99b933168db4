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

from floatscope.twins.words import Words
from floatscope.twins.world import (
    Sample,
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

TEXT, CONTEXT, ANSWER, TAIL = range(4)
"""What a token is: of a text, of what an answer is asked from, of an answer, an end of text after it."""

SHARES = {"text": 0.2, "lesson": 0.58, "told": 0.03, "closed": 0.1, "contradicted": 0.03, "few-shot": 0.06}
LONGEST_TAIL = 10


@dataclass(frozen=True)
class Rows:
    tokens: np.ndarray  # [row, length] uint16
    roles: np.ndarray  # [row, length] uint8


def prompt_of(sample: Sample) -> str:
    """The prompt a question is asked with, here and in evaluation."""
    told = "".join(f"Document {i}: {p.text}\n" for i, p in enumerate(sample.passages, 1))
    return f"{told}Question: {sample.question}\nAnswer:"


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
        self.put([self.words.eos] * self.rng.randrange(LONGEST_TAIL), TAIL)

    def ask(self, sample: Sample) -> None:
        self.put(self.words(f"Question: {sample.question}\nAnswer:"), CONTEXT)
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
    writer.put(writer.words(prompt_of(sample := contradicted(fixed, writer.rng, "", passages))), CONTEXT)
    writer.answer(sample.answers[0])


def _taught(writer: Writer, world: World, first: Sample) -> None:
    """The sample, then questions on whatever else its passages tell."""
    rng = writer.rng
    writer.put(writer.words(prompt_of(first)), CONTEXT)
    writer.answer(first.answers[0])
    facts = [(p.title, relation) for p in first.passages for relation in p.relations]
    rng.shuffle(facts)
    for name, relation in facts[: rng.randint(1, 8)]:
        if writer.full:
            return
        person = world.person(name)
        writer.ask(Sample("", ask(person, relation, rng), (person.facts[relation],)))


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
    writer.ask(few_shot(writer.rng, "", writer.rng.randint(1, 6)))


KINDS: dict[str, Callable[[Writer, np.ndarray, World, int], None]] = {
    "text": _text,
    "lesson": _lesson,
    "told": _told,
    "closed": _closed,
    "contradicted": _contradicted,
    "few-shot": _few_shot,
}
