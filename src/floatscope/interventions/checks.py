"""What can be known to be wrong with edits before anything is decoded, in one sentence each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch

from floatscope.canvas import CanvasState
from floatscope.errors import UserError, unknown_choice
from floatscope.interventions.edits import OTHERS, Edit, Keys
from floatscope.interventions.intervention import OF_CANVAS, token_of
from floatscope.models.model import Model
from floatscope.schema import State

STATES = ("masked", "committed", "prompt")


def check(edits: Sequence[Edit], model: Model, canvas: CanvasState) -> None:
    layers, heads = shape_of(model)
    for edit in edits:
        for what, given, count in (("layer", edit.layers, layers), ("head", edit.heads, heads)):
            if missing := [i for i in given or () if count is not None and i >= count]:
                has = f"{model.spec.name} has {what}s 0 to {(count or 0) - 1}"
                raise UserError(f"{edit} acts on {what} {missing[0]}, and {has}")
        _check_keys(edit, canvas, layers, model.spec.name)
        part = next((name for name in ("layers", "heads", "queries") if getattr(edit, name) is not None), None)
        if edit.primitive in OF_CANVAS and part is not None:
            raise UserError(f"{edit} changes what the whole model sees, so that it takes no {part}; leave {part} out")
        if edit.queries is not None and edit.queries not in (rows := (OTHERS, *STATES, *canvas.regions.names)):
            raise unknown_choice(f"region in {edit}: the samples do not have", edit.queries, rows)
        if edit.primitive == "freeze" and model.spec.paradigm == "arm":
            raise UserError(f"{edit} keeps the queries of a step, and {model.spec.name} has new ones at every step")
        if edit.primitive == "replace" and not 0 <= token_of(edit, model) < model.vocabulary:
            raise UserError(
                f"{edit} names a token that {model.spec.name} does not have: ids end at {model.vocabulary - 1}"
            )
        if edit.primitive == "drop" and model.spec.bos_id is None:
            raise UserError(f"{model.spec.name} has no bos to drop")
        next_row = model.spec.shift or model.spec.paradigm == "arm"
        if edit.primitive == "drop" and next_row and _only_bos(canvas, model.spec.bos_id):
            raise UserError(f"{edit} leaves nothing that decides the first new token where a prompt is only the bos")
    for a, b in combinations(edits, 2):
        alone = a.primitive == b.primitive and a.primitive in ("move", "freeze", "sink")
        where = ("layers", "heads") if a.primitive == "freeze" else ("steps", "layers", "heads")
        if alone and all(_overlap(getattr(a, name), getattr(b, name)) for name in where):
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
        told = keys.like or keys
        if told.layer is not None and layers is not None and not 0 <= told.layer < layers:
            raise UserError(f"{edit} takes anchors of layer {told.layer}, and {name} has layers 0 to {layers - 1}")
        if told.layer is not None and told.of == "now" and edit.layers and min(edit.layers) < told.layer:
            late = f"takes anchors of layer {told.layer} in the same step"
            raise UserError(f"{edit} acts on layer {min(edit.layers)} and {late}, which comes later")
        if keys.rule not in ("region", "positions", "first") and keys.k > length:
            raise UserError(f"{edit} picks {keys.k} keys, and a canvas has {length}; give a smaller k")
        for picked in (keys, keys.like):
            if picked is not None and picked.rule == "region" and picked.region not in (*STATES, *canvas.regions.names):
                known = (*STATES, *canvas.regions.names)
                raise unknown_choice(f"region in {edit}: the samples do not have", str(picked.region), known)
        if isinstance(keys, Keys) and keys.rule == "positions" and any(p >= length for p in keys.positions):
            raise UserError(f"{edit} picks position {max(keys.positions)}, and a canvas has {length}")


def _only_bos(canvas: CanvasState, bos: int | None) -> bool:
    """Whether in some sample a bos stands alone before the first mask, or before the end."""
    first = canvas.valid.int().argmax(-1, keepdim=True)
    after = torch.nn.functional.pad(canvas.states, (0, 1), value=int(State.MASKED)).gather(-1, first + 1)
    return bool(((canvas.tokens.gather(-1, first) == bos) & (after == State.MASKED)).any())


def _overlap(a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> bool:
    return a is None or b is None or bool(set(a) & set(b))
