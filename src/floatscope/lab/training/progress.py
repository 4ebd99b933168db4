"""Where a training is, and how fast it learns there.

progress = Progress(0, [])
rate(recipe, progress.step)                          # the learning rate of a step
progress.stepped(text_loss, answer_loss, 20, 6000)   # one step more; every 20 a mean is kept
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor


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
    since: list[Float[Tensor, "2"]] = field(default_factory=list)  # (text, answers) of each step since the last entry

    def stepped(self, text: Float[Tensor, ""], answers: Float[Tensor, ""], every: int, steps: int) -> bool:
        """A step is done; whether it ended in an entry, as every so many and the last do."""
        self.since.append(torch.stack([text.detach(), answers.detach()]))
        self.step += 1
        if self.step % every and self.step < steps:
            return False
        mean = torch.stack([each.to(text.device) for each in self.since]).mean(0).tolist()
        self.losses.append((self.step, mean[0], mean[1]))
        self.since.clear()
        return True

    @property
    def as_json(self) -> dict[str, Any]:
        since = [each.tolist() for each in self.since]
        return {"step": self.step, "losses": self.losses, "seconds": self.seconds, "since": since}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Progress:
        losses = [(int(step), float(text), float(answers)) for step, text, answers in told["losses"]]
        since = [torch.tensor([float(text), float(answers)]) for text, answers in told["since"]]
        return cls(int(told["step"]), losses, float(told["seconds"]), since)


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
