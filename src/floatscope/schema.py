"""What a watched forward leaves behind: every field, its axes, its type, the keep level that includes it.

This table is the single source for the reducers (what to compute), the trace (how to store it), the forecast (how
large it will be) and the docs. Axes are those of one sample at one step and layer; a stored trace puts `step` and
`layer` in front, except that fields with a `commit` axis are stored `[commit, layer, …]` and those of `SHARED` once per
*visibility* (layers with the same mask share them) as `[step, visibility, group, key]`.

Levels nest: `summary` ⊂ `heads` ⊂ `rows` ⊂ `full`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from floatscope.errors import UserError, unknown_choice

LEVELS = ("summary", "heads", "rows", "full")
GROUPS = ("all", "masked", "committed", "predicting")
RANKS = 16
KEY_STATS = ("qk", "cos", "key_norm", "value_norm", "output_norm", "norm")
TOP_STATS = ("lift", *KEY_STATS)
QUANTITIES = (*(f"lift_{g}" for g in GROUPS), *KEY_STATS)
ORDERS = ("n", "sum", "sumsq")
HEAD_STATS = ("entropy", "gini", "first", "output_norm", "query_norm")
MIN_VISIBLE_ROWS = 16
"""Lift is detected over keys seen by at least this many queries of the group (or by all of a smaller group)."""


@dataclass(frozen=True)
class Field:
    axes: tuple[str, ...]
    dtype: str  # as stored; computed in float32
    level: str
    meaning: str


FIELDS: dict[str, Field] = {
    "received": Field(("group", "key"), "float32", "summary", "received attention, mean scale, mean over heads"),
    "uniform": Field(
        ("group", "key"), "float32", "summary", "what `received` would be if every row attended uniformly"
    ),
    "seen": Field(("group", "key"), "int32", "summary", "how many rows of the group may see the key"),
    "eligible": Field(("group", "key"), "int8", "summary", "1 where enough rows see the key for its lift to be ranked"),
    "top_key": Field(
        ("head", "group", "rank"), "int32", "summary", "the 16 keys of largest lift; -1 where there are fewer"
    ),
    "top": Field(
        ("head", "group", "rank", "top_stat"), "float32", "summary", "lift, mean qk and cos, norms of those keys"
    ),
    "moments": Field(("head", "quantity", "order"), "float32", "summary", "n, Σ, Σ² over eligible keys"),
    "turned": Field(
        ("head", "rank"),
        "float32",
        "summary",
        "mean qk of the top keys of `all` up to this rank, were they turned to where the other eligible keys point",
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
    "rows": Field(("commit", "head", "key"), "float32", "rows", "whole predicting rows"),
    "matrix": Field(("head", "query", "key"), "float32", "full", "the attention matrix"),
}
SHARED = ("uniform", "seen", "eligible")


def fields_at_level(keep: str) -> tuple[str, ...]:
    """Names of the fields a keep level stores: `fields_of("heads")` is summary's and `received_heads`."""
    if keep not in LEVELS:
        raise unknown_choice("keep level", keep, LEVELS)
    reach = LEVELS.index(keep)
    return tuple(name for name, f in FIELDS.items() if LEVELS.index(f.level) <= reach)


def check_fields(names: tuple[str, ...]) -> tuple[str, ...]:
    """Every name is a field, and there is one at least."""
    for name in names:
        if name not in FIELDS:
            raise unknown_choice("field", name, FIELDS)
    if not names:
        raise UserError(f"nothing to keep: name at least one field of {', '.join(FIELDS)}")
    return names


class State(IntEnum):
    """What a canvas position is when the forward of a step begins."""

    PAD = 0
    PROMPT = 1
    MASKED = 2
    COMMITTED = 3
