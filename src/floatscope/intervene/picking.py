"""Which keys a rule picks: in every sample and head the first few of an order.

    picked = pick(Keys("anchors", 5), ranking, scene)       # [batch, head, rank], -1 where there are fewer
    as_mask(picked, keys=512)                                # [batch, head, key]

A `Ranking` is what one layer attended to before it was edited; the `Scene` is the canvas, the layer and whose samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from floatscope.capture.changes import NOWHERE
from floatscope.decode.noise import step_keys, uniform
from floatscope.values import CanvasState, Keys, State


@dataclass(frozen=True)
class Ranking:
    """Lift of every key in every head, and which keys enough rows see to be ranked; longer canvases count as unseen."""

    eligible: Bool[Tensor, "batch key"]
    lift: Float[Tensor, "batch head key"] | None = None  # None: only asked who could be ranked

    def of(self, keys: int) -> Ranking:
        """For a canvas that has grown since."""
        more = keys - self.eligible.shape[-1]
        if not more:
            return self
        lift = None if self.lift is None else torch.nn.functional.pad(self.lift, (0, more))
        return Ranking(torch.nn.functional.pad(self.eligible, (0, more)), lift)


@dataclass(frozen=True)
class Scene:
    canvas: CanvasState
    layer: int
    heads: int
    samples: Sequence[str]

    @property
    def first(self) -> Int[Tensor, " batch"]:
        return self.canvas.valid.int().argmax(-1)

    def region(self, name: str) -> Bool[Tensor, "batch key"]:
        """A region of the canvas, or the positions in a state."""
        states = {"masked": State.MASKED, "committed": State.COMMITTED, "prompt": State.PROMPT}
        regions = self.canvas.regions
        if name in regions.names and regions.member is not None:
            member: Tensor = regions.member.to(self.canvas.tokens.device)[..., regions.names.index(name)]
            return member
        return self.canvas.states == int(states[name])


def pick(keys: Keys, ranking: Ranking | None, scene: Scene) -> Int[Tensor, "batch head rank"]:
    """The keys of a rule in their order; NOWHERE beyond those there are."""
    B, K = scene.canvas.tokens.shape
    device = scene.canvas.tokens.device
    if keys.rule == "first":
        return scene.first[:, None, None].expand(B, scene.heads, int(keys.k))
    if keys.rule == "positions":
        at = torch.tensor(keys.positions, device=device) + scene.first[:, None]
        there = (at < K) & scene.canvas.valid.gather(-1, at.clamp_max(K - 1))
        return at.masked_fill(~there, NOWHERE)[:, None].expand(B, scene.heads, -1)
    if keys.rule == "region":
        assert keys.region is not None
        inside = scene.region(keys.region) & scene.canvas.valid
        return _first_of(inside.float(), inside, int(inside.sum(-1).max())).expand(B, scene.heads, -1)
    assert ranking is not None
    ranking = ranking.of(K)
    eligible = ranking.eligible[:, None].expand(B, scene.heads, K)
    if keys.rule == "random":
        return _random(keys, ranking, scene, eligible)
    assert ranking.lift is not None
    if keys.rule == "anchors":
        return _first_of(ranking.lift, eligible, int(keys.k))
    count = eligible.sum(-1, keepdim=True)
    place = torch.where(eligible, ranking.lift, -torch.inf).argsort(-1, descending=True).argsort(-1)  # 0 the largest
    if keys.rule == "middle":
        off = (place - (count - 1) / 2 + 0.25).abs()  # of two that are as near the larger comes first
        return _first_of(-off, eligible, int(keys.k))
    keep = (count.double() * keys.k - 1e-6).ceil() if isinstance(keys.k, float) else torch.full_like(count, int(keys.k))
    return _first_of(place.float(), eligible & (place >= keep), K)


def as_mask(picked: Int[Tensor, "batch head rank"], keys: int) -> Bool[Tensor, "batch head key"]:
    out = torch.zeros(*picked.shape[:2], keys + 1, dtype=torch.bool, device=picked.device)
    return out.scatter_(-1, picked.masked_fill(picked == NOWHERE, keys), True)[..., :keys]


def _first_of(order: Tensor, among: Tensor, n: int) -> Tensor:
    """The n of largest order among some, [batch, head, n]."""
    if order.ndim == 2:
        order, among = order[:, None], among[:, None]
    most = min(n, order.shape[-1])
    value, at = torch.where(among, order, -torch.inf).topk(most, -1)
    at = at.masked_fill(value == -torch.inf, NOWHERE)
    return torch.nn.functional.pad(at, (0, n - most), value=NOWHERE)


def _random(keys: Keys, ranking: Ranking, scene: Scene, eligible: Tensor) -> Tensor:
    _, H, K = eligible.shape
    device = eligible.device
    key = step_keys(keys.seed, scene.samples, scene.canvas.step, f"keys {scene.layer}").to(device)
    own = (
        torch.arange(K, device=device) - scene.first[:, None]
    )  # counted from the sample's start: padding moves nothing
    counter = own[:, None] + torch.arange(H, device=device)[:, None] * 2**24
    chance = uniform(key[:, None, None], counter).float()
    if keys.like is None:
        return _first_of(chance, eligible, int(keys.k))
    like = pick(keys.like, ranking, scene)
    drawn = _first_of(chance, eligible, like.shape[-1])
    ranks = torch.arange(like.shape[-1], device=device)
    return drawn.masked_fill(ranks >= (like != NOWHERE).sum(-1, keepdim=True), NOWHERE)
