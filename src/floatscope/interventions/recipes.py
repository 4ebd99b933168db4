"""Edits as people write them, and the control that belongs to each.

    edits_of("mask_anchors(k=5)")                    # a recipe, its arguments literal
    edits_of(["pin(k=1)", Edit("zero", heads=(3,))]) # several, in order
    controlled(edits, "random", draw=1)              # the same number of random keys, or of other heads of those layers

Every recipe takes `steps`, `layers` and `heads` besides its own arguments; without them it acts everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from floatscope.errors import UserError, unknown_choice
from floatscope.interventions.edits import OTHERS, Edit, Keys
from floatscope.syntax import merge_arguments, parse_call

CONTROLS = ("random", "middle")
WHERE: dict[str, Any] = {"steps": None, "layers": None, "heads": None}


@dataclass(frozen=True)
class Recipe:
    about: str
    make: Callable[..., list[Edit]]
    defaults: Mapping[str, Any]


def mask_anchors(k: int, of: str) -> list[Edit]:
    return [Edit("bias", keys=Keys("anchors", k, of), amount=-float("inf"))]


def pin(k: int, layer: int | None) -> list[Edit]:
    to = Keys("anchors", k, "first") if layer is None else Keys("anchors", k, "now", layer)
    return [Edit("move", keys=Keys("anchors", k, "now"), to=to)]


def freeze(step: int) -> list[Edit]:
    return [Edit("freeze", steps=(step,))]


def move_to_first(k: int) -> list[Edit]:
    return [Edit("move", keys=Keys("anchors", k, "now"), to=Keys("first", k))]


def spread(k: int) -> list[Edit]:
    return [Edit("move", keys=Keys("anchors", k, "now"))]


def virtual_sink(score: float) -> list[Edit]:
    return [Edit("sink", amount=score)]


def scale_values(k: int, factor: float) -> list[Edit]:
    return [Edit("scale", keys=Keys("anchors", k), what="value", amount=factor)]


def scale_keys(k: int, factor: float) -> list[Edit]:
    return [Edit("scale", keys=Keys("anchors", k), what="key", amount=factor)]


def replace_token(k: int, token: str | int) -> list[Edit]:
    return [Edit("replace", keys=Keys("anchors", k), token=token)]


def drop_bos() -> list[Edit]:
    return [Edit("drop")]


def zero_heads(pairs: Any) -> list[Edit]:
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
    return [Edit("zero", layers=(layer,), heads=tuple(sorted(set(heads)))) for layer, heads in sorted(by_layer.items())]


def knock_out(queries: str, keys: str) -> list[Edit]:
    hidden = Keys("region", region=keys)
    return [Edit("bias", queries=None if queries == "all" else queries, keys=hidden, amount=-float("inf"))]


def blank(region: str) -> list[Edit]:
    return [Edit("bias", queries=OTHERS, keys=Keys("region", region=region), amount=-float("inf"))]


def evict(keep: int | float, by: str) -> list[Edit]:
    rows = {"received": "all", "masked": "masked"}
    if by not in rows:
        raise unknown_choice("score to evict by", by, rows)
    return [Edit("bias", keys=Keys("least", keep, rows=rows[by]), amount=-float("inf"))]


RECIPES = {
    "mask_anchors": Recipe(
        "the k anchors of the step before are hidden from every row but their own",
        mask_anchors,
        {"k": 5, "of": "before"},
    ),
    "pin": Recipe(
        "the mass on the k anchors goes to those of the first step, or, from a layer on, to that layer's",
        pin,
        {"k": 1, "layer": None},
    ),
    "freeze": Recipe("every later step attends as that step did, to today's values", freeze, {"step": 0}),
    "move_to_first": Recipe("the mass on the k anchors goes to the first token", move_to_first, {"k": 1}),
    "spread": Recipe("the mass on the k anchors is spread over all a row sees", spread, {"k": 1}),
    "virtual_sink": Recipe("an extra key with this score and a value of zero", virtual_sink, {"score": 0.0}),
    "scale_values": Recipe("the values of the k anchors times a factor", scale_values, {"k": 1, "factor": 0.0}),
    "scale_keys": Recipe("the keys of the k anchors times a factor", scale_keys, {"k": 1, "factor": 0.5}),
    "replace_token": Recipe(
        "another token stands at the k anchors: newline, mask, a text, an id",
        replace_token,
        {"k": 1, "token": "newline"},
    ),
    "drop_bos": Recipe("the first token is not there", drop_bos, {}),
    "zero_heads": Recipe("the output of heads is zero, given as (layer, head)", zero_heads, {"pairs": ()}),
    "knock_out": Recipe(
        "rows of a region (or all, masked, committed, prompt) do not see a region",
        knock_out,
        {"queries": "all", "keys": "gold"},
    ),
    "blank": Recipe("no row outside a region sees it", blank, {"region": "gold"}),
    "evict": Recipe(
        "only the keys of largest lift are kept, so many or that share", evict, {"keep": 0.5, "by": "received"}
    ),
}  # fmt: skip


def parse_edits(given: str | Edit | Sequence[str | Edit]) -> tuple[Edit, ...]:
    """Edits in order; recipes by name."""
    several = given if isinstance(given, list | tuple) else [given]
    found: list[Edit] = []
    for one in several:
        if isinstance(one, Edit):
            found.append(one)
        elif isinstance(one, str):
            found += _recipe(one)
        else:
            raise UserError(f"an edit is a recipe such as 'mask_anchors(k=5)' or a fs.Edit, got {one!r}")
    return tuple(found)


def _recipe(text: str) -> list[Edit]:
    name, given = parse_call(text, "mask_anchors(k=5)")
    if name not in RECIPES:
        raise unknown_choice("edit", name, RECIPES)
    recipe = RECIPES[name]
    where: dict[str, Any] = {key: _numbers(name, key, given.pop(key)) for key in WHERE if key in given}
    made = recipe.make(**_arguments(name, given, recipe.defaults))
    if fixed := [key for key in where if any(getattr(edit, key) is not None for edit in made)]:
        raise UserError(f"edit '{name}' says itself which {fixed[0]} it acts on; leave {fixed[0]} out")
    return [replace(edit, name=text.strip(), **where) for edit in made]


def _arguments(name: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    for argument in given:
        if argument not in defaults:
            raise unknown_choice(f"argument of edit '{name}'", argument, [*defaults, *WHERE])
    share = type(given.get("keep")) is int  # a number of keys instead of a share of them
    filled = merge_arguments("edit", name, {k: v for k, v in given.items() if not (share and k == "keep")}, defaults)
    for argument, default in defaults.items():
        value = filled[argument]
        text = isinstance(value, str) or (argument == "token" and type(value) is int)
        if isinstance(default, str) and not text:
            raise UserError(f"edit '{name}' takes a text for {argument}, got {value!r}")
        if default is None and value is not None and type(value) is not int:
            raise UserError(f"edit '{name}' takes a whole number for {argument}, got {value!r}")
    return {**filled, "keep": given["keep"]} if share else filled


def _numbers(name: str, key: str, value: Any) -> tuple[int, ...]:
    several = (value,) if type(value) is int else value
    if not isinstance(several, list | tuple) or not several or not all(type(i) is int and i >= 0 for i in several):
        raise UserError(f"edit '{name}' takes whole numbers for {key}, as in {key}=[0, 1], got {value!r}")
    return tuple(several)


def build_control(
    edits: Sequence[Edit], control: str = "random", draw: int = 0, heads: int | None = None
) -> tuple[Edit, ...]:
    """The matched control: random or mid-rank keys in the place of anchors, other heads of the same layers; as many.

    `heads` is how many the model has in a layer, for edits of heads.
    """
    if control not in CONTROLS:
        raise unknown_choice("control", control, CONTROLS)
    return tuple(_controlled(edit, control, draw, heads) for edit in edits)


def _controlled(edit: Edit, control: str, draw: int, heads: int | None) -> Edit:
    name = f"{edit}, {control} {draw}" if control == "random" else f"{edit}, {control}"
    if control == "middle" and (edit.keys is None or edit.keys.rule != "anchors"):
        raise UserError(f"mid-rank keys are the control of anchors, and {edit} picks none; use the control random")
    if edit.primitive == "zero":
        if heads is None or edit.heads is None:
            raise UserError("the control of zeroed heads needs to know how many heads a layer has")
        others = [h for h in range(heads) if h not in edit.heads]
        if len(others) < len(edit.heads):
            raise UserError(
                f"{edit} zeroes {len(edit.heads)} of {heads} heads of a layer, so that fewer are left for a control;"
                " zero at most half of a layer"
            )
        drawn = random.Random(f"{draw} {edit.layers} {edit.heads}").sample(others, len(edit.heads))
        return replace(edit, heads=tuple(sorted(drawn)), name=name)
    if edit.keys is None:
        raise UserError(
            f"{edit} has no matched control: it picks no keys and no heads; run it without (--control none)"
        )
    if control == "middle":
        return replace(edit, keys=replace(edit.keys, rule="middle"), name=name)
    counted = edit.keys.rule in ("anchors", "middle", "random", "first")
    keys = Keys("random", int(edit.keys.k), seed=draw) if counted else Keys("random", seed=draw, like=edit.keys)
    return replace(edit, keys=keys, name=name)
