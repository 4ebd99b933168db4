"""The question put to a backend and its answer; `received.receive` is where it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

TILE = 16  # columns of one kernel pass: the narrowest matrix product the tensor cores have


@dataclass(frozen=True)
class ReductionSpec:
    """What to add up, the same for every layer of a step. Padding rows have zero weight in every column.

    The entropy weights are those of `row_mean`: under full visibility all rows of a sample that count weigh the same,
    which the Triton kernel relies on. None: no entropy wanted.
    """

    weights: Float[Tensor, "batch query group"]
    entropy: Float[Tensor, "batch query"] | None = None
    memberships: bool = False  # every weight is 0 or 1, so fp16 holds it without scaling

    @cached_property
    def halves(self) -> list[tuple[Tensor, Tensor | None]]:
        """The weights in tiles of 16 columns as fp16, each column scaled to a largest weight of 1, and those scales."""
        if self.memberships:
            return [(tile.half(), None) for tile in tiles(self.weights)]
        return [(scaled.half(), scale) for scaled, scale in map(_scaled, tiles(self.weights))]

    @cached_property
    def entropy_total(self) -> Float[Tensor, "batch 1"]:
        assert self.entropy is not None
        return self.entropy.sum(-1, keepdim=True)

    @cached_property
    def entropy_weight(self) -> Float[Tensor, "batch 1"]:
        """The weight of a row that counts, where all that count weigh the same."""
        assert self.entropy is not None
        return self.entropy.amax(-1, keepdim=True)

    @cached_property
    def singles(self) -> list[Tensor]:
        return tiles(self.weights.float())


@dataclass(frozen=True)
class Received:
    received: Float[Tensor, "batch head group key"]
    entropy: Float[Tensor, "batch head"] | None
    carried: Float[Tensor, "batch query column"] | None
    mass: Float[Tensor, "batch head"] | None = None
    """What the rows of the first group summed to under the kernel's log-sum-exp, before its rounding was divided out;
    None: what `received` sums to."""


def row_mean(valid: Bool[Tensor, "batch query"], seen: Float[Tensor, "b query"]) -> Float[Tensor, "batch query"]:
    """Weights that turn row entropies into the mean of entropy / log n_i over the rows that see more than one key."""
    counts = valid & (seen > 1)
    weight = torch.where(counts, 1 / seen.clamp_min(2).log(), 0.0)
    return weight / counts.sum(-1, keepdim=True).clamp_min(1)


def tiles(columns: Float[Tensor, "batch n column"]) -> list[Float[Tensor, "batch n 16"]]:
    """Columns cut into contiguous tiles of 16, the last filled up with zeros."""
    padded = F.pad(columns, (0, -columns.shape[-1] % TILE))
    return [piece.contiguous() for piece in padded.split(TILE, -1)]


def _scaled(tile: Tensor) -> tuple[Tensor, Tensor]:
    scale = tile.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)  # [batch, 16]
    return tile / scale[:, None], scale
