"""Stress: sweeps that move one thing about samples and leave everything else; samples in, points out.

    for point in points("position", read_samples("nq.jsonl"), seed=0, documents=10):
        point.name, point.value, point.samples       # "gold-3", 3, the samples with gold as the fourth of ten
    points("dirty", samples, transforms=("typos", "stale"), levels=(0, 0.1))

All points of a sweep have the same samples, by their ids and in the same order, so that scores can be subtracted. Ids
and answers never change, nor does the text of the evidence. What is random follows from (seed, kind, id) of a sample.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from floatscope.errors import UserError, unknown_choice
from floatscope.tasks.sample import Sample
from floatscope.tasks.stress.asked import masks, query, shots
from floatscope.tasks.stress.dirty import dirty
from floatscope.tasks.stress.draw import Source
from floatscope.tasks.stress.layout import layout
from floatscope.tasks.stress.noise import noise
from floatscope.tasks.stress.point import Point
from floatscope.tasks.stress.position import needle, position

__all__ = ["KINDS", "Kind", "Point", "points"]


@dataclass(frozen=True)
class Kind:
    title: str
    about: str
    axis: str  # what `Point.value` counts
    make: Callable[..., list[Point]]

    @property
    def options(self) -> list[str]:
        """The names it takes."""
        return [name for name in inspect.signature(self.make).parameters if name != "source"]


KINDS = {
    "position": Kind(
        "Place of the gold passage",
        "The gold passage stands at each place in turn; closed-book, oracle and shuffled are beside it.",
        "passages before the gold one",
        position,
    ),
    "noise": Kind(
        "Distractors",
        "More and more distractors of each sort, added to the gold passages or in the place of harmless ones.",
        "distractors",
        noise,
    ),
    "layout": Kind(
        "Layout of the hops",
        "The gold passages of a question with several hops stand differently to each other.",
        "",
        layout,
    ),
    "query": Kind(
        "Place of the question", "The question stands before, after, around or amid the passages.", "", query
    ),
    "shots": Kind("Examples", "More and more answered examples stand before the question.", "examples", shots),
    "masks": Kind(
        "Extra masks",
        "More and more masks than the answer needs; as control a filler in their place.",
        "extra masks",
        masks,
    ),
    "needle": Kind("Needle", "The gold passage is the first, the middle or the last of ever more.", "passages", needle),
    "dirty": Kind(
        "Real-world noise",
        "Passages or questions with typos, scanning errors, cuts, copies, boilerplate or stale versions.",
        "chance to be hit",
        dirty,
    ),
}


def points(kind: str, samples: Sequence[Sample], *, seed: int = 0, **options: Any) -> list[Point]:
    """The points of a sweep. A sample that cannot take part in one of them is in none, and counted in `left_out`."""
    if kind not in KINDS:
        raise unknown_choice("stress", kind, KINDS)
    for name in options:
        if name not in KINDS[kind].options:
            raise unknown_choice(f"option of {kind}", name, KINDS[kind].options)
    if not samples:
        raise UserError("there are no samples to put under stress; give one or more")
    if twice := [id for id, count in Counter(sample.id for sample in samples).items() if count > 1]:
        raise UserError(f"the id '{twice[0]}' is that of several samples; ids must differ")
    made = KINDS[kind].make(Source(tuple(samples), seed), **options)
    return [
        replace(point, same_as=_first(point, made[:number]), left_out=len(samples) - len(point.samples))
        for number, point in enumerate(made)
    ]


def _first(point: Point, before: Sequence[Point]) -> str:
    """The name of the first earlier point that asks the same."""
    return next((other.name for other in before if _asks(other) == _asks(point)), "")


def _asks(point: Point) -> tuple[object, ...]:
    return point.placement, point.shots, point.extra_masks, point.filler, point.samples
