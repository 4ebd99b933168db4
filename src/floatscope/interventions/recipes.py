"""Edits as people write them, and the control that belongs to each.

    parse_edits("mask_anchors(k=5)")                    # a recipe; its arguments are literals
    parse_edits(["pin(k=1)", ZeroHeads(heads=(3,))]) # several edits, in order
    build_control(edits, "mass", draw=1)                # random keys that hold as much attention
    build_control(edits, "random", draw=1)              # the same number of random keys, or of other heads

Every recipe also takes `steps`, `layers` and `heads`; without them it acts everywhere. `only` restricts the anchors by
type (`key_rules.ANCHOR_TYPES`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from floatscope.errors import UserError, unknown_choice
from floatscope.interventions.edits import (
    HIDE,
    OTHER_ROWS,
    Anchors,
    Bias,
    DropBos,
    Edit,
    FirstKey,
    Freeze,
    KeyEdit,
    LeastKeys,
    MiddleSameCount,
    Move,
    RandomSameCount,
    RandomSameMass,
    RegionKeys,
    ReplaceToken,
    ScaleKeys,
    ScaleValues,
    VirtualSink,
    ZeroHeads,
)
from floatscope.syntax import merge_arguments, parse_call

CONTROLS = ("mass", "random", "middle")
SCOPE_ARGUMENTS = ("steps", "layers", "heads")


@dataclass(frozen=True)
class Recipe:
    """A row of `RECIPES`: what the recipe does, how its edits are built, and its arguments with their defaults."""

    description: str
    build: Callable[..., list[Edit]]
    defaults: Mapping[str, Any]


def _mask_anchors(k: int, of: str, only: str) -> list[Edit]:
    return [Bias(Anchors(k, of, only=only), HIDE)]


def _pin(k: int, layer: int | None, only: str) -> list[Edit]:
    target = Anchors(k, "first" if layer is None else "now", layer, only=only)
    return [Move(Anchors(k, "now", only=only), to=target)]


def _freeze(step: int) -> list[Edit]:
    return [Freeze(step)]


def _move_to_first(k: int, only: str) -> list[Edit]:
    return [Move(Anchors(k, "now", only=only), to=FirstKey(k))]


def _spread(k: int, only: str) -> list[Edit]:
    return [Move(Anchors(k, "now", only=only))]


def _virtual_sink(score: float) -> list[Edit]:
    return [VirtualSink(score)]


def _scale_values(k: int, factor: float, only: str) -> list[Edit]:
    return [ScaleValues(Anchors(k, only=only), factor)]


def _scale_keys(k: int, factor: float, only: str) -> list[Edit]:
    return [ScaleKeys(Anchors(k, only=only), factor)]


def _replace_token(k: int, token: str | int, only: str) -> list[Edit]:
    return [ReplaceToken(Anchors(k, only=only), token)]


def _drop_bos() -> list[Edit]:
    return [DropBos()]


def _zero_heads(pairs: Any) -> list[Edit]:
    try:
        by_layer: dict[int, list[int]] = {}
        for layer, head in pairs:
            if type(layer) is not int or type(head) is not int:
                raise TypeError
            by_layer.setdefault(layer, []).append(head)
    except (TypeError, ValueError):
        raise UserError(f"zero_heads takes pairs of layer and head, as in pairs=[(3, 1)], got {pairs!r}") from None
    if not by_layer:
        raise UserError("zero_heads needs the heads, as in zero_heads(pairs=[(3, 1), (4, 0)])")
    return [ZeroHeads(layers=(layer,), heads=tuple(sorted(set(heads)))) for layer, heads in sorted(by_layer.items())]


def _knock_out(queries: str, keys: str) -> list[Edit]:
    return [Bias(RegionKeys(keys), HIDE, queries=None if queries == "all" else queries)]


def _blank(region: str) -> list[Edit]:
    return [Bias(RegionKeys(region), HIDE, queries=OTHER_ROWS)]


def _evict(keep: int | float, by: str) -> list[Edit]:
    rows = {"received": "all", "masked": "masked"}
    if by not in rows:
        raise unknown_choice("score to evict by", by, rows)
    return [Bias(LeastKeys(keep, rows=rows[by]), HIDE)]


RECIPES = {
    "mask_anchors": Recipe(
        "hides the k anchors of a step (of: before, now or first) from every row except their own",
        _mask_anchors,
        {"k": 5, "of": "before", "only": "all"},
    ),
    "pin": Recipe(
        "moves the mass on the k anchors to those of the first step, or of the given layer",
        _pin,
        {"k": 1, "layer": None, "only": "all but evidence"},
    ),
    "freeze": Recipe(
        "repeats the attention pattern of that step in all later steps, with their own values", _freeze, {"step": 0}
    ),
    "move_to_first": Recipe(
        "moves the mass on the k anchors to the first token", _move_to_first, {"k": 1, "only": "all"}
    ),
    "spread": Recipe(
        "spreads the mass on the k anchors over all keys visible to a row", _spread, {"k": 1, "only": "all"}
    ),
    "virtual_sink": Recipe("adds a key with this score and a value of zero", _virtual_sink, {"score": 0.0}),
    "scale_values": Recipe(
        "multiplies the values of the k anchors by a factor", _scale_values, {"k": 1, "factor": 0.0, "only": "all"}
    ),
    "scale_keys": Recipe(
        "multiplies the keys of the k anchors by a factor", _scale_keys, {"k": 1, "factor": 0.5, "only": "all"}
    ),
    "replace_token": Recipe(
        "replaces the token at the k anchors: newline, mask, a text, an id",
        _replace_token,
        {"k": 1, "token": "newline", "only": "all"},
    ),
    "drop_bos": Recipe("removes the first token", _drop_bos, {}),
    "zero_heads": Recipe("sets the output of heads to zero, given as (layer, head)", _zero_heads, {"pairs": ()}),
    "knock_out": Recipe(
        "hides a region from the rows of a region (or all, masked, committed, prompt)",
        _knock_out,
        {"queries": "all", "keys": "gold"},
    ),
    "blank": Recipe("hides a region from all rows outside it", _blank, {"region": "gold"}),
    "evict": Recipe(
        "keeps only the keys of largest lift, a number or a share of them", _evict, {"keep": 0.5, "by": "received"}
    ),
}  # fmt: skip


def parse_edits(edits: str | Edit | Sequence[str | Edit]) -> tuple[Edit, ...]:
    """Turn recipes and `Edit`s, one or several, into a tuple of `Edit`s in the same order."""
    items = edits if isinstance(edits, list | tuple) else [edits]
    parsed: list[Edit] = []
    for item in items:
        if isinstance(item, Edit):
            parsed.append(item)
        elif isinstance(item, str):
            parsed += _parse_recipe(item)
        else:
            raise UserError(f"an edit must be a recipe such as 'mask_anchors(k=5)' or an fs.Edit, got {item!r}")
    return tuple(parsed)


def _parse_recipe(text: str) -> list[Edit]:
    name, arguments = parse_call(text, "mask_anchors(k=5)")
    if name not in RECIPES:
        raise unknown_choice("edit", name, RECIPES)
    recipe = RECIPES[name]
    scope: dict[str, Any] = {
        key: _parse_indices(name, key, arguments.pop(key)) for key in SCOPE_ARGUMENTS if key in arguments
    }
    edits = recipe.build(**_fill_arguments(name, arguments, recipe.defaults))
    if fixed := [key for key in scope if any(getattr(edit, key) is not None for edit in edits)]:
        raise UserError(f"edit '{name}' sets its own {fixed[0]}; leave {fixed[0]} out")
    return [replace(edit, name=text.strip(), **scope) for edit in edits]


def _fill_arguments(name: str, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    for argument in arguments:
        if argument not in defaults:
            raise unknown_choice(f"argument of edit '{name}'", argument, [*defaults, *SCOPE_ARGUMENTS])
    keeps_number = type(arguments.get("keep")) is int  # a number of keys instead of a share of them
    others = {key: value for key, value in arguments.items() if not (keeps_number and key == "keep")}
    filled = merge_arguments("edit", name, others, defaults)
    for argument, default in defaults.items():
        value = filled[argument]
        is_text = isinstance(value, str) or (argument == "token" and type(value) is int)
        if isinstance(default, str) and not is_text:
            raise UserError(f"edit '{name}' takes a text for {argument}, got {value!r}")
        if default is None and value is not None and type(value) is not int:
            raise UserError(f"edit '{name}' takes a whole number for {argument}, got {value!r}")
    return {**filled, "keep": arguments["keep"]} if keeps_number else filled


def _parse_indices(name: str, key: str, value: Any) -> tuple[int, ...]:
    indices = (value,) if type(value) is int else value
    if not isinstance(indices, list | tuple) or not indices or not all(type(i) is int and i >= 0 for i in indices):
        raise UserError(f"edit '{name}' takes whole numbers for {key}, as in {key}=[0, 1], got {value!r}")
    return tuple(indices)


def build_control(
    edits: Sequence[Edit], control: str = "random", draw: int = 0, heads: int | None = None
) -> tuple[Edit, ...]:
    """Build the matched control of edits: the same edits on other keys, or on other heads of the same layers.

    Args:
        edits: from `parse_edits`.
        control: "mass" (random other keys that hold as much attention), "random" (as many random keys) or "middle" (as
            many keys of middle rank).
        draw: the seed of a random control.
        heads: the number of heads in a layer, for edits of heads.
    """
    if control not in CONTROLS:
        raise unknown_choice("control", control, CONTROLS)
    return tuple(_build_control(edit, control, draw, heads) for edit in edits)


def can_match_mass(edits: Sequence[Edit]) -> bool:
    """Whether edits have a control of equal mass: they all pick keys of an attention call."""
    return all(isinstance(edit, KeyEdit) for edit in edits)


def _build_control(edit: Edit, control: str, draw: int, heads: int | None) -> Edit:
    name = f"{edit}, {control}" if control == "middle" else f"{edit}, {control} {draw}"
    if control == "mass" and not isinstance(edit, KeyEdit):
        raise UserError(f"{edit} has no control of equal mass: it picks no keys of an attention call; use 'random'")
    if control == "middle":
        if not isinstance(edit, KeyEdit | ReplaceToken) or not isinstance(edit.keys, Anchors):
            raise UserError(
                f"control 'middle' replaces anchors, and {edit} does not pick anchors; use control 'random'"
            )
        return replace(edit, keys=MiddleSameCount(edit.keys), name=name)
    if isinstance(edit, ZeroHeads):
        return replace(edit, heads=_draw_other_heads(edit, draw, heads), name=name)
    if not isinstance(edit, KeyEdit | ReplaceToken):
        raise UserError(f"{edit} has no matched control: it picks no keys and no heads; use --control none")
    matching = RandomSameMass if control == "mass" else RandomSameCount
    return replace(edit, keys=matching(edit.keys, seed=draw), name=name)


def _draw_other_heads(edit: ZeroHeads, draw: int, heads: int | None) -> tuple[int, ...]:
    """As many other heads of the layer as the edit zeroes."""
    if heads is None or edit.heads is None:
        raise UserError("the control of zeroed heads needs `heads`, the number of heads in a layer")
    others = [h for h in range(heads) if h not in edit.heads]
    if len(others) < len(edit.heads):
        raise UserError(
            f"{edit} zeroes {len(edit.heads)} of {heads} heads in a layer, which leaves too few for a control;"
            " zero at most half of a layer"
        )
    return tuple(sorted(random.Random(f"{draw} {edit.layers} {edit.heads}").sample(others, len(edit.heads))))
