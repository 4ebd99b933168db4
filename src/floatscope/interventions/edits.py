"""Edits as values: one class for each change inside an attention call, or of the canvas before it.

    Bias(Anchors(5), HIDE)                                  # hide the 5 anchors of the previous step
    Move(Anchors(1), to=FirstKey(), layers=(2, 3))          # move the anchor's mass to the first token
    ZeroHeads(layers=(3,), heads=(1,))                      # zero the output of a head

Every edit takes `steps`, `layers` and `heads`; None means all of them. Edits are checked when they are made, and need
no torch. `recipes` builds them from text, `intervention` applies them.

Example:
    hide_first = fs.edits.Bias(fs.edits.FirstKey(), fs.edits.HIDE, layers=(3,))
    fs.decode(fs.load("twin:mdm"), "Where does Mira live?", new_tokens=4, edits=hide_first).text
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from floatscope.errors import UserError
from floatscope.interventions.key_rules import (
    Anchors,
    FirstKey,
    KeyRule,
    LeastKeys,
    MiddleKeys,
    MiddleSameCount,
    PositionKeys,
    RandomKeys,
    RandomSameCount,
    RandomSameMass,
    RegionKeys,
    is_index,
)

__all__ = [
    "HIDE",
    "Anchors",
    "Bias",
    "CanvasEdit",
    "DropBos",
    "Edit",
    "FirstKey",
    "Freeze",
    "KeyEdit",
    "KeyRule",
    "LeastKeys",
    "MiddleKeys",
    "MiddleSameCount",
    "Move",
    "PositionKeys",
    "RandomKeys",
    "RandomSameCount",
    "RandomSameMass",
    "RegionKeys",
    "ReplaceToken",
    "ScaleKeys",
    "ScaleValues",
    "VirtualSink",
    "ZeroHeads",
]

HIDE = -math.inf
"""The `amount` of a `Bias` that hides its keys. The row of a key itself still sees it, so that no row is empty."""
OTHER_ROWS = "others"
"""`KeyEdit.queries`: all rows except those of the picked keys, or in a control, of the keys that it matches."""


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A change of the attention while a model decodes. Use one of its subclasses, in `fs.edits`, or a recipe.

    Args:
        steps: The steps at which the edit acts; None: all.
        layers: The layers in which it acts; None: all.
        heads: The heads on which it acts; None: all.
        name: The edit as people write it.

    Example:
        edit = fs.edits.Bias(fs.edits.FirstKey(), fs.edits.HIDE, layers=(3,))
        fs.decode(fs.load("twin:mdm"), "Where does Mira live?", new_tokens=4, edits=edit).text
    """

    verb: ClassVar[str] = "edit"
    """What the edit does, in messages."""
    is_exclusive: ClassVar[bool] = False
    """Whether two edits of this class cannot act at the same place."""

    steps: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        for name in ("steps", "layers", "heads"):
            values = getattr(self, name)
            is_valid = isinstance(values, Sequence) and values and all(is_index(i) for i in values)
            if values is not None and not is_valid:
                raise UserError(f"{name} of an edit must be whole numbers of at least 0, got {values!r}")
            object.__setattr__(self, name, None if values is None else tuple(values))

    def __str__(self) -> str:
        return self.name or self.verb

    @property
    def key_rules(self) -> tuple[KeyRule, ...]:
        """The rules of the edit: for the keys it acts on, and for their targets."""
        return ()

    @property
    def first_step(self) -> int:
        """The first step at which the edit changes something."""
        return 0 if self.steps is None else min(self.steps)

    def is_active(self, step: int, layer: int) -> bool:
        """Whether the edit acts at this step and layer."""
        return (self.steps is None or step in self.steps) and (self.layers is None or layer in self.layers)


# Edits of keys


@dataclass(frozen=True)
class KeyEdit(Edit):
    """An edit of the keys that a rule picks."""

    keys: KeyRule

    @property
    def key_rules(self) -> tuple[KeyRule, ...]:
        """The rule for the keys."""
        return (self.keys,)


@dataclass(frozen=True)
class RowEdit(KeyEdit):
    """An edit of keys in the rows of `queries`: a region, or masked, committed, prompt or others; None: all rows."""

    queries: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.queries, str | None):
            raise UserError(f"queries of an edit must be the name of a region, got {self.queries!r}")
        if self.queries == OTHER_ROWS and not self.keys.reference.is_shared:
            raise UserError("queries='others' needs keys that all heads share: a region, positions or the first token")


