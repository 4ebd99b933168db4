"""The input and the output of the reduction that every backend computes (`backends.reduce_attention`).

spec = ReductionSpec(weights)                      # [batch, query, group]: which rows to add up, by group
result = reduce_attention(call, lse, spec)
result.received                                    # [batch, head, group, key]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

TILE = 16  # columns of one kernel pass: the narrowest matrix product of the tensor cores


@dataclass(frozen=True)
class ReductionSpec:
    """What to add up. All layers of a step with the same mask share one spec.

    weights          the weight of each query row in each group; zero for padding rows
    entropy_weights  the weight of each row's entropy, from `entropy_row_weights`; None skips the entropy. Under full
                     visibility all rows of a sample with a nonzero weight have the same one; the Triton kernel relies
                     on it
    is_binary        every weight is 0 or 1, so fp16 represents it without scaling
    """

    weights: Float[Tensor, "batch query group"]
    entropy_weights: Float[Tensor, "batch query"] | None = None
    is_binary: bool = False

    @cached_property
    def fp16_tiles(self) -> list[tuple[Tensor, Tensor | None]]:
        """The weights in fp16 tiles of 16 columns with the scale of each column (None: no scaling).

        A column is divided by its largest absolute weight, so that it fits fp16.
        """
        if self.is_binary:
            return [(tile.half(), None) for tile in split_tiles(self.weights)]
        return [(scaled.half(), scale) for scaled, scale in map(_scale_columns, split_tiles(self.weights))]

    @cached_property
    def fp32_tiles(self) -> list[Tensor]:
        """The weights in fp32 tiles of 16 columns."""
        return split_tiles(self.weights.float())

    @cached_property
    def entropy_total(self) -> Float[Tensor, "batch 1"]:
        """The sum of a sample's entropy weights."""
        assert self.entropy_weights is not None
        return self.entropy_weights.sum(-1, keepdim=True)

    @cached_property
    def shared_entropy_weight(self) -> Float[Tensor, "batch 1"]:
        """The entropy weight of every counted row of a sample, where all counted rows have the same one."""
        assert self.entropy_weights is not None
        return self.entropy_weights.amax(-1, keepdim=True)


@dataclass(frozen=True)
class ReductionResult:
    """What `reduce_attention` returns.

    received        Σ_i weights[i, g] · A[i, j]
    entropy         Σ_i entropy_weights[i] · H_i in nats; None if the spec has no entropy weights
    attended_carry  the head mean of A · carry; None without a carry
    mass            what the rows of the first group sum to under the log-sum-exp of the model's kernel, before its
                    rounding is divided out; None: the sum of `received`
    """

    received: Float[Tensor, "batch head group key"]
    entropy: Float[Tensor, "batch head"] | None
    attended_carry: Float[Tensor, "batch query column"] | None
    mass: Float[Tensor, "batch head"] | None = None


def entropy_row_weights(
    valid: Bool[Tensor, "batch query"], visible_keys: Float[Tensor, "b query"]
) -> Float[Tensor, "batch query"]:
    """Weights that turn row entropies into the mean of entropy / log n_i over the rows that see more than one key.

    `visible_keys` is n_i, the number of keys each row may see.
    """
    is_counted = valid & (visible_keys > 1)
    weight = torch.where(is_counted, 1 / visible_keys.clamp_min(2).log(), 0.0)
    return weight / is_counted.sum(-1, keepdim=True).clamp_min(1)


def split_tiles(columns: Float[Tensor, "batch n column"]) -> list[Float[Tensor, "batch n 16"]]:
    """Split columns into contiguous tiles of 16; the last is padded with zeros."""
    padded = F.pad(columns, (0, -columns.shape[-1] % TILE))
    return [piece.contiguous() for piece in padded.split(TILE, -1)]


def _scale_columns(tile: Tensor) -> tuple[Tensor, Tensor]:
    scale = tile.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)  # [batch, 16]
    return tile / scale[:, None], scale
