"""Edits at work in one decoding: before each attention call they become `Changes`, from what was attended to before.

    work = Intervention(edits_of("mask_anchors(k=5)"), model, samples)
    canvas = work.seen(canvas)                       # what the model looks at: tokens replaced, the first one dropped
    call = work.change(call, layer, canvas)          # by the watcher, for every layer
    work.idle                                        # edits that picked nothing, and how often

Which keys are anchors is told by `anchors.py`.
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
from floatscope.capture.attention import Attention
from floatscope.capture.changes import NOWHERE, Bias, Changes, Move
from floatscope.errors import UserError
from floatscope.interventions.anchors import Anchors
from floatscope.interventions.edits import OTHERS, Edit, Keys
from floatscope.interventions.picking import Scene, as_mask, pick, put
from floatscope.models.model import Model
from floatscope.schema import State

OF_CANVAS = ("replace", "drop")


@dataclass
class Intervention:
    edits: tuple[Edit, ...]
    model: Model
    samples: Sequence[str]
    _calls: Counter[Edit] = field(default_factory=Counter)  # how often an edit was at work
    _empty: dict[Edit, Tensor] = field(default_factory=dict)  # and how often it picked nothing; read when all is done
    _anchors: Anchors = field(default_factory=Anchors)
    _frozen: dict[tuple[Edit, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def idle(self) -> list[str]:
        """A sentence for every edit that picked no key somewhere, or whose steps never came."""
        empty = {edit: int(count) for edit, count in self._empty.items()}
        told = [f"{edit} picked nothing {n} of {self._calls[edit]} times" for edit, n in empty.items() if n]
        steps = self._anchors.step + 1
        last = {edit: steps - 1 - int(edit.primitive == "freeze") for edit in self.edits}  # a freeze acts later
        late = [edit for edit in self.edits if edit.steps is not None and min(edit.steps) > last[edit]]
        return told + [f"{edit} was never at work: there were {steps} steps" for edit in late]

    def looks_first(self, canvas: CanvasState) -> bool:
        """Whether the anchors must be known before the first forward: a token is replaced before it is attended to."""
        return canvas.step == 0 and any(e.primitive == "replace" and _ranked(e) and e.acts(0, 0) for e in self.edits)

    def seen(self, canvas: CanvasState) -> CanvasState:
        """The canvas as the model is to see it."""
        for edit in self.edits:
            if edit.primitive in OF_CANVAS and (edit.steps is None or canvas.step in edit.steps):
                canvas = self._dropped(edit, canvas) if edit.primitive == "drop" else self._replaced(edit, canvas)
        return canvas

    def change(self, call: Attention, layer: int, canvas: CanvasState) -> Attention:
        """The call with what the edits make of it."""
        canvas = canvas.to(call.query.device)
        self._anchors.at_step(canvas.step)
        for rows in sorted({keys.rows for edit in self.edits for keys in _ranks_at(edit, layer, canvas.step)}):
            self._anchors.look(call, layer, canvas, rows)
        scene = Scene(canvas, layer, call.query.shape[1], self.samples)
        biases: list[Bias] = []
        moves: list[Move] = []
        sink = silent = None
        for edit in self.edits:
            if edit.primitive == "freeze":
                call = self._freeze(edit, call, layer, canvas.step)
                continue
            if edit.primitive in OF_CANVAS or not edit.acts(canvas.step, layer) or not self._known(edit, layer):
                continue
            heads = _heads(edit, call)
            if edit.primitive == "zero":
                silent = heads if silent is None else silent | heads
            elif edit.primitive == "sink":
                assert edit.amount is not None
                sink = torch.where(heads, edit.amount, -torch.inf if sink is None else sink)
            else:
                picked = self._pick(edit.keys, scene)
                queries = _queries(edit, picked, scene, call)
                if edit.heads is not None:
                    picked = picked.masked_fill(~heads[:, None], NOWHERE)
                if layer == min(edit.layers or (0,)):  # once a step
                    self._count(edit, picked if queries is None else picked.where(queries.any(), NOWHERE))
                if edit.primitive == "scale":
                    call = _scaled(edit, call, picked)
                elif edit.primitive == "bias":
                    biases.append(_bias(edit, picked, queries, call.visible.keys))
                else:
                    moves.append(Move(picked, None if edit.to is None else self._to(edit, picked, scene), queries))
        if not biases and not moves and sink is None and silent is None:
            return call
        return replace(call, changes=Changes(tuple(biases), sink, tuple(moves), silent))

    def _pick(self, keys: Keys | None, scene: Scene) -> Tensor:
        assert keys is not None
        known = self._anchors.before(keys, scene.canvas)
        return pick(keys, self._anchors.ranking(keys, scene.layer), scene) if known is None else known[scene.layer]

    def _to(self, edit: Edit, source: Tensor, scene: Scene) -> Tensor:
        target = self._pick(edit.to, scene)
        return F.pad(target, (0, source.shape[-1] - target.shape[-1]), value=NOWHERE)

    def _known(self, edit: Edit, layer: int) -> bool:
        """Whether the layer whose anchors it takes has run."""
        rules = [keys for keys in (edit.keys, edit.to) if keys is not None and keys.ranked]
        return all(self._anchors.ranking(keys, layer) is not None for keys in rules)

    def _freeze(self, edit: Edit, call: Attention, layer: int, step: int) -> Attention:
        assert edit.steps is not None
        if edit.layers is not None and layer not in edit.layers:
            return call
        if step == edit.steps[0]:
            self._frozen[edit, layer] = call.query, call.key
        held = self._frozen.get((edit, layer))
        if held is None or step == edit.steps[0]:
            return call
        heads = _heads(edit, call)
        if bool(heads.all()) and held[1].shape[1] == call.key.shape[1]:
            return replace(call, query=held[0], key=held[1])
        key, value = (x.repeat_interleave(call.repeats, 1) for x in (call.key, call.value))
        was = held[1].repeat_interleave(len(heads) // held[1].shape[1], 1)
        query = torch.where(heads[:, None, None], held[0], call.query)
        return replace(call, query=query, key=torch.where(heads[:, None, None], was, key), value=value)

    def _dropped(self, edit: Edit, canvas: CanvasState) -> CanvasState:
        at = canvas.valid.int().argmax(-1)[:, None]
        begins = canvas.tokens.gather(-1, at) == (-1 if self.model.spec.bos_id is None else self.model.spec.bos_id)
        self._count(edit, at.masked_fill(~begins, NOWHERE))
        first = torch.zeros_like(canvas.valid).scatter_(-1, at, begins)
        return replace(canvas, states=canvas.states.masked_fill(first, int(State.PAD)))

    def _replaced(self, edit: Edit, canvas: CanvasState) -> CanvasState:
        keys = edit.keys
        assert keys is not None
        scene = Scene(canvas, -1, 1, self.samples)
        ranking = self._anchors.over_layers(keys, canvas) if keys.ranked else None
        picked = pick(keys, ranking, scene)
        self._count(edit, picked)
        there = as_mask(picked, canvas.tokens.shape[1])[:, 0] & ~canvas.masked
        return replace(canvas, tokens=canvas.tokens.masked_fill(there, token_of(edit, self.model)))

    def _count(self, edit: Edit, picked: Tensor) -> None:
        nothing = (picked == NOWHERE).all().long()
        self._calls[edit] += 1
        self._empty[edit] = self._empty[edit] + nothing if edit in self._empty else nothing


def rewrites(edits: Sequence[Edit]) -> bool:
    """Whether a position that was seen may look otherwise in a later step, so that its keys and values cannot be kept.
    A first token that is never there stays away."""
    return any(e.primitive == "replace" or (e.primitive == "drop" and e.steps is not None) for e in edits)


def token_of(edit: Edit, model: Model) -> int:
    """The token that is put in another's place."""
    spec, wanted = model.spec, edit.token
    if isinstance(wanted, int):
        return wanted
    if wanted == "mask":
        if spec.mask_id is None:
            raise UserError(f"{spec.name} has no mask token to put in another's place; name another token")
        return spec.mask_id
    if model.tokenizer is None:
        raise UserError(f"{spec.name} has no tokenizer, so a token is named by its id, as in replace_token(token=13)")
    text = "\n" if wanted == "newline" else str(wanted)
    ids = [i for i in model.tokenizer.encode(text) if i not in model.tokenizer.special_ids]
    if len(ids) != 1:
        raise UserError(f"{text!r} is {len(ids)} tokens to {spec.name}; name a text that is one, or its id")
    return ids[0]


