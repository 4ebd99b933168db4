"""How well a twin answers the held-out questions.

    score(model, read("reading-5"))          # Score(acc=0.91, low=0.88, high=0.93, n=500)

The prompt is the one it learnt with, decoding the default of its kind, temperature 0, eight new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from floatscope.decoding import decode
from floatscope.models import Model
from floatscope.tasks.score import acc
from floatscope.twins.lessons import prompt_of
from floatscope.twins.world import Sample

NEW_TOKENS = 8
DRAWS = 2000


@dataclass(frozen=True)
class Score:
    """Share of questions whose answer is right, with a bootstrap 95 % interval over questions."""

    acc: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.acc:.3f} [{self.low:.3f}, {self.high:.3f}]"


def answers(model: Model, samples: Sequence[Sample], batch: int = 32) -> list[str]:
    """What the model says to each question; prompts of like length share a batch."""
    assert model.text is not None
    order = sorted(range(len(samples)), key=lambda i: len(prompt_of(samples[i])))
    said = [""] * len(samples)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        prompts = [prompt_of(samples[i]) for i in chosen]
        out = decode(model, prompts, chat=False, new_tokens=NEW_TOKENS, samples=[samples[i].id for i in chosen])
        for i, text in zip(chosen, out.texts, strict=True):
            said[i] = text
    return said


def score(model: Model, samples: Sequence[Sample], batch: int = 32) -> Score:
    right = np.array([acc(a, s.answers) for a, s in zip(answers(model, samples, batch), samples, strict=True)])
    draws = np.random.default_rng(0).integers(0, len(right), (DRAWS, len(right)))
    low, high = np.quantile(right[draws].mean(1), [0.025, 0.975])
    return Score(float(right.mean()), float(low), float(high), len(right))
