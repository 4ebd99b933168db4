"""Watching one forward: every attention call is run with the model's own kernel and reduced on the spot.

A `Watcher` knows nothing of models, samplers or files. The ways in (`ways.py`) hand it attention calls as they happen;
`begin` tells it the canvas, `finish` the commits, and gives back one `Reductions` per layer:

    watcher = Watcher(Watch(keep="summary"))
    with into(model, watcher):
        watcher.begin(canvas)
        logits = forward(canvas)
        layers = watcher.finish(commits)

The predicting rows of a step are known only after its commits, so with `rows=True` the keys of every layer and the
queries from the first mask on are held until `finish`: as much as half a KV cache, T·D·L values, never T².
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from floatscope.canvas import CanvasState, Commits, Reductions
from floatscope.capture import blocked, column_kernel
from floatscope.capture.attention import Attention, full_precision
from floatscope.capture.changed import attend
from floatscope.capture.columns import columns
from floatscope.capture.plan import Expected, Plan, plan_for, same
from floatscope.capture.received import BACKENDS, receive
from floatscope.capture.reduce import OF_COLUMNS, Raw, chosen_rows, ranked, region_mass, summarise
from floatscope.capture.reducer import Reducer
from floatscope.capture.verify import check_call
from floatscope.capture.visibility import Visibility
from floatscope.errors import UserError, unknown_choice
from floatscope.schema import FIELDS, SHARED, check_fields, fields_at_level

CHUNK_BYTES = 2**26
"""Layers are summarised together up to this much received attention at a time: few launches, bounded memory."""
KEEP_BYTES = 2**23
"""Up to this much a layer's received attention is kept whole until `finish`: fewer launches while the model runs."""


@dataclass(frozen=True)
class Watch:
    """What to keep of every head at every step.

    keep      a level of `FIELDS`: summary ⊂ heads ⊂ rows ⊂ full
    fields    exactly these fields instead of a level
    reducers  your own, beside them
    verify    recompute every call dense in float64 and compare: captured == executed (slow, short inputs)
    backend   auto | triton | blocked | dense
    influence also how far each committed token's logit moves with the embedding of each position: a second forward
              for each step, with gradients, and a backward for each commit
    """

    level: str = "summary"
    fields: tuple[str, ...] | None = None
    reducers: tuple[Reducer, ...] = ()
    verify: bool = False
    backend: str = "auto"
    influence: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.fields, str):
            raise UserError(
                f"fields must be a tuple of names, got the string '{self.fields}'; write ('{self.fields}',)"
            )
        if self.fields is not None:
            object.__setattr__(self, "fields", tuple(self.fields))
        check_fields(self.names)
        for reducer in self.reducers if isinstance(self.reducers, Sequence) else (self.reducers,):
            if not isinstance(reducer, Reducer) or not hasattr(reducer, "name") or not hasattr(reducer, "axes"):
                raise UserError(f"{reducer!r} is no reducer: give an instance of a fs.Reducer with a name and axes")
        object.__setattr__(
            self, "reducers", tuple(self.reducers if isinstance(self.reducers, Sequence) else [self.reducers])
        )
        if self.backend not in BACKENDS:
            raise unknown_choice("backend", self.backend, BACKENDS)
        taken = [r.name for r in self.reducers]
        for name in taken:
            if name in FIELDS or taken.count(name) > 1:
                raise UserError(f"a reducer is named '{name}', which is taken; give it another name")

    @property
    def names(self) -> tuple[str, ...]:
        return fields_at_level(self.level) if self.fields is None else self.fields

    @property
    def field_names(self) -> tuple[str, ...]:
        """What a trace says it keeps: the fields, and `influence` where it was asked for."""
        return (*self.names, "influence") if self.influence else self.names


@dataclass(frozen=True)
class Layer:
    """Where an attention call happens: its name, its output projection as a Gram matrix, the residual stream's norm."""

    name: str
    gram: Callable[[], Tensor | None] = lambda: None
    residual: Callable[[], Tensor | None] = lambda: None


