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

from floatscope.canvas import CanvasState
from floatscope.capture.changes import NOWHERE
from floatscope.interventions.edits import Keys
from floatscope.sampling.noise import step_keys, uniform
from floatscope.schema import State


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
        found = first_of(inside.float()[:, None], inside[:, None], int(inside.sum(-1).max()))
        return found.expand(B, scene.heads, -1)
    if keys.shared:
        return _random_positions(keys, scene)
    assert ranking is not None
    ranking = ranking.of(K)
    eligible = ranking.eligible[:, None].expand(B, scene.heads, K)
    if keys.rule == "random":
        return _random(keys, ranking, scene, eligible)
    assert ranking.lift is not None
    if keys.rule == "anchors":
        return first_of(ranking.lift, eligible, int(keys.k))
    count = eligible.sum(-1, keepdim=True)
    place = torch.where(eligible, ranking.lift, -torch.inf).argsort(-1, descending=True).argsort(-1)  # 0 the largest
    if keys.rule == "middle":
        off = (place - (count - 1) / 2 + 0.25).abs()  # of two that are as near the larger comes first
        return first_of(-off, eligible, int(keys.k))
    keep = (count.double() * keys.k - 1e-6).ceil() if isinstance(keys.k, float) else torch.full_like(count, int(keys.k))
    return first_of(place.float(), eligible & (place >= keep), K)


def put(picked: Int[Tensor, "batch head rank"], keys: int, amount: float) -> Float[Tensor, "batch head key"]:
    """The amount at the keys that are picked, 0 elsewhere."""
    out = torch.zeros(*picked.shape[:2], keys + 1, device=picked.device)
    return out.scatter_(-1, torch.where(picked == NOWHERE, keys, picked), amount)[..., :keys]


def as_mask(picked: Int[Tensor, "batch head rank"], keys: int) -> Bool[Tensor, "batch head key"]:
    return put(picked, keys, 1.0) > 0


def first_of(
    order: Float[Tensor, "*layer batch head key"], among: Bool[Tensor, "*layer batch head key"], n: int
) -> Int[Tensor, "*layer batch head rank"]:
    """The n of largest order among some."""
    most = min(n, order.shape[-1])
    value, at = torch.where(among, order, -torch.inf).topk(most, -1)
    at = torch.where(value == -torch.inf, NOWHERE, at)
    return torch.nn.functional.pad(at, (0, n - most), value=NOWHERE) if n > most else at


def _random_positions(keys: Keys, scene: Scene) -> Tensor:
    """As many as `like` picks, the same for all heads, layers and steps: of the prompt, then of the rest."""
    assert keys.like is not None
    like = pick(keys.like, None, scene)
    order = _chance(step_keys(keys.seed, scene.samples, 0, "positions"), 1, scene)
    order = order + (scene.canvas.states == int(State.PROMPT))[:, None]
    drawn = first_of(order, scene.canvas.valid[:, None], like.shape[-1]).expand_as(like)
    return _as_many(drawn, like)


def _random(keys: Keys, ranking: Ranking, scene: Scene, eligible: Tensor) -> Tensor:
    chance = _chance(step_keys(keys.seed, scene.samples, scene.canvas.step, f"keys {scene.layer}"), scene.heads, scene)
    if keys.like is None:
        return first_of(chance, eligible, int(keys.k))
    like = pick(keys.like, ranking, scene)
    return _as_many(first_of(chance, eligible, like.shape[-1]), like)


def _chance(key: Int[Tensor, " batch"], heads: int, scene: Scene) -> Float[Tensor, "batch head key"]:
    """A number for each position, counted from the sample's start: padding moves nothing."""
    device = scene.canvas.tokens.device
    own = torch.arange(scene.canvas.tokens.shape[1], device=device) - scene.first[:, None]
    counter = own[:, None] + torch.arange(heads, device=device)[:, None] * 2**24
    return uniform(key.to(device)[:, None, None], counter).float()


def _as_many(drawn: Tensor, like: Tensor) -> Tensor:
    ranks = torch.arange(like.shape[-1], device=like.device)
    return drawn.masked_fill(ranks >= (like != NOWHERE).sum(-1, keepdim=True), NOWHERE)
