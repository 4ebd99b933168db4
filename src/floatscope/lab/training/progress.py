"""The state of a training, the events it reports, and its learning-rate schedule.

progress = Progress(0, [])
learning_rate(recipe, progress.step)                        # the learning rate of this step
progress.record_step(text_loss, answer_loss, 20, 6000)      # adds one step; stores a mean loss every 20 steps
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor


class Recipe(Protocol):
    """The settings of a training: everything it depends on beside its data."""

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""

    @property
    def warmup(self) -> int:
        """Number of warm-up steps."""

    @property
    def lr(self) -> float:
        """Peak learning rate."""

    @property
    def as_json(self) -> dict[str, Any]:
        """All settings, as they are stored in training.json."""


@dataclass
class Progress:
    """The state of a training beside its weights and optimizer."""

    step: int
    losses: list[tuple[int, float, float]]  # (step, text, answers), means since the entry before
    seconds: float = 0.0  # time spent on these steps, over all segments
    pending: list[Float[Tensor, "2"]] = field(default_factory=list)  # (text, answers) of each step since the last entry

    def record_step(self, text: Float[Tensor, ""], answers: Float[Tensor, ""], every: int, steps: int) -> bool:
        """Count one step; return whether it completed an entry of `losses`, as each `every`-th and the last do."""
        self.pending.append(torch.stack([text.detach(), answers.detach()]))
        self.step += 1
        if self.step % every and self.step < steps:
            return False
        mean = torch.stack([losses.to(text.device) for losses in self.pending]).mean(0).tolist()
        self.losses.append((self.step, mean[0], mean[1]))
        self.pending.clear()
        return True

    @property
    def as_json(self) -> dict[str, Any]:
        """The state as a checkpoint stores it."""
        pending = [losses.tolist() for losses in self.pending]
        return {"step": self.step, "losses": self.losses, "seconds": self.seconds, "pending": pending}


@dataclass(frozen=True)
class ProgressEvent:
    """What a training reports while it runs."""

    kind: str
    step: int
    steps: int
    text_loss: float
    answer_loss: float
    tokens_per_second: float
    finished: bool = False

    @classmethod
    def from_progress(
        cls, kind: str, progress: Progress, recipe: Recipe, tokens_per_second: float, finished: bool = False
    ) -> ProgressEvent:
        """Build the event of the current step; the losses are NaN before the first entry."""
        _, text, answer = progress.losses[-1] if progress.losses else (0, float("nan"), float("nan"))
        return cls(kind, progress.step, recipe.steps, text, answer, tokens_per_second, finished)


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine down to 5 % of the peak."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
