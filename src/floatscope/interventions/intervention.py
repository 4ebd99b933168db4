"""Edits applied during one decoding: before each attention call they become `EditTensors`.

    intervention = Intervention(parse_edits("mask_anchors(k=5)"), model, samples)
    canvas = intervention.edit_canvas(canvas)                # tokens replaced, bos dropped
    call = intervention.edit_call(call, layer, canvas)       # called by the watcher for every layer
    intervention.notes                                       # edits that selected nothing, and how often

`anchors.py` decides which keys are anchors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor

from floatscope.canvas import CanvasState
from floatscope.capture.attention import AttentionCall
from floatscope.capture.edit_tensors import NO_KEY, Bias, EditTensors, Move
from floatscope.errors import UserError
from floatscope.interventions.anchors import AnchorTracker
from floatscope.interventions.edits import OTHER_ROWS, Edit, Keys
from floatscope.interventions.key_selection import SelectionContext, scatter_amount, select_keys, to_mask
from floatscope.models.model import Model
from floatscope.schema import State

CANVAS_PRIMITIVES = ("replace", "drop")
"""Edits of the canvas; the others edit an attention call."""


@dataclass
class Intervention:
    """The edits of one decoding and their state: the anchors so far, and the frozen queries and keys."""

    edits: tuple[Edit, ...]
    model: Model
    samples: Sequence[str]
    _uses: Counter[Edit] = field(default_factory=Counter)  # how often an edit selected keys
    _empty_uses: dict[Edit, Tensor] = field(default_factory=dict)  # how often it found none; read at the end
    _anchors: AnchorTracker = field(default_factory=AnchorTracker)
    _frozen: dict[tuple[Edit, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """A sentence for every edit that selected no key at some step, or whose steps were never reached."""
        empty = {edit: int(count) for edit, count in self._empty_uses.items()}
        notes = [f"{edit} selected no keys in {n} of {self._uses[edit]} steps" for edit, n in empty.items() if n]
        steps = self._anchors.step + 1
        last = {
            edit: steps - 1 - int(edit.primitive == "freeze") for edit in self.edits
        }  # a freeze acts one step later
        late = [edit for edit in self.edits if edit.steps is not None and min(edit.steps) > last[edit]]
        return notes + [f"{edit} was never active: there were only {steps} steps" for edit in late]

    def needs_preview(self, canvas: CanvasState) -> bool:
        """Whether anchors must be known before the first forward, because a token is replaced at them."""
        return canvas.step == 0 and any(
            edit.primitive == "replace" and _needs_ranking(edit) and edit.is_active(0, 0) for edit in self.edits
        )

    def edit_canvas(self, canvas: CanvasState) -> CanvasState:
        """The canvas that the model sees: tokens replaced, bos dropped."""
        for edit in self.edits:
            if edit.primitive in CANVAS_PRIMITIVES and (edit.steps is None or canvas.step in edit.steps):
                canvas = self._drop_bos(edit, canvas) if edit.primitive == "drop" else self._replace(edit, canvas)
        return canvas

    def edit_call(self, call: AttentionCall, layer: int, canvas: CanvasState) -> AttentionCall:
        """The attention call with the edits of this layer and step."""
        # 1. Rank the keys of the unedited call, if an edit needs it.
        canvas = canvas.to(call.query.device)
        self._anchors.begin_step(canvas.step)
        for rows in sorted({keys.rows for edit in self.edits for keys in _rules_to_rank(edit, layer, canvas.step)}):
            self._anchors.observe(call, layer, canvas, rows)
        # 2. Collect the changes of each edit.
        context = SelectionContext(canvas, layer, call.query.shape[1], self.samples)
        biases: list[Bias] = []
        moves: list[Move] = []
        sink = silent_heads = None
        for edit in self.edits:
            if edit.primitive == "freeze":
                call = self._freeze(edit, call, layer, canvas.step)
                continue
            is_active = edit.primitive not in CANVAS_PRIMITIVES and edit.is_active(canvas.step, layer)
            if not is_active or not self._has_rankings(edit, layer):
                continue
            heads = _select_heads(edit, call)
            if edit.primitive == "zero":
                silent_heads = heads if silent_heads is None else silent_heads | heads
            elif edit.primitive == "sink":
                assert edit.amount is not None
                sink = torch.where(heads, edit.amount, -torch.inf if sink is None else sink)
            else:
                keys = self._select_keys(edit.keys, context)
                queries = _select_queries(edit, keys, context, call)
                if edit.heads is not None:
                    keys = keys.masked_fill(~heads[:, None], NO_KEY)
                if layer == min(edit.layers or (0,)):  # once per step
                    self._count_use(edit, keys if queries is None else keys.where(queries.any(), NO_KEY))
                if edit.primitive == "scale":
                    call = _scale(edit, call, keys)
                elif edit.primitive == "bias":
                    biases.append(_build_bias(edit, keys, queries, call.visibility.keys))
                else:
                    target = None if edit.to is None else self._select_targets(edit, keys, context)
                    moves.append(Move(keys, target, queries))
        # 3. Attach them to the call.
        if not biases and not moves and sink is None and silent_heads is None:
            return call
        return replace(call, edits=EditTensors(tuple(biases), sink, tuple(moves), silent_heads))

    def _select_keys(self, keys: Keys | None, context: SelectionContext) -> Tensor:
        assert keys is not None
        by_layer = self._anchors.select_previous_anchors(keys, context.canvas)
        if by_layer is not None:
            return by_layer[context.layer]
        return select_keys(keys, self._anchors.find_ranking(keys, context.layer), context)

    def _select_targets(self, edit: Edit, source: Tensor, context: SelectionContext) -> Tensor:
        target = self._select_keys(edit.to, context)
        return F.pad(target, (0, source.shape[-1] - target.shape[-1]), value=NO_KEY)

    def _has_rankings(self, edit: Edit, layer: int) -> bool:
        """Whether the layers whose anchors the edit uses have run."""
        rules = [keys for keys in (edit.keys, edit.to) if keys is not None and keys.needs_ranking]
        return all(self._anchors.find_ranking(keys, layer) is not None for keys in rules)

    def _freeze(self, edit: Edit, call: AttentionCall, layer: int, step: int) -> AttentionCall:
        assert edit.steps is not None
        if edit.layers is not None and layer not in edit.layers:
            return call
        if step == edit.steps[0]:
            self._frozen[edit, layer] = call.query, call.key
        frozen = self._frozen.get((edit, layer))
        if frozen is None or step == edit.steps[0]:
            return call
        heads = _select_heads(edit, call)
        if bool(heads.all()) and frozen[1].shape[1] == call.key.shape[1]:
            return replace(call, query=frozen[0], key=frozen[1])
        key, value = (x.repeat_interleave(call.repeats, 1) for x in (call.key, call.value))
        frozen_key = frozen[1].repeat_interleave(len(heads) // frozen[1].shape[1], 1)
        query = torch.where(heads[:, None, None], frozen[0], call.query)
        return replace(call, query=query, key=torch.where(heads[:, None, None], frozen_key, key), value=value)

    def _drop_bos(self, edit: Edit, canvas: CanvasState) -> CanvasState:
        first = canvas.valid.int().argmax(-1)[:, None]
        bos_id = -1 if self.model.spec.bos_id is None else self.model.spec.bos_id
        is_bos = canvas.tokens.gather(-1, first) == bos_id
        self._count_use(edit, first.masked_fill(~is_bos, NO_KEY))
        dropped = torch.zeros_like(canvas.valid).scatter_(-1, first, is_bos)
        return replace(canvas, states=canvas.states.masked_fill(dropped, int(State.PAD)))

    def _replace(self, edit: Edit, canvas: CanvasState) -> CanvasState:
        keys = edit.keys
        assert keys is not None
        context = SelectionContext(canvas, -1, 1, self.samples)
        ranking = self._anchors.mean_ranking(keys, canvas) if keys.needs_ranking else None
        selected = select_keys(keys, ranking, context)
        self._count_use(edit, selected)
        replaced = to_mask(selected, canvas.tokens.shape[1])[:, 0] & ~canvas.masked
        return replace(canvas, tokens=canvas.tokens.masked_fill(replaced, resolve_token(edit, self.model)))

    def _count_use(self, edit: Edit, selected: Tensor) -> None:
        is_empty = (selected == NO_KEY).all().long()
        self._uses[edit] += 1
        self._empty_uses[edit] = self._empty_uses[edit] + is_empty if edit in self._empty_uses else is_empty


def invalidates_cache(edits: Sequence[Edit]) -> bool:
    """Whether edits change an earlier position between steps, so that its keys and values cannot be cached.

    A bos that is dropped at every step does not.
    """
    return any(e.primitive == "replace" or (e.primitive == "drop" and e.steps is not None) for e in edits)


def resolve_token(edit: Edit, model: Model) -> int:
    """The id of the token that a `replace` edit writes."""
    spec, token = model.spec, edit.token
    if isinstance(token, int):
        return token
    if token == "mask":
        if spec.mask_id is None:
            raise UserError(f"{spec.name} has no mask token; name another token in {edit}")
        return spec.mask_id
    if model.tokenizer is None:
        raise UserError(f"{spec.name} has no tokenizer; give the token as an id, as in replace_token(token=13)")
    text = "\n" if token == "newline" else str(token)
    ids = [i for i in model.tokenizer.encode(text) if i not in model.tokenizer.special_ids]
    if len(ids) != 1:
        raise UserError(f"{text!r} is {len(ids)} tokens in {spec.name}; give a text of one token, or a token id")
    return ids[0]


def _needs_ranking(edit: Edit) -> bool:
    return any(keys.needs_ranking for keys in (edit.keys, edit.to) if keys is not None)


def _rules_to_rank(edit: Edit, layer: int, step: int) -> Iterator[Keys]:
    """The rules of an edit that need the ranking of this layer at this step."""
    for keys in (edit.keys, edit.to):
        if keys is None or not keys.needs_ranking:
            continue
        rule = keys.reference
        uses_layer = rule.layer == layer if rule.layer is not None else edit.layers is None or layer in edit.layers
        if edit.primitive == "replace" or (uses_layer and (rule.of != "first" or step == 0)):
            yield rule


def _select_heads(edit: Edit, call: AttentionCall) -> Bool[Tensor, " head"]:
    mask = torch.ones(call.query.shape[1], dtype=torch.bool, device=call.query.device)
    if edit.heads is not None:
        mask[:] = False
        mask[list(edit.heads)] = True
    return mask


def _select_queries(
    edit: Edit, keys: Tensor, context: SelectionContext, call: AttentionCall
) -> Bool[Tensor, "batch query"] | None:
    if edit.queries is None:
        return None
    see = call.visibility
    rows = ~to_mask(keys[:, :1], see.keys)[:, 0] if edit.queries == OTHER_ROWS else context.region(edit.queries)
    return rows[:, see.keys - see.queries :]


def _build_bias(edit: Edit, selected: Tensor, queries: Tensor | None, keys: int) -> Bias:
    assert edit.amount is not None
    return Bias(scatter_amount(selected, keys, edit.amount), queries, hides_keys=edit.amount == -float("inf"))


def _scale(edit: Edit, call: AttentionCall, selected: Tensor) -> AttentionCall:
    """Scale keys or values per query head: heads that share them may be scaled differently."""
    assert edit.amount is not None
    factor = torch.where(to_mask(selected, call.visibility.keys), edit.amount, 1.0)[..., None]
    key, value = (x.repeat_interleave(call.repeats, 1) for x in (call.key, call.value))
    if edit.operand == "key":
        return replace(call, key=(key * factor).to(key.dtype), value=value)
    return replace(call, key=key, value=(value * factor).to(value.dtype))
