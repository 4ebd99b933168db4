"""`watch`: capture every forward of a model inside a block of any code.

with watch(any_module, mask_id=103) as session:
    any_module.generate(...)
session.traces
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
from floatscope.capture.hooks import attach
from floatscope.capture.watcher import Watch, Watcher
from floatscope.errors import UserError, unknown_choice
from floatscope.models.model import Model
from floatscope.schema import FIELDS, RowSource, State
from floatscope.traces import Trace
from floatscope.traces.recorder import Recorder


@contextmanager
def watch(module: nn.Module | Model, *, mask_id: int | None = None, **settings: Any) -> Iterator[WatchSession]:
    """Capture the attention of every forward of `module` inside the block.

    The code in the block can be anything: transformers' `generate()`, a sampler of your own, a plain call. `watch` does
    not know which positions are committed, so its traces have no predicting rows; use `fs.decode` for those.

    Args:
        module: a torch module or a floatscope `Model`.
        mask_id: the mask token of a masked diffusion model; it marks masked positions, and tells a step of denoising
            from a new prompt. The default is that of the `Model`.
        **settings: fields of `fs.Watch` (level, fields, backend, verify, reducers), without `influence`.

    Yields:
        A `WatchSession`; read its `traces` after the block.

    Example:
        import torch

        model = fs.load("twin:arm")
        with fs.watch(model, level="heads") as session:
            model.module.generate(torch.arange(2, 10)[None], max_new_tokens=4)
        session.traces[0].received().shape  # (step, layer, key)
    """
    meta = {}
    if isinstance(module, Model):
        mask_id = module.spec.mask_id if mask_id is None else mask_id
        meta = module.metadata
        module = module.module
    if not isinstance(module, nn.Module):
        raise UserError(f"watch needs a torch module or a floatscope Model, got {type(module).__name__}")
    session = WatchSession(module, Watcher(_build_watch(settings)), mask_id, meta)
    with attach(module, session.watcher) as session.hook:
        handles = [
            module.register_forward_pre_hook(lambda _, args, kwargs: session._begin(args, kwargs), with_kwargs=True),
            module.register_forward_hook(lambda _, args, output: session._finish()),
        ]
        try:
            yield session
        finally:
            for handle in handles:
                handle.remove()


class WatchSession:
    """The captured forwards of a `watch` block: one step per forward, one trace per sequence.

    A forward with another prompt starts another sequence.

    Attributes:
        watcher: the `Watcher` that captures the attention.
        mask_id: the mask token, if there is one.
        meta: the metadata of the traces.
        hook: how attention is captured: "AttentionInterface" or "scaled_dot_product_attention".
    """

    def __init__(
        self, module: nn.Module, watcher: Watcher, mask_id: int | None, meta: Mapping[str, Any] | None = None
    ) -> None:
        self.watcher, self.mask_id, self.meta = watcher, mask_id, dict(meta or {})
        self.hook = ""
        self._signature = signature(module.forward)
        self._recorders: list[Recorder] = []
        self._previous: CanvasState | None = None

    @property
    def traces(self) -> list[Trace]:
        """One trace per sequence, in the order in which they started."""
        if not self._recorders:
            raise UserError("nothing was seen: no forward of the watched model ran inside the `watch` block")
        return [trace for recorder in self._recorders for trace in recorder.build_traces()]

    @property
    def layers(self) -> list[str]:
        """The names of the attention modules, in the order of a forward."""
        return self.watcher.layers

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._current = self._read_canvas(self._signature.bind_partial(*args, **kwargs).arguments)
        self.watcher.begin(self._current)

    def _finish(self) -> None:
        capture = self.watcher.finish()
        if not capture.layers:
            raise UserError(
                "no attention was seen in this forward: the model calls neither transformers' AttentionInterface nor"
                " F.scaled_dot_product_attention"
            )
        if self._previous is None:
            names = [f"{len(self._recorders)}.{b}" for b in range(len(self._current.tokens))]
            self._recorders.append(build_recorder(names, self.watcher, {**self.meta, "rows": RowSource.ALL}))
        if self._has_cache:
            self._recorders[-1].meta["rows"] = RowSource.CACHE
        step = Step(self._current, self._current, Commits.empty())
        self._recorders[-1].add(step, capture)
        self._previous = self._current

    def _read_canvas(self, arguments: Mapping[str, Any]) -> CanvasState:
        """The canvas, from the arguments of the forward."""
        ids = _read_ids(arguments)
        # 1. The positions that are already in the cache.
        cache = arguments.get("past_key_values")
        if cache is not None and hasattr(cache, "reorder_cache"):
            cache.reorder_cache = _refuse_beams
        if getattr(cache, "is_compileable", False):
            raise UserError(
                f"a {type(cache).__name__} attends over positions that are not written yet, which is not captured;"
                " use generate(cache_implementation='dynamic')"
            )
        cached = int(cache.get_seq_length()) if cache is not None and hasattr(cache, "get_seq_length") else 0
        self._has_cache = cache is not None
        # 2. The previous forward, if this one continues its sequences.
        if self._previous is not None and not _continues(self._previous, ids, cached):
            self._previous = None
        previous = self._previous
        if cached and previous is None:
            raise UserError(
                f"the cache holds {cached} positions whose rows were not seen; begin the `watch` block before the first"
                " forward of a sequence"
            )
        if previous is not None:
            ids = torch.cat([previous.tokens[:, :cached], ids], 1)
        # 3. Padding, commits and masks.
        mask = arguments.get("attention_mask")
        valid = torch.ones_like(ids, dtype=torch.bool)
        if isinstance(mask, Tensor) and mask.ndim == 2:
            valid[:, : mask.shape[1]] = mask[:, : ids.shape[1]].bool()
        states = torch.where(valid, int(State.PROMPT), int(State.PAD))
        if previous is not None:  # a position that was masked in the previous step and is not now was committed
            n = previous.tokens.shape[1]
            states[:, :n][(previous.states >= State.MASKED) & valid[:, :n]] = int(State.COMMITTED)
            states[:, n:][valid[:, n:]] = int(State.COMMITTED)
        if self.mask_id is not None:
            states[(ids == self.mask_id) & valid] = int(State.MASKED)
        return CanvasState(ids, states, step=0 if previous is None else previous.step + 1)


def build_recorder(samples: Sequence[str], watcher: Watcher, meta: Mapping[str, Any]) -> Recorder:
    """Build a recorder with the names of the watched layers and the axes of the user's reducers."""
    axes = {reducer.name: reducer.axes for reducer in watcher.watch.reducers}
    return Recorder(samples, meta=meta, extra_axes=axes, coords={"layer": watcher.layers})


