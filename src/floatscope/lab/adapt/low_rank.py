"""What is learnt: W + up · down for the matrix of every projection, and the embedding of the mask.

    learn(module, mask_id, rank=32)          # the base is frozen, the small matrices are its only parameters with grad
    learn(module, mask_id, rank=None)        # or everything is learnt
    tensors = learnt(module, torch.bfloat16) # by the names an adapter has

The sum is made once a forward, whatever the batch, so that what is trained is the merged network itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from floatscope.errors import UserError
from floatscope.models.adapter import DOWN, MASK, UP, projections


class LowRank(nn.Module):
    """A linear map with up · down added to its matrix; nothing at first."""

    def __init__(self, base: Any, rank: int, draw: torch.Generator) -> None:
        super().__init__()
        rows, columns = base.weight.shape
        first = torch.randn(rank, columns, generator=draw) / columns**0.5
        self.base: Any = base
        self.turned = not isinstance(base, nn.Linear)  # a Conv1D's matrix is [in, out]
        self.down = nn.Parameter(first.to(base.weight.device))
        self.up = nn.Parameter(torch.zeros(rows, rank, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight + self.up @ self.down
        return F.linear(x, weight.T if self.turned else weight, self.base.bias)


class MaskEmbedding(nn.Module):
    """An embedding with one row of its own, scaled as the others are (Gemma's)."""

    def __init__(self, base: nn.Embedding, mask_id: int) -> None:
        super().__init__()
        self.base, self.mask_id = base, mask_id
        self.row = nn.Parameter(base.weight.mean(0).detach().clone())

    def forward(self, ids: Tensor) -> Tensor:
        row = self.row * getattr(self.base, "embed_scale", 1.0)
        return torch.where((ids == self.mask_id)[..., None], row, self.base(ids))


class TiedHead(nn.Module):
    """An output whose matrix is the embedding's: it has the mask's row too, and does not teach it, for a mask is never
    predicted."""

    def __init__(self, embedding: MaskEmbedding, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.embedding, self.bias = embedding, bias

    def forward(self, x: Tensor) -> Tensor:
        weight = self.embedding.base.weight
        is_mask = torch.arange(len(weight), device=weight.device) == self.embedding.mask_id
        return F.linear(x, torch.where(is_mask[:, None], self.embedding.row.detach(), weight), self.bias)


def learn(module: Any, mask_id: int | None, rank: int | None, seed: int = 0) -> None:
    """Make `module` one that learns; `rank` None: all its weights; `mask_id` None: no mask."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if rank is None:
        if mask_id is not None:
            with torch.no_grad():
                embedding.weight[mask_id] = embedding.weight.mean(0)
        module.requires_grad_(True)
        return
    module.requires_grad_(False)
    draw = torch.Generator().manual_seed(seed)
    found = list(projections(module))
    if not found:
        raise UserError(f"{type(module).__name__} has no projections to adapt; give --rank 0 to learn all its weights")
    most = min(min(part.weight.shape) for _, part in found)
    if rank > most:
        raise UserError(f"a projection has rank {most}, and {rank} is more; give less, or --rank 0 for whole weights")
    for name, part in found:
        module.set_submodule(name, LowRank(part, rank, draw))
    if mask_id is None:
        return
    own = MaskEmbedding(embedding, mask_id)
    module.set_input_embeddings(own)
    if head is not None and head.weight is embedding.weight:
        module.set_output_embeddings(TiedHead(own, head.bias))


def learnt(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """What an adapter stores of a module that has learnt."""
    found: dict[str, Tensor] = {}
    for name, part in module.named_modules():
        if isinstance(part, LowRank):
            found |= {f"{name}.weight{UP}": part.up, f"{name}.weight{DOWN}": part.down}
        elif isinstance(part, MaskEmbedding):
            found[MASK] = part.row
    found = found or dict(module.named_parameters())
    return {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in found.items()}
