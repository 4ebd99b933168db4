"""Parts of the masked diffusion losses that twins and adapters share."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MIN_MASK_RATE = 0.02  # t is uniform between this and 1, which bounds the weight 1/t of a mask


def sample_masks(
    tokens: Int[Tensor, "row position"], rng: torch.Generator
) -> tuple[Float[Tensor, "row 1"], Bool[Tensor, "row position"]]:
    """Return (t, masks): each row draws its own rate t, and each of its tokens is masked with probability t."""
    rows, length = tokens.shape
    t = torch.rand(rows, 1, device=tokens.device, generator=rng) * (1 - MIN_MASK_RATE) + MIN_MASK_RATE
    return t, torch.rand(rows, length, device=tokens.device, generator=rng) < t


def masked_mean(values: Float[Tensor, "*n"], mask: Bool[Tensor, "*n"]) -> Float[Tensor, ""]:
    """Return the mean of the values where `mask` is true, 0 if it is true nowhere."""
    return (values * mask).sum() / mask.sum().clamp_min(1)
