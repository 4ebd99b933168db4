"""Rules that pick the keys an edit acts on, one class each; they are checked when they are made, and need no torch.

    Anchors(5)                              # the 5 keys with the largest lift at the previous step
    Anchors(5, only="structural")           # those of the 5 that are structure
    RegionKeys("gold")                      # the keys of a region
    RandomSameMass(Anchors(5), seed=1)      # a control: other keys that hold as much attention

A rule picks keys separately for each sample, layer and head. `key_selection` applies it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from floatscope.errors import UserError, unknown_choice

ANCHOR_STEPS = ("before", "now", "first")
ANCHOR_ROWS = ("all", "masked")
ANCHOR_TYPES = ("all", "first", "structural", "evidence", "all but evidence")


class RankingSource(NamedTuple):
    """Where the lift that a rule ranks keys by comes from."""

    of: str = "before"  # the step: the previous one | now | the first one
    layer: int | None = None  # None: the edited layer
    rows: str = "all"  # lift over all rows | masked: over rows on a mask


@dataclass(frozen=True)
class KeyRule:
    """A rule that picks keys. Use one of the classes below."""

    has_fixed_count: ClassVar[bool] = True
    """Whether the number of keys is known before the canvas is."""

    @property
    def ranking(self) -> RankingSource | None:
        """Where the lift comes from; None if all heads and layers pick the same keys, whatever their lift."""
        return None

    @property
    def reference(self) -> KeyRule:
        """The rule that a control matches; the rule itself if it is not a control."""
        return self

    @property
    def is_shared(self) -> bool:
        """Whether all heads and layers pick the same keys."""
        return self.ranking is None

    @property
    def spares_evidence(self) -> bool:
        """Whether the rule leaves the evidence out."""
        return False

    @property
    def needs_structure(self) -> bool:
        """Whether the rule must know which tokens are structure."""
        return False


# Rules that all heads and layers share


@dataclass(frozen=True)
class FirstKey(KeyRule):
    """The sample's first token, `count` times if it is the target of several keys."""

    count: int = 1

    def __post_init__(self) -> None:
        _check_count("count", self.count)


@dataclass(frozen=True)
class PositionKeys(KeyRule):
    """Positions, counted from the sample's first token."""

    positions: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", tuple(self.positions))
        if not all(is_index(position) for position in self.positions):
            raise UserError(f"positions of a key rule must be whole numbers of at least 0, got {self.positions!r}")


@dataclass(frozen=True)
class RegionKeys(KeyRule):
    """All keys of a region, or of a state: masked, committed or prompt."""

    has_fixed_count: ClassVar[bool] = False

    region: str

    def __post_init__(self) -> None:
        if not isinstance(self.region, str):
            raise UserError(f"region of a key rule must be the name of a region, got {self.region!r}")


# Rules that rank the keys of each head by their lift


@dataclass(frozen=True)
class RankedKeys(KeyRule):
    """A rule that ranks the keys of each head, by the lift at the previous step unless it says otherwise."""

    @property
    def ranking(self) -> RankingSource:
        """Where the lift comes from."""
        return RankingSource()


@dataclass(frozen=True)
class KeysByLift(RankedKeys):
    """Keys picked by their lift in the attention before the edit, at a step, in a layer, over some rows."""

    k: int = 1
    of: str = "before"
    layer: int | None = None
    rows: str = "all"

    def __post_init__(self) -> None:
        _check_count("k", self.k)
        _check_source(self.of, self.layer, self.rows)

    @property
    def ranking(self) -> RankingSource:
        """Where the lift comes from."""
        return RankingSource(self.of, self.layer, self.rows)


@dataclass(frozen=True)
class Anchors(KeysByLift):
    """The `k` keys with the largest lift, in the attention before the edit.

    `of` is their step (`before`, `now` or `first`), `layer` their layer (None: the edited one), `rows` the rows that
    the lift is over (`all` or `masked`). `only` restricts them by type: of the `k` anchors, `first` keeps the sample's
    first token, `structural` bos, special tokens, masks, template, punctuation and whitespace, `evidence` the region of
    that name, and `all but evidence` the others. A head may have no anchor of a type.
    """

    only: str = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.only not in ANCHOR_TYPES:
            raise unknown_choice("type of anchors", str(self.only), ANCHOR_TYPES)

    @property
    def spares_evidence(self) -> bool:
        """Whether the anchors exclude the evidence."""
        return self.only == "all but evidence"

    @property
    def needs_structure(self) -> bool:
        """Whether only structural anchors are picked."""
        return self.only == "structural"


@dataclass(frozen=True)
class MiddleKeys(KeysByLift):
    """`k` keys with a lift of middle rank."""


@dataclass(frozen=True)
class LeastKeys(RankedKeys):
    """All keys except those with the largest lift, of which `keep` are left: a number, or a share between 0 and 1."""

    has_fixed_count: ClassVar[bool] = False

    keep: int | float
    of: str = "before"
    layer: int | None = None
    rows: str = "all"

    def __post_init__(self) -> None:
        is_share = isinstance(self.keep, float) and 0 < self.keep < 1
        if not is_share and not (is_index(self.keep) and self.keep >= 1):
            raise UserError(f"keep must be a number of keys, 1 or more, or a share between 0 and 1, got {self.keep!r}")
        _check_source(self.of, self.layer, self.rows)

    @property
    def ranking(self) -> RankingSource:
        """Where the lift comes from."""
        return RankingSource(self.of, self.layer, self.rows)


@dataclass(frozen=True)
class RandomKeys(RankedKeys):
    """`k` random keys among those that could be anchors."""

    k: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        _check_count("k", self.k)


# Controls: keys that match those of another rule


@dataclass(frozen=True)
class MatchedKeys(KeyRule):
    """The keys of a control. It picks none where `matched` picks none, and no evidence if `matched` spares it."""

    matched: KeyRule
    seed: int = 0

    @property
    def ranking(self) -> RankingSource | None:
        """Where the lift comes from."""
        return self.matched.ranking

    @property
    def reference(self) -> KeyRule:
        """The rule that is matched."""
        return self.matched

    @property
    def spares_evidence(self) -> bool:
        """Whether the matched rule leaves the evidence out."""
        return self.matched.spares_evidence


@dataclass(frozen=True)
class RandomSameCount(MatchedKeys):
    """As many random keys as `matched` picks.

    If `matched` picks the same keys for all heads, layers and steps, keys are drawn in one order for all of them.
    """


@dataclass(frozen=True)
class RandomSameMass(MatchedKeys):
    """Random keys that `matched` does not pick, until they hold as much attention."""

    @property
    def is_shared(self) -> bool:
        """Heads hold different amounts of attention, so they pick different keys."""
        return False


@dataclass(frozen=True)
class MiddleSameCount(MatchedKeys):
    """As many keys of middle rank as `matched`, a rule for anchors, picks."""

    matched: Anchors


def is_index(i: object) -> bool:
    """Whether `i` is a whole number of at least 0 (a bool is not)."""
    return isinstance(i, int) and not isinstance(i, bool) and i >= 0


def _check_count(name: str, count: object) -> None:
    if not (is_index(count) and count):
        raise UserError(f"{name} must be a number of keys, 1 or more, got {count!r}")


def _check_source(of: str, layer: int | None, rows: str) -> None:
    for kind, value, allowed in (("step of anchors", of, ANCHOR_STEPS), ("rows of anchors", rows, ANCHOR_ROWS)):
        if value not in allowed:
            raise unknown_choice(kind, str(value), allowed)
    if layer is not None and not is_index(layer):
        raise UserError(f"layer of a key rule must be whole numbers of at least 0, got {layer!r}")
