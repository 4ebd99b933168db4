"""Which tokens of a text are masked while a model learns to fill masks."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LEAST_TIME = 0.02  # t is drawn from here to 1: the weight 1/t of a mask stays bounded


def drawn(
    tokens: Int[Tensor, "row position"], draw: torch.Generator
) -> tuple[Float[Tensor, "row 1"], Bool[Tensor, "row position"]]:
    """(t, masks): each row has a t of its own, and each of its tokens is masked with that probability."""
    rows, length = tokens.shape
    t = torch.rand(rows, 1, device=tokens.device, generator=draw) * (1 - LEAST_TIME) + LEAST_TIME
    return t, torch.rand(rows, length, device=tokens.device, generator=draw) < t
