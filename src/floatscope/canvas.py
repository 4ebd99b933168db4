"""The frozen values every room meets at (`Trace`, the fifth, lives in `floatscope.traces`).

    CanvasState   what the model is about to see: tokens, padding, position states, regions, step, block
    Commits       what a step wrote: sample, position, predicting row, token, confidence
    Groups        names + weights [batch, query, group]: whose attention is being added up
    Reductions    what one attention layer left behind at one step, batch first, field by field
    Edit          a change to make inside the attention call; `Keys` a rule that picks keys for it

They hold tensors and names and nothing else: no models, no files, no metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from floatscope.errors import UserError
from floatscope.schema import State


@dataclass(frozen=True)
class Regions:
    """Named sets of positions (question, document 3, gold, …); a position may lie in several or in none."""

    names: tuple[str, ...] = ()
    member: Bool[Tensor, "batch position region"] | None = None

    def __post_init__(self) -> None:
        width = 0 if self.member is None else self.member.shape[-1]
        if width != len(self.names):
            raise UserError(
                f"{len(self.names)} region names for {width} columns of membership; give one name per column"
            )
        if len(set(self.names)) != len(self.names):
            raise UserError(f"region names must differ, got {', '.join(self.names)}")

    @staticmethod
    def from_spans(spans: Sequence[Mapping[str, Sequence[tuple[int, int]]]], length: int) -> Regions:
        """One `{name: [(start, stop), …]}` per sample → membership [sample, length, region], names in order met."""
        names = tuple(dict.fromkeys(name for sample in spans for name in sample))
        member = torch.zeros(len(spans), length, len(names), dtype=torch.bool)
        for b, sample in enumerate(spans):
            for name, pieces in sample.items():
                for start, stop in pieces:
                    if not 0 <= start <= stop <= length:
                        raise UserError(f"region '{name}' spans {start}:{stop}, outside a canvas of {length} positions")
                    member[b, start:stop, names.index(name)] = True
        return Regions(names, member)


@dataclass(frozen=True)
class CanvasState:
    """A batch of canvases as the forward of `step` will see them, before that step's commits."""

    tokens: Int[Tensor, "batch position"]
    states: Int[Tensor, "batch position"]  # values of `State`
    step: int = 0
    regions: Regions = field(default_factory=Regions)
    block: Int[Tensor, "batch 2"] | None = None  # [start, stop) of the block each sample is filling
    active: Bool[Tensor, " batch"] | None = None  # samples still being decoded; None: all. The others stand still

    @property
    def valid(self) -> Bool[Tensor, "batch position"]:
        return self.states != State.PAD

    def to(self, device: torch.device) -> CanvasState:
        if self.tokens.device == device:
            return self
        member, block, active = (
            None if t is None else t.to(device) for t in (self.regions.member, self.block, self.active)
        )
        regions = replace(self.regions, member=member)
        tokens, states = self.tokens.to(device), self.states.to(device)
        return replace(self, tokens=tokens, states=states, regions=regions, block=block, active=active)

    @property
    def masked(self) -> Bool[Tensor, "batch position"]:
        return self.states == State.MASKED


@dataclass(frozen=True)
class Commits:
    """The tokens a step wrote, over the whole batch. `row` is the predicting row, the query that decided it."""

    sample: Int[Tensor, " commit"]  # index into the batch
    position: Int[Tensor, " commit"]
    row: Int[Tensor, " commit"]
    token: Int[Tensor, " commit"]
    confidence: Float[Tensor, " commit"]

    def __len__(self) -> int:
        return len(self.sample)

    def to(self, device: torch.device) -> Commits:
        return Commits(*(getattr(self, f.name).to(device) for f in fields(self)))

    @staticmethod
    def none() -> Commits:
        empty = torch.zeros(0, dtype=torch.long)
        return Commits(empty, empty, empty, empty, torch.zeros(0))


@dataclass(frozen=True)
class Groups:
    """Query groups: R[g, j] = Σ_i weights[i, g] · A[i, j]. A query may be in several groups, with any weight."""

    names: tuple[str, ...]
    weights: Float[Tensor, "batch query group"]

    @property
    def count(self) -> Float[Tensor, "batch group"]:
        """The weight in each group: n_g when the weights are memberships."""
        return self.weights.sum(1)

    @staticmethod
    def from_canvas(canvas: CanvasState) -> Groups:
        """`all`, `masked` and `committed` rows. `predicting` rows are known only after the commits."""
        s = canvas.states
        columns = [canvas.valid, s == State.MASKED, s == State.COMMITTED]
        return Groups(("all", "masked", "committed"), torch.stack(columns, -1).float())


@dataclass(frozen=True)
class Reductions:
    """One layer of one step. `fields[name]` is batch first, then the axes `capture.fields.FIELDS[name]` gives."""

    layer: int
    fields: Mapping[str, Tensor]


Forward = Callable[[CanvasState, slice], Float[Tensor, "batch row vocabulary"]]
"""The model as decoding sees it: the logits of the rows asked for."""


@dataclass(frozen=True)
class Step:
    """The attention of a step belongs to `before`; the commits were decided by that forward and stand in `after`."""

    before: CanvasState
    after: CanvasState
    commits: Commits


def build_canvas(
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    mask_id: int | None,
    *,
    suffix: Sequence[int] = (),
    regions: Regions | None = None,
    pad_id: int = 0,
) -> CanvasState:
    """Each prompt, `new_tokens` masks and the suffix, padded on the left. Without a mask id only the prompts.

    A mask in a prompt is infilling: it is filled like the others. Regions are counted over prompt, new tokens and
    suffix.
    """
    if not prompts or min(map(len, prompts)) + new_tokens < 1:
        raise UserError(f"a canvas needs at least one prompt and one token, got {len(prompts)} prompts")
    tail = [] if mask_id is None else [mask_id] * new_tokens + list(suffix)
    length = max(len(p) for p in prompts) + len(tail)
    tokens = torch.full((len(prompts), length), pad_id)
    states = torch.full((len(prompts), length), int(State.PAD))
    for b, prompt in enumerate(prompts):
        start = length - len(prompt) - len(tail)
        tokens[b, start:] = torch.tensor([*prompt, *tail], dtype=torch.long)
        states[b, start:] = State.PROMPT
        if mask_id is not None:
            states[b, start:][tokens[b, start:] == mask_id] = State.MASKED
    regions = Regions() if regions is None else regions
    full = length + (new_tokens if mask_id is None else 0)
    if regions.member is not None and regions.member.shape[:2] != (len(prompts), full):
        given = tuple(regions.member.shape)
        raise UserError(
            f"the regions are for {given[0]} canvases of {given[1]} positions, and there are {len(prompts)} of"
            f" {full}: count them over prompt and new tokens, from the first position of the left-padded batch"
        )
    return CanvasState(tokens, states, regions=regions)


def crop_regions(regions: Regions, length: int) -> Regions:
    """The regions of a canvas that has not grown to its full length yet."""
    return regions if regions.member is None else replace(regions, member=regions.member[:, :length])
