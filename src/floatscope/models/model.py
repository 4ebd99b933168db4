"""A model as the rest of floatscope uses it: `forward(canvas, rows) -> logits` and a `ModelSpec`.

    logits = model.forward(canvas, slice(40, 72))      # [batch, 32, vocabulary]: the logits of those rows
    forward = model.cached_forward()                   # the same for a causal or block-causal model, with a cache

Positions count valid tokens only: the first valid token of a sample has position 0, wherever it is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from floatscope.canvas import CanvasState, EndAlignment, Forward, crop_regions, move_columns
from floatscope.capture.block_causal import block_causal_name, find_block_size, use_block_causal
from floatscope.errors import UserError
from floatscope.models.canvas_forward import CanvasForward
from floatscope.models.spec import ModelSpec
from floatscope.schema import Paradigm, RowSource

if TYPE_CHECKING:
    from floatscope.models.tokenizer import ModelTokenizer

OnForward = Callable[[CanvasState, bool], None]
"""(canvas, is_step): is called before each forward of a module with a cache; `is_step` if it gives the logits of a
step."""


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
        if spec.paradigm is Paradigm.MDM and spec.block_size is None:
            arguments["is_causal"] = False
        return self._logits(canvas, 0, slice(0, canvas.tokens.shape[1]) if rows is None else rows, arguments)

    def cached_forward(self, on_forward: OnForward = lambda canvas, is_step: None) -> Forward:
        """Return a forward with a key-value cache, for one decoding with an autoregressive or block-causal model.

        If the model does not support the cache (recurrent networks have none), every call computes the whole canvas.

        Args:
            on_forward: is called before each forward of the module with the canvas that it sees, and whether its logits
                are those of a step; the other forwards store finished blocks.
        """
        if self.spec.paradigm is Paradigm.MDM and self.spec.block_size is None:
            raise UserError(
                f"{self.spec.name} attends in both directions, so its keys and values change at every step and cannot"
                " be cached; use forward"
            )
        match self.spec.row_source:
            case RowSource.CACHE:
                return CachedForward(self, on_forward)
            case RowSource.BLOCK:
                return BlockCachedForward(self, on_forward)

        def forward(canvas: CanvasState, rows: slice) -> Tensor:
            on_forward(canvas, True)
            return self.forward(canvas, rows)

        return forward

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
        spec = self.spec
        if find_block_size(self.module) != spec.block_size:
            raise UserError(
                f"the attention of {spec.name} was changed after it was opened; set_attn_implementation("
                f"'{'sdpa' if spec.block_size is None else block_causal_name(spec.block_size)}') restores it"
            )
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


class KeyValueCache:
    """The keys and values of the first columns of a batch, in every layer of a model."""

    def __init__(self, model: Model) -> None:
        from transformers import DynamicCache

        self._model = model
        self._cache = DynamicCache()  # without a config it drops nothing, so a sliding window can be captured too

    @property
    def columns(self) -> int:
        """The number of columns."""
        return int(self._cache.get_seq_length())

    def run(self, canvas: CanvasState, rows: slice) -> Float[Tensor, "batch row vocabulary"]:
        """Run the columns of the canvas that are not cached, add them, and return the logits of `rows`."""
        logits = self._model._logits(canvas, self.columns, rows, {"past_key_values": self._cache, "use_cache": True})
        if self.columns != canvas.tokens.shape[1]:
            raise UserError(
                f"{self._model.spec.name} ignores its key-value cache; give its ModelSpec supports_cache=False"
            )
        return logits

    def crop(self, columns: int) -> None:
        """Drop all but the first columns."""
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[:, :, :columns], layer.values[:, :, :columns]

    def move(self, offset: Int[Tensor, " batch"], columns: int) -> None:
        """Move the columns of each sample right by its offset; keep the first `columns`."""
        for layer in self._cache.layers:
            layer.keys, layer.values = (
                move_columns(x.transpose(1, 2), offset, columns).transpose(1, 2) for x in (layer.keys, layer.values)
            )


class CachedForward:
    """The forward of a causal model with its key-value cache: each call runs only the new positions."""

    def __init__(self, model: Model, on_forward: OnForward = lambda canvas, is_step: None) -> None:
        self._cache, self._on_forward = KeyValueCache(model), on_forward

    def __call__(self, canvas: CanvasState, rows: slice) -> Float[Tensor, "batch row vocabulary"]:
        self._on_forward(canvas, True)
        return self._cache.run(canvas, rows)


class BlockCachedForward:
    """The forward of a block-causal model with a cache of its finished blocks: a call runs only the last block.

    The samples of a batch may be in different blocks, so the canvases are moved until all end at the last column
    (`EndAlignment`). The rows of a call are then the last columns of the batch: a block, and one row more if row p
    predicts p + 1, because the last row of the finished block before predicts the first position. What a call adds to
    the cache is dropped again. Once a sample is in a later block, one forward more stores the blocks that it finished.

    A canvas consists of whole blocks, and only its last block may change. Logits of rows that a call does not run are
    NaN.
    """

    def __init__(self, model: Model, on_forward: OnForward = lambda canvas, is_step: None) -> None:
        assert model.spec.block_size is not None
        self._cache, self._on_forward = KeyValueCache(model), on_forward
        self._size, self._shift = model.spec.block_size, int(model.spec.shift)
        self._stored: Tensor | None = None  # the number of cached positions of each sample

    def __call__(self, canvas: CanvasState, rows: slice) -> Float[Tensor, "batch row vocabulary"]:
        alignment = EndAlignment.from_canvas(canvas)
        aligned, offset = alignment.move_canvas(canvas), alignment.offset
        # 1. Store the blocks that were finished since the last call.
        cached = max(0, alignment.width - self._size - self._shift)
        self._store(_first_columns(aligned, alignment.width - self._size), cached)
        # 2. Run the last block.
        self._on_forward(aligned, True)
        start = max(cached, rows.start + int(offset.min()))
        stop = min(alignment.width, rows.stop + int(offset.max()))
        logits = self._cache.run(aligned, slice(start, stop))
        self._cache.crop(cached)
        # 3. Move the rows back to the columns that the caller knows.
        return move_columns(logits, start - offset - rows.start, rows.stop - rows.start, torch.nan)

    def _store(self, finished: CanvasState, cached: int) -> None:
        """Bring the cache to the first `cached` columns of the finished blocks.

        A sample that needs fewer new rows than another one computes some of its stored rows again.
        """
        width, count = finished.tokens.shape[1], finished.valid.sum(-1)
        target = (count - (width - cached)).clamp_min(0)
        before = torch.zeros_like(count) if self._stored is None else self._stored
        if torch.equal(target, before):
            return
        start = width - int((count - before).max())
        self._cache.move((width - count) - (self._cache.columns - before), start)
        self._on_forward(finished, False)
        self._cache.run(finished, slice(width - 1, width))
        self._cache.crop(cached)
        self._stored = target


def _first_columns(canvas: CanvasState, width: int) -> CanvasState:
    return replace(
        canvas,
        tokens=canvas.tokens[:, :width],
        states=canvas.states[:, :width],
        regions=crop_regions(canvas.regions, width),
    )
