"""How far each position's distribution moved since the step before: KL(now ‖ before), for rules that wait for rest.

drift = Drift(canvas.tokens, history=2)
drift.since(log_p, sample, position)      # [candidate]: the larger of the last two; inf before there are two
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Drift:
    """Holds one step's distributions, as large as the logits of the positions being filled, in fp32."""

    def __init__(self, tokens: Int[Tensor, "batch position"], history: int) -> None:
        self._moves = torch.full((history, *tokens.shape), torch.inf, device=tokens.device)  # the latest first
        self._at = torch.full_like(tokens, -1)  # which row of `_before` a position has; −1: none
        self._before: Tensor | None = None

    def since(
        self,
        log_p: Float[Tensor, "candidate vocabulary"],
        sample: Int[Tensor, " candidate"],
        position: Int[Tensor, " candidate"],
    ) -> Float[Tensor, " candidate"]:
        now = torch.full_like(self._moves[0], torch.inf)
        if self._before is not None:
            at = self._at[sample, position]
            p = log_p.exp()
            kl = torch.where(p > 0, p * (log_p - self._before[at]), 0.0).sum(-1)
            now[sample, position] = torch.where(at >= 0, kl, torch.inf)
        self._moves = torch.cat([now[None], self._moves[:-1]])
        self._at.fill_(-1)
        self._at[sample, position] = torch.arange(len(sample), device=sample.device)
        self._before = log_p
        return self._moves[:, sample, position].amax(0)
