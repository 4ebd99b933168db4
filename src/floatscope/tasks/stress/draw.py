"""What a sample borrows from the others: passages that do not concern it, answers that are wrong for it.

    source = Source(samples, seed=0)
    source.passages("noise random", sample, 8)        # of other samples, none of which tells the answer
    source.wrong("noise counterfactual", sample, 3)   # answers of other samples, of the same relation if that is told

Things stand on a ring at places that follow from their text, and a sample takes what comes after places that follow
from its id. So the order of samples does not matter, a larger draw begins with the smaller one, and a sample that joins
changes a draw of another only by what it brings.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.score import normalise
from floatscope.tasks.stress.passages import answering, plain, told_answers
from floatscope.tasks.stress.point import Need, gold_of, rest_of

T = TypeVar("T")
Sort = tuple[str, str, str]


def _place(*of: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(of).encode()).digest()[:8])


@dataclass(frozen=True)
class Ring(Generic[T]):
    places: list[int]
    things: list[T]

    @staticmethod
    def of(seed: int, things: dict[str, T]) -> Ring[T]:
        """Things under their texts, which say where they stand."""
        standing = sorted((_place(seed, text), text) for text in things)
        return Ring([place for place, _ in standing], [things[text] for _, text in standing])

    def drawn(self, by: tuple[object, ...], count: int, fits: Callable[[T], bool]) -> list[T]:
        """So many different things that fit, or all there are."""
        free, found = [True] * len(self.things), list[T]()
        while len(found) < count:
            start = bisect_left(self.places, _place(*by, len(found)))
            for step in range(len(self.things)):
                at = (start + step) % len(self.things)
                if free[at]:
                    free[at] = False
                    if fits(self.things[at]):
                        found.append(self.things[at])
                        break
            else:
                break
        return found


@dataclass(frozen=True)
class Source:
    """All samples that were given, also those that do not take part."""

    samples: tuple[Sample, ...]
    seed: int

    def passages(self, purpose: str, sample: Sample, count: int, without: Iterable[Passage] = ()) -> list[Passage]:
        """Of other samples, and not gold there if anybody has such: none that it has itself, that has the title of one
        of its gold passages, or that tells an answer."""
        own = {passage.text for passage in (*sample.passages, *without)}
        titles = {passage.title.casefold() for passage in gold_of(sample)} - {""}
        answers = [f" {normalise(answer)} " for answer in sample.answers if normalise(answer)]
        return self._pool.drawn(
            (self.seed, purpose, sample.id),
            count,
            lambda passage: (
                passage.text not in own
                and passage.title.casefold() not in titles
                and not any(answer in self._words(passage.text) for answer in answers)
            ),
        )

    def wrong(self, purpose: str, sample: Sample, count: int) -> list[str]:
        """Answers of other samples that no rule of scoring would take for right. Those of its relation come first, or
        if none is told those of its kind, numbers for a number."""
        right = [normalise(answer) for answer in sample.answers if normalise(answer)]
        by = (self.seed, purpose, sample.id)
        like = self._answers.get(_sort_of(sample))
        found = like.drawn(by, count, lambda answer: _differs(answer, right)) if like else []
        known = set(map(normalise, found))
        more = self._all_answers.drawn(
            by, count - len(found), lambda answer: normalise(answer) not in known and _differs(answer, right)
        )
        return found + more

    def _words(self, text: str) -> str:
        return self._normalised.get(text) or self._normalised.setdefault(text, f" {normalise(text)} ")

    @cached_property
    def _pool(self) -> Ring[Passage]:
        spare = [passage for sample in self.samples for passage in rest_of(sample)]
        spare = spare or [passage for sample in self.samples for passage in gold_of(sample)]
        ordered = sorted(spare, key=lambda passage: (passage.text, passage.title))
        return Ring.of(self.seed, {passage.text: plain(passage) for passage in ordered})

    @cached_property
    def _normalised(self) -> dict[str, str]:
        """The words of the passages that were looked at."""
        return {}

    @cached_property
    def _told(self) -> list[tuple[Sort, str]]:
        """The answers as passages spell them, each with its sort."""
        return sorted((_sort_of(sample), _spelled(sample)) for sample in self.samples if answering(sample))

    @cached_property
    def _answers(self) -> dict[Sort, Ring[str]]:
        sorts = {sort for sort, _ in self._told}
        return {
            sort: Ring.of(self.seed, {normalise(text): text for of, text in self._told if of == sort}) for sort in sorts
        }

    @cached_property
    def _all_answers(self) -> Ring[str]:
        return Ring.of(self.seed, {normalise(text): text for _, text in self._told})


def has_wrong(source: Source, purpose: str) -> Need:
    """That another value can be told in the answer's place."""
    help = "give more samples, with other answers"
    return Need("an answer of another sample to put in its place", help, lambda s: bool(source.wrong(purpose, s, 1)))


def _differs(answer: str, right: Iterable[str]) -> bool:
    """Whether neither has the other in it."""
    said = normalise(answer)
    return bool(said) and not any(one in said or said in one for one in right)


def _spelled(sample: Sample) -> str:
    passage = answering(sample)[0]
    start, stop = told_answers(passage, sample.answers)[0]
    return passage.text[start:stop]


def _sort_of(sample: Sample) -> Sort:
    """What makes answers alike."""
    if "relation" in sample.meta:
        return ("relation", str(sample.meta["relation"]), "")
    number = any(letter.isdigit() for answer in sample.answers for letter in answer)
    return ("kind", str(sample.meta.get("kind")), "number" if number else "words")
