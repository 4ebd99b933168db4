"""A model as the rest of floatscope uses it: `forward(canvas, rows) -> logits` and a `ModelSpec`.

    logits = model.forward(canvas, slice(40, 72))      # [batch, 32, vocabulary]: the logits of those rows
    forward = model.cached_forward()                   # the same for a causal model, with a key-value cache

Positions count valid tokens only: the first valid token of a sample has position 0, wherever it is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from floatscope.canvas import CanvasState
from floatscope.capture.block_causal import block_causal_name, find_block_size, use_block_causal
from floatscope.errors import UserError
from floatscope.models.canvas_forward import CanvasForward
from floatscope.models.spec import ModelSpec
from floatscope.schema import Paradigm

if TYPE_CHECKING:
    from floatscope.models.tokenizer import ModelTokenizer


@dataclass(frozen=True)
class Model:
    """A transformers module with its spec and tokenizer.

    `load` builds it.

    Attributes:
        module: a language model that returns an object with `.logits`.
        spec: the facts its weights do not say: paradigm, mask id, special tokens, …
        tokenizer: None if prompts are token ids.

    Example:
        model = fs.load("twin:mdm")
        model.device, model.dtype, model.vocab_size
    """

    module: nn.Module
    spec: ModelSpec
    tokenizer: ModelTokenizer | None = None

    def __post_init__(self) -> None:
        """Give the module of a block-causal model its mask, so that each of its forwards has it."""
        size = self.spec.block_size
        if size is not None and find_block_size(self.module) != size:
            use_block_causal(self.module, size)

    def __repr__(self) -> str:
        paradigm, size = self.spec.paradigm.label, self.spec.block_size
        config = getattr(self.module, "config", None)
        text_config = getattr(config, "get_text_config", lambda: config)()
        layers = getattr(text_config, "num_hidden_layers", None)
        parameters = sum(p.numel() for p in self.module.parameters())
        paradigm += "" if size is None else f" in blocks of {size}"
        paradigm += "" if self.spec.canvas_size is None else f" on canvases of {self.spec.canvas_size}"
        parts = [paradigm, *([] if layers is None else [f"{layers} layers"]), f"{parameters:,} parameters"]
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Model({self.spec.name}: {', '.join(parts)}, {dtype} on {self.device})"

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point parameter."""
        return next(p.dtype for p in self.module.parameters() if p.is_floating_point())

    @property
    def metadata(self) -> dict[str, Any]:
        """What a run and a trace record about the model."""
        names = ("paradigm", "architecture", "mask_id", "shift", "revision", "weights")
        return {
            "model": self.spec.name,
            **{name: getattr(self.spec, name) for name in names},
            **({} if self.spec.block_size is None else {"block_size": self.spec.block_size}),
            **({} if self.spec.canvas_size is None else {"canvas_size": self.spec.canvas_size}),
            "remote_code": self.spec.uses_remote_code,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    @property
    def vocab_size(self) -> int:
        """The number of token ids the model accepts."""
        return int(self.module.get_input_embeddings().num_embeddings)  # type: ignore[operator]

    def forward(self, canvas: CanvasState, rows: slice | None = None) -> Float[Tensor, "batch row vocabulary"]:
        """Return the logits of `rows` (default: all); no cache, every position is computed."""
        spec, arguments = self.spec, {"use_cache": False}
        if spec.canvas_size is not None:
            raise UserError(
                f"{spec.name} denoises a canvas over a text that is encoded before, so one forward over a whole text"
                " does not exist; use fs.decode"
            )
        if find_block_size(self.module) != spec.block_size:
            raise UserError(
                f"the attention of {spec.name} was changed after it was opened; set_attn_implementation("
                f"'{'sdpa' if spec.block_size is None else block_causal_name(spec.block_size)}') restores it"
            )
        if spec.paradigm is Paradigm.MDM and spec.block_size is None:
            arguments["is_causal"] = False
        return self._logits(canvas, 0, slice(0, canvas.tokens.shape[1]) if rows is None else rows, arguments)

    def cached_forward(self) -> Callable[[CanvasState, slice], Tensor]:
        """Return a forward with a key-value cache, for autoregressive models.

        If the model does not support the cache (recurrent networks have none), every call computes the whole canvas.
        """
        if self.spec.paradigm is not Paradigm.ARM:
            raise UserError(
                f"{self.spec.name} attends in both directions, so its keys and values change at every step and cannot"
                " be cached; use forward"
            )
        return CachedForward(self) if self.spec.supports_cache else self.forward

    def canvas_forward(self) -> CanvasForward:
        """Return the forward of a model that denoises canvases, with the key-value cache of the text before them."""
        if self.spec.canvas_size is None:
            raise UserError(f"{self.spec.name} does not denoise canvases after a text; use forward")
        return CanvasForward(self.module, self.spec)

    @cached_property
    def forward_parameters(self) -> frozenset[str]:
        """The parameter names of the module's forward; "**" if it accepts any."""
        parameters = signature(self.module.forward).parameters.values()
        return frozenset("**" if p.kind is Parameter.VAR_KEYWORD else p.name for p in parameters)

    def _logits(self, canvas: CanvasState, start: int, rows: slice, arguments: dict[str, Any]) -> Tensor:
        """Run the positions from `start` on; `rows` are positions of the canvas."""
        valid = canvas.valid
        arguments = {**arguments, "attention_mask": valid.long()}
        has_position_ids = "position_ids" in self.forward_parameters
        if not (has_position_ids and self.spec.supports_padding) and not bool(valid[:, 0].all()):
            why = (
                "predicts something else when it is padded"
                if has_position_ids
                else "takes no position_ids, so padding would move its positions"
            )
            raise UserError(f"{self.spec.name} {why}; decode prompts of one length together")
        if has_position_ids:
            positions = (valid.long().cumsum(-1) - 1).clamp_min(0) + self.spec.first_position
            arguments["position_ids"] = positions[:, start:]
        rows = slice(rows.start - start, rows.stop - start)
        selects_rows = "logits_to_keep" in self.forward_parameters
        if selects_rows:  # documented as a number or an index; a slice is an index that copies nothing
            arguments["logits_to_keep"] = rows
        names = self.forward_parameters
        accepted = {k: v for k, v in arguments.items() if k in names or "**" in names}
        logits: Tensor = self.module(input_ids=canvas.tokens[:, start:], **accepted).logits
        logits = (logits if selects_rows else logits[:, rows]).to(canvas.tokens.device)
        if not self.spec.excludes_mask or self.spec.mask_id is None:
            return logits
        mask = torch.tensor([self.spec.mask_id], device=logits.device)
        # The lowest number and not −inf: guidance takes differences of logits.
        return logits.index_fill(-1, mask, torch.finfo(logits.dtype).min)


class CachedForward:
    """The forward of a causal model with its key-value cache: each call runs only the new positions."""

    def __init__(self, model: Model) -> None:
        from transformers import DynamicCache

        self._model = model
        self._cache = DynamicCache()  # without a config it drops nothing, so a sliding window can be captured too
        self._length = 0

    def __call__(self, canvas: CanvasState, rows: slice) -> Float[Tensor, "batch row vocabulary"]:
        arguments = {"past_key_values": self._cache, "use_cache": True}
        logits = self._model._logits(canvas, self._length, rows, arguments)
        self._length = canvas.tokens.shape[1]
        return logits
