"""Edits applied during one decoding: before each attention call they become `EditTensors`.

    intervention = Intervention(parse_edits("mask_anchors(k=5)"), model, samples)
    canvas = intervention.edit_canvas(canvas)                # tokens replaced, bos dropped
    call = intervention.edit_call(call, layer, canvas)       # called by the watcher for every layer
    intervention.doses                                       # per sample, the share of the attention that was moved
    intervention.notes                                       # edits that selected nothing, and how often

`anchors.py` decides which keys are anchors.
"""

from __future__ import annotations

import math
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
from floatscope.interventions.dose import DoseSum, has_dose, measure_dose
from floatscope.interventions.edits import OTHER_ROWS, Edit, Keys
from floatscope.interventions.key_selection import (
    Selection,
    SelectionContext,
    keep_ranks,
    match_count,
    match_mass,
    restrict_type,
    scatter_amount,
    select_keys,
    to_mask,
)
from floatscope.interventions.notes import EditNote, Problem
from floatscope.interventions.structure import StructureFinder
from floatscope.interventions.unedited import RANKS_AT_ONCE, UneditedCall
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
    _dose: DoseSum = field(default_factory=DoseSum)
    _short: dict[Edit, Tensor] = field(default_factory=dict)  # [heads without enough other keys, all heads]
    _structure: StructureFinder = field(init=False)

    def __post_init__(self) -> None:
        self._structure = StructureFinder(self.model)

    @property
    def doses(self) -> list[float]:
        """The dose of each sample: the share of the attention that the edits move, in the attention before them.

        The mean over the rows and heads of all calls in which an edit is active; NaN if it is not defined.
        """
        is_defined = all(has_dose(edit) for edit in self.edits)
        return self._dose.means(len(self.samples)) if is_defined else [math.nan] * len(self.samples)

    @property
    def notes(self) -> list[EditNote]:
        """A note for every edit that selected too few keys or none, or whose steps were never reached."""
        empty = {edit: int(count) for edit, count in self._empty_uses.items()}
        notes = [EditNote(str(edit), Problem.NO_KEYS, n, self._uses[edit]) for edit, n in empty.items() if n]
        for edit, counts in self._short.items():
            short, total = counts.tolist()
            if short:
                notes.append(EditNote(str(edit), Problem.TOO_LITTLE_ATTENTION, int(short), int(total)))
        steps = self._anchors.step + 1
        last = {
            edit: steps - 1 - int(edit.primitive == "freeze") for edit in self.edits
        }  # a freeze acts one step later
        late = [edit for edit in self.edits if edit.steps is not None and min(edit.steps) > last[edit]]
        return notes + [EditNote(str(edit), Problem.NEVER_ACTIVE, steps, steps) for edit in late]

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
        unedited = self._anchors.open_call(call, canvas)
        for rows in sorted({keys.rows for edit in self.edits for keys in _rules_to_rank(edit, layer, canvas.step)}):
            self._anchors.observe(unedited, layer, canvas, rows)
        # 2. Collect the changes of each edit.
        context = self._build_context(canvas, layer, call.query.shape[1])
        biases: list[Bias] = []
        moves: list[Move] = []
        doses: list[Tensor] = []  # of each active edit, summed over rows and heads
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
                doses.append((unedited.rows.sum(-1) * heads.sum()).double())
            elif edit.primitive == "sink":
                assert edit.amount is not None
                sink = torch.where(heads, edit.amount, -torch.inf if sink is None else sink)
            else:
                selection = self._select(edit, context, unedited, heads)
                doses.append(measure_dose(edit, selection, unedited))
                if _may_be_empty(edit) and not bool((selection.keys != NO_KEY).any()):
                    continue  # the call stays exactly as it is
                if edit.primitive == "scale":
                    call = _scale(edit, call, selection.keys)
                elif edit.primitive == "bias":
                    biases.append(_build_bias(edit, selection, call.visibility.keys))
                else:
                    moves += _build_moves(selection)
        if doses:
            self._dose.add(torch.stack(doses).sum(0), unedited.rows.sum(-1) * context.heads, canvas.active)
        # 3. Attach them to the call.
        if not biases and not moves and sink is None and silent_heads is None:
            return call
        return replace(call, edits=EditTensors(tuple(biases), sink, tuple(moves), silent_heads))

    def _select(
        self, edit: Edit, context: SelectionContext, unedited: UneditedCall, heads: Bool[Tensor, " head"]
    ) -> Selection:
        """What an edit acts on. A control first selects what its edit would act on, and then keys that match it."""
        rule = edit.keys
        assert rule is not None
        keys = self._select_keys(rule.reference, context)
        if context.layer == min(edit.layers or (0,)) and rule.reference.only == "all":  # once per step
            queries = _select_queries(edit, keys, context, unedited)
            self._count_use(edit, keys if queries is None else keys.where(queries.any(), NO_KEY))
        target = None
        if edit.to is not None:
            target = self._select_keys(edit.to, context)
            target = F.pad(target, (0, max(0, keys.shape[-1] - target.shape[-1])), value=NO_KEY)[..., : keys.shape[-1]]
            # A key without a target, or that is its own target, stays where it is.
            keys, target = keep_ranks((keys != NO_KEY) & (target != NO_KEY) & (keys != target), keys, target)
        ranking = self._anchors.find_ranking(rule, context.layer)
        if rule.same_count_as is not None:
            keys = match_count(rule, keys, ranking, context)
        queries = _select_queries(edit, keys, context, unedited)
        if rule.same_mass_as is not None:
            mass = unedited.hidden(queries) if edit.hides_keys else unedited.received(queries)
            goal = keys
            keys, is_short = match_mass(rule, goal, mass, ranking, context, target)
            has_goal = (goal != NO_KEY).any(-1)
            counts = torch.stack([(is_short & heads).sum(), (has_goal & heads).sum()])
            self._short[edit] = self._short.get(edit, 0) + counts
        if target is not None:
            target = _repeat_targets(target, keys)
        if edit.heads is not None:
            keys = keys.masked_fill(~heads[:, None], NO_KEY)
        return Selection(keys, target, queries)

    def _select_keys(self, keys: Keys, context: SelectionContext) -> Tensor:
        by_layer = self._anchors.select_previous_anchors(replace(keys, only="all"), context.canvas)
        if by_layer is not None:
            return restrict_type(by_layer[context.layer], keys.only, context)
        return select_keys(keys, self._anchors.find_ranking(keys, context.layer), context)

    def _build_context(self, canvas: CanvasState, layer: int, heads: int) -> SelectionContext:
        rules = [keys.reference for edit in self.edits for keys in (edit.keys, edit.to) if keys is not None]
        needs_structure = any(keys.only == "structural" for keys in rules)
        structure = self._structure.find(canvas) if needs_structure else None
        return SelectionContext(canvas, layer, heads, self.samples, structure)

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
        context = self._build_context(canvas, -1, 1)
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
    edit: Edit, keys: Tensor, context: SelectionContext, unedited: UneditedCall
) -> Bool[Tensor, "batch query"] | None:
    if edit.queries is None:
        return None
    see = unedited.call.visibility
    rows = ~to_mask(keys[:, :1], see.keys)[:, 0] if edit.queries == OTHER_ROWS else context.region(edit.queries)
    return rows[:, see.keys - see.queries :]


