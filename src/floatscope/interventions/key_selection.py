"""Select the keys of a rule: for every sample and head the first keys of an order.

    selected = select_keys(Anchors(5), ranking, context)     # [batch, head, rank], −1 where there are fewer
    to_mask(selected, keys=512)                                       # [batch, head, key]
    match_count(control, selected, ranking, context)                  # as many other keys
    match_mass(control, selected, mass, ranking, context)             # other keys that hold as much attention

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
from floatscope.interventions.key_rules import (
    Anchors,
    FirstKey,
    KeyRule,
    LeastKeys,
    MatchedKeys,
    MiddleKeys,
    MiddleSameCount,
    PositionKeys,
    RandomKeys,
    RegionKeys,
)
from floatscope.sampling.randomness import step_keys, uniform
from floatscope.schema import UNDECIDED, State

EVIDENCE = "evidence"
"""The region with the words that give the answer."""


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
    structural: Bool[Tensor, "batch key"] | None = None  # needed for the anchor type "structural"

    @property
    def first(self) -> Int[Tensor, " batch"]:
        """The position of each sample's first token."""
        return self.canvas.valid.int().argmax(-1)

    def region(self, name: str) -> Bool[Tensor, "batch key"]:
        """The positions of a region, or of a state (masked, committed, prompt); noise counts as masked."""
        states = {"masked": UNDECIDED, "committed": (State.COMMITTED,), "prompt": (State.PROMPT,)}
        regions = self.canvas.regions
        if name in regions.names and regions.member is not None:
            member: Tensor = regions.member.to(self.canvas.tokens.device)[..., regions.names.index(name)]
            return member
        return torch.isin(self.canvas.states, torch.tensor(states[name], device=self.canvas.states.device))

    def anchor_type(self, name: str) -> Bool[Tensor, "batch key"]:
        """Which keys are of a type of anchors."""
        keys = self.canvas.tokens.shape[1]
        if name == "first":
            return torch.arange(keys, device=self.canvas.tokens.device) == self.first[:, None]
        if name == "structural":
            assert self.structural is not None
            return self.structural
        has_evidence = EVIDENCE in self.canvas.regions.names
        evidence = self.region(EVIDENCE) if has_evidence else torch.zeros_like(self.canvas.valid)
        return {"all": self.canvas.valid, "evidence": evidence, "all but evidence": ~evidence}[name]


@dataclass(frozen=True)
class Selection:
    """What an edit acts on in one attention call."""

    keys: Int[Tensor, "batch head rank"]
    target: Int[Tensor, "batch head rank"] | None  # where a move takes the mass of each key
    queries: Bool[Tensor, "batch query"] | None  # the rows; None: all


def select_keys(rule: KeyRule, ranking: Ranking | None, context: SelectionContext) -> Int[Tensor, "batch head rank"]:
    """The keys of a rule in their order; `NO_KEY` where there are fewer. Rules on lift need a `ranking`."""
    if isinstance(rule, MatchedKeys):
        return match_count(rule, select_keys(rule.matched, ranking, context), ranking, context)
    if rule.is_shared:
        return _select_shared(rule, context)
    assert ranking is not None
    ranking = ranking.pad_to(context.canvas.tokens.shape[1])
    if isinstance(rule, RandomKeys):
        return select_largest(*_draw_order(rule, ranking, context), rule.k)
    assert ranking.lift is not None
    eligible = ranking.eligible[:, None].expand_as(ranking.lift)
    if isinstance(rule, Anchors):
        return restrict_type(select_largest(ranking.lift, eligible, rule.k), rule.only, context)
    count = eligible.sum(-1, keepdim=True)
    rank = torch.where(eligible, ranking.lift, -torch.inf).argsort(-1, descending=True).argsort(-1)  # 0: largest lift
    if isinstance(rule, MiddleKeys):
        distance = (rank - (count - 1) / 2 + 0.25).abs()  # of two equally near keys the one of larger lift comes first
        return select_largest(-distance, eligible, rule.k)
    assert isinstance(rule, LeastKeys)
    is_share = isinstance(rule.keep, float)
    keep = (count.double() * rule.keep - 1e-6).ceil() if is_share else torch.full_like(count, int(rule.keep))
    return select_largest(rank.float(), eligible & (rank >= keep), rank.shape[-1])


def _select_shared(rule: KeyRule, context: SelectionContext) -> Int[Tensor, "batch head rank"]:
    """The keys of a rule that does not depend on the attention, the same for all heads."""
    canvas = context.canvas
    B, K = canvas.tokens.shape
    if isinstance(rule, FirstKey):
        return context.first[:, None, None].expand(B, context.heads, rule.count)
    if isinstance(rule, PositionKeys):
        position = torch.tensor(rule.positions, device=canvas.tokens.device) + context.first[:, None]
        exists = (position < K) & canvas.valid.gather(-1, position.clamp_max(K - 1))
        return position.masked_fill(~exists, NO_KEY)[:, None].expand(B, context.heads, -1)
    assert isinstance(rule, RegionKeys)
    inside = context.region(rule.region) & canvas.valid
    selected = select_largest(inside.float()[:, None], inside[:, None], int(inside.sum(-1).max()))
    return selected.expand(B, context.heads, -1)


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


