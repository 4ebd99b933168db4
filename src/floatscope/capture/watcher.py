"""Watching one forward: every attention call is run with the model's own kernel and reduced on the spot.

A `Watcher` knows nothing of models, samplers or files. The ways in (`ways.py`) hand it attention calls in the order they
happen; `begin` tells it the canvas, `finish` the commits, and gives back one `Reductions` per layer:

    with Watcher(Watch(keep="summary")) as watcher, through_transformers(model, watcher):
        watcher.begin(canvas)
        logits = forward(canvas)
        layers = watcher.finish(commits)

The predicting rows of a step are known only after its commits, so with `rows=True` the keys of every layer are held
until `finish`: as much as half a KV cache, T·D·L values, never T².
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from floatscope.capture import blocked
from floatscope.capture.ask import Ask, row_mean
from floatscope.capture.attention import Attention, attend
from floatscope.capture.columns import columns
from floatscope.capture.fields import FIELDS, GROUPS, check_fields, fields_of
from floatscope.capture.received import BACKENDS, receive
from floatscope.capture.reduce import Expected, Raw, chosen_rows, expected, summarise
from floatscope.capture.reducer import Reducer
from floatscope.capture.verify import check_call
from floatscope.capture.visibility import Visibility
from floatscope.errors import UserError, unknown
from floatscope.values import CanvasState, Commits, Groups, Reductions

CHUNK_BYTES = 2**26
"""Layers are summarised together up to this much received attention at a time: few launches, bounded memory."""
MASS_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2, torch.float64: 1e-3}


@dataclass(frozen=True)
class Watch:
    """What to keep of every head at every step.

    keep      a level of `FIELDS`: summary ⊂ heads ⊂ rows ⊂ full
    fields    exactly these fields instead of a level
    reducers  your own, beside them
    verify    recompute every call dense in float64 and compare: captured == executed (slow, short inputs)
    backend   auto | triton | blocked | dense
    """

    keep: str = "summary"
    fields: tuple[str, ...] | None = None
    reducers: tuple[Reducer, ...] = ()
    verify: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        check_fields(self.names)
        if self.backend not in BACKENDS:
            raise unknown("backend", self.backend, BACKENDS)
        taken = [r.name for r in self.reducers]
        for name in taken:
            if name in FIELDS or taken.count(name) > 1:
                raise UserError(f"a reducer is named '{name}', which is taken; give it another name")

    @property
    def names(self) -> tuple[str, ...]:
        return fields_of(self.keep) if self.fields is None else self.fields


@dataclass(frozen=True)
class Layer:
    """Where an attention call happens: its name, its output projection as a Gram matrix, the residual stream's norm."""

    name: str
    gram: Callable[[], Tensor | None] = lambda: None
    residual: Float[Tensor, "batch query"] | None = None