def _may_be_empty(edit: Edit) -> bool:
    """Whether an edit may have nothing to act on; anchors of any type always exist."""
    keys = edit.keys
    assert keys is not None
    return keys.is_shared or keys.reference is not keys or keys.only != "all" or edit.to is not None


def _repeat_targets(target: Tensor, keys: Tensor) -> Tensor:
    """A target for every key: the targets in their order, again and again if there are more keys than targets."""
    count = (target != NO_KEY).sum(-1, keepdim=True)
    index = torch.arange(keys.shape[-1], device=keys.device) % count.clamp_min(1)
    return target.gather(-1, index).masked_fill(keys == NO_KEY, NO_KEY)


def _build_bias(edit: Edit, selection: Selection, keys: int) -> Bias:
    assert edit.amount is not None
    return Bias(scatter_amount(selection.keys, keys, edit.amount), selection.queries, hides_keys=edit.hides_keys)


def _build_moves(selection: Selection) -> list[Move]:
    """The move in pieces of a few ranks, because a call reads the mass of all rows for all ranks of a piece."""
    pieces = selection.keys.split(RANKS_AT_ONCE, -1)
    targets = [None] * len(pieces) if selection.target is None else selection.target.split(RANKS_AT_ONCE, -1)
    return [Move(keys, target, selection.queries) for keys, target in zip(pieces, targets, strict=True)]


def _scale(edit: Edit, call: AttentionCall, selected: Tensor) -> AttentionCall:
    """Scale keys or values per query head: heads that share them may be scaled differently."""
    assert edit.amount is not None
    factor = torch.where(to_mask(selected, call.visibility.keys), edit.amount, 1.0)[..., None]
    key, value = (x.repeat_interleave(call.repeats, 1) for x in (call.key, call.value))
    if edit.operand == "key":
        return replace(call, key=(key * factor).to(key.dtype), value=value)
    return replace(call, key=key, value=(value * factor).to(value.dtype))
