"""`watch`: see every forward of a model inside a block of somebody else's code.

with watch(any_module, mask_id=103) as seen:
    any_module.generate(...)
seen.traces
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from floatscope.canvas import CanvasState, Commits, Step
from floatscope.capture.watcher import Watch, Watcher
from floatscope.capture.ways import attach
from floatscope.errors import UserError, unknown_choice
from floatscope.models.model import Model
from floatscope.schema import FIELDS, State
from floatscope.traces import Trace
from floatscope.traces.recorder import Recorder


class Seen:
    """What a `watch` block saw: a step per forward, a trace per sequence; another prompt begins another sequence."""

    def __init__(
        self, module: nn.Module, watcher: Watcher, mask_id: int | None, meta: Mapping[str, Any] | None = None
    ) -> None:
        self.watcher, self.mask_id, self.meta = watcher, mask_id, dict(meta or {})
        self._signature = signature(module.forward)
        self.way = ""
        self._recorders: list[Recorder] = []
        self._before: CanvasState | None = None

    @property
    def traces(self) -> list[Trace]:
        """One trace per sequence, in the order they began."""
        if not self._recorders:
            raise UserError("nothing was seen: no forward of the watched model ran inside the `watch` block")
        return [trace for recorder in self._recorders for trace in recorder.traces()]

    @property
    def layers(self) -> list[str]:
        """Names of the attention modules, in the order of a forward."""
        return self.watcher.layers

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._now = self._canvas(self._signature.bind_partial(*args, **kwargs).arguments)
        self.watcher.begin(self._now)

    def _finish(self) -> None:
        layers = self.watcher.finish()
        if not layers:
            raise UserError(
                "no attention was seen in this forward: the model calls neither transformers' AttentionInterface nor"
                " F.scaled_dot_product_attention"
            )
        if self._before is None:
            names = [f"{len(self._recorders)}.{b}" for b in range(len(self._now.tokens))]
            self._recorders.append(recorder_for(names, self.watcher, {**self.meta, "rows": "all"}))
        if self._cached:
            self._recorders[-1].meta["rows"] = "cache"
        self._recorders[-1].add(Step(self._now, self._now, Commits.none()), layers, self.watcher.layer_visibility)
        self._before = self._now

    def _canvas(self, given: Mapping[str, Any]) -> CanvasState:
        """The canvas from what the forward was given, by position or by name."""
        first = next(iter(given.values()), None)
        ids = given.get("input_ids", first)
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
            embeds = given.get("inputs_embeds", ids)
            if not isinstance(embeds, Tensor) or embeds.ndim < 2:
                raise UserError("the watched forward takes neither token ids [batch, position] nor embeddings")
            ids = torch.full(embeds.shape[:2], -1, device=embeds.device)
        past = given.get("past_key_values")
        if past is not None and hasattr(past, "reorder_cache"):
            past.reorder_cache = _refuse_beams
        if getattr(past, "is_compileable", False):
            raise UserError(
                f"a {type(past).__name__} attends over positions that are not written yet, which is not captured;"
                " use generate(cache_implementation='dynamic')"
            )
        cached = int(past.get_seq_length()) if past is not None and hasattr(past, "get_seq_length") else 0
        self._cached = past is not None
        if self._before is not None and not _continues(self._before, ids, cached):
            self._before = None
        before = self._before
        if cached and before is None:
            raise UserError(
                f"the cache holds {cached} positions whose rows were not seen; begin the `watch` block before the first"
                " forward of a sequence"
            )
        if before is not None:
            ids = torch.cat([before.tokens[:, :cached], ids], 1)
        mask = given.get("attention_mask")
        valid = torch.ones_like(ids, dtype=torch.bool)
        if isinstance(mask, Tensor) and mask.ndim == 2:
            valid[:, : mask.shape[1]] = mask[:, : ids.shape[1]].bool()
        states = torch.where(valid, int(State.PROMPT), int(State.PAD))
        if before is not None:  # what was masked in the step before and is not now has been committed
            n = before.tokens.shape[1]
            states[:, :n][(before.states >= State.MASKED) & valid[:, :n]] = int(State.COMMITTED)
            states[:, n:][valid[:, n:]] = int(State.COMMITTED)
        if self.mask_id is not None:
            states[(ids == self.mask_id) & valid] = int(State.MASKED)
        return CanvasState(ids, states, step=0 if before is None else before.step + 1)


@contextmanager
def watch(module: nn.Module | Model, *, mask_id: int | None = None, **settings: Any) -> Iterator[Seen]:
    """Watch every forward of `module` inside the block; settings are those of `Watch`.

    Nothing else is needed of the code in the block: it may be transformers' `generate()` or a sampler of your own.
    `mask_id` tells masked positions from the others, and so a step of denoising from a new prompt. Commits are not
    known here, so there is no predicting group.
    """
    meta = {}
    if isinstance(module, Model):
        mask_id = module.spec.mask_id if mask_id is None else mask_id
        meta = module.metadata
        module = module.module
    if not isinstance(module, nn.Module):
        raise UserError(f"watch needs a torch module or a floatscope Model, got {type(module).__name__}")
    if settings.pop("influence", False):
        raise UserError("influence is of the tokens a step commits, which `watch` does not know; use fs.decode")
    allowed = [f.name for f in dataclass_fields(Watch) if f.name != "influence"]
    for name in settings:
        if name not in allowed:
            raise unknown_choice("setting of `watch`", name, allowed)
    wanted = Watch(**settings)
    without_rows = tuple(name for name in wanted.names if "commit" not in FIELDS[name].axes)
    if wanted.fields is not None and without_rows != wanted.fields:
        unknown_here = ", ".join(name for name in wanted.fields if name not in without_rows)
        raise UserError(
            f"{unknown_here}: rows of commits, which `watch` does not know; use fs.decode, or leave them out"
        )
    seen = Seen(module, Watcher(replace(wanted, fields=without_rows)), mask_id, meta)
    with attach(module, seen.watcher) as seen.way:
        root = [
            module.register_forward_pre_hook(lambda _, args, kwargs: seen._begin(args, kwargs), with_kwargs=True),
            module.register_forward_hook(lambda _, args, output: seen._finish()),
        ]
        try:
            yield seen
        finally:
            for handle in root:
                handle.remove()


def _refuse_beams(*_: Any) -> None:
    raise UserError(
        "beam search moves sequences from row to row of the batch, so a row is no one sequence's trace;"
        " generate with num_beams=1, or watch one forward over the finished sequences"
    )


def _continues(before: CanvasState, ids: Tensor, cached: int) -> bool:
    """Whether a forward goes on with the sequences of the one before: as many, no shorter, their prompts unchanged."""
    n = before.tokens.shape[1]
    if len(before.tokens) != len(ids) or n > cached + ids.shape[1]:
        return False
    prompt = before.states == State.PROMPT
    return bool(cached) or bool((before.tokens == ids[:, :n])[prompt].all())


def recorder_for(samples: Sequence[str], watcher: Watcher, meta: Mapping[str, Any]) -> Recorder:
    """A recorder that knows the names of the watched layers and the axes of the user's reducers."""
    axes = {reducer.name: reducer.axes for reducer in watcher.watch.reducers}
    return Recorder(samples, meta=meta, extra_axes=axes, coords={"layer": watcher.layers})