class Watcher:
    def __init__(self, watch: Watch, rows: bool = False) -> None:
        self.watch, self.rows = watch, rows
        self.fields = frozenset(watch.names)
        self.layers: list[str] = []  # names, in the order the last forward met them
        self.layer_visibility: list[int] = []
        self._canvas: CanvasState | None = None
        self._past: list[Tensor] = []  # rollout of a cached prefix, by layer boundary

    def begin(self, canvas: CanvasState) -> None:
        """The forward of `canvas.step` starts: the next attention calls belong to it."""
        self._canvas = canvas
        self._raws: list[Raw] = []
        self._held: list[Attention] = []
        self._extra: list[dict[str, Tensor]] = []
        self._visibilities: list[Visibility] = []
        self._asks: list[tuple[Ask, Expected, Tensor]] = []
        self._carry: Tensor | None = None
        self.layers, self.layer_visibility = [], []

    @property
    def watching(self) -> bool:
        return self._canvas is not None

    def attend(self, call: Attention, layer: Layer) -> Float[Tensor, "batch head query value_dim"]:
        """Run one attention call; if a forward is being watched, reduce it too."""
        done = attend(call)
        if self._canvas is not None:
            with torch.no_grad():
                self._reduce(_detached(call), done.output.detach(), done.lse, layer, self._canvas)
        return done.output

    def finish(self, commits: Commits | None = None) -> list[Reductions]:
        """The step is over; with its commits known, the predicting rows are read and every field is made."""
        canvas = self._canvas
        if canvas is None:
            raise UserError("finish() without begin(): no forward is being watched")
        self._canvas = None
        commits = Commits.none() if commits is None else commits
        with torch.no_grad():
            predicted = [blocked.rows(call, commits.sample, self._row(commits, call)) for call in self._held]
            self._check_mass(canvas)
            layers = self._summaries(commits, predicted)
            for i, p in enumerate(predicted):
                member = canvas.regions.member
                layers[i] |= chosen_rows(p, None if member is None else member.to(p.device), commits, self.fields)
            for v in range(len(self._visibilities)):  # once per visibility, with the first layer that has it
                at = self.layer_visibility.index(v)
                if "uniform" in self.fields:
                    layers[at]["uniform"] = self._expected(v, commits)[1].uniform
        out = [Reductions(i, {**layers[i], **self._extra[i]}) for i in range(len(layers))]
        self._raws, self._held, self._extra = [], [], []
        return out

    def _reduce(self, call: Attention, output: Tensor, lse: Tensor | None, layer: Layer, canvas: CanvasState) -> None:
        see, index = call.visible, len(self._raws)
        T = canvas.tokens.shape[1]
        if see.keys != T:
            raise UserError(
                f"layer '{layer.name}' attends over {see.keys} keys but the canvas has {T} positions:"
                " cross-attention and pruned caches are not captured"
            )
        visibility = self._visibility(see, canvas)
        ask, _, valid = self._asks[visibility]
        carry = self._carry_in(index, see, canvas)
        wanted = receive(call, lse, ask, carry, self.watch.backend)
        if self.watch.verify:
            check_call(call, output, ask, carry, wanted, layer.name, canvas.step)
        extra: dict[str, Tensor] = {}
        R = len(canvas.regions.names)
        groups = ask.weights.shape[-1] - R
        if R and "regions" in self.fields:
            member = _to(canvas.regions.member, output)
            mass = wanted.received[:, :, groups:] @ member[:, None].float()
            extra["regions"] = mass / ask.weights[:, :, groups:].sum(1)[:, None, :, None]
        if wanted.carried is not None:
            extra["rollout"] = self._carry_out(index, wanted.carried, see, canvas)
        if layer.residual is not None and "residual" in self.fields:
            cached = see.keys - see.queries  # rows of earlier steps: not in this forward
            extra["residual"] = F.pad(layer.residual, (cached, 0), value=torch.nan)
        for reducer in self.watch.reducers:
            extra[reducer.name] = reducer.run(call, lse)
        if "matrix" in self.fields:
            extra["matrix"] = _matrix(call, lse)
        stats = None
        if "head_stats" in self.fields:
            rows = valid[:, None].float() / valid.sum(-1).clamp_min(1)[:, None, None]
            norms = [(x.float().norm(dim=-1) * rows).sum(-1) for x in (output, call.query)]
            stats = torch.stack([_known(wanted.entropy, norms[0]), *norms], -1)
        need_columns = self.fields & {"top", "top_key", "moments"}
        cols = columns(call, valid, layer.gram()) if need_columns else None
        self._raws.append(Raw(wanted.received[:, :, :groups], cols, stats, visibility))
        if self.rows:
            self._held.append(call)
        self._extra.append(extra)
        self.layers.append(layer.name)
        self.layer_visibility.append(visibility)

    def _visibility(self, see: Visibility, canvas: CanvasState) -> int:
        """Index of this visibility among the step's, with its `Ask` prepared; layers share the object, not a copy."""
        for i, known in enumerate(self._visibilities):
            if known is see or (_comparable(known, see) and replace(known) == replace(see)):
                return i
        device, Q = canvas.tokens.device, see.queries
        groups = Groups.of_canvas(canvas)
        weights = groups.weights[:, see.keys - Q :]
        valid = canvas.valid[:, see.keys - Q :]
        count = weights.sum(1)
        seen = see.sum_over_seeing(weights).mean(1).transpose(1, 2)
        want = expected(see.uniform(weights), seen, count)
        columns = [weights]
        if canvas.regions.member is not None and "regions" in self.fields:
            columns.append(canvas.regions.member[:, see.keys - Q :].float() * valid[..., None])
        entropy = None
        if "head_stats" in self.fields:
            entropy = row_mean(valid, see.seen_keys(device).mean(1).expand(len(valid), -1))
        self._visibilities.append(see)
        self._asks.append((Ask(torch.cat(columns, -1).contiguous(), entropy), want, valid))
        return len(self._visibilities) - 1

    def _expected(self, visibility: int, commits: Commits) -> tuple[Tensor, Expected]:
        """Counts and expectations of all four groups: those of the forward and, now, the predicting rows."""
        ask, want, valid = self._asks[visibility]
        see, G = self._visibilities[visibility], want.uniform.shape[1]
        count = ask.weights[..., :G].sum(1)
        weights = torch.zeros_like(ask.weights[..., :1])
        row = commits.row.to(weights.device) - (see.keys - see.queries)
        weights[commits.sample.to(weights.device), row, 0] = 1.0
        n = weights.sum(1)
        more = expected(see.uniform(weights), see.sum_over_seeing(weights).mean(1).transpose(1, 2), n)
        return torch.cat([count, n], -1), Expected(
            torch.cat([want.uniform, more.uniform], 1), torch.cat([want.eligible, more.eligible], 1)
        )

    def _summaries(self, commits: Commits, predicted: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        out: list[dict[str, Tensor]] = []
        start = 0
        while start < len(self._raws):
            visibility = self._raws[start].visibility
            room = max(1, CHUNK_BYTES // max(1, self._raws[start].received.nbytes))
            stop = start + 1
            while stop < min(len(self._raws), start + room) and self._raws[stop].visibility == visibility:
                stop += 1
            raws = self._raws[start:stop]
            received = torch.stack([r.received for r in raws])
            rows = torch.zeros_like(received[:, :, :, :1])
            for i, p in enumerate(predicted[start:stop]):
                rows[i].index_put_((commits.sample.to(p.device),), p[:, :, None], accumulate=True)
            count, want = self._expected(visibility, commits)
            stats, cols = [r.head_stats for r in raws], [r.columns for r in raws]
            made = summarise(
                torch.cat([received, rows], 3),
                _stack(cols),
                _stack(stats),
                count,
                want,
                self.fields,
            )
            out += [{name: value[i] for name, value in made.items()} for i in range(len(raws))]
            start = stop
        return out

    def _carry_in(self, index: int, see: Visibility, canvas: CanvasState) -> Tensor | None:
        """Region indicators as they reach this layer, on all keys; None when no rollout is kept or it cannot be known."""
        member = canvas.regions.member
        if member is None or "rollout" not in self.fields:
            return None
        if index == 0:
            self._carry = _to(member, canvas.tokens)[:, see.keys - see.queries :].float()
        if self._carry is None:
            return None
        return self._with_past(index, self._carry, see)

    def _carry_out(self, index: int, carried: Tensor, see: Visibility, canvas: CanvasState) -> Tensor:
        """Y ← ½·mean_h A Y + ½·Y, and what each region's rows now hold of each region."""
        assert self._carry is not None
        self._carry = carried.lerp(self._carry, 0.5)
        everywhere = self._with_past(index + 1, self._carry, see)
        rows = _to(canvas.regions.member, carried) & canvas.valid[..., None]
        return rows.float().transpose(1, 2) @ everywhere / rows.sum(1)[..., None]

    def _with_past(self, boundary: int, now: Tensor, see: Visibility) -> Tensor:
        """A causal prefix never changes, so what its rows held at this boundary is kept from the steps before."""
        before = see.keys - see.queries
        if before:
            past = self._past[boundary] if boundary < len(self._past) else now[:, :0]
            if past.shape[1] < before:
                raise UserError("rollout needs the whole prefix: start watching before the cache is filled")
            now = torch.cat([past[:, :before], now], 1)
        if see.kind != "full":
            self._past[boundary : boundary + 1] = [now]
        return now

    def _check_mass(self, canvas: CanvasState) -> None:
        """Rows of softmax sum to 1: the cheapest proof that the log-sum-exp belongs to these scores. One sync a step."""
        if not self._raws:
            return
        totals = torch.stack([r.received[:, :, 0].sum(-1) for r in self._raws])  # [layer, batch, head]
        asks = [self._asks[v][0].weights[..., 0].sum(1) for v in self.layer_visibility]
        error = (totals / torch.stack(asks)[..., None].clamp_min(1) - 1).abs()
        rowless = torch.stack(asks)[..., None] == 0
        limit = MASS_TOLERANCE.get(canvas_dtype(self._held), 2e-2)
        bad = ((error > limit) | ~error.isfinite()) & ~rowless
        if not bool(bad.any()):
            return
        layer, sample, head = bad.nonzero()[0].tolist()
        where = f"layer {layer} ('{self.layers[layer]}'), head {head}, step {canvas.step}, sample {sample}"
        if not bool(error[layer, sample, head].isfinite()):
            raise UserError(f"NaN or inf in the attention scores at {where}; try float32 or bfloat16 weights")
        raise UserError(
            f"captured attention differs from executed at {where}: rows sum to"
            f" {1 + float(error[layer, sample, head]):.4f} instead of 1; run `floatscope doctor`"
        )

    def _row(self, commits: Commits, call: Attention) -> Tensor:
        return commits.row - (call.visible.keys - call.visible.queries)


def canvas_dtype(held: Sequence[Attention]) -> torch.dtype:
    return held[0].query.dtype if held else torch.bfloat16


def _detached(call: Attention) -> Attention:
    return replace(call, query=call.query.detach(), key=call.key.detach(), value=call.value.detach())


def _matrix(call: Attention, lse: Tensor | None) -> Tensor:
    B, H, Q, _ = call.query.shape
    out = torch.zeros(B, H, Q, call.visible.keys, device=call.query.device)
    for at in blocked.blocks(call, lse):
        out[at.batch, at.heads, at.rows, at.keys] = at.p
    return out


def _comparable(a: Visibility, b: Visibility) -> bool:
    return all(x.valid is None and x.mask is None and x.rule is None for x in (a, b))


def _known(value: Tensor | None, like: Tensor) -> Tensor:
    return torch.full_like(like, torch.nan) if value is None else value.to(like.dtype)


def _stack(values: Sequence[Tensor | None]) -> Tensor | None:
    present = [v for v in values if v is not None]
    return torch.stack(present) if len(present) == len(values) else None


def _to(member: Tensor | None, like: Tensor) -> Tensor:
    assert member is not None
    return member.to(like.device)
