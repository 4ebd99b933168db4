"""The anchors of a decoding: the keys of every layer ranked by lift, at the current, the previous and the first step.

    anchors = AnchorTracker()
    anchors.begin_step(canvas.step)
    unedited = anchors.open_call(call, canvas)           # before the call is edited
    anchors.observe(unedited, layer, canvas, rows="all")
    anchors.find_ranking(keys, layer)                    # the ranking a rule uses; None if it is not known yet

Anchors come from the attention as the model computes it at that layer without the edit itself. Otherwise a key hidden
at one step would not be an anchor at the next, and would be shown again. A causal model with a cache computes each row
once, so the attention its keys receive is summed over steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from floatscope.canvas import CanvasState
from floatscope.capture.attention import AttentionCall, full_precision
from floatscope.capture.plan import build_baseline
from floatscope.capture.reduction_spec import ReductionSpec
from floatscope.capture.visibility import Visibility
from floatscope.interventions.key_rules import Anchors, KeyRule, RankingSource
from floatscope.interventions.key_selection import Ranking, select_largest
from floatscope.interventions.unedited import UneditedCall
from floatscope.schema import MIN_VISIBLE_ROWS


@dataclass
class ReceivedAttention:
    """The attention that the keys of one layer receive over all rows so far, and under uniform attention."""

    received: Float[Tensor, "batch head key"]
    uniform: Float[Tensor, "batch key"]
    visible_rows: Float[Tensor, "batch key"]
    row_count: Float[Tensor, " batch"]

    def add(self, later: ReceivedAttention) -> ReceivedAttention:
        """The sum with the rows of a later step, which may have more keys."""
        more = later.uniform.shape[-1] - self.uniform.shape[-1]
        received, uniform, visible_rows = (
            F.pad(x, (0, more)) for x in (self.received, self.uniform, self.visible_rows)
        )
        return ReceivedAttention(
            received + later.received,
            uniform + later.uniform,
            visible_rows + later.visible_rows,
            self.row_count + later.row_count,
        )

    @cached_property
    def eligible(self) -> Bool[Tensor, "batch key"]:
        """Which keys are visible to enough rows to be ranked."""
        return (self.visible_rows >= self.row_count.clamp(1, MIN_VISIBLE_ROWS)[:, None]) & (self.uniform > 0)

    @cached_property
    def uniform_per_head(self) -> Float[Tensor, "batch 1 key"]:
        """`uniform`, safe to divide by."""
        return self.uniform.clamp_min(1e-30)[:, None]

    @property
    def ranking(self) -> Ranking:
        """The keys ranked by lift."""
        return Ranking(self.eligible, self.received / self.uniform_per_head)


@dataclass
class AnchorTracker:
    """The rankings of all layers over the steps of one decoding."""

    step: int = -1
    _now: dict[tuple[int, str], Ranking] = field(default_factory=dict)  # by layer and rows
    _previous: dict[tuple[int, str], Ranking] = field(default_factory=dict)
    _first: dict[tuple[int, str], Ranking] = field(default_factory=dict)
    _sums: dict[tuple[int, str], ReceivedAttention] = field(default_factory=dict)  # for a model with a cache
    # The rest belongs to the current step only.
    _selected: dict[tuple[Anchors, torch.device], dict[int, Tensor]] = field(default_factory=dict)
    _expected: dict[tuple[object, str], tuple[Visibility, ReductionSpec, ReceivedAttention]] = field(
        default_factory=dict
    )

    def begin_step(self, step: int) -> None:
        """Start a step: the current rankings become those of the previous step."""
        if step != self.step:
            self.step, self._previous, self._now, self._expected, self._selected = step, self._now, {}, {}, {}

    def open_call(self, call: AttentionCall, canvas: CanvasState) -> UneditedCall:
        """The call before its edits."""
        return UneditedCall(call, self._expect_uniform(call, canvas, "all")[1])

    def observe(self, unedited: UneditedCall, layer: int, canvas: CanvasState, rows: str) -> None:
        """Rank the keys of a layer by the attention of the unedited call."""
        index, call = (layer, rows), unedited.call
        _, spec, expected = self._expect_uniform(call, canvas, rows)
        received = unedited.received() if rows == "all" else unedited.reduce(spec)
        if call.visibility.queries < call.visibility.keys and index in self._sums:
            self._sums[index] = self._sums[index].add(replace(expected, received=received))
            self._now[index] = self._sums[index].ranking
        else:
            self._sums[index] = replace(expected, received=received)
            # `expected` is shared by all layers, and so are the tensors cached in it.
            self._now[index] = Ranking(expected.eligible, received / expected.uniform_per_head)
        if canvas.step == 0:
            self._first[index] = self._now[index]

    def find_ranking(self, rule: KeyRule, layer: int) -> Ranking | None:
        """The ranking of the layer and the step that a rule refers to; None if it is not known, or not needed."""
        source = rule.ranking
        if source is None:
            return None
        index = (layer if source.layer is None else source.layer, source.rows)
        rankings = {"now": self._now, "first": self._first, "before": self._previous or self._now}[source.of]
        return rankings.get(index) or self._now.get(index)

    def select_previous_anchors(self, keys: Anchors, canvas: CanvasState) -> dict[int, Tensor] | None:
        """The anchors of the previous step by layer, selected for all layers in a few kernel launches.

        None for anchors of another step or of one layer, and in the first step.
        """
        if keys.of != "before" or keys.layer is not None or not self._previous:
            return None
        device = canvas.tokens.device
        if (keys, device) not in self._selected:
            rankings = {
                layer: ranking.pad_to(canvas.tokens.shape[1])
                for (layer, rows), ranking in self._previous.items()
                if rows == keys.rows and ranking.eligible.device == device
            }
            lifts = torch.stack([ranking.lift for ranking in rankings.values() if ranking.lift is not None])
            eligible = torch.stack([ranking.eligible for ranking in rankings.values()])
            selected = select_largest(lifts, eligible[:, :, None].expand_as(lifts), keys.k)
            self._selected[keys, device] = dict(zip(rankings, selected, strict=True))
        return self._selected[keys, device]

    def mean_ranking(self, source: RankingSource, canvas: CanvasState) -> Ranking:
        """The ranking by mean lift over heads, and over layers unless the rule names one, for edits of the canvas."""
        known = self._first if source.of == "first" else self._now
        layers = [ranking for (i, rows), ranking in known.items() if rows == source.rows and source.layer in (None, i)]
        layers = [ranking.pad_to(canvas.tokens.shape[1]) for ranking in layers]
        lifts = [ranking.lift.mean(1, keepdim=True) for ranking in layers if ranking.lift is not None]
        device = canvas.tokens.device
        mean = torch.stack([lift.to(device) for lift in lifts]).mean(0)
        return Ranking(layers[0].eligible.to(device) & ~canvas.masked, mean)

    def _expect_uniform(
        self, call: AttentionCall, canvas: CanvasState, rows: str
    ) -> tuple[Visibility, ReductionSpec, ReceivedAttention]:
        """Which rows count, and what their keys receive under uniform attention; shared by layers that see alike."""
        see = call.visibility
        index = (see.kind, see.queries, see.keys, see.size, id(see.valid), id(see.mask), id(see.rule)), rows
        if index not in self._expected:
            first_row = see.keys - see.queries
            counted = canvas.valid[:, first_row:]
            if rows == "masked" and bool(canvas.masked.any()):
                counted = counted & canvas.masked[:, first_row:]
            weights = counted[..., None].float()
            with torch.no_grad(), full_precision():
                baseline, B = build_baseline(see, weights), len(weights)
            row_count = baseline.count[:, 0]
            uniform = baseline.uniform[:, 0] * row_count[:, None]
            zeros = uniform.new_zeros(B, 1, see.keys)
            visible_rows = baseline.visible_rows[:, 0].expand(B, -1)
            self._expected[index] = (
                see,  # a reference, so that its id is not reused
                ReductionSpec(weights, is_binary=True),
                ReceivedAttention(zeros, uniform.expand(B, -1), visible_rows, row_count),
            )
        return self._expected[index]
