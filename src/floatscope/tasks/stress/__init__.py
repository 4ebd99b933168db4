"""Stress sweeps: change one property of the samples and keep everything else; samples in, points out.

    for point in build_points("position", read_samples("nq.jsonl"), seed=0, documents=10):
        point.name, point.value, point.samples       # "gold-3", 3, the samples with gold as the fourth of ten
    build_points("dirty", samples, transforms=("typos", "stale"), levels=(0, 0.1))

All points of a sweep have the same samples, by id and in the same order, so their scores can be compared question by
question. Ids, answers and the text of the evidence never change. Random choices depend only on the seed, the kind and
the sample's id.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from floatscope.errors import UserError, unknown_choice
from floatscope.tasks.sample import Sample
from floatscope.tasks.stress.corruption import sweep_dirty
from floatscope.tasks.stress.layout import sweep_layout
from floatscope.tasks.stress.noise import sweep_noise
from floatscope.tasks.stress.point import Point
from floatscope.tasks.stress.position import sweep_needle, sweep_position
from floatscope.tasks.stress.prompt_sweeps import sweep_masks, sweep_query, sweep_shots
from floatscope.tasks.stress.sample_pool import SamplePool

__all__ = ["KINDS", "Point", "StressKind", "build_points"]


@dataclass(frozen=True)
class StressKind:
    """A kind of sweep: how reports describe it, and the function that builds its points."""

    title: str
    description: str
    axis: str  # what `Point.value` counts
    build: Callable[..., list[Point]]

    @property
    def options(self) -> list[str]:
        """The names of its options."""
        return [name for name in inspect.signature(self.build).parameters if name != "pool"]


KINDS = {
    "position": StressKind(
        "Position of the gold passage",
        "The gold passage moves through all positions; closed-book, oracle and shuffled are the references.",
        "passages before the gold one",
        sweep_position,
    ),
    "noise": StressKind(
        "Distractors",
        "The number of distractors of each type grows; they are added, or they replace harmless passages."
        " Nothing distinguishes counterfactual copies from the gold passage; years distinguish dated ones.",
        "distractors",
        sweep_noise,
    ),
    "layout": StressKind(
        "Layout of the hops",
        "The gold passages of a multi-hop question are arranged in different ways.",
        "",
        sweep_layout,
    ),
    "query": StressKind(
        "Position of the question",
        "The question is before, after, around or between the passages.",
        "",
        sweep_query,
    ),
    "shots": StressKind("Shots", "The number of solved examples before the question grows.", "shots", sweep_shots),
    "masks": StressKind(
        "Extra masks",
        "The number of masks after the answer grows; a filler text in their place is the control.",
        "extra masks",
        sweep_masks,
    ),
    "needle": StressKind(
        "Needle", "The gold passage is the first, middle or last of a growing number.", "passages", sweep_needle
    ),
    "dirty": StressKind(
        "Real-world noise",
        "Passages or questions have typos, OCR errors, cuts, copies, boilerplate or stale versions.",
        "probability of a change",
        sweep_dirty,
    ),
}


def build_points(kind: str, samples: Sequence[Sample], *, seed: int = 0, **options: Any) -> list[Point]:
    """Build the points of a sweep.

    Args:
        kind: One of `KINDS`.
        samples: The samples to change.
        seed: The seed of all random choices.
        options: The options of the kind (`KINDS[kind].options`); None or absent: the default.

    Returns:
        The points. A sample that cannot take part in one of them is in none; `Point.left_out` counts these.
    """
    if kind not in KINDS:
        raise unknown_choice("kind of stress test", kind, KINDS)
    for name in options:
        if name not in KINDS[kind].options:
            raise unknown_choice(f"option of {kind}", name, KINDS[kind].options)
    if not samples:
        raise UserError("there are no samples for a stress test; give one or more")
    if repeated := [id for id, count in Counter(sample.id for sample in samples).items() if count > 1]:
        raise UserError(f"several samples have the id '{repeated[0]}'; ids must differ")
    points = KINDS[kind].build(SamplePool(tuple(samples), seed), **options)
    return [
        replace(point, same_as=_find_equal(point, points[:number]), left_out=len(samples) - len(point.samples))
        for number, point in enumerate(points)
    ]


def _find_equal(point: Point, earlier: Sequence[Point]) -> str:
    """Return the name of the first earlier point with the same prompts."""
    return next((other.name for other in earlier if _prompt_key(other) == _prompt_key(point)), "")


def _prompt_key(point: Point) -> tuple[object, ...]:
    return point.placement, point.shots, point.extra_masks, point.filler, point.samples
