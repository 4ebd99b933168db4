"""Select the keys of a rule: for every sample and head the first keys of an order.

    selected = select_keys(Keys("anchors", 5), ranking, context)     # [batch, head, rank], −1 where there are fewer
    to_mask(selected, keys=512)                                       # [batch, head, key]

A `Ranking` holds the lift of the keys of one layer before it is edited. A `SelectionContext` holds the canvas, the
layer and the names of the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from floatscope.canvas import CanvasState
from floatscope.capture.edit_tensors import NO_KEY
from floatscope.interventions.edits import Keys
from floatscope.sampling.randomness import step_keys, uniform
from floatscope.schema import State


@dataclass(frozen=True)
class Ranking:
    """The lift of every key in every head, and which keys are visible to enough rows to be ranked."""

    eligible: Bool[Tensor, "batch key"]
    lift: Float[Tensor, "batch head key"] | None = None  # None: only the eligible keys are known

    def pad_to(self, keys: int) -> Ranking:
        """The ranking for a canvas that has grown to `keys` positions; new keys are not eligible."""
        more = keys - self.eligible.shape[-1]
        if not more:
            return self
        lift = None if self.lift is None else torch.nn.functional.pad(self.lift, (0, more))
        return Ranking(torch.nn.functional.pad(self.eligible, (0, more)), lift)


@dataclass(frozen=True)
class SelectionContext:
    """Where keys are selected: the canvas, the layer, its number of heads, and the names of the samples."""

    canvas: CanvasState
    layer: int
    heads: int
    samples: Sequence[str]

    @property
    def first(self) -> Int[Tensor, " batch"]:
        """The position of each sample's first token."""
        return self.canvas.valid.int().argmax(-1)

    def region(self, name: str) -> Bool[Tensor, "batch key"]:
        """The positions of a region, or of a state (masked, committed, prompt)."""
        states = {"masked": State.MASKED, "committed": State.COMMITTED, "prompt": State.PROMPT}
        regions = self.canvas.regions
        if name in regions.names and regions.member is not None:
            member: Tensor = regions.member.to(self.canvas.tokens.device)[..., regions.names.index(name)]
            return member
        return self.canvas.states == int(states[name])


def select_keys(keys: Keys, ranking: Ranking | None, context: SelectionContext) -> Int[Tensor, "batch head rank"]:
    """The keys of a rule in their order; `NO_KEY` where there are fewer. Rules on lift need a `ranking`."""
    canvas = context.canvas
    B, K = canvas.tokens.shape
    if keys.rule == "first":
        return context.first[:, None, None].expand(B, context.heads, int(keys.k))
    if keys.rule == "positions":
        position = torch.tensor(keys.positions, device=canvas.tokens.device) + context.first[:, None]
        exists = (position < K) & canvas.valid.gather(-1, position.clamp_max(K - 1))
        return position.masked_fill(~exists, NO_KEY)[:, None].expand(B, context.heads, -1)
    if keys.rule == "region":
        assert keys.region is not None
        inside = context.region(keys.region) & canvas.valid
        selected = select_largest(inside.float()[:, None], inside[:, None], int(inside.sum(-1).max()))
        return selected.expand(B, context.heads, -1)
    if keys.is_shared:
        return _select_random_positions(keys, context)
    assert ranking is not None
    ranking = ranking.pad_to(K)
    eligible = ranking.eligible[:, None].expand(B, context.heads, K)
    if keys.rule == "random":
        return _select_random_keys(keys, ranking, context, eligible)
    assert ranking.lift is not None
    if keys.rule == "anchors":
        return select_largest(ranking.lift, eligible, int(keys.k))
    count = eligible.sum(-1, keepdim=True)
    rank = torch.where(eligible, ranking.lift, -torch.inf).argsort(-1, descending=True).argsort(-1)  # 0: largest lift
    if keys.rule == "middle":
        distance = (rank - (count - 1) / 2 + 0.25).abs()  # of two equally near keys the one of larger lift comes first
        return select_largest(-distance, eligible, int(keys.k))
    is_share = isinstance(keys.k, float)
    keep = (count.double() * keys.k - 1e-6).ceil() if is_share else torch.full_like(count, int(keys.k))
    return select_largest(rank.float(), eligible & (rank >= keep), K)


def scatter_amount(
    selected: Int[Tensor, "batch head rank"], keys: int, amount: float
) -> Float[Tensor, "batch head key"]:
    """`amount` at the selected keys, 0 elsewhere."""
    out = torch.zeros(*selected.shape[:2], keys + 1, device=selected.device)
    return out.scatter_(-1, torch.where(selected == NO_KEY, keys, selected), amount)[..., :keys]


def to_mask(selected: Int[Tensor, "batch head rank"], keys: int) -> Bool[Tensor, "batch head key"]:
    """True at the selected keys."""
    return scatter_amount(selected, keys, 1.0) > 0


def select_largest(
    score: Float[Tensor, "*layer batch head key"], eligible: Bool[Tensor, "*layer batch head key"], n: int
) -> Int[Tensor, "*layer batch head rank"]:
    """The `n` eligible keys with the largest score; `NO_KEY` where there are fewer."""
    available = min(n, score.shape[-1])
    value, key = torch.where(eligible, score, -torch.inf).topk(available, -1)
    key = torch.where(value == -torch.inf, NO_KEY, key)
    return torch.nn.functional.pad(key, (0, n - available), value=NO_KEY) if n > available else key


def _select_random_positions(keys: Keys, context: SelectionContext) -> Tensor:
    """As many positions as `same_count_as` picks, the same for all heads, layers and steps; the prompt's come first."""
    assert keys.same_count_as is not None
    reference = select_keys(keys.same_count_as, None, context)
    score = _random_scores(step_keys(keys.seed, context.samples, 0, "positions"), 1, context)
    score = score + (context.canvas.states == int(State.PROMPT))[:, None]
    selected = select_largest(score, context.canvas.valid[:, None], reference.shape[-1]).expand_as(reference)
    return _match_count(selected, reference)


def _select_random_keys(keys: Keys, ranking: Ranking, context: SelectionContext, eligible: Tensor) -> Tensor:
    key = step_keys(keys.seed, context.samples, context.canvas.step, f"keys {context.layer}")
    score = _random_scores(key, context.heads, context)
    if keys.same_count_as is None:
        return select_largest(score, eligible, int(keys.k))
    reference = select_keys(keys.same_count_as, ranking, context)
    return _match_count(select_largest(score, eligible, reference.shape[-1]), reference)


def _random_scores(
    key: Int[Tensor, " batch"], heads: int, context: SelectionContext
) -> Float[Tensor, "batch head key"]:
    """A random number per position, keyed by its distance from the sample's start: padding changes nothing."""
    device = context.canvas.tokens.device
    position = torch.arange(context.canvas.tokens.shape[1], device=device) - context.first[:, None]
    counter = position[:, None] + torch.arange(heads, device=device)[:, None] * 2**24
    return uniform(key.to(device)[:, None, None], counter).float()


def _match_count(selected: Tensor, reference: Tensor) -> Tensor:
    """Keep as many keys per head as `reference` has."""
    rank = torch.arange(reference.shape[-1], device=reference.device)
    return selected.masked_fill(rank >= (reference != NO_KEY).sum(-1, keepdim=True), NO_KEY)
