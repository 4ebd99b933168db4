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
from floatscope.capture.edit_tensors import NO_KEY, BiasTensors, EditTensors, MoveTensors
from floatscope.errors import UserError
from floatscope.interventions.anchors import AnchorTracker
from floatscope.interventions.dose import DoseSum, has_dose, measure_dose
from floatscope.interventions.edits import (
    OTHER_ROWS,
    Bias,
    CanvasEdit,
    DropBos,
    Edit,
    Freeze,
    KeyEdit,
    Move,
    ReplaceToken,
    RowEdit,
    ScaleKeys,
    Scaling,
    VirtualSink,
    ZeroHeads,
)
from floatscope.interventions.key_rules import Anchors, KeyRule, MatchedKeys, RandomSameMass, RankingSource
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
from floatscope.models.spec import ModelSpec
from floatscope.schema import State


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
        late = [edit for edit in self.edits if edit.first_step >= steps]
        return notes + [EditNote(str(edit), Problem.NEVER_ACTIVE, steps, steps) for edit in late]

    def needs_preview(self, canvas: CanvasState) -> bool:
        """Whether anchors must be known before the first forward, because a token is replaced at them."""
        return canvas.step == 0 and any(
            isinstance(edit, ReplaceToken) and edit.keys.ranking is not None and edit.acts_on(0) for edit in self.edits
        )

    def edit_canvas(self, canvas: CanvasState) -> CanvasState:
        """The canvas that the model sees: tokens replaced, bos dropped."""
        for edit in self.edits:
            if isinstance(edit, ReplaceToken) and edit.acts_on(canvas.step):
                canvas = self._replace(edit, canvas)
            elif isinstance(edit, DropBos) and edit.acts_on(canvas.step):
                canvas = self._drop_bos(edit, canvas)
        return canvas

    def edit_call(self, call: AttentionCall, layer: int, canvas: CanvasState) -> AttentionCall:
        """The attention call with the edits of this layer and step."""
        # 1. Rank the keys of the unedited call, if an edit needs it.
        canvas = canvas.to(call.query.device)
        self._anchors.begin_step(canvas.step)
        unedited = self._anchors.open_call(call, canvas)
        sources = [source for edit in self.edits for source in _rankings_needed(edit, layer, canvas.step)]
        for rows in sorted({source.rows for source in sources}):
            self._anchors.observe(unedited, layer, canvas, rows)
        # 2. Collect the changes of each edit.
        context = self._build_context(canvas, layer, call.query.shape[1])
        biases: list[BiasTensors] = []
        moves: list[MoveTensors] = []
        doses: list[Tensor] = []  # of each active edit, summed over rows and heads
        sink = silent_heads = None
        for edit in self.edits:
            if isinstance(edit, Freeze):
                call = self._freeze(edit, call, layer, canvas.step)
                continue
            is_active = not isinstance(edit, CanvasEdit) and edit.is_active(canvas.step, layer)
            if not is_active or not self._has_rankings(edit, layer):
                continue
            heads = _select_heads(edit, call)
            if isinstance(edit, ZeroHeads):
                silent_heads = heads if silent_heads is None else silent_heads | heads
                doses.append((unedited.rows.sum(-1) * heads.sum()).double())
            elif isinstance(edit, VirtualSink):
                sink = torch.where(heads, edit.score, -torch.inf if sink is None else sink)
            elif isinstance(edit, KeyEdit):
                selection = self._select(edit, context, unedited, heads)
                doses.append(measure_dose(edit, selection, unedited))
                if _may_be_empty(edit) and not bool((selection.keys != NO_KEY).any()):
                    continue  # the call stays exactly as it is
                if isinstance(edit, Scaling):
                    call = _scale(edit, call, selection.keys)
                elif isinstance(edit, Bias):
                    amount = scatter_amount(selection.keys, call.visibility.keys, edit.amount)
                    biases.append(BiasTensors(amount, selection.queries, hides_keys=edit.hides_keys))
                else:
                    moves += _build_moves(selection)
        if doses:
            self._dose.add(torch.stack(doses).sum(0), unedited.rows.sum(-1) * context.heads, canvas.active)
        # 3. Attach them to the call.
        if not biases and not moves and sink is None and silent_heads is None:
            return call
        return replace(call, edits=EditTensors(tuple(biases), sink, tuple(moves), silent_heads))

    def _select(
        self, edit: KeyEdit, context: SelectionContext, unedited: UneditedCall, heads: Bool[Tensor, " head"]
    ) -> Selection:
        """What an edit acts on. A control first selects what its edit would act on, and then keys that match it."""
        rule = edit.keys
        keys = self._select_keys(rule.reference, context)
        if context.layer == min(edit.layers or (0,)) and not _has_type(rule.reference):  # once per step
            queries = _select_queries(edit, keys, context, unedited)
            self._count_use(edit, keys if queries is None else keys.where(queries.any(), NO_KEY))
        target = None
        if isinstance(edit, Move) and edit.to is not None:
            target = self._select_keys(edit.to, context)
            target = F.pad(target, (0, max(0, keys.shape[-1] - target.shape[-1])), value=NO_KEY)[..., : keys.shape[-1]]
            # A key without a target, or that is its own target, stays where it is.
            keys, target = keep_ranks((keys != NO_KEY) & (target != NO_KEY) & (keys != target), keys, target)
        ranking = self._anchors.find_ranking(rule, context.layer)
        if isinstance(rule, MatchedKeys) and not isinstance(rule, RandomSameMass):
            keys = match_count(rule, keys, ranking, context)
        queries = _select_queries(edit, keys, context, unedited)
        if isinstance(rule, RandomSameMass):
            hides_keys = isinstance(edit, Bias) and edit.hides_keys
            mass = unedited.hidden(queries) if hides_keys else unedited.received(queries)
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

    def _select_keys(self, rule: KeyRule, context: SelectionContext) -> Tensor:
        if isinstance(rule, Anchors):
            by_layer = self._anchors.select_previous_anchors(replace(rule, only="all"), context.canvas)
            if by_layer is not None:
                return restrict_type(by_layer[context.layer], rule.only, context)
        return select_keys(rule, self._anchors.find_ranking(rule, context.layer), context)

    def _build_context(self, canvas: CanvasState, layer: int, heads: int) -> SelectionContext:
        needs_structure = any(rule.reference.needs_structure for edit in self.edits for rule in edit.key_rules)
        structure = self._structure.find(canvas) if needs_structure else None
        return SelectionContext(canvas, layer, heads, self.samples, structure)

    def _has_rankings(self, edit: Edit, layer: int) -> bool:
        """Whether the layers whose anchors the edit uses have run."""
        ranked = [rule for rule in edit.key_rules if rule.ranking is not None]
        return all(self._anchors.find_ranking(rule, layer) is not None for rule in ranked)

    def _freeze(self, edit: Freeze, call: AttentionCall, layer: int, step: int) -> AttentionCall:
        if edit.layers is not None and layer not in edit.layers:
            return call
        if step == edit.step:
            self._frozen[edit, layer] = call.query, call.key
        frozen = self._frozen.get((edit, layer))
        if frozen is None or step == edit.step:
            return call
        heads = _select_heads(edit, call)
        if bool(heads.all()) and frozen[1].shape[1] == call.key.shape[1]:
            return replace(call, query=frozen[0], key=frozen[1])
        key, value = (x.repeat_interleave(call.repeats, 1) for x in (call.key, call.value))
        frozen_key = frozen[1].repeat_interleave(len(heads) // frozen[1].shape[1], 1)
        query = torch.where(heads[:, None, None], frozen[0], call.query)
        return replace(call, query=query, key=torch.where(heads[:, None, None], frozen_key, key), value=value)

    def _drop_bos(self, edit: DropBos, canvas: CanvasState) -> CanvasState:
        first = canvas.valid.int().argmax(-1)[:, None]
        bos_id = -1 if self.model.spec.bos_id is None else self.model.spec.bos_id
        is_bos = canvas.tokens.gather(-1, first) == bos_id
        self._count_use(edit, first.masked_fill(~is_bos, NO_KEY))
        dropped = torch.zeros_like(canvas.valid).scatter_(-1, first, is_bos)
        return replace(canvas, states=canvas.states.masked_fill(dropped, int(State.PAD)))

    def _replace(self, edit: ReplaceToken, canvas: CanvasState) -> CanvasState:
        context, source = self._build_context(canvas, -1, 1), edit.keys.ranking
        ranking = None if source is None else self._anchors.mean_ranking(source, canvas)
        selected = select_keys(edit.keys, ranking, context)
        self._count_use(edit, selected)
        replaced = to_mask(selected, canvas.tokens.shape[1])[:, 0] & ~canvas.masked
        return replace(canvas, tokens=canvas.tokens.masked_fill(replaced, resolve_token(edit, self.model)))

    def _count_use(self, edit: Edit, selected: Tensor) -> None:
        is_empty = (selected == NO_KEY).all().long()
        self._uses[edit] += 1
        self._empty_uses[edit] = self._empty_uses[edit] + is_empty if edit in self._empty_uses else is_empty


def invalidates_cache(edits: Sequence[Edit], spec: ModelSpec) -> bool:
    """Whether edits change an earlier position between steps, so that its keys and values cannot be cached.

    A bos that is dropped at every step does not. The steps of a block-causal model edit the rows of its finished blocks
    too, each by what it finds, so every edit changes them.
    """
    if spec.block_size is not None and edits:
        return True
    return any(
        isinstance(edit, ReplaceToken) or (isinstance(edit, DropBos) and edit.steps is not None) for edit in edits
    )


def resolve_token(edit: ReplaceToken, model: Model) -> int:
    """The id of the token that the edit writes."""
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


def _rankings_needed(edit: Edit, layer: int, step: int) -> Iterator[RankingSource]:
    """The rankings of this layer at this step that the rules of an edit need."""
    for rule in edit.key_rules:
        source = rule.ranking
        if source is None:
            continue
        uses_layer = source.layer == layer if source.layer is not None else edit.layers is None or layer in edit.layers
        if isinstance(edit, ReplaceToken) or (uses_layer and (source.of != "first" or step == 0)):
            yield source


def _select_heads(edit: Edit, call: AttentionCall) -> Bool[Tensor, " head"]:
    mask = torch.ones(call.query.shape[1], dtype=torch.bool, device=call.query.device)
    if edit.heads is not None:
        mask[:] = False
        mask[list(edit.heads)] = True
    return mask


def _select_queries(
    edit: KeyEdit, keys: Tensor, context: SelectionContext, unedited: UneditedCall
) -> Bool[Tensor, "batch query"] | None:
    if not isinstance(edit, RowEdit) or edit.queries is None:
        return None
    see = unedited.call.visibility
    rows = ~to_mask(keys[:, :1], see.keys)[:, 0] if edit.queries == OTHER_ROWS else context.region(edit.queries)
    return rows[:, see.keys - see.queries :]


def _has_type(rule: KeyRule) -> bool:
    """Whether a rule restricts anchors by type, so that some heads have none."""
    return isinstance(rule, Anchors) and rule.only != "all"


def _may_be_empty(edit: KeyEdit) -> bool:
    """Whether an edit may have nothing to act on; anchors of any type always exist."""
    rule = edit.keys
    return rule.is_shared or rule.reference is not rule or _has_type(rule) or len(edit.key_rules) > 1


def _repeat_targets(target: Tensor, keys: Tensor) -> Tensor:
    """A target for every key: the targets in their order, again and again if there are more keys than targets."""
    count = (target != NO_KEY).sum(-1, keepdim=True)
    index = torch.arange(keys.shape[-1], device=keys.device) % count.clamp_min(1)
    return target.gather(-1, index).masked_fill(keys == NO_KEY, NO_KEY)


def _build_moves(selection: Selection) -> list[MoveTensors]:
    """The move in pieces of a few ranks, because a call reads the mass of all rows for all ranks of a piece."""
    pieces = selection.keys.split(RANKS_AT_ONCE, -1)
    targets = [None] * len(pieces) if selection.target is None else selection.target.split(RANKS_AT_ONCE, -1)
    return [MoveTensors(keys, target, selection.queries) for keys, target in zip(pieces, targets, strict=True)]


def _scale(edit: Scaling, call: AttentionCall, selected: Tensor) -> AttentionCall:
    """Scale keys or values per query head: heads that share them may be scaled differently."""
    factor = torch.where(to_mask(selected, call.visibility.keys), edit.factor, 1.0)[..., None]
    key, value = (x.repeat_interleave(call.repeats, 1) for x in (call.key, call.value))
    if isinstance(edit, ScaleKeys):
        return replace(call, key=(key * factor).to(key.dtype), value=value)
    return replace(call, key=key, value=(value * factor).to(value.dtype))
