"""The frozen values every room meets at (`Trace`, the fifth, lives in `floatscope.trace`).

    CanvasState   what the model is about to see: tokens, padding, position states, regions, step, block
    Commits       what a step wrote: sample, position, predicting row, token, confidence
    Groups        names + weights [batch, query, group]: whose attention is being added up
    Reductions    what one attention layer left behind at one step, batch first, field by field
    Edit          a change to make inside the attention call; `Keys` a rule that picks keys for it

They hold tensors and names and nothing else: no models, no files, no metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from floatscope.errors import UserError, unknown


class State(IntEnum):
    """What a canvas position is when the forward of a step begins."""

    PAD = 0
    PROMPT = 1
    MASKED = 2
    COMMITTED = 3


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
    def of_canvas(canvas: CanvasState) -> Groups:
        """`all`, `masked` and `committed` rows. `predicting` rows are known only after the commits."""
        s = canvas.states
        columns = [canvas.valid, s == State.MASKED, s == State.COMMITTED]
        return Groups(("all", "masked", "committed"), torch.stack(columns, -1).float())


@dataclass(frozen=True)
class Reductions:
    """One layer of one step. `fields[name]` is batch first, then the axes `capture.fields.FIELDS[name]` gives."""

    layer: int
    fields: Mapping[str, Tensor]


RULES = ("anchors", "middle", "least", "random", "region", "positions", "first")
OF = ("before", "now", "first")
OTHERS = "others"
PRIMITIVES = ("bias", "move", "scale", "zero", "sink", "freeze", "replace", "drop")


@dataclass(frozen=True)
class Keys:
    """A rule that picks keys, anew for each sample, layer and head.

    anchors     the `k` of largest lift, as the model attends before the edit
    middle      `k` of middling lift
    least       all but the `k` of largest lift; a `k` below 1 is a share of them
    random      `k` of those that could be anchors; or as many as `like` picks, the same for all heads, layers and steps
                where those of `like` are
    region      all of a region
    positions   counted from the sample's first token
    first       the sample's first token
    """

    rule: str
    k: int | float = 1
    of: str = "before"  # anchors of the step before | now | of the first step
    layer: int | None = None  # of that layer instead of the one that is edited
    rows: str = "all"  # lift over all rows | masked: those that stand on a mask
    region: str | None = None
    positions: tuple[int, ...] = ()
    seed: int = 0
    like: Keys | None = None

    def __post_init__(self) -> None:
        for what, given, allowed in (
            ("rule for keys", self.rule, RULES),
            ("step of anchors", self.of, OF),
            ("rows of anchors", self.rows, ("all", "masked")),
        ):
            if given not in allowed:
                raise unknown(what, str(given), allowed)
        share = self.rule == "least" and isinstance(self.k, float) and 0 < self.k < 1
        if not share and not (_counts(self.k) and self.k >= 1):
            or_share = ", or below 1 a share of them" if self.rule == "least" else ""
            raise UserError(f"k is how many keys, 1 or more{or_share}, got {self.k!r}")
        object.__setattr__(self, "positions", tuple(self.positions))
        for what, several in (("layer", () if self.layer is None else (self.layer,)), ("positions", self.positions)):
            if not all(_counts(i) for i in several):
                raise UserError(f"{what} of a rule for keys: whole numbers from 0 on, got {getattr(self, what)!r}")

    @property
    def ranked(self) -> bool:
        """Whether what was attended to decides."""
        return not self.shared

    @property
    def shared(self) -> bool:
        """Whether all heads and layers pick the same."""
        told = self if self.like is None else self.like
        return told.rule in ("region", "positions", "first")


@dataclass(frozen=True)
class Edit:
    """One change inside the attention call; `None` selects everything along that axis.

    bias     add `amount` (−inf hides) to the scores of `keys` for `queries`
    move     the mass a row puts on `keys` goes to `to`, rank by rank; without `to` over all keys it sees
    scale    multiply `what` ("key" or "value") of `keys` by `amount`
    zero     the output of `heads` becomes zero
    sink     an extra key with the score `amount` and a value of zero
    freeze   queries and keys stay those of the first of `steps`; values are today's
    replace  another `token` stands at `keys` when the model looks
    drop     the sample's first token is not there
    """

    primitive: str
    steps: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    queries: str | None = None  # a region, or `masked`, `committed`, `prompt`; `others`: rows that are none of the keys
    keys: Keys | None = None
    to: Keys | None = None
    what: str | None = None
    amount: float | None = None
    token: str | int | None = None
    name: str = ""  # the recipe as it was written

    def __post_init__(self) -> None:
        if self.primitive not in PRIMITIVES:
            raise unknown("edit primitive", self.primitive, PRIMITIVES)
        needs = {"bias": ("keys", "amount"), "move": ("keys",), "scale": ("keys", "what", "amount"), "zero": ("heads",),
                 "sink": ("amount",), "freeze": ("steps",), "replace": ("keys", "token")}  # fmt: skip
        for name in needs.get(self.primitive, ()):
            if getattr(self, name) is None:
                raise UserError(f"edit '{self.primitive}' needs `{name}`")
        if self.what not in (None, "key", "value"):
            raise unknown("operand of an edit", self.what, ("key", "value"))
        if self.queries == OTHERS and (self.keys is None or not self.keys.shared):
            raise UserError("queries='others' needs keys that all heads share: a region, positions, the first token")
        for name in ("steps", "layers", "heads"):
            given = getattr(self, name)
            if given is not None and not (isinstance(given, Sequence) and given and all(_counts(i) for i in given)):
                raise UserError(f"{name} of an edit are whole numbers from 0 on, got {given!r}")
            object.__setattr__(self, name, None if given is None else tuple(given))
        hides = self.primitive == "bias" and self.amount == -math.inf
        if self.amount is not None and not (hides or math.isfinite(self.amount)):
            raise UserError(f"edit '{self.primitive}' takes a finite amount, got {self.amount}")
        if not isinstance(self.queries, str | None):
            raise UserError(f"queries of an edit are the name of a region, got {self.queries!r}")
        if not isinstance(self.token, str | int | None) or isinstance(self.token, bool):
            raise UserError(f"a token is a text or an id, got {self.token!r}")
        if self.primitive == "move":
            self._check_move()

    def _check_move(self) -> None:
        rules = [keys for keys in (self.keys, self.to) if keys is not None]
        if uncounted := [keys.rule for keys in rules if keys.rule in ("least", "region")]:
            raise UserError(f"mass is moved between counted keys, not between all of '{uncounted[0]}'")
        source = rules[0]
        if (source.rule == "first" and source.k > 1) or len(set(source.positions)) < len(source.positions):
            raise UserError("mass can be taken from a key once; name each key once")

    def __str__(self) -> str:
        return self.name or self.primitive

    def acts(self, step: int, layer: int) -> bool:
        return (self.steps is None or step in self.steps) and (self.layers is None or layer in self.layers)


def _counts(i: object) -> bool:
    """Whether it is a whole number from 0 on; True is none."""
    return isinstance(i, int) and not isinstance(i, bool) and i >= 0