@dataclass(frozen=True)
class Bias(RowEdit):
    """Add `amount` to the scores of `keys` in the rows of `queries`; `HIDE` hides them."""

    verb: ClassVar[str] = "bias"

    amount: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.hides_keys:
            _check_finite(self, self.amount)

    @property
    def hides_keys(self) -> bool:
        """Whether the keys become invisible."""
        return self.amount == HIDE


@dataclass(frozen=True)
class Move(RowEdit):
    """Move the mass of each row from `keys` to the keys `to`, rank by rank; without `to`, spread it over all visible
    keys."""

    verb: ClassVar[str] = "move"
    is_exclusive: ClassVar[bool] = True

    to: KeyRule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for rule in self.key_rules:
            if not rule.has_fixed_count:
                kind = type(rule).__name__
                raise UserError(f"move needs a fixed number of keys, and {kind} does not have one; use another rule")
        positions = self.keys.positions if isinstance(self.keys, PositionKeys) else ()
        if (isinstance(self.keys, FirstKey) and self.keys.count > 1) or len(set(positions)) < len(positions):
            raise UserError("move can take the mass of a key only once; name each key once")

    @property
    def key_rules(self) -> tuple[KeyRule, ...]:
        """The rules for the keys and their targets."""
        return (self.keys,) if self.to is None else (self.keys, self.to)


@dataclass(frozen=True)
class Scaling(KeyEdit):
    """An edit that multiplies vectors of `keys` by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_finite(self, self.factor)


@dataclass(frozen=True)
class ScaleKeys(Scaling):
    """Multiply the key vectors of `keys` by `factor`."""

    verb: ClassVar[str] = "scale keys"


@dataclass(frozen=True)
class ScaleValues(Scaling):
    """Multiply the value vectors of `keys` by `factor`."""

    verb: ClassVar[str] = "scale values"


# Edits of heads


@dataclass(frozen=True)
class ZeroHeads(Edit):
    """Set the output of `heads` to zero."""

    verb: ClassVar[str] = "zero heads"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads is None:
            raise UserError("edit 'zero heads' needs `heads`")


@dataclass(frozen=True)
class VirtualSink(Edit):
    """Add a key with this score and a value of zero."""

    verb: ClassVar[str] = "virtual sink"
    is_exclusive: ClassVar[bool] = True

    score: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_finite(self, self.score)


@dataclass(frozen=True)
class Freeze(Edit):
    """Use the queries and keys of `step` in all later steps, with their own values."""

    verb: ClassVar[str] = "freeze"
    is_exclusive: ClassVar[bool] = True

    step: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None:
            raise UserError("edit 'freeze' sets its own steps; leave steps out")
        if not is_index(self.step):
            raise UserError(f"step of an edit must be a whole number of at least 0, got {self.step!r}")

    @property
    def first_step(self) -> int:
        """The step after the one that is repeated."""
        return self.step + 1


# Edits of the canvas


@dataclass(frozen=True)
class CanvasEdit(Edit):
    """An edit of what the model sees, before any attention call."""

    def acts_on(self, step: int) -> bool:
        """Whether the edit acts on the canvas of this step."""
        return self.steps is None or step in self.steps


@dataclass(frozen=True)
class ReplaceToken(CanvasEdit):
    """Show the model `token` (newline, mask, a text of one token, an id) at the positions of `keys`."""

    verb: ClassVar[str] = "replace token"

    keys: KeyRule
    token: str | int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.token, str | int) or isinstance(self.token, bool):
            raise UserError(f"token of an edit must be a text or a token id, got {self.token!r}")

    @property
    def key_rules(self) -> tuple[KeyRule, ...]:
        """The rule for the keys."""
        return (self.keys,)


@dataclass(frozen=True)
class DropBos(CanvasEdit):
    """Hide the sample's first token, if it is the bos, from the model."""

    verb: ClassVar[str] = "drop bos"


def _check_finite(edit: Edit, amount: float) -> None:
    if not math.isfinite(amount):
        raise UserError(f"edit '{edit.verb}' takes a finite amount, got {amount}")
