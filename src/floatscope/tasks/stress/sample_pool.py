"""What a sample borrows from the other samples: unrelated passages and wrong answers.

    pool = SamplePool(samples, seed=0)
    pool.draw_passages("noise random", sample, 8)                  # of other samples; none states the answer
    pool.draw_wrong_answers("noise counterfactual", sample, 3)     # answers of other samples, same relation first

Draws use consistent hashing: items have positions on a ring that follow from their text, and a sample takes the items
after positions that follow from its id. So the order of the samples does not matter, a larger draw begins with the
smaller one, and a new sample changes the draws of others only by its own items.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Generic, TypeVar

from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.scores import normalise
from floatscope.tasks.stress.passage_edits import find_stated_answers, get_answering, make_distractor
from floatscope.tasks.stress.requirements import Requirement, get_gold, get_others

T = TypeVar("T")
AnswerType = tuple[str, str, str]


def make_rng(*key: object) -> Random:
    """Return a random generator that depends only on its key: a seed, a kind, a sample's id."""
    return Random(" ".join(map(repr, key)))


def _hash(*key: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8])


@dataclass(frozen=True)
class Ring(Generic[T]):
    """Items in the order of their hashed positions."""

    positions: list[int]
    items: list[T]

    @staticmethod
    def build(seed: int, items: dict[str, T]) -> Ring[T]:
        """Place items by their texts."""
        placed = sorted((_hash(seed, text), text) for text in items)
        return Ring([position for position, _ in placed], [items[text] for _, text in placed])

    def draw(self, key: tuple[object, ...], count: int, is_allowed: Callable[[T], bool]) -> list[T]:
        """Draw `count` different items that are allowed, or all there are."""
        is_free, drawn = [True] * len(self.items), list[T]()
        while len(drawn) < count:
            start = bisect_left(self.positions, _hash(*key, len(drawn)))
            for step in range(len(self.items)):
                at = (start + step) % len(self.items)
                if is_free[at]:
                    is_free[at] = False
                    if is_allowed(self.items[at]):
                        drawn.append(self.items[at])
                        break
            else:
                break
        return drawn


@dataclass(frozen=True)
class SamplePool:
    """All samples that were given, also those that do not take part in a sweep."""

    samples: tuple[Sample, ...]
    seed: int

    def draw_passages(self, purpose: str, sample: Sample, count: int, without: Iterable[Passage] = ()) -> list[Passage]:
        """Draw passages of other samples that are not gold there; gold ones only if nobody has others.

        A passage is not drawn if the sample has it already, if it has the title of one of its gold passages, or if it
        states an answer.
        """
        own = {passage.text for passage in (*sample.passages, *without)}
        titles = {passage.title.casefold() for passage in get_gold(sample)} - {""}
        answers = [f" {normalise(answer)} " for answer in sample.answers if normalise(answer)]
        return self._passages.draw(
            (self.seed, purpose, sample.id),
            count,
            lambda passage: (
                passage.text not in own
                and passage.title.casefold() not in titles
                and not any(answer in self._normalise(passage.text) for answer in answers)
            ),
        )

    def draw_wrong_answers(self, purpose: str, sample: Sample, count: int) -> list[str]:
        """Draw answers of other samples that no score counts as right.

        Answers of the same relation come first; without relations, those of the same kind, numbers for a number.
        """
        right = [normalise(answer) for answer in sample.answers if normalise(answer)]
        key = (self.seed, purpose, sample.id)
        similar = self._answers_by_type.get(_answer_type(sample))
        drawn = similar.draw(key, count, lambda answer: _is_wrong(answer, right)) if similar else []
        known = set(map(normalise, drawn))
        more = self._all_answers.draw(
            key, count - len(drawn), lambda answer: normalise(answer) not in known and _is_wrong(answer, right)
        )
        return drawn + more

    def _normalise(self, text: str) -> str:
        return self._normalised.get(text) or self._normalised.setdefault(text, f" {normalise(text)} ")

    @cached_property
    def _passages(self) -> Ring[Passage]:
        passages = [passage for sample in self.samples for passage in get_others(sample)]
        passages = passages or [passage for sample in self.samples for passage in get_gold(sample)]
        ordered = sorted(passages, key=lambda passage: (passage.text, passage.title))
        return Ring.build(self.seed, {passage.text: make_distractor(passage) for passage in ordered})

    @cached_property
    def _normalised(self) -> dict[str, str]:
        """A cache: text → normalised text."""
        return {}

    @cached_property
    def _typed_answers(self) -> list[tuple[AnswerType, str]]:
        """The answers as passages spell them, each with its type."""
        return sorted((_answer_type(s), _spell_answer(s)) for s in self.samples if get_answering(s))

    @cached_property
    def _answers_by_type(self) -> dict[AnswerType, Ring[str]]:
        types = {type for type, _ in self._typed_answers}
        return {
            type: Ring.build(self.seed, {normalise(text): text for other, text in self._typed_answers if other == type})
            for type in types
        }

    @cached_property
    def _all_answers(self) -> Ring[str]:
        return Ring.build(self.seed, {normalise(text): text for _, text in self._typed_answers})


def has_wrong_answer(pool: SamplePool, purpose: str) -> Requirement:
    """Return the requirement that another sample has an answer which can replace the sample's own."""
    return Requirement(
        "an answer of another sample that can replace its own",
        "give more samples, with other answers",
        lambda sample: bool(pool.draw_wrong_answers(purpose, sample, 1)),
    )


def _is_wrong(answer: str, right: Iterable[str]) -> bool:
    """Whether neither the answer nor a right one contains the other."""
    text = normalise(answer)
    return bool(text) and not any(gold in text or text in gold for gold in right)


def _spell_answer(sample: Sample) -> str:
    passage = get_answering(sample)[0]
    start, stop = find_stated_answers(passage, sample.answers)[0]
    return passage.text[start:stop]


def _answer_type(sample: Sample) -> AnswerType:
    """Return the type of a sample's answers: its relation, or its kind and whether they are numbers."""
    if "relation" in sample.meta:
        return ("relation", str(sample.meta["relation"]), "")
    is_number = any(letter.isdigit() for answer in sample.answers for letter in answer)
    return ("kind", str(sample.meta.get("kind")), "number" if is_number else "words")
