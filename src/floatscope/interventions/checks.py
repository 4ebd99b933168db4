"""Checks of edits against a model and its samples, before anything is decoded: one sentence per problem."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch

from floatscope.canvas import CanvasState
from floatscope.errors import UserError, unknown_choice
from floatscope.interventions.edits import OTHER_ROWS, CanvasEdit, DropBos, Edit, Freeze, ReplaceToken, RowEdit
from floatscope.interventions.intervention import resolve_token
from floatscope.interventions.key_rules import (
    Anchors,
    KeyRule,
    MiddleKeys,
    PositionKeys,
    RandomKeys,
    RankingSource,
    RegionKeys,
)
from floatscope.interventions.key_selection import EVIDENCE
from floatscope.models.model import Model
from floatscope.schema import Paradigm, State

STATES = ("masked", "committed", "prompt")


def check_edits(edits: Sequence[Edit], model: Model, canvas: CanvasState) -> None:
    """Raise a `UserError` if an edit cannot act on this model and these samples, or if two edits conflict."""
    layers, heads = count_layers_and_heads(model)
    for edit in edits:
        for axis, indices, count in (("layer", edit.layers, layers), ("head", edit.heads, heads)):
            if missing := [i for i in indices or () if count is not None and i >= count]:
                has = f"{model.spec.name} has {axis}s 0 to {(count or 0) - 1}"
                raise UserError(f"{edit} acts on {axis} {missing[0]}, but {has}")
        _check_keys(edit, model, canvas, layers)
        _check_canvas_edit(edit, model, canvas)
        rows = (OTHER_ROWS, *STATES, *canvas.regions.names)
        if isinstance(edit, RowEdit) and edit.queries is not None and edit.queries not in rows:
            raise unknown_choice(f"region in {edit}: the samples do not have", edit.queries, rows)
        if model.spec.canvas_size is not None and isinstance(edit, CanvasEdit | Freeze):
            why = "its text is encoded before a canvas" if isinstance(edit, CanvasEdit) else "its keys grow by canvases"
            raise UserError(f"{edit} cannot act on {model.spec.name}, because {why}; edit the attention of its canvas")
        if isinstance(edit, Freeze) and model.spec.paradigm is Paradigm.ARM:
            raise UserError(f"{edit} needs the same queries at every step, but {model.spec.name} has new ones")
    for a, b in combinations(edits, 2):
        overlap = all(_overlap(getattr(a, name), getattr(b, name)) for name in ("steps", "layers", "heads"))
        if type(a) is type(b) and a.is_exclusive and overlap:
            raise UserError(f"{a} and {b} conflict where both act; give them different steps, layers or heads")


def count_layers_and_heads(model: Model) -> tuple[int | None, int | None]:
    """The number of layers and of heads per layer; None where the model's config does not say."""
    config = getattr(model.module, "config", None)
    text_config = getattr(config, "get_text_config", lambda: config)()
    return getattr(text_config, "num_hidden_layers", None), getattr(text_config, "num_attention_heads", None)


def _check_canvas_edit(edit: Edit, model: Model, canvas: CanvasState) -> None:
    name = model.spec.name
    axis = next((axis for axis in ("layers", "heads") if getattr(edit, axis) is not None), None)
    if isinstance(edit, CanvasEdit) and axis is not None:
        raise UserError(f"{edit} changes the input of the whole model and takes no {axis}; leave {axis} out")
    if isinstance(edit, ReplaceToken) and not 0 <= resolve_token(edit, model) < model.vocab_size:
        raise UserError(f"{edit} names a token that {name} does not have; ids go up to {model.vocab_size - 1}")
    if not isinstance(edit, DropBos):
        return
    if model.spec.bos_id is None:
        raise UserError(f"{name} has no bos token to drop")
    if (model.spec.shift or model.spec.paradigm is Paradigm.ARM) and _has_bos_only_prompt(canvas, model.spec.bos_id):
        raise UserError(f"{edit} leaves no row that predicts the first new token, because a prompt is only the bos")


def _check_keys(edit: Edit, model: Model, canvas: CanvasState, layers: int | None) -> None:
    name = model.spec.name
    length = int(canvas.valid.sum(-1).min())
    for rule in dict.fromkeys(rule for keys in edit.key_rules for rule in (keys, keys.reference)):
        of, layer, _ = rule.ranking or RankingSource()
        if layer is not None:
            if layers is not None and layer >= layers:
                raise UserError(f"{edit} uses anchors of layer {layer}, but {name} has layers 0 to {layers - 1}")
            if of == "now" and edit.layers and min(edit.layers) < layer:
                later = f"uses anchors of layer {layer} of the same step, which comes later"
                raise UserError(f"{edit} acts on layer {min(edit.layers)} but {later}")
        if isinstance(rule, Anchors | MiddleKeys | RandomKeys) and rule.k > length:
            raise UserError(f"{edit} picks {rule.k} keys, but a canvas has {length}; give a smaller k")
        _check_anchor_type(edit, rule, model, canvas)
        known = (*STATES, *canvas.regions.names)
        if isinstance(rule, RegionKeys) and rule.region not in known:
            raise unknown_choice(f"region in {edit}: the samples do not have", rule.region, known)
        if isinstance(rule, PositionKeys) and any(p >= length for p in rule.positions):
            raise UserError(f"{edit} picks position {max(rule.positions)}, but a canvas has {length}")


def _check_anchor_type(edit: Edit, rule: KeyRule, model: Model, canvas: CanvasState) -> None:
    if isinstance(rule, Anchors) and rule.only == EVIDENCE and EVIDENCE not in canvas.regions.names:
        raise UserError(f"{edit} edits evidence, but the samples have no region '{EVIDENCE}'; use another type")
    if rule.needs_structure and model.tokenizer is None:
        raise UserError(f"{edit} edits structural tokens, but {model.spec.name} has no tokenizer to recognise them")


def _has_bos_only_prompt(canvas: CanvasState, bos_id: int) -> bool:
    """Whether in some sample the bos is the only token before the first mask, or before the end."""
    first = canvas.valid.int().argmax(-1, keepdim=True)
    next_state = torch.nn.functional.pad(canvas.states, (0, 1), value=int(State.MASKED)).gather(-1, first + 1)
    return bool(((canvas.tokens.gather(-1, first) == bos_id) & (next_state == State.MASKED)).any())


def _overlap(a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> bool:
    return a is None or b is None or bool(set(a) & set(b))
