"""Low-rank adaptation: W + lora_B · lora_A for the matrix of every linear layer, and an embedding for the mask.

    make_trainable(module, mask_id, rank=32)          # freezes the base; only the small matrices are trained
    make_trainable(module, mask_id, rank=None)        # or all weights are trained
    tensors = adapter_tensors(module, torch.bfloat16) # by the names of an adapter file

The sum is computed once per forward, whatever the batch, so that the network in training is the merged one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from floatscope.errors import UserError
from floatscope.models.adapter_merge import is_transposed, linear_layers
from floatscope.models.peft_format import LORA_A, LORA_B, TOKEN_ROWS


class LoraLinear(nn.Module):
    """A linear layer with lora_B · lora_A added to its matrix; the product is zero at first."""

    def __init__(self, base: Any, rank: int, rng: torch.Generator) -> None:
        super().__init__()
        self.base: Any = base
        self.is_transposed = is_transposed(base)
        outputs, inputs = self._matrix.shape
        first = torch.randn(rank, inputs, generator=rng) / inputs**0.5
        self.lora_A = nn.Parameter(first.to(base.weight.device))  # (rank, inputs)
        self.lora_B = nn.Parameter(torch.zeros(outputs, rank, device=base.weight.device))  # (outputs, rank)

    @property
    def _matrix(self) -> Tensor:
        """The base's matrix as (outputs, inputs)."""
        weight: Tensor = self.base.weight
        return weight.T if self.is_transposed else weight

    def forward(self, x: Tensor) -> Tensor:
        """Apply the merged layer."""
        return F.linear(x, self._matrix + self.lora_B @ self.lora_A, self.base.bias)


class MaskEmbedding(nn.Module):
    """An embedding with a trainable row for the mask, scaled like the other rows (Gemma)."""

    def __init__(self, base: nn.Embedding, mask_id: int) -> None:
        super().__init__()
        self.base, self.mask_id = base, mask_id
        self.row = nn.Parameter(base.weight.mean(0).detach().clone())

    def forward(self, ids: Tensor) -> Tensor:
        """Embed token ids."""
        row = self.row * getattr(self.base, "embed_scale", 1.0)
        return torch.where((ids == self.mask_id)[..., None], row, self.base(ids))


class TiedHead(nn.Module):
    """An output layer that shares the embedding's matrix.

    It uses the mask's row without training it, because a mask is never predicted.
    """

    def __init__(self, embedding: MaskEmbedding, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.embedding, self.bias = embedding, bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        weight = self.embedding.base.weight
        is_mask = torch.arange(len(weight), device=weight.device) == self.embedding.mask_id
        return F.linear(x, torch.where(is_mask[:, None], self.embedding.row.detach(), weight), self.bias)


def make_trainable(module: Any, mask_id: int | None, rank: int | None, seed: int = 0) -> None:
    """Prepare `module` for training in place.

    Args:
        module: The network of the base.
        mask_id: The id of the mask; None: a control, without a mask.
        rank: Of the small matrices; None: all weights are trained.
        seed: Of the initial lora_A.
    """
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if rank is None:
        if mask_id is not None:
            with torch.no_grad():
                embedding.weight[mask_id] = embedding.weight.mean(0)
        module.requires_grad_(True)
        return
    module.requires_grad_(False)
    rng = torch.Generator().manual_seed(seed)
    layers = list(linear_layers(module))
    if not layers:
        name = type(module).__name__
        raise UserError(f"{name} has no linear layers to adapt; give --rank 0 to train all its weights")
    max_rank = min(min(layer.weight.shape) for _, layer in layers)
    if rank > max_rank:
        raise UserError(f"the rank can be at most {max_rank}, got {rank}; give less, or --rank 0 to train all weights")
    for name, layer in layers:
        module.set_submodule(name, LoraLinear(layer, rank, rng))
    if mask_id is None:
        return
    mask_embedding = MaskEmbedding(embedding, mask_id)
    module.set_input_embeddings(mask_embedding)
    if head is not None and head.weight is embedding.weight:
        module.set_output_embeddings(TiedHead(mask_embedding, head.bias))


def adapter_tensors(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what an adapter stores of a trained module, by name."""
    tensors: dict[str, Tensor] = {}
    for name, part in module.named_modules():
        if isinstance(part, LoraLinear):
            tensors |= {f"{name}{LORA_B}": part.lora_B, f"{name}{LORA_A}": part.lora_A}
        elif isinstance(part, MaskEmbedding):
            tensors[f"{name}{TOKEN_ROWS}"] = part.row[None]
    tensors = tensors or dict(module.named_parameters())
    return {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