def _build_watch(settings: dict[str, Any]) -> Watch:
    """The settings of a `watch` block without the fields that need commits."""
    if settings.pop("influence", False):
        raise UserError("influence needs the commits of a step, which `watch` does not know; use fs.decode")
    allowed = [f.name for f in dataclass_fields(Watch) if f.name != "influence"]
    for name in settings:
        if name not in allowed:
            raise unknown_choice("setting of `watch`", name, allowed)
    requested = Watch(**settings)
    fields = tuple(name for name in requested.selected_fields if "commit" not in FIELDS[name].axes)
    if requested.fields is not None and fields != requested.fields:
        unknown = ", ".join(name for name in requested.fields if name not in fields)
        raise UserError(f"{unknown}: needs the commits, which `watch` does not know; use fs.decode, or leave it out")
    return replace(requested, fields=fields)


def _read_ids(arguments: Mapping[str, Any]) -> Tensor:
    """The token ids of a forward, by position or by name; −1 where it takes embeddings."""
    ids = arguments.get("input_ids", next(iter(arguments.values()), None))
    if isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point():
        return ids
    embeds = arguments.get("inputs_embeds", ids)
    if not isinstance(embeds, Tensor) or embeds.ndim < 2:
        raise UserError("the watched forward takes neither token ids [batch, position] nor embeddings")
    return torch.full(embeds.shape[:2], -1, device=embeds.device)


def _refuse_beams(*_: Any) -> None:
    raise UserError(
        "beam search moves sequences between the rows of the batch, so a row is not the trace of one sequence;"
        " generate with num_beams=1, or watch one forward over the finished sequences"
    )


def _continues(previous: CanvasState, ids: Tensor, cached: int) -> bool:
    """Whether a forward continues the sequences of the previous one: as many, not shorter, with the same prompts."""
    n = previous.tokens.shape[1]
    if len(previous.tokens) != len(ids) or n > cached + ids.shape[1]:
        return False
    prompt = previous.states == State.PROMPT
    return bool(cached) or bool((previous.tokens == ids[:, :n])[prompt].all())