def _ranked(edit: Edit) -> bool:
    return any(keys.ranked for keys in (edit.keys, edit.to) if keys is not None)


def _ranks_at(edit: Edit, layer: int, step: int) -> Iterator[Keys]:
    """The rules of an edit that want to know what this layer attends to in this step."""
    for keys in (edit.keys, edit.to):
        if keys is None or not keys.ranked:
            continue
        told = keys.like or keys
        here = told.layer == layer if told.layer is not None else edit.layers is None or layer in edit.layers
        if edit.primitive == "replace" or (here and (told.of != "first" or step == 0)):
            yield told


def _heads(edit: Edit, call: Attention) -> Bool[Tensor, " head"]:
    H = call.query.shape[1]
    chosen = torch.ones(H, dtype=torch.bool, device=call.query.device)
    if edit.heads is not None:
        chosen[:] = False
        chosen[list(edit.heads)] = True
    return chosen


def _queries(edit: Edit, picked: Tensor, scene: Scene, call: Attention) -> Bool[Tensor, "batch query"] | None:
    if edit.queries is None:
        return None
    rows = ~as_mask(picked[:, :1], call.visible.keys)[:, 0] if edit.queries == OTHERS else scene.region(edit.queries)
    return rows[:, call.visible.keys - call.visible.queries :]


def _bias(edit: Edit, picked: Tensor, queries: Tensor | None, keys: int) -> Bias:
    assert edit.amount is not None
    return Bias(put(picked, keys, edit.amount), queries, hides=edit.amount == -float("inf"))


def _scaled(edit: Edit, call: Attention, picked: Tensor) -> Attention:
    """Keys or values of every query head by itself: heads that share them may be scaled differently."""
    assert edit.amount is not None
    factor = torch.where(as_mask(picked, call.visible.keys), edit.amount, 1.0)[..., None]
    key, value = (x.repeat_interleave(call.repeats, 1) for x in (call.key, call.value))
    if edit.what == "key":
        return replace(call, key=(key * factor).to(key.dtype), value=value)
    return replace(call, key=key, value=(value * factor).to(value.dtype))
