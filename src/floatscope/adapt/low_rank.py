"""What is learnt: W + up · down for the matrix of every projection, and the embedding of the mask.

    learn(module, mask_id, rank=32)          # the base is frozen, the small matrices are its only parameters with grad
    learn(module, mask_id, rank=None)        # or everything is learnt
    tensors = learnt(module, torch.bfloat16) # by the names an adapter has

The sum is made once a forward, whatever the batch, and the rest of the network does not know of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from floatscope.errors import UserError
from floatscope.models.adapter import DOWN, MASK, UP


class LowRank(nn.Module):
    """W → W + up · down; zero at first."""

    def __init__(self, weight: Tensor, rank: int, draw: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape
        first = torch.randn(rank, columns, generator=draw) / columns**0.5
        self.down = nn.Parameter(first.to(weight.device))
        self.up = nn.Parameter(torch.zeros(rows, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


class MaskRow(nn.Module):
    """An embedding with one row learnt."""

    def __init__(self, weight: Tensor, mask_id: int) -> None:
        super().__init__()
        self.row = nn.Parameter(weight.mean(0).detach().clone())
        is_mask = torch.arange(len(weight), device=weight.device) == mask_id
        self.register_buffer("is_mask", is_mask[:, None], persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        return torch.where(self.is_mask, self.row, weight)  # type: ignore[arg-type]


class SameRow(nn.Module):
    """The output's weight where it is the embedding's: it has that row too, and does not teach it, for a mask is never
    predicted."""

    def __init__(self, of: MaskRow) -> None:
        super().__init__()
        self.of = [of]  # its parameters are not mine

    def forward(self, weight: Tensor) -> Tensor:
        return torch.where(self.of[0].is_mask, self.of[0].row.detach(), weight)  # type: ignore[arg-type]


def learn(module: Any, mask_id: int, rank: int | None, seed: int = 0) -> None:
    """Make `module` one that learns; `rank` None: all its weights."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if rank is None:
        with torch.no_grad():
            embedding.weight[mask_id] = embedding.weight.mean(0)
        module.requires_grad_(True)
        return
    module.requires_grad_(False)
    tied = head is not None and head.weight is embedding.weight
    draw = torch.Generator().manual_seed(seed)
    found = list(projections(module))
    if not found:
        raise UserError(f"{type(module).__name__} has no projections to adapt; give --rank 0 to learn all its weights")
    for _, part in found:
        parametrize.register_parametrization(part, "weight", LowRank(part.weight, rank, draw), unsafe=True)
    row = MaskRow(embedding.weight, mask_id)
    parametrize.register_parametrization(embedding, "weight", row, unsafe=True)
    if tied:
        parametrize.register_parametrization(head, "weight", SameRow(row), unsafe=True)


def projections(module: Any) -> Iterator[tuple[str, Any]]:
    """Every linear map of the network but the one to the vocabulary."""
    from transformers.pytorch_utils import Conv1D

    head = module.get_output_embeddings()
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear | Conv1D) and part is not head:
            yield name, part


def learnt(module: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """What an adapter stores of a module that has learnt."""
    parts = {name: part for name, part in module.named_modules() if parametrize.is_parametrized(part, "weight")}
    if not parts:
        return {name: p.detach().to("cpu", dtype) for name, p in module.named_parameters()}
    found: dict[str, Tensor] = {}
    for name, part in parts.items():
        own = part.parametrizations.weight[0]
        if isinstance(own, LowRank):
            found |= {f"{name}.weight{UP}": own.up, f"{name}.weight{DOWN}": own.down}
        elif isinstance(own, MaskRow):
            found[MASK] = own.row
    return {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in found.items()}
