"""A model as the rest of floatscope sees it: `forward(canvas, rows) -> logits` and a few facts.

    logits = model.forward(canvas, slice(40, 72))      # [batch, 32, vocabulary]: the rows that are asked for
    forward = model.cached()                           # the same for a causal model that keeps its keys and values

Padding gets its own positions: a sample's first valid token is position 0, wherever it stands in the batch.
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
from floatscope.errors import UserError

if TYPE_CHECKING:
    from floatscope.models.text import ModelTokenizer


@dataclass(frozen=True)
class ModelSpec:
    """What must be known of a checkpoint and cannot be read off its weights."""

    name: str
    paradigm: str  # "mdm" | "arm"
    mask_id: int | None
    shift: bool = False  # logits at row p decide position p + 1
    architecture: str = ""  # the row of the families table it was opened by
    bos_id: int | None = None
    eos_id: int | None = None
    eot_id: int | None = None  # ends a turn, where that is another token than eos
    pad_id: int | None = None
    context: int | None = None  # positions it was trained for
    first_position: int = 0  # the position id of a text's first token (RoBERTa counts from its padding id + 1)
    revision: str | None = None  # commit of a hub checkpoint
    weights: str | None = None  # fingerprint of the files
    remote_code: bool = False  # the checkpoint's own code was run because the user said so
    cache: bool = True  # its keys and values may be kept; False: a cache would change its answers (see probe.py)
    padding: bool = True  # samples of several lengths may be decoded together; False: padding would change its answers

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """A text ends at the first of these."""
        return tuple(dict.fromkeys(i for i in (self.eos_id, self.eot_id) if i is not None))


@dataclass(frozen=True)
class Model:
    module: nn.Module
    spec: ModelSpec
    tokenizer: ModelTokenizer | None = None  # the tokenizer; None: prompts are token ids

    def __repr__(self) -> str:
        kind = "masked diffusion" if self.spec.paradigm == "mdm" else "autoregressive"
        layers = getattr(getattr(self.module, "config", None), "num_hidden_layers", None)
        parameters = sum(p.numel() for p in self.module.parameters())
        parts = [kind, *([] if layers is None else [f"{layers} layers"]), f"{parameters:,} parameters"]
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Model({self.spec.name}: {', '.join(parts)}, {dtype} on {self.device})"

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.module.parameters() if p.is_floating_point())

    @property
    def metadata(self) -> dict[str, Any]:
        """What a trace says of the model it was made with."""
        names = ("family", "layout", "mask_id", "shift", "revision", "weights", "remote_code")
        known = {name: getattr(self.spec, name) for name in names}
        return {"model": self.spec.name, **known, "dtype": str(self.dtype).removeprefix("torch.")}

    @property
    def vocabulary(self) -> int:
        """How many token ids the model takes."""
        return int(self.module.get_input_embeddings().num_embeddings)  # type: ignore[operator]

    def forward(self, canvas: CanvasState, rows: slice | None = None) -> Float[Tensor, "batch row vocabulary"]:
        """Logits of `rows` (default: all), every position computed anew."""
        extra = {"use_cache": False, **({"is_causal": False} if self.spec.paradigm == "mdm" else {})}
        return self._logits(canvas, 0, slice(0, canvas.tokens.shape[1]) if rows is None else rows, extra)

    def cached(self) -> Callable[[CanvasState, slice], Tensor]:
        """A forward that keeps keys and values from call to call: only a causal model's never change. Where a cache
        would be wrong (a recurrent network has none of this kind), every call computes the whole canvas."""
        if self.spec.paradigm != "arm":
            raise UserError(f"{self.spec.name} looks both ways, so its keys and values change at every step: no cache")
        return Cached(self) if self.spec.cache else self.forward

    def _logits(self, canvas: CanvasState, start: int, rows: slice, extra: dict[str, Any]) -> Tensor:
        """Run the positions from `start` on; `rows` are positions of the canvas."""
        valid = canvas.valid
        wanted: dict[str, Any] = {**extra, "attention_mask": valid.long()}
        placed = "position_ids" in self._takes
        if not (placed and self.spec.padding) and not bool(valid[:, 0].all()):
            why = (
                "answers otherwise when it is padded"
                if placed
                else "takes no position_ids, so padding would move its positions"
            )
            raise UserError(f"{self.spec.name} {why}; decode prompts of one length together")
        if placed:
            positions = (valid.long().cumsum(-1) - 1).clamp_min(0) + self.spec.first_position
            wanted["position_ids"] = positions[:, start:]
        rows = slice(rows.start - start, rows.stop - start)
        keep = "logits_to_keep" in self._takes
        if keep:  # a number or an index, says transformers; a slice is an index that copies nothing
            wanted["logits_to_keep"] = rows
        taken = {k: v for k, v in wanted.items() if k in self._takes or "**" in self._takes}
        logits: Tensor = self.module(input_ids=canvas.tokens[:, start:], **taken).logits
        return (logits if keep else logits[:, rows]).to(canvas.tokens.device)

    @cached_property
    def _takes(self) -> frozenset[str]:
        """The names of the arguments the module's forward takes; "**" if it takes any."""
        parameters = signature(self.module.forward).parameters.values()
        return frozenset("**" if p.kind is Parameter.VAR_KEYWORD else p.name for p in parameters)


class Cached:
    """A causal model's forward with its cache: each call runs the positions that are new."""

    def __init__(self, model: Model) -> None:
        from transformers import DynamicCache

        self._model = model
        self._past = DynamicCache()  # without a config it forgets nothing, so a sliding window can be watched too
        self._length = 0

    def __call__(self, canvas: CanvasState, rows: slice) -> Float[Tensor, "batch row vocabulary"]:
        extra = {"past_key_values": self._past, "use_cache": True}
        logits = self._model._logits(canvas, self._length, rows, extra)
        self._length = canvas.tokens.shape[1]
        return logits
