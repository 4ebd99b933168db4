"""Edits as values: `Edit`, one change inside the attention call, and `Keys`, a rule that picks the keys it acts on.

    Edit("bias", keys=Keys("anchors", k=5), amount=-float("inf"))           # hide the 5 anchors of the previous step
    Edit("move", keys=Keys("anchors"), to=Keys("first"), layers=(2, 3))     # move the anchor's mass to the first token
    Edit("zero", layers=(3,), heads=(1,))                                   # zero the output of a head

They are checked when they are made, and need no torch. `recipes` builds them from text, `intervention` applies them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from floatscope.errors import UserError, unknown_choice

KEY_RULES = ("anchors", "middle", "least", "random", "region", "positions", "first")
ANCHOR_STEPS = ("before", "now", "first")
ANCHOR_ROWS = ("all", "masked")
ANCHOR_TYPES = ("all", "first", "structural", "evidence", "all but evidence")
SHARED_RULES = ("region", "positions", "first")
"""Rules that pick the same keys for all heads and layers."""
PRIMITIVES = ("bias", "move", "scale", "zero", "sink", "freeze", "replace", "drop")
REQUIRED_FIELDS = {
    "bias": ("keys", "amount"),
    "move": ("keys",),
    "scale": ("keys", "operand", "amount"),
    "zero": ("heads",),
    "sink": ("amount",),
    "freeze": ("steps",),
    "replace": ("keys", "token"),
}
OPERANDS = ("key", "value")
OTHER_ROWS = "others"
"""`Edit.queries`: all rows except those of the picked keys, or with `same_mass_as`, of the keys of the other rule."""


@dataclass(frozen=True)
class Keys:
    """A rule that picks keys, separately for each sample, layer and head.

    anchors     the `k` keys with the largest lift, in the attention before the edit
    middle      `k` keys with a lift of middle rank
    least       all except the `k` keys with the largest lift; a `k` below 1 is a share of the keys
    random      `k` random keys among those that could be anchors
    region      all keys of a region
    positions   positions counted from the sample's first token
    first       the sample's first token

    `only` restricts anchors by type: of the `k` anchors, `first` keeps the sample's first token, `structural` bos,
    special tokens, masks, template, punctuation and whitespace, `evidence` the region of that name, and `all but
    evidence` the others. A head may have no anchor of a type.

    A control picks `random` keys (or `middle` ones) that match those of another rule: as many as `same_count_as` picks,
    or, with `same_mass_as`, keys that the other rule does not pick, until they hold as much attention. It picks none
    where the other rule picks none, and no evidence if the other rule excludes it. If the other rule picks the same
    keys for all heads, layers and steps, random keys are drawn in one order for all of them.

    Example:
        fs.Keys("anchors", k=5)
        fs.Keys("anchors", k=5, only="structural")
        fs.Keys("region", region="gold")
    """

    rule: str
    k: int | float = 1
    of: str = "before"  # the step of the anchors: the previous one | now | the first one
    layer: int | None = None  # the layer of the anchors; None: the edited layer
    rows: str = "all"  # lift over all rows | masked: over rows on a mask
    region: str | None = None
    positions: tuple[int, ...] = ()
    seed: int = 0
    only: str = "all"  # the type of anchors
    same_count_as: Keys | None = None
    same_mass_as: Keys | None = None

    def __post_init__(self) -> None:
        for kind, value, allowed in (
            ("rule for keys", self.rule, KEY_RULES),
            ("step of anchors", self.of, ANCHOR_STEPS),
            ("rows of anchors", self.rows, ANCHOR_ROWS),
            ("type of anchors", self.only, ANCHOR_TYPES),
        ):
            if value not in allowed:
                raise unknown_choice(kind, str(value), allowed)
        is_share = self.rule == "least" and isinstance(self.k, float) and 0 < self.k < 1
        if not is_share and not (_is_index(self.k) and self.k >= 1):
            or_share = ", or a share between 0 and 1" if self.rule == "least" else ""
            raise UserError(f"k must be a number of keys, 1 or more{or_share}, got {self.k!r}")
        if self.only != "all" and self.rule != "anchors":
            raise UserError(f"only={self.only!r} restricts anchors, and the rule is '{self.rule}'; use rule 'anchors'")
        if self.same_mass_as is not None and (self.rule != "random" or self.same_count_as is not None):
            raise UserError("same_mass_as needs the rule 'random', and no same_count_as")
        object.__setattr__(self, "positions", tuple(self.positions))
        for name, values in (("layer", () if self.layer is None else (self.layer,)), ("positions", self.positions)):
            if not all(_is_index(i) for i in values):
                raise UserError(
                    f"{name} of a key rule must be whole numbers of at least 0, got {getattr(self, name)!r}"
                )

    @property
    def reference(self) -> Keys:
        """The rule that this one matches: `same_count_as` or `same_mass_as` if given, else this rule."""
        return self.same_count_as or self.same_mass_as or self

    @property
    def is_shared(self) -> bool:
        """Whether all heads and layers pick the same keys."""
        return self.reference.rule in SHARED_RULES and self.same_mass_as is None

    @property
    def needs_ranking(self) -> bool:
        """Whether the rule depends on the lift of the keys."""
        return self.reference.rule not in SHARED_RULES


@dataclass(frozen=True)
class Edit:
    """One change inside the attention call. `None` for steps, layers, heads or queries means all of them.

    bias     add `amount` (−inf hides) to the scores of `keys` in the rows of `queries`
    move     move the mass of each row from `keys` to `to`, rank by rank; without `to`, spread it over all visible keys
    scale    multiply the `operand` ("key" or "value") of `keys` by `amount`
    zero     set the output of `heads` to zero
    sink     add a key with the score `amount` and the value zero
    freeze   use the queries and keys of the first of `steps` in all later steps, with the current values
    replace  show the model `token` at the positions of `keys`
    drop     hide the sample's first token (bos) from the model

    Example:
        edit = fs.Edit("bias", keys=fs.Keys("first"), amount=float("-inf"), layers=(3,))
        fs.decode(fs.load("twin:mdm"), "Where does Mira live?", new_tokens=4, edits=edit).text
    """

    primitive: str
    steps: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    queries: str | None = None  # a region, or masked | committed | prompt | others (all rows except those of the keys)
    keys: Keys | None = None
    to: Keys | None = None
    operand: str | None = None
    amount: float | None = None
    token: str | int | None = None
    name: str = ""  # the recipe as written

    def __post_init__(self) -> None:
        if self.primitive not in PRIMITIVES:
            raise unknown_choice("edit primitive", self.primitive, PRIMITIVES)
        for name in REQUIRED_FIELDS.get(self.primitive, ()):
            if getattr(self, name) is None:
                raise UserError(f"edit '{self.primitive}' needs `{name}`")
        if self.operand is not None and self.operand not in OPERANDS:
            raise unknown_choice("operand of an edit", self.operand, OPERANDS)
        if self.queries == OTHER_ROWS and (self.keys is None or not self.keys.reference.is_shared):
            raise UserError("queries='others' needs keys that all heads share: a region, positions or the first token")
        for name in ("steps", "layers", "heads"):
            values = getattr(self, name)
            is_valid = isinstance(values, Sequence) and values and all(_is_index(i) for i in values)
            if values is not None and not is_valid:
                raise UserError(f"{name} of an edit must be whole numbers of at least 0, got {values!r}")
            object.__setattr__(self, name, None if values is None else tuple(values))
        if self.amount is not None and not (self.hides_keys or math.isfinite(self.amount)):
            raise UserError(f"edit '{self.primitive}' takes a finite amount, got {self.amount}")
        if not isinstance(self.queries, str | None):
            raise UserError(f"queries of an edit must be the name of a region, got {self.queries!r}")
        if not isinstance(self.token, str | int | None) or isinstance(self.token, bool):
            raise UserError(f"token of an edit must be a text or a token id, got {self.token!r}")
        if self.primitive == "move":
            self._check_move()

    def _check_move(self) -> None:
        rules = [keys for keys in (self.keys, self.to) if keys is not None]
        if unranked := [keys.rule for keys in rules if keys.rule in ("least", "region")]:
            raise UserError(
                f"move needs a fixed number of keys, and '{unranked[0]}' does not have one; use another rule"
            )
        source = rules[0]
        if (source.rule == "first" and source.k > 1) or len(set(source.positions)) < len(source.positions):
            raise UserError("move can take the mass of a key only once; name each key once")

    def __str__(self) -> str:
        return self.name or self.primitive

    @property
    def hides_keys(self) -> bool:
        """Whether the edit hides its keys."""
        return self.primitive == "bias" and self.amount == -math.inf

    def is_active(self, step: int, layer: int) -> bool:
        """Whether the edit acts at this step and layer."""
        return (self.steps is None or step in self.steps) and (self.layers is None or layer in self.layers)


def _is_index(i: object) -> bool:
    """Whether `i` is a whole number of at least 0 (a bool is not)."""
    return isinstance(i, int) and not isinstance(i, bool) and i >= 0
