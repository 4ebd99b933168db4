"""The forwards inside a `watch` block: the canvas that each one sees, and the sequence that it continues.

    forwards = WatchedForwards(module, Watch(), mask_id=103, meta={})
    with attach(module, forwards.watcher, observer=forwards):
        ...
    forwards.sequences          # one per prompt, each with a recorder

A forward counts if it is outermost, whether it is called as `model(…)`, `model.forward(…)` or on a part of the model.
Its canvas is read at its first attention call: only there it shows how many keys a cache adds, and what is padding.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from floatscope.canvas import CanvasState, Commits, Step
from floatscope.capture.attention import AttentionCall
from floatscope.capture.watcher import Watch, Watcher
from floatscope.compat import is_in_backward
from floatscope.errors import UserError
from floatscope.schema import RowSource, State
from floatscope.traces.recorder import Recorder

ID_ARGUMENTS = ("input_ids", "decoder_input_ids")


@dataclass(frozen=True)
class _Forward:
    """The outermost forward that is running: its arguments, and its cache with the length it had before."""

    arguments: Mapping[str, Any]
    cache: Any | None
    cached: int


@dataclass
class _Begun:
    """The canvas of the running forward, the sequence that it continues, and how many positions were cached."""

    canvas: CanvasState
    sequence: WatchedSequence | None
    cached: int
    last_key: Tensor  # [batch, head, dim]: of the first layer, at the last position


@dataclass(eq=False)
class WatchedSequence:
    """Forwards that belong together: a recorder, its layers, the first canvas and the last one, and its cache."""

    recorder: Recorder
    layers: list[str]
    first_canvas: CanvasState
    canvas: CanvasState
    last_key: Tensor
    has_cache: bool = False
    is_appending: bool = True  # each forward computed exactly the rows that follow those of the one before
    _cache: weakref.ref[Any] | None = field(default=None, repr=False)

    @property
    def cache(self) -> Any | None:
        """The cache of the last forward; None if there is none, or no code refers to it any more."""
        return None if self._cache is None else self._cache()

    def add(self, begun: _Begun, capture: Any, cache: Any | None) -> None:
        """Add a forward."""
        is_first = begun.sequence is None
        self.is_appending &= begun.cached == (0 if is_first else self.canvas.tokens.shape[1])
        self.has_cache |= begun.cached > 0
        # Rows that are computed again at every step must not be added up over steps.
        self.recorder.meta["rows"] = RowSource.CACHE if self.has_cache and self.is_appending else RowSource.ALL
        self.recorder.add(Step(begun.canvas, begun.canvas, Commits.empty()), capture)
        self.canvas, self.last_key = begun.canvas, begun.last_key
        self._cache = None if cache is None else weakref.ref(cache)


class WatchedForwards:
    """Observes the outermost forwards of a model, and records each of them as a step of a sequence."""

    def __init__(self, root: nn.Module, watch: Watch, mask_id: int | None, meta: Mapping[str, Any]) -> None:
        self.root, self.mask_id, self.meta = root, mask_id, dict(meta)
        self.watcher = Watcher(watch, on_first_call=self._begin)
        self.sequences: list[WatchedSequence] = []
        self._forward: _Forward | None = None
        self._begun: _Begun | None = None
        self._contents: weakref.WeakKeyDictionary[Any, CanvasState] = weakref.WeakKeyDictionary()  # of each cache
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()

    @contextmanager
    def refuse_beams(self) -> Iterator[None]:
        """Restore the caches, which refuse beam search while they are watched, when the block ends."""
        try:
            yield
        finally:
            for cache in self._caches:
                del cache.reorder_cache

    def enter_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the arguments of a forward until its first attention call."""
        self._forward = None
        if is_in_backward():  # activation checkpointing runs a forward again, which was a step the first time
            return
        arguments = _bind(module, args, kwargs)
        if module is self.root:
            _read_ids(arguments)  # a model of something else than text is refused before it runs
        cache: Any = arguments.get("past_key_values")
        if not hasattr(cache, "get_seq_length"):
            self._forward = _Forward(arguments, None, 0)
            return
        if getattr(cache, "is_compileable", False):
            raise UserError(
                f"a {type(cache).__name__} attends over positions that are not written yet, which is not captured;"
                " use generate(cache_implementation='dynamic')"
            )
        if hasattr(cache, "reorder_cache") and "reorder_cache" not in vars(cache):
            cache.reorder_cache = _refuse_beams
            self._caches.add(cache)
        self._forward = _Forward(arguments, cache, int(cache.get_seq_length()))

    def leave_forward(self, module: nn.Module, output: Any) -> None:
        """Record the forward, if it attended."""
        forward, begun = self._forward, self._begun
        self._forward = self._begun = None
        if forward is None:
            return
        if begun is None:
            if module is not self.root:  # an embedding or a head that is called on its own
                return
            raise UserError(
                "no attention was seen in this forward: the model calls neither transformers' AttentionInterface nor"
                " F.scaled_dot_product_attention"
            )
        capture, layers = self.watcher.finish(), self.watcher.layers
        sequence = begun.sequence
        if sequence is None:
            names = [f"{len(self.sequences)}.{b}" for b in range(len(begun.canvas.tokens))]
            recorder = build_recorder(names, self.watcher, self.meta)
            sequence = WatchedSequence(recorder, layers, begun.canvas, begun.canvas, begun.last_key)
            self.sequences.append(sequence)
        elif sequence.layers != layers:
            raise UserError(
                f"this forward ran {len(layers)} attention layers, {layers[0]} to {layers[-1]}, but the one before it"
                f" ran {len(sequence.layers)}, {sequence.layers[0]} to {sequence.layers[-1]}: the steps of a trace must"
                " have the same layers"
            )
        cache = getattr(output, "past_key_values", None) if forward.cache is None else forward.cache
        cache = cache if hasattr(cache, "get_seq_length") else None
        sequence.add(begun, capture, cache)
        if cache is not None and int(cache.get_seq_length()) == begun.canvas.tokens.shape[1]:
            self._contents[cache] = begun.canvas  # the forward added its positions; a read-only cache keeps its own

    def abort_forward(self) -> None:
        """Forget a forward that failed."""
        self._forward = self._begun = None
        self.watcher.discard()

    def _begin(self, call: AttentionCall, layer: str) -> None:
        """Read the canvas at the first attention call of a forward."""
        forward = self._forward
        if forward is None:
            if is_in_backward():
                return
            raise UserError(
                f"layer '{layer}' attends, but neither the model nor a part of it that holds whole layers is running:"
                " a layer that is called on its own is not a step; call the model inside the `watch` block"
            )
        ids = _read_ids(forward.arguments)
        # 1. The positions that are already in a cache, and the sequence that the forward continues.
        own = call.visibility.keys - ids.shape[1] if forward.cache is None else 0
        cached = forward.cached or max(0, own)
        sequence = self._find_sequence(layer, ids, forward, cached, call.key)
        before = None if sequence is None else sequence.canvas
        if cached:
            prefix = self._find_prefix(call, layer, ids, forward, before, cached)
            before = prefix if before is None else before
            ids = torch.cat([prefix.tokens[:, :cached], ids], 1)
        # 2. Padding.
        valid = _read_valid(forward.arguments, call, ids, cached)
        if cached:
            valid[:, :cached] &= prefix.valid[:, :cached]
        # 3. A position that is not in the first forward, or was masked in it, is committed once it is not masked.
        states = torch.where(valid, int(State.PROMPT), int(State.PAD))
        if before is not None:
            n = min(before.tokens.shape[1], ids.shape[1])
            states[:, :n][(before.states[:, :n] != State.PROMPT) & valid[:, :n]] = int(State.COMMITTED)
            states[:, n:][valid[:, n:]] = int(State.COMMITTED)
        if self.mask_id is not None:
            states[(ids == self.mask_id) & valid] = int(State.MASKED)
        canvas = CanvasState(ids, states, step=0 if sequence is None else sequence.canvas.step + 1)
        self._begun = _Begun(canvas, sequence, cached, call.key[:, :, -1].detach().clone())
        self.watcher.begin(canvas)

    def _find_sequence(
        self, layer: str, ids: Tensor, forward: _Forward, cached: int, key: Tensor
    ) -> WatchedSequence | None:
        """The sequence that a forward continues; None: it starts one."""
        same_part = [s for s in reversed(self.sequences) if s.layers[0] == layer and len(s.canvas.tokens) == len(ids)]
        if forward.cache is not None:
            return next((s for s in same_part if cached and s.cache is forward.cache), None)
        if cached:  # in a cache of the model's own: its last key says of which sequence
            sequences = (s for s in same_part if s.canvas.tokens.shape[1] == cached)
            return next((s for s in sequences if torch.equal(s.last_key, key[:, :, cached - 1])), None)
        latest = self.sequences[-1] if self.sequences else None
        return latest if latest in same_part and _continues(latest, ids) else None

    def _find_prefix(
        self, call: AttentionCall, layer: str, ids: Tensor, forward: _Forward, before: CanvasState | None, cached: int
    ) -> CanvasState:
        """The positions that the cache holds."""
        if forward.cache is None and before is None:
            raise UserError(
                f"layer '{layer}' attends over {call.visibility.keys} keys in a forward of {ids.shape[1]} tokens, and"
                f" the other {cached} are not those of the forward before: if they are in a cache of the model's own,"
                " begin the `watch` block before the first forward of a sequence, and watch one sequence at a time; if"
                " they are another sequence, this is cross-attention, which is not captured"
            )
        prefix = before if forward.cache is None else self._contents.get(forward.cache)
        if prefix is None or len(prefix.tokens) != len(ids) or prefix.tokens.shape[1] < cached:
            raise UserError(
                f"the cache holds {cached} positions whose rows were not seen; begin the `watch` block before the first"
                " forward of a sequence"
            )
        return prefix


