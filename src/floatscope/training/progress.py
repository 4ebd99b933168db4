"""Where a training is, and how fast it learns there.

progress = Progress(0, [])
rate(recipe, progress.step)          # the learning rate of a step
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol


class Recipe(Protocol):
    """Everything a training depends on beside what it reads."""

    @property
    def steps(self) -> int: ...
    @property
    def warmup(self) -> int: ...
    @property
    def peak(self) -> float: ...
    @property
    def as_json(self) -> dict[str, Any]: ...


@dataclass
class Progress:
    """Where a training is: all that is needed to go on."""

    step: int
    losses: list[tuple[int, float, float]]  # (step, text, answers), means since the last entry
    seconds: float = 0.0  # spent on these steps, over all legs


@dataclass(frozen=True)
class Told:
    """How far a training is, for people."""

    kind: str
    step: int
    steps: int
    text_loss: float
    answer_loss: float
    tokens_per_second: float
    finished: bool = False


def told(kind: str, progress: Progress, recipe: Recipe, rate: float, finished: bool = False) -> Told:
    _, text, answer = progress.losses[-1] if progress.losses else (0, float("nan"), float("nan"))
    return Told(kind, progress.step, recipe.steps, text, answer, rate, finished)


def rate(recipe: Recipe, step: int) -> float:
    """Warm-up, then a cosine down to a twentieth."""
    if step < recipe.warmup:
        return recipe.peak * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
