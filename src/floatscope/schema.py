"""The fields of a watched forward: their axes, their types, and the level that includes each.

    fields_at_level("heads")                         # the fields of "summary", and `received_heads`
    FIELDS["received"].axes                          # ("group", "key")

This table is the single source for the reductions (what to compute), the trace (how to store it), the forecast (how
large it becomes) and the docs. Axes are those of one sample at one step and layer. A stored trace puts `step` and
`layer` in front, with two exceptions: fields with a `commit` axis are stored as `[commit, layer, …]`, and the fields of
SHARED once per *visibility* (layers with the same mask share them), as `[step, visibility, group, key]`.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from floatscope.errors import UserError, unknown_choice


class State(IntEnum):
    """The state of a canvas position when the forward of a step begins.

    Example:
        out = fs.decode(fs.load("twin:mdm"), "What floats?", new_tokens=4, steps=2)
        out.steps[1].before.states == fs.State.COMMITTED  # [batch, position]
    """

    PAD = 0
    PROMPT = 1
    MASKED = 2
    COMMITTED = 3
    NOISE = 4  # of a model without a mask token: a random token, which the last step did not accept


UNDECIDED = (State.MASKED, State.NOISE)
"""The states of positions that have no committed token."""


class Paradigm(StrEnum):
    """How a model decodes.

    Example:
        fs.load("twin:arm").spec.paradigm is fs.Paradigm.ARM
        fs.Paradigm("mdm").label  # 'masked diffusion'
    """

    MDM = "mdm"
    ARM = "arm"

    @property
    def label(self) -> str:
        """The paradigm in words."""
        return "masked diffusion" if self is Paradigm.MDM else "autoregressive"

    @classmethod
    def _missing_(cls, value: object) -> Paradigm:
        raise unknown_choice("paradigm", str(value), list(cls))


class RowSource(StrEnum):
    """Which rows the forward of a step computes: all rows of the canvas; the new ones, with the others cached; or those
    of the block that is being filled, at every step again, with the finished blocks cached."""

    ALL = "all"
    CACHE = "cache"
    BLOCK = "block"


class MaskKind(StrEnum):
    """Which keys a row sees: all, those up to its own, the last `size` of these, or all up to the end of its block. A
    `rule` and a `mask` have no structure that can be written down."""

    FULL = "full"
    CAUSAL = "causal"
    WINDOW = "window"
    BLOCK = "block"
    RULE = "rule"
    MASK = "mask"


@dataclass(frozen=True)
class MaskStructure:
    """The attention mask of a layer: its kind, and the size of its window or blocks, which count from the first token
    of a sample. A row stands at its own position of the canvas."""

    kind: MaskKind
    size: int = 0

    @property
    def label(self) -> str:
        """The mask in words."""
        return MASK_LABELS[self.kind].format(size=self.size)

    @property
    def is_known(self) -> bool:
        """Whether kind and size say which keys a row sees."""
        return self.kind not in (MaskKind.RULE, MaskKind.MASK)


MASK_LABELS = {
    MaskKind.FULL: "to all positions",
    MaskKind.CAUSAL: "to positions up to its own",
    MaskKind.WINDOW: "to the last {size} positions up to its own",
    MaskKind.BLOCK: "to positions up to the end of its block of {size}",
    MaskKind.RULE: "by a rule of the model",
    MaskKind.MASK: "by a mask of the model",
}
LEVELS = ("summary", "heads", "rows", "full")
"""Each level includes the fields of those before it."""
ON_REQUEST = "on request"
"""Stands in place of a level for fields that no level includes."""
MIN_VISIBLE_ROWS = 16
"""The lift of a key is ranked if at least this many rows of the group see it (all rows, in a smaller group)."""

MIN_ANCHOR_LIFT = 2.0
"""The top key is an anchor if its lift is at least this; below it the leader is a matter of chance."""

# The labels of the axes

GROUPS = ("all", "masked", "committed", "predicting")
RANKS = 16
"""The length of a `rank` axis: how many top keys are stored."""
KEY_STATS = ("qk", "cos", "key_norm", "value_norm", "output_norm", "norm")
TOP_STATS = ("lift", *KEY_STATS)
QUANTITIES = (*(f"lift_{g}" for g in GROUPS), *KEY_STATS)
ORDERS = ("n", "sum", "sumsq")
HEAD_STATS = ("entropy", "gini", "first", "output_norm", "query_norm")


@dataclass(frozen=True)
class Field:
    """One field: its axes, the dtype it is stored in (it is computed in float32), its level and its meaning."""

    axes: tuple[str, ...]
    dtype: str
    level: str
    meaning: str


FIELDS: dict[str, Field] = {
    "received": Field(("group", "key"), "float32", "summary", "received attention, mean scale, mean over heads"),
    "uniform": Field(("group", "key"), "float32", "summary", "`received` if every row attended uniformly"),
    "visible_rows": Field(("group", "key"), "int32", "summary", "how many rows of the group may see the key"),
    "eligible": Field(("group", "key"), "int8", "summary", "1 where enough rows see the key for its lift to be ranked"),
    "top_key": Field(
        ("head", "group", "rank"), "int32", "summary", "the 16 keys of largest lift; -1 where there are fewer"
    ),
    "top": Field(
        ("head", "group", "rank", "top_stat"), "float32", "summary", "lift, mean qk and cos, norms of those keys"
    ),
    "moments": Field(("head", "quantity", "order"), "float32", "summary", "n, Σ, Σ² over eligible keys"),
    "score_at_mean_direction": Field(
        ("head", "rank"),
        "float32",
        "summary",
        "mean qk of the top keys of `all` up to this rank if they pointed in the mean direction of the other eligible"
        " keys",
    ),
    "key_stats": Field(("key_stat", "key"), "float16", "summary", "mean qk and cos, norms; mean over heads"),
    "contribution": Field(
        ("group", "key"), "float32", "summary", "received attention times the norm of W_O v, mean over heads"
    ),
    "head_stats": Field(
        ("head", "head_stat"), "float32", "summary", "row entropy / log n, Gini, first-key mass, norms"
    ),
    "regions": Field(("head", "region", "key_region"), "float16", "summary", "mass a region's rows put on each region"),
    "rollout": Field(("region", "key_region"), "float32", "summary", "the same after Abnar rollout up to this layer"),
    "residual": Field(("key",), "float32", "summary", "norm of the residual stream entering the layer"),
    "row_key": Field(("commit", "head", "rank"), "int32", "summary", "16 largest keys of each predicting row"),
    "row_mass": Field(("commit", "head", "rank"), "float32", "summary", "their attention"),
    "row_regions": Field(
        ("commit", "head", "key_region"), "float16", "summary", "mass of each predicting row on regions"
    ),
    "received_heads": Field(("head", "group", "key"), "float32", "heads", "received attention per head, mean scale"),
    "rows": Field(("commit", "head", "key"), "float32", "rows", "complete predicting rows"),
    "matrix": Field(("head", "query", "key"), "float32", "full", "the attention matrix"),
    "expert_ids": Field(
        ("key", "expert_rank"), "int16", ON_REQUEST, "the experts of each token, by weight; -1 for cached positions"
    ),
    "expert_weights": Field(
        ("key", "expert_rank"),
        "float16",
        ON_REQUEST,
        "the factors by which the outputs of these experts are multiplied",
    ),
}
EXPERT_FIELDS = ("expert_ids", "expert_weights")
"""The fields that `Watch(experts=True)` adds."""
SHARED = ("uniform", "visible_rows", "eligible")
"""Fields that layers with the same visibility share."""


def fields_at_level(level: str) -> tuple[str, ...]:
    """The names of the fields that a level includes."""
    if level not in LEVELS:
        raise unknown_choice("level", level, LEVELS)
    included = LEVELS[: LEVELS.index(level) + 1]
    return tuple(name for name, f in FIELDS.items() if f.level in included)


def check_fields(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names if there is at least one and all are fields; raise a UserError otherwise."""
    for name in names:
        if name not in FIELDS:
            raise unknown_choice("field", name, FIELDS)
    if not names:
        raise UserError(f"no fields to capture: name at least one of {', '.join(FIELDS)}")
    return names
