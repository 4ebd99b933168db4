"""A model as the rest of floatscope sees it: `forward(canvas) -> logits` and a few facts.

    logits = model.forward(canvas)          # [batch, position, vocabulary]

Padding gets its own positions: a sample's first valid token is position 0, wherever it stands in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from floatscope.values import CanvasState


@dataclass(frozen=True)
class ModelSpec:
    """What cannot be read off the weights."""

    name: str
    family: str  # "mdm" | "arm"
    mask_id: int | None
    shift: bool = False  # logits at row p decide position p + 1
    eos_id: int | None = None


@dataclass(frozen=True)
class Model:
    module: nn.Module
    spec: ModelSpec

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def forward(self, canvas: CanvasState) -> Float[Tensor, "batch position vocabulary"]:
        valid = canvas.valid
        output = self.module(
            input_ids=canvas.tokens,
            attention_mask=valid.long(),
            position_ids=(valid.long().cumsum(-1) - 1).clamp_min(0),
            is_causal=self.spec.family == "arm",
            use_cache=False,
        )
        logits: Tensor = output.logits
        return logits
