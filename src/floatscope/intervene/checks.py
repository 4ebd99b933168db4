"""What can be known to be wrong with edits before anything is decoded, in one sentence each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from floatscope.errors import UserError, unknown
from floatscope.intervene.intervention import token_of
from floatscope.models import Model
from floatscope.values import OTHERS, CanvasState, Edit, Keys

STATES = ("masked", "committed", "prompt")


def check(edits: Sequence[Edit], model: Model, canvas: CanvasState) -> None:
    layers, heads = shape_of(model)
    for edit in edits:
        for what, given, count in (("layer", edit.layers, layers), ("head", edit.heads, heads)):
            if missing := [i for i in given or () if count is not None and i >= count]:
                has = f"{model.spec.name} has {what}s 0 to {(count or 0) - 1}"
                raise UserError(f"{edit} acts on {what} {missing[0]}, and {has}")
        _check_keys(edit, canvas, layers, model.spec.name)
        if edit.queries is not None and edit.queries not in (rows := (OTHERS, *STATES, *canvas.regions.names)):
            raise unknown(f"region in {edit}: the samples do not have", edit.queries, rows)
        if edit.primitive == "freeze" and model.spec.family == "arm":
            raise UserError(f"{edit} keeps the queries of a step, and {model.spec.name} has new ones at every step")
        if edit.primitive == "replace" and not 0 <= token_of(edit, model) < model.vocabulary:
            raise UserError(
                f"{edit} names a token that {model.spec.name} does not have: ids end at {model.vocabulary - 1}"
            )
        if edit.primitive == "drop" and model.spec.bos_id is None:
            raise UserError(f"{model.spec.name} has no bos to drop")
    for a, b in combinations(edits, 2):
        alone = a.primitive == b.primitive and a.primitive in ("move", "freeze", "sink")
        if alone and all(_overlap(getattr(a, name), getattr(b, name)) for name in ("steps", "layers", "heads")):
            raise UserError(f"{a} and {b} contradict each other where both act; give them other steps, layers or heads")


def shape_of(model: Model) -> tuple[int | None, int | None]:
    """Layers, and heads of a layer; None where the model does not tell."""
    config = getattr(model.module, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    return getattr(text, "num_hidden_layers", None), getattr(text, "num_attention_heads", None)


def _check_keys(edit: Edit, canvas: CanvasState, layers: int | None, name: str) -> None:
    length = int(canvas.valid.sum(-1).min())
    for keys in (edit.keys, edit.to):
        if keys is None:
            continue
        if keys.layer is not None and layers is not None and not 0 <= keys.layer < layers:
            raise UserError(f"{edit} takes anchors of layer {keys.layer}, and {name} has layers 0 to {layers - 1}")
        if keys.rule not in ("region", "positions", "first") and keys.k > length:
            raise UserError(f"{edit} picks {keys.k} keys, and a canvas has {length}; give a smaller k")
        for picked in (keys, keys.like):
            if picked is not None and picked.rule == "region" and picked.region not in (*STATES, *canvas.regions.names):
                known = (*STATES, *canvas.regions.names)
                raise unknown(f"region in {edit}: the samples do not have", str(picked.region), known)
        if isinstance(keys, Keys) and keys.rule == "positions" and any(p >= length for p in keys.positions):
            raise UserError(f"{edit} picks position {max(keys.positions)}, and a canvas has {length}")


def _overlap(a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> bool:
    return a is None or b is None or bool(set(a) & set(b))