Change = Callable[[Attention, int, CanvasState], Attention]
"""What an intervention makes of the attention call of a layer."""


class Watcher:
    def __init__(self, watch: Watch, rows: bool = False, change: Change | None = None) -> None:
        self.watch, self.rows, self.change = watch, rows, change
        self.fields = frozenset(watch.names)
        self.layers: list[str] = []  # names, in the order the last forward met them
        self.layer_visibility: list[int] = []  # which of the step's visibilities each layer has
        self._canvas: CanvasState | None = None
        self._past: list[Tensor] = []  # rollout of a cached prefix, by layer boundary

    def begin(self, canvas: CanvasState, first_row: int | None = None) -> None:
        """The forward of `canvas.step` starts: the next attention calls belong to it.

        `first_row` is the first that may turn out to be predicting, where that is not read off the masks.
        """
        self._canvas = canvas
        self._plans: list[Plan] = []
        self._raws: list[Raw] = []
        self._held: list[Attention] = []
        self._extra: list[dict[str, Tensor]] = []
        self._carry: Tensor | None = None
        if canvas.step == 0:
            self._past = []
        self._first_row = _first_candidate(canvas) if self.rows and first_row is None else first_row or 0
        self.layers, self.layer_visibility = [], []

    @property
    def watching(self) -> bool:
        return self._canvas is not None

    def attend(self, call: Attention, layer: Layer) -> Float[Tensor, "batch head query value_dim"]:
        """Run one attention call; if a forward is being watched, reduce it too."""
        call = replace(call, visible=call.visible.to(call.query.device))
        if self.change is not None and self._canvas is not None:
            call = self.change(call, len(self._raws), self._canvas)
        done = attend(call)
        if self._canvas is None:
            return done.output
        with full_precision():
            if not torch.is_grad_enabled():
                self._reduce(call, done.output, done.lse, layer, self._canvas)
                return done.output
            with torch.no_grad():
                self._reduce(_detached(call), done.output.detach(), done.lse, layer, self._canvas)
        return done.output

    def finish(self, commits: Commits | None = None) -> list[Reductions]:
        """The step is over; with its commits known, the predicting rows are read and every field is made."""
        canvas = self._canvas
        if canvas is None:
            raise UserError("finish() without begin(): no forward is being watched")
        self._canvas = None
        commits = Commits.none() if commits is None or not self.rows else commits
        if len(commits) and int(commits.row.min()) < self._first_row:
            raise ValueError(f"row {int(commits.row.min())} decided a commit, but no position it decides was masked")
        with torch.no_grad(), torch.autocast(canvas.tokens.device.type, enabled=False), full_precision():
            expected = [plan.expected(commits) for plan in self._plans]
            here = commits.to(torch.device("cpu"))  # once, not for every layer
            predicted = [_predicting_rows(call, here) for call in self._held]
            layers = self._summaries(commits, predicted, expected)
            for i, p in enumerate(predicted):
                layers[i] |= chosen_rows(p, self._plans[self.layer_visibility[i]].member, commits, self.fields)
            for v, want in enumerate(expected):  # once per visibility, with the first layer that has it
                at = self.layer_visibility.index(v)
                layers[at] |= {name: getattr(want, name) for name in SHARED if name in self.fields}
            self._check_mass(canvas)  # last, because it waits for the device
        out = [Reductions(i, layers[i] | self._extra[i]) for i in range(len(layers))]
        self._raws, self._held, self._extra = [], [], []
        return out

    def _reduce(self, call: Attention, output: Tensor, lse: Tensor | None, layer: Layer, canvas: CanvasState) -> None:
        see, index = call.visible, len(self._raws)
        if see.keys != canvas.tokens.shape[1]:
            raise UserError(
                f"layer '{layer.name}' attends over {see.keys} keys but the canvas has {canvas.tokens.shape[1]}"
                " positions: cross-attention and pruned caches are not captured; if the cache keeps only"
                " a sliding window, generate with use_cache=False"
            )
        if len(call.query) != len(canvas.tokens):
            raise UserError(
                f"layer '{layer.name}' attends in a batch of {len(call.query)} but the canvas has {len(canvas.tokens)}"
                " samples: heads or windows folded into the batch are not captured"
            )
        at = self._plan(see, canvas, call.query.device)
        plan = self._plans[at]
        carry = self._carry_in(index, plan)
        got = receive(call, lse, plan.ask, carry, self.watch.backend)
        if self.watch.verify:
            check_call(call, output, plan.ask, carry, got, layer.name, canvas.step)
        extra: dict[str, Tensor] = {}
        if got.carried is not None:
            extra["rollout"] = self._carry_out(index, got.carried, plan)
        if "residual" in self.fields and (norms := layer.residual()) is not None:
            cached = see.keys - norms.shape[1]  # rows of earlier steps: not in this forward
            extra["residual"] = F.pad(norms, (cached, 0), value=torch.nan) if cached else norms
        for reducer in self.watch.reducers:
            extra[reducer.name] = reducer.run(call, lse)
        if "matrix" in self.fields:
            extra["matrix"] = _matrix(call, lse)
        cols = None
        if self.fields & OF_COLUMNS:
            if column_kernel.serves(call):
                cols = column_kernel.columns(call, output, plan.rows, layer.gram())
            else:
                apart = "turned" in self.fields and see.kind != "full"
                top = ranked(got.received[:, :, 0], plan) if apart else None
                cols = columns(call, output, plan.rows, layer.gram(), top)
        half = call.query.dtype in (torch.float16, torch.bfloat16)
        received, regions = got.received, None
        if received.nbytes > KEEP_BYTES:  # too much to keep for all layers: pool the regions now, keep the groups
            regions = None if plan.member is None else region_mass(received, plan.member)
            received = received[:, :, : plan.groups.shape[-1]].clone()
        self._raws.append(Raw(at, half, received, got.mass, regions, got.entropy, cols))
        if self.rows:
            first = self._first_row - (see.keys - see.queries)
            q, visible = call.query[:, :, max(0, first) :].clone(), see.rows_from(max(0, first))
            changes = None if call.changes is None else call.changes.rows_from(max(0, first))
            self._held.append(replace(call, query=q, value=call.key, visible=visible, changes=changes))
        self._extra.append(extra)
        self.layers.append(layer.name)
        self.layer_visibility.append(at)

    def _plan(self, see: Visibility, canvas: CanvasState, device: torch.device) -> int:
        for i, plan in enumerate(self._plans):
            if same(plan.visible, see) and plan.groups.device == device:
                return i
        regions = bool(self.fields & {"regions", "rollout", "row_regions"})
        self._plans.append(plan_for(see, canvas.to(device), regions=regions, entropy="head_stats" in self.fields))
        return len(self._plans) - 1

    def _summaries(
        self, commits: Commits, predicted: Sequence[Tensor], expected: Sequence[Expected]
    ) -> list[dict[str, Tensor]]:
        out: list[dict[str, Tensor]] = []
        for at, alike in groupby(self._raws, key=lambda raw: raw.plan):
            waiting = list(alike)
            room = max(1, CHUNK_BYTES // waiting[0].received.nbytes)
            for start in range(0, len(waiting), room):
                raws = waiting[start : start + room]
                rows = _rows_received(predicted[len(out) : len(out) + len(raws)], commits, raws[0].received)
                made = summarise(raws, rows, self._plans[at], expected[at], self.fields)
                by_layer = {name: value.unbind(0) for name, value in made.items()}
                out += [{name: values[i] for name, values in by_layer.items()} for i in range(len(raws))]
        return out

    def _carry_in(self, index: int, plan: Plan) -> Tensor | None:
        """Region indicators as they reach this layer, on all keys; None when no rollout is kept."""
        if plan.member is None or "rollout" not in self.fields:
            return None
        if index == 0:
            self._carry = plan.member[:, plan.visible.keys - plan.visible.queries :]
        assert self._carry is not None
        self._carry = self._carry.to(plan.member.device)
        return self._with_past(index, self._carry, plan.visible)

    def _carry_out(self, index: int, carried: Tensor, plan: Plan) -> Tensor:
        """Y ← ½·mean_h A Y + ½·Y, and what each region's rows now hold of each region."""
        assert self._carry is not None
        assert plan.pool is not None
        self._carry = carried.lerp(self._carry, 0.5)
        return torch.bmm(plan.pool, self._with_past(index + 1, self._carry, plan.visible))

    def _with_past(self, boundary: int, now: Tensor, see: Visibility) -> Tensor:
        """A causal prefix never changes, so what its rows held at this boundary is kept from the steps before."""
        before = see.keys - see.queries
        if before:
            past = self._past[boundary] if boundary < len(self._past) else now[:, :0]
            if past.shape[1] < before:
                raise UserError("rollout needs the whole prefix: start watching before the cache is filled")
            now = torch.cat([past[:, :before].to(now.device), now], 1)
        if see.kind != "full":
            self._past[boundary : boundary + 1] = [now]
        return now

    def _check_mass(self, canvas: CanvasState) -> None:
        """Rows of softmax sum to 1: the cheapest proof that the log-sum-exp belongs to these scores."""
        if not self._raws:
            return
        masses = [raw.received[:, :, 0].sum(-1) if raw.mass is None else raw.mass for raw in self._raws]
        device = canvas.tokens.device
        totals = torch.stack([mass.to(device) for mass in masses])  # [layer, batch, head]
        counts = [plan.groups[..., 0].sum(1, keepdim=True).to(device) for plan in self._plans]
        count = torch.stack(counts)[self.layer_visibility]
        error = (totals / count.clamp_min(1) - 1).abs()
        limit = 2e-2 if self._raws[0].half else 1e-3
        bad = ((error > limit) | ~error.isfinite()) & (count > 0)
        if not bool(bad.any()):
            return
        layer, sample, head = bad.nonzero()[0].tolist()
        where = f"layer {layer} ('{self.layers[layer]}'), head {head}, step {canvas.step}, sample {sample}"
        if not bool(error[layer, sample, head].isfinite()):
            raise UserError(
                f"NaN or inf in the attention scores at {where}; look for NaN in the weights, or try"
                " float32 or bfloat16"
            )
        raise UserError(
            f"captured attention differs from executed at {where}: rows sum to"
            f" {float((totals / count)[layer, sample, head]):.4f} instead of 1; run `floatscope doctor`"
        )


def _first_candidate(canvas: CanvasState) -> int:
    """The first row that may turn out to be predicting: the first mask's, or the one before (shifted logits)."""
    masked = canvas.masked.any(0).nonzero()
    return max(0, int(masked[0]) - 1) if len(masked) else max(0, canvas.tokens.shape[1] - 1)


def _predicting_rows(call: Attention, commits: Commits) -> Tensor:
    """[commit, head, key]; the queries of a held call are the last positions of the canvas."""
    return blocked.rows(call, commits.sample, commits.row - (call.visible.keys - call.visible.queries))


def _detached(call: Attention) -> Attention:
    return replace(call, query=call.query.detach(), key=call.key.detach(), value=call.value.detach())


def _matrix(call: Attention, lse: Tensor | None) -> Tensor:
    B, H, Q, _ = call.query.shape
    out = torch.zeros(B, H, Q, call.visible.keys, device=call.query.device)
    for at in blocked.blocks(call, lse):
        out[at.batch, at.heads, at.rows, at.keys] = at.p
    return out


def _rows_received(predicted: Sequence[Tensor], commits: Commits, like: Tensor) -> Tensor | None:
    """What the predicting rows give each key, added up per sample, [layer, batch, head, key]; None without any."""
    if not predicted or not len(commits):
        return None
    out = like.new_zeros(len(predicted), *like[:, :, 0].shape)
    for into, p in zip(out, predicted, strict=True):
        into.index_add_(0, commits.sample.to(p.device), p)
    return out
