"""Everything an adaptation depends on beside the base and what it reads."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from floatscope.errors import UserError


@dataclass(frozen=True)
class Recipe:
    rank: int = 32  # 0: all weights are learnt
    steps: int = 6000
    tokens: int = 16384  # of text in a step, and as many of questions with their passages
    length: int = 512  # of a row of text
    lengths: tuple[int, ...] = (256, 512, 1024)  # of a row with a question
    warmup: int = 100
    peak: float = 1e-3
    control: bool = False  # the base goes on as it is, from the same rows: the next token, the causal mask kept
    anneal: int = 0  # steps until every token sees all those after it; 0: from the first on
    seed: int = 0
    mask_id: int | None = None  # None: not yet chosen, for the base is not yet known, or a control's

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise UserError(f"the rank is a number from 1 on, or 0 for whole weights, got {self.rank}")
        if self.steps < 1:
            raise UserError(f"there must be at least one step, got {self.steps}")
        if self.tokens < self.length:
            raise UserError(f"a step has at least one row of text, which is {self.length} tokens, got {self.tokens}")
        if not 0 < self.peak < math.inf:
            raise UserError(f"the highest learning rate is a number above 0, got {self.peak:g}")
        if not 0 <= self.seed < 1 << 32:
            raise UserError(f"the seed is a number from 0 to {(1 << 32) - 1}, got {self.seed}")
        if self.control and self.anneal:
            raise UserError("a control keeps its causal mask; leave --anneal out")
        if not 0 <= self.anneal <= self.steps:
            raise UserError(f"the mask is opened over 0 to {self.steps} steps, got {self.anneal}")

    @property
    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "lengths": list(self.lengths)}
