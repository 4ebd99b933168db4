"""`watch`: capture every forward of a model inside a block of any code.

with watch(any_module, mask_id=103) as session:
    any_module.generate(...)
session.traces
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import Any

from torch import nn

from floatscope.capture.hooks import attach
from floatscope.capture.watcher import Watch
from floatscope.errors import UserError, unknown_choice
from floatscope.models.model import Model
from floatscope.pipelines.watched_forwards import WatchedForwards
from floatscope.schema import FIELDS
from floatscope.traces import Trace


@contextmanager
def watch(module: nn.Module | Model, *, mask_id: int | None = None, **settings: Any) -> Iterator[WatchSession]:
    """Capture the attention of every forward of `module` inside the block.

    The code in the block can be anything: transformers' `generate()`, a sampler of your own, a plain call, of the model
    or of a part of it, as `model(…)` or as `model.forward(…)`. `watch` does not know which positions are committed, so
    its traces have no predicting rows; use `fs.decode` for those.

    The model runs its own attention and returns what it returns otherwise. In a padded batch this holds for the valid
    positions, up to rounding: attention is computed without the padding, so outputs at padding positions, which no
    valid position sees, are others.

    Args:
        module: a torch module or a floatscope `Model`.
        mask_id: the mask token of a masked diffusion model; it marks masked positions, and tells a step of denoising
            from a new prompt. The default is that of the `Model`.
        **settings: fields of `fs.Watch` (level, fields, backend, verify, reducers, experts), without `influence`.

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
    forwards = WatchedForwards(module, _build_watch(settings), mask_id, meta)
    with forwards.refuse_beams(), attach(module, forwards.watcher, forwards) as hook:
        yield WatchSession(forwards, hook)


class WatchSession:
    """The captured forwards of a `watch` block: one step per forward, one trace per sequence.

    A forward with another prompt, with another cache or of another part of the model starts another sequence.

    Attributes:
        watcher: the `Watcher` that captures the attention.
        mask_id: the mask token, if there is one.
        meta: the metadata of the traces.
        hook: how attention is captured: "AttentionInterface" or "scaled_dot_product_attention".
    """

    def __init__(self, forwards: WatchedForwards, hook: str) -> None:
        self._forwards, self.hook = forwards, hook
        self.watcher, self.mask_id, self.meta = forwards.watcher, forwards.mask_id, forwards.meta

    @property
    def traces(self) -> list[Trace]:
        """One trace per sequence, in the order in which they started."""
        if not self._forwards.sequences:
            raise UserError("nothing was seen: no forward of the watched model ran inside the `watch` block")
        return [trace for sequence in self._forwards.sequences for trace in sequence.recorder.build_traces()]

    @property
    def layers(self) -> list[str]:
        """The names of the attention modules, in the order of a forward."""
        return self.watcher.layers


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
