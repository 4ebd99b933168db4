"""The public verbs: decode under watch, and watch somebody else's code. Glue between the rooms, no logic of its own.

out = decode(model, [prompt_ids], new_tokens=16, steps=16, watch=Watch())
out.traces[0].plot()

with watch(any_module, mask_id=103) as seen:
    any_module.generate(...)
seen.traces
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from floatscope.capture.fields import FIELDS
from floatscope.capture.watcher import Watch, Watcher
from floatscope.capture.ways import into
from floatscope.decode import Step, canvas_of, denoise
from floatscope.errors import UserError, unknown
from floatscope.models import Model
from floatscope.trace import Recorder, Trace
from floatscope.values import CanvasState, Commits, Regions, State


@dataclass(frozen=True)
class Decoded:
    """What came out: the finished canvases, every step, and one trace per prompt if it was watched."""

    tokens: Tensor
    steps: list[Step]
    traces: list[Trace]


def decode(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    steps: int,
    watch: Watch | None = None,
    samples: Sequence[str] | None = None,
    regions: Regions | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Decoded:
    """Denoise the prompts (token ids) as one batch, watched or not."""
    if not isinstance(model, Model):
        raise UserError(
            f"decode needs a floatscope Model (fs.open_llada), got {type(model).__name__}; see also fs.watch"
        )
    if watch is not None and not isinstance(watch, Watch):
        raise UserError(f"watch must be a fs.Watch(…) or None, got {watch!r}")
    if regions is not None and not isinstance(regions, Regions):
        raise UserError(f"regions must be fs.Regions, got {type(regions).__name__}; use fs.Regions.from_spans")
    if model.spec.mask_id is None:
        raise UserError(f"{model.spec.name} has no mask token: it cannot denoise")
    _check_prompts(prompts, model)
    canvas = _to(canvas_of(prompts, new_tokens, model.spec.mask_id, regions=regions), model.device)
    names = [str(i) for i in range(len(prompts))] if samples is None else list(samples)
    if len(names) != len(prompts) or len(set(names)) != len(names):
        raise UserError(f"{len(set(names))} different sample names for {len(prompts)} prompts; give one for each")
    go: dict[str, Any] = {"mask_id": model.spec.mask_id, "steps": steps, "shift": model.spec.shift}
    done: list[Step] = []
    with torch.inference_mode():
        if watch is None:
            done = list(denoise(model.forward, canvas, **go))
            return Decoded(done[-1].after.tokens, done, [])
        watcher = Watcher(watch, rows=True)

        def watched(state: CanvasState) -> Tensor:
            watcher.begin(state)
            return model.forward(state)

        facts = {"model": model.spec.name, "sampler": "confidence", "new_tokens": new_tokens, "steps": steps}
        facts |= {
            "temperature": 0,
            "dtype": str(next(model.module.parameters()).dtype).removeprefix("torch."),
            "fields": list(watch.names),
        }
        recorder: Recorder | None = None
        with into(model.module, watcher):
            for step in denoise(watched, canvas, **go):
                layers = watcher.finish(step.commits)
                if recorder is None:
                    recorder = _recorder(names, watcher, {**facts, **(meta or {})})
                recorder.add(step, layers, watcher.layer_visibility)
                done.append(step)
    assert recorder is not None
    return Decoded(done[-1].after.tokens, done, recorder.traces())


class Seen:
    """What a `watch` block saw: a step per forward, a trace per sequence; another prompt begins another sequence."""

    def __init__(self, module: nn.Module, watcher: Watcher, mask_id: int | None) -> None:
        self.watcher, self.mask_id = watcher, mask_id
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
            self._recorders.append(_recorder(names, self.watcher, {"rows": "all"}))
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
    if isinstance(module, Model):
        mask_id = module.spec.mask_id if mask_id is None else mask_id
        module = module.module
    if not isinstance(module, nn.Module):
        raise UserError(f"watch needs a torch module or a floatscope Model, got {type(module).__name__}")
    allowed = [f.name for f in dataclass_fields(Watch)]
    for name in settings:
        if name not in allowed:
            raise unknown("setting of `watch`", name, allowed)
    wanted = Watch(**settings)
    without_rows = tuple(name for name in wanted.names if "commit" not in FIELDS[name].axes)
    if wanted.fields is not None and without_rows != wanted.fields:
        unknown_here = ", ".join(name for name in wanted.fields if name not in without_rows)
        raise UserError(
            f"{unknown_here}: rows of commits, which `watch` does not know; use fs.decode, or leave them out"
        )
    seen = Seen(module, Watcher(replace(wanted, fields=without_rows)), mask_id)
    with into(module, seen.watcher) as seen.way:
        root = [
            module.register_forward_pre_hook(lambda _, args, kwargs: seen._begin(args, kwargs), with_kwargs=True),
            module.register_forward_hook(lambda _, args, output: seen._finish()),
        ]
        try:
            yield seen
        finally:
            for handle in root:
                handle.remove()


def _check_prompts(prompts: Sequence[Sequence[int]], model: Model) -> None:
    vocabulary = model.module.get_input_embeddings().num_embeddings  # type: ignore[operator]
    for prompt in prompts:
        if isinstance(prompt, str) or not hasattr(prompt, "__len__"):
            raise UserError(f"each prompt is a list of token ids, got {prompt!r}; one prompt is [[1, 2, 3]]")
        for token in prompt:
            if token != int(token) or not 0 <= token < vocabulary:
                raise UserError(f"token {token} is not in {model.spec.name}'s vocabulary, 0 … {vocabulary - 1}")


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


def _recorder(samples: Sequence[str], watcher: Watcher, meta: Mapping[str, Any]) -> Recorder:
    axes = {reducer.name: reducer.axes for reducer in watcher.watch.reducers}
    return Recorder(samples, meta=meta, extra_axes=axes, coords={"layer": watcher.layers})


def _to(canvas: CanvasState, device: torch.device) -> CanvasState:
    member = canvas.regions.member
    regions = replace(canvas.regions, member=None if member is None else member.to(device))
    return replace(canvas, tokens=canvas.tokens.to(device), states=canvas.states.to(device), regions=regions)