def restrict_type(selected: Int[Tensor, "batch head rank"], only: str, context: SelectionContext) -> Tensor:
    """The selected keys of a type of anchors, in their order; `NO_KEY` after them."""
    if only == "all":
        return selected
    is_type = context.anchor_type(only)[:, None].expand(-1, selected.shape[1], -1)
    return keep_ranks(is_type.gather(-1, selected.clamp_min(0)) & (selected != NO_KEY), selected)[0]


def keep_ranks(keep: Bool[Tensor, "batch head rank"], *keys: Int[Tensor, "batch head rank"]) -> list[Tensor]:
    """The ranks to keep, moved to the front; `NO_KEY` after them."""
    order = (~keep).to(torch.int8).argsort(dim=-1, stable=True)
    return [each.masked_fill(~keep, NO_KEY).gather(-1, order) for each in keys]


def match_count(
    rule: MatchedKeys, reference: Int[Tensor, "batch head rank"], ranking: Ranking | None, context: SelectionContext
) -> Int[Tensor, "batch head rank"]:
    """Keys of a control, as many in each head as `reference` has."""
    if isinstance(rule, MiddleSameCount):
        source = rule.matched
        middle = MiddleKeys(max(1, reference.shape[-1]), source.of, source.layer, source.rows)
        selected = select_keys(middle, ranking, context)[..., : reference.shape[-1]]
    else:
        selected = select_largest(*_draw_order(rule, ranking, context), reference.shape[-1]).expand_as(reference)
    rank = torch.arange(reference.shape[-1], device=reference.device)
    return selected.masked_fill(rank >= (reference != NO_KEY).sum(-1, keepdim=True), NO_KEY)


def match_mass(
    rule: MatchedKeys,
    reference: Int[Tensor, "batch head rank"],
    mass: Float[Tensor, "batch head key"],
    ranking: Ranking | None,
    context: SelectionContext,
    excluded: Int[Tensor, "batch head excluded"] | None = None,
) -> tuple[Int[Tensor, "batch head selected"], Bool[Tensor, "batch head"]]:
    """Random keys that hold as much `mass` as those of `reference`, and in which heads there are too few of them.

    Keys are taken in random order, without those of `reference` and of `excluded`. Of all beginnings of that order, the
    one whose mass is nearest to that of `reference` is selected; none where `reference` selects none.
    """
    score, candidates = _draw_order(rule, ranking, context)
    chosen = to_mask(reference, mass.shape[-1])
    goal = (mass.double() * chosen).sum(-1, keepdim=True)
    candidates = candidates.expand_as(mass) & ~chosen
    if excluded is not None:
        candidates = candidates & ~to_mask(excluded, mass.shape[-1])
    order = torch.where(candidates, score.expand_as(mass), -torch.inf).argsort(-1, descending=True)
    held = torch.where(candidates, mass.double(), 0.0).gather(-1, order).cumsum(-1)
    held = torch.nn.functional.pad(held, (1, 0))  # [batch, head, number of keys]
    number = torch.arange(held.shape[-1], device=mass.device)
    is_allowed = number <= torch.where(goal > 0, candidates.sum(-1, keepdim=True), 0)
    count = torch.where(is_allowed, (held - goal).abs(), torch.inf).argmin(-1, keepdim=True)
    selected = order.masked_fill(number[:-1] >= count, NO_KEY)
    return selected[..., : int(count.max())], held[..., -1] < goal[..., 0]


def _draw_order(
    rule: RandomKeys | MatchedKeys, ranking: Ranking | None, context: SelectionContext
) -> tuple[Float[Tensor, "batch h key"], Bool[Tensor, "batch h key"]]:
    """A random number per key, the largest of which comes first, and which keys may be drawn.

    The control of a region has one order for all heads, layers and steps, in which the prompt comes first.
    """
    canvas = context.canvas
    if rule.reference.is_shared:
        score = _random_scores(step_keys(rule.seed, context.samples, 0, "positions"), 1, context)
        return score + (canvas.states == int(State.PROMPT))[:, None], canvas.valid[:, None]
    assert ranking is not None
    key = step_keys(rule.seed, context.samples, canvas.step, f"keys {context.layer}")
    score = _random_scores(key, context.heads, context)
    candidates = ranking.pad_to(canvas.tokens.shape[1]).eligible
    if rule.spares_evidence:  # an edit that spares the evidence is compared with one that does too
        candidates = candidates & context.anchor_type("all but evidence")
    return score, candidates[:, None].expand_as(score)


def _random_scores(
    key: Int[Tensor, " batch"], heads: int, context: SelectionContext
) -> Float[Tensor, "batch head key"]:
    """A random number per position, keyed by its distance from the sample's start: padding changes nothing."""
    device = context.canvas.tokens.device
    position = torch.arange(context.canvas.tokens.shape[1], device=device) - context.first[:, None]
    counter = position[:, None] + torch.arange(heads, device=device)[:, None] * 2**24
    return uniform(key.to(device)[:, None, None], counter).float()