def build_recorder(samples: Sequence[str], watcher: Watcher, meta: Mapping[str, Any]) -> Recorder:
    """Build a recorder with the names of the watched layers and the axes of the user's reducers."""
    axes = {reducer.name: reducer.axes for reducer in watcher.watch.reducers}
    return Recorder(samples, meta=meta, extra_axes=axes, coords={"layer": watcher.layers})


def _bind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward by name; those in **kwargs too, as wrappers pass them on."""
    parameters = signature(module.forward).parameters
    arguments = dict(signature(module.forward).bind_partial(*args, **kwargs).arguments)
    for name in [name for name in arguments if parameters[name].kind is Parameter.VAR_KEYWORD]:
        arguments |= arguments.pop(name)
    for name in [
        name for name in arguments if name in parameters and parameters[name].kind is Parameter.VAR_POSITIONAL
    ]:
        arguments |= {name: next(iter(arguments[name]), None)}
    return arguments


def _read_ids(arguments: Mapping[str, Any]) -> Tensor:
    """The token ids of a forward, by name or the first argument; −1 where it takes embeddings."""
    first = next(iter(arguments.values()), None)
    for ids in (*(arguments.get(name) for name in ID_ARGUMENTS), first):
        if isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point():
            return ids
    embeds = arguments.get("inputs_embeds", first)
    if not isinstance(embeds, Tensor) or embeds.ndim < 2:
        raise UserError("the watched forward takes neither token ids [batch, position] nor embeddings")
    return torch.full(embeds.shape[:2], -1, device=embeds.device)


def _read_valid(arguments: Mapping[str, Any], call: AttentionCall, ids: Tensor, cached: int) -> Tensor:
    """Which positions are not padding, [batch, position]: by the 2-D mask of the forward, else as attention sees it."""
    valid = torch.ones_like(ids, dtype=torch.bool)
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        start = cached if mask.shape[1] == ids.shape[1] - cached else 0  # a mask of the new positions alone, or of all
        valid[:, start : start + mask.shape[1]] = mask[:, : ids.shape[1]].bool()
        return valid
    padding = call.visibility.find_padding()
    if padding is not None and padding.shape[1] == ids.shape[1]:
        valid &= ~padding.to(ids.device)
    return valid


def _continues(sequence: WatchedSequence, ids: Tensor) -> bool:
    """Whether a forward without a cache continues a sequence: not shorter, with the same prompts, not from the start.

    A canvas that is the first one again, after others, is a second decoding of the same prompts.
    """
    before, first, n = sequence.canvas, sequence.first_canvas.tokens, sequence.canvas.tokens.shape[1]
    if n > ids.shape[1] or not bool((before.tokens == ids[:, :n])[before.states == State.PROMPT].all()):
        return False
    return not torch.equal(ids, first) or torch.equal(before.tokens, first)


def _refuse_beams(*_: Any) -> None:
    raise UserError(
        "beam search moves sequences between the rows of the batch, so a row is not the trace of one sequence;"
        " generate with num_beams=1, or watch one forward over the finished sequences"
    )
