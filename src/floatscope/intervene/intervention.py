"""Edits at work in one decoding: before each attention call they become `Changes`, from what was attended to before.

    work = Intervention(edits_of("mask_anchors(k=5)"), model, samples)
    canvas = work.seen(canvas)                       # what the model looks at: tokens replaced, the first one dropped
    call = work.change(call, layer, canvas)          # by the watcher, for every layer
    work.idle                                        # edits that picked nothing, and how often

Anchors are those of the attention as the model computes it at that place, the edit itself left out: else what is hidden
in one step would be no anchor in the next, and be shown again. A causal model with a cache computes each row once, so
what its keys received is added up from step to step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from floatscope.capture.ask import Ask
from floatscope.capture.attention import Attention, attend, full_precision
from floatscope.capture.changes import NOWHERE, Bias, Changes, Move
from floatscope.capture.fields import ELIGIBLE
from floatscope.capture.plan import expectation
from floatscope.capture.received import receive
from floatscope.capture.visibility import Visibility
from floatscope.errors import UserError
from floatscope.intervene.picking import Ranking, Scene, as_mask, first_of, pick, put
from floatscope.models import Model
from floatscope.values import OTHERS, CanvasState, Edit, Keys, State

OF_CANVAS = ("replace", "drop")


@dataclass
class Received:
    """What the keys of one layer received in all rows so far, and what uniform attention would have given them."""

    received: Float[Tensor, "batch head key"]
    uniform: Float[Tensor, "batch key"]
    seen: Float[Tensor, "batch key"]
    count: Float[Tensor, " batch"]

    def with_more(self, later: Received) -> Received:
        more = later.uniform.shape[-1] - self.uniform.shape[-1]
        earlier = [F.pad(x, (0, more)) for x in (self.received, self.uniform, self.seen)]
        added = [a + b for a, b in zip(earlier, (later.received, later.uniform, later.seen), strict=True)]
        return Received(added[0], added[1], added[2], self.count + later.count)

    @cached_property
    def eligible(self) -> Bool[Tensor, "batch key"]:
        return (self.seen >= self.count.clamp(1, ELIGIBLE)[:, None]) & (self.uniform > 0)

    @cached_property
    def evenly(self) -> Float[Tensor, "batch 1 key"]:
        return self.uniform.clamp_min(1e-30)[:, None]

    @property
    def ranking(self) -> Ranking:
        return Ranking(self.eligible, self.received / self.evenly)


@dataclass
class Intervention:
    edits: tuple[Edit, ...]
    model: Model
    samples: Sequence[str]
    _calls: Counter[Edit] = field(default_factory=Counter)  # how often an edit was at work
    _empty: dict[Edit, Tensor] = field(default_factory=dict)  # and how often it picked nothing; read when all is done
    _step: int = -1
    _now: dict[tuple[int, str], Ranking] = field(default_factory=dict)  # by layer and rows
    _before: dict[tuple[int, str], Ranking] = field(default_factory=dict)
    _first: dict[tuple[int, str], Ranking] = field(default_factory=dict)
    _picked: dict[tuple[Keys, torch.device], dict[int, Tensor]] = field(default_factory=dict)  # this step's
    _sums: dict[tuple[int, str], Received] = field(default_factory=dict)  # of a cached model
    _frozen: dict[tuple[Edit, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    _expected: dict[tuple[object, str], tuple[Visibility, Ask, Received]] = field(default_factory=dict)  # this step's

    @property
    def idle(self) -> list[str]:
        """A sentence for every edit that picked no key somewhere, or whose steps never came."""
        empty = {edit: int(count) for edit, count in self._empty.items()}
        told = [f"{edit} picked nothing {n} of {self._calls[edit]} times" for edit, n in empty.items() if n]
        last = {edit: self._step - int(edit.primitive == "freeze") for edit in self.edits}  # a freeze acts later
        late = [edit for edit in self.edits if edit.steps is not None and min(edit.steps) > last[edit]]
        return told + [f"{edit} was never at work: there were {self._step + 1} steps" for edit in late]

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
        if canvas.step != self._step:
            self._step, self._before, self._now, self._expected = canvas.step, self._now, {}, {}
            self._picked = {}
        for rows in sorted({keys.rows for edit in self.edits for keys in _ranks_at(edit, layer, canvas.step)}):
            self._rank(call, layer, canvas, rows)
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

    # --- anchors ----------------------------------------------------------------------------------------------------

    def _pick(self, keys: Keys | None, scene: Scene) -> Tensor:
        assert keys is not None
        if keys.rule == "anchors" and keys.of == "before" and keys.layer is None and self._before:
            return self._anchors_before(keys, scene.canvas)[scene.layer]
        return pick(keys, self._ranking(keys, scene.layer), scene)

    def _anchors_before(self, keys: Keys, canvas: CanvasState) -> dict[int, Tensor]:
        """Those of the step before are known for all layers: a few launches for all of them."""
        device = canvas.tokens.device
        if (keys, device) not in self._picked:
            grown = {
                layer: ranked.of(canvas.tokens.shape[1])
                for (layer, rows), ranked in self._before.items()
                if rows == keys.rows and ranked.eligible.device == device
            }
            lifts = torch.stack([ranked.lift for ranked in grown.values() if ranked.lift is not None])
            eligible = torch.stack([ranked.eligible for ranked in grown.values()])
            picked = first_of(lifts, eligible[:, :, None].expand_as(lifts), int(keys.k))
            self._picked[keys, device] = dict(zip(grown, picked, strict=True))
        return self._picked[keys, device]

    def _to(self, edit: Edit, source: Tensor, scene: Scene) -> Tensor:
        target = self._pick(edit.to, scene)
        return F.pad(target, (0, source.shape[-1] - target.shape[-1]), value=NOWHERE)

    def _known(self, edit: Edit, layer: int) -> bool:
        """Whether the layer whose anchors it takes has run."""
        rules = [keys for keys in (edit.keys, edit.to) if keys is not None and keys.ranked]
        return all(self._ranking(keys, layer) is not None for keys in rules)

    def _ranking(self, keys: Keys, layer: int) -> Ranking | None:
        if not keys.ranked:
            return None
        like = keys.like or keys
        at = (layer if like.layer is None else like.layer, like.rows)
        found = {"now": self._now, "first": self._first, "before": self._before or self._now}[like.of]
        return found.get(at) or self._now.get(at)

    def _rank(self, call: Attention, layer: int, canvas: CanvasState, rows: str) -> None:
        """What this layer attends to before it is edited."""
        at, plain = (layer, rows), replace(call, changes=None)
        with torch.no_grad(), full_precision():
            _, ask, expected = self._uniform(plain, canvas, rows)
            got = receive(plain, attend(plain).lse, ask).received[:, :, 0]
        if call.visible.queries < call.visible.keys and at in self._sums:
            self._sums[at] = self._sums[at].with_more(replace(expected, received=got))
            self._now[at] = self._sums[at].ranking
        else:
            self._sums[at] = replace(expected, received=got)
            self._now[at] = Ranking(expected.eligible, got / expected.evenly)  # the same for all layers
        if canvas.step == 0:
            self._first[at] = self._now[at]

    def _uniform(self, call: Attention, canvas: CanvasState, rows: str) -> tuple[Visibility, Ask, Received]:
        """Once for all layers that see alike: which rows count, and what they would give if they looked evenly."""
        see = call.visible
        key = (see.kind, see.queries, see.keys, see.size, id(see.valid), id(see.mask), id(see.rule)), rows
        if key not in self._expected:
            first = see.keys - see.queries
            counted = canvas.valid[:, first:]
            if rows == "masked" and bool(canvas.masked.any()):
                counted = counted & canvas.masked[:, first:]
            weights = counted[..., None].float()
            want = expectation(see, weights)
            count = want.count[:, 0]
            uniform = want.uniform[:, 0] * count[:, None]
            nothing = uniform.new_zeros(len(weights), 1, see.keys)
            self._expected[key] = (
                see,  # kept, so that no other gets its id
                Ask(weights, memberships=True),
                Received(nothing, uniform.expand(len(weights), -1), want.seen[:, 0].expand(len(weights), -1), count),
            )
        return self._expected[key]

    # --- what is not attention --------------------------------------------------------------------------------------

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
        ranking = None
        if keys.ranked:
            told = keys.like or keys
            known = self._first if told.of == "first" else self._now
            layers = [r for (i, rows), r in known.items() if rows == told.rows and told.layer in (None, i)]
            layers = [ranked.of(canvas.tokens.shape[1]) for ranked in layers]
            lifts = [ranked.lift.mean(1, keepdim=True) for ranked in layers if ranked.lift is not None]
            device = canvas.tokens.device
            mean = torch.stack([lift.to(device) for lift in lifts]).mean(0)
            ranking = Ranking(layers[0].eligible.to(device) & ~canvas.masked, mean)
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
    if model.text is None:
        raise UserError(f"{spec.name} has no tokenizer, so a token is named by its id, as in replace_token(token=13)")
    text = "\n" if wanted == "newline" else str(wanted)
    ids = [i for i in model.text.encode(text) if i not in model.text.special_ids]
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
