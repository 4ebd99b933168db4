"""TODO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from floatscope.errors import UserError, unknown_choice

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
                raise unknown_choice(what, str(given), allowed)
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
            raise unknown_choice("edit primitive", self.primitive, PRIMITIVES)
        needs = {"bias": ("keys", "amount"), "move": ("keys",), "scale": ("keys", "what", "amount"), "zero": ("heads",),
                 "sink": ("amount",), "freeze": ("steps",), "replace": ("keys", "token")}  # fmt: skip
        for name in needs.get(self.primitive, ()):
            if getattr(self, name) is None:
                raise UserError(f"edit '{self.primitive}' needs `{name}`")
        if self.what not in (None, "key", "value"):
            raise unknown_choice("operand of an edit", self.what, ("key", "value"))
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
