"""The anchors of a decoding: what every layer attends to, ranked by lift, at this step, the one before and the first.

    anchors = Anchors()
    anchors.at_step(canvas.step)
    anchors.look(call, layer, canvas, rows="all")    # before the call is edited
    anchors.ranking(keys, layer)                     # what a rule ranks its keys by; None: not yet known

Anchors are those of the attention as the model computes it at that place, the edit itself left out: else what is hidden
in one step would be no anchor in the next, and be shown again. A causal model with a cache computes each row once, so
what its keys received is added up from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from floatscope.canvas import CanvasState
from floatscope.capture.ask import ReductionSpec
from floatscope.capture.attention import Attention, attend, full_precision
from floatscope.capture.plan import expectation
from floatscope.capture.received import receive
from floatscope.capture.visibility import Visibility
from floatscope.interventions.edits import Keys
from floatscope.interventions.picking import Ranking, first_of
from floatscope.schema import MIN_VISIBLE_ROWS


@dataclass
class Received:
    """What the keys of one layer received in all rows so far, and what uniform attention would have given them."""

    received: Float[Tensor, "batch head key"]
    uniform: Float[Tensor, "batch key"]
    seen: Float[Tensor, "batch key"]
    count: Float[Tensor, " batch"]

    def with_more(self, later: Received) -> Received:
        more = later.uniform.shape[-1] - self.uniform.shape[-1]
        earlier = [F.pad(x, (0, more)) for x in (self.received, self.uniform, self.seen)]
        added = [a + b for a, b in zip(earlier, (later.received, later.uniform, later.seen), strict=True)]
        return Received(added[0], added[1], added[2], self.count + later.count)

    @cached_property
    def eligible(self) -> Bool[Tensor, "batch key"]:
        return (self.seen >= self.count.clamp(1, MIN_VISIBLE_ROWS)[:, None]) & (self.uniform > 0)

    @cached_property
    def evenly(self) -> Float[Tensor, "batch 1 key"]:
        return self.uniform.clamp_min(1e-30)[:, None]

    @property
    def ranking(self) -> Ranking:
        return Ranking(self.eligible, self.received / self.evenly)


@dataclass
class Anchors:
    step: int = -1
    _now: dict[tuple[int, str], Ranking] = field(default_factory=dict)  # by layer and rows
    _before: dict[tuple[int, str], Ranking] = field(default_factory=dict)
    _first: dict[tuple[int, str], Ranking] = field(default_factory=dict)
    _sums: dict[tuple[int, str], Received] = field(default_factory=dict)  # of a cached model
    _picked: dict[tuple[Keys, torch.device], dict[int, Tensor]] = field(default_factory=dict)  # this step's
    _expected: dict[tuple[object, str], tuple[Visibility, ReductionSpec, Received]] = field(
        default_factory=dict
    )  # this step's

    def at_step(self, step: int) -> None:
        if step != self.step:
            self.step, self._before, self._now, self._expected, self._picked = step, self._now, {}, {}, {}

    def look(self, call: Attention, layer: int, canvas: CanvasState, rows: str) -> None:
        """What this layer attends to before it is edited."""
        at, plain = (layer, rows), replace(call, changes=None)
        with torch.no_grad(), full_precision():
            _, ask, expected = self._uniform(plain, canvas, rows)
            got = receive(plain, attend(plain).lse, ask).received[:, :, 0]
        if call.visible.queries < call.visible.keys and at in self._sums:
            self._sums[at] = self._sums[at].with_more(replace(expected, received=got))
            self._now[at] = self._sums[at].ranking
        else:
            self._sums[at] = replace(expected, received=got)
            self._now[at] = Ranking(expected.eligible, got / expected.evenly)  # the same for all layers
        if canvas.step == 0:
            self._first[at] = self._now[at]

    def ranking(self, keys: Keys, layer: int) -> Ranking | None:
        """Of the layer and the step a rule means."""
        if not keys.ranked:
            return None
        like = keys.like or keys
        at = (layer if like.layer is None else like.layer, like.rows)
        found = {"now": self._now, "first": self._first, "before": self._before or self._now}[like.of]
        return found.get(at) or self._now.get(at)

    def before(self, keys: Keys, canvas: CanvasState) -> dict[int, Tensor] | None:
        """The anchors of the step before, by layer: they are known for all of them, and picked in a few launches. None
        for other rules, and in the first step."""
        if keys.rule != "anchors" or keys.of != "before" or keys.layer is not None or not self._before:
            return None
        device = canvas.tokens.device
        if (keys, device) not in self._picked:
            grown = {
                layer: ranked.of(canvas.tokens.shape[1])
                for (layer, rows), ranked in self._before.items()
                if rows == keys.rows and ranked.eligible.device == device
            }
            lifts = torch.stack([ranked.lift for ranked in grown.values() if ranked.lift is not None])
            eligible = torch.stack([ranked.eligible for ranked in grown.values()])
            picked = first_of(lifts, eligible[:, :, None].expand_as(lifts), int(keys.k))
            self._picked[keys, device] = dict(zip(grown, picked, strict=True))
        return self._picked[keys, device]

    def over_layers(self, keys: Keys, canvas: CanvasState) -> Ranking:
        """By the mean over heads, and over layers unless the rule names one: for what is done to the canvas."""
        told = keys.like or keys
        known = self._first if told.of == "first" else self._now
        layers = [r for (i, rows), r in known.items() if rows == told.rows and told.layer in (None, i)]
        layers = [ranked.of(canvas.tokens.shape[1]) for ranked in layers]
        lifts = [ranked.lift.mean(1, keepdim=True) for ranked in layers if ranked.lift is not None]
        device = canvas.tokens.device
        mean = torch.stack([lift.to(device) for lift in lifts]).mean(0)
        return Ranking(layers[0].eligible.to(device) & ~canvas.masked, mean)

    def _uniform(self, call: Attention, canvas: CanvasState, rows: str) -> tuple[Visibility, ReductionSpec, Received]:
        """Once for all layers that see alike: which rows count, and what they would give if they looked evenly."""
        see = call.visible
        key = (see.kind, see.queries, see.keys, see.size, id(see.valid), id(see.mask), id(see.rule)), rows
        if key not in self._expected:
            first = see.keys - see.queries
            counted = canvas.valid[:, first:]
            if rows == "masked" and bool(canvas.masked.any()):
                counted = counted & canvas.masked[:, first:]
            weights = counted[..., None].float()
            want = expectation(see, weights)
            count = want.count[:, 0]
            uniform = want.uniform[:, 0] * count[:, None]
            nothing = uniform.new_zeros(len(weights), 1, see.keys)
            self._expected[key] = (
                see,  # kept, so that no other gets its id
                ReductionSpec(weights, memberships=True),
                Received(nothing, uniform.expand(len(weights), -1), want.seen[:, 0].expand(len(weights), -1), count),
            )
        return self._expected[key]
