"""Watch one forward: run every attention call with the model's own kernel and reduce it at once.

A `Watcher` is independent of models, samplers and files. `hooks.attach` passes it the attention calls of a model as
they happen; `begin` gives it the canvas and `finish` the commits, and `finish` returns one `Reductions` per layer:

    watcher = Watcher(Watch(level="summary"))
    with attach(module, watcher):
        watcher.begin(canvas)
        logits = forward(canvas)
        capture = watcher.finish(commits)

The predicting rows of a step are known only after its commits. So with `predicting_rows=True` the watcher keeps the
keys of every layer, and the queries from the first mask on, until `finish`: at most half a KV cache, T·D·L values,
never T².
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from floatscope.canvas import CanvasState, Commits, Reductions, StepCapture, move_columns
from floatscope.capture import blocked, key_stats_kernel
from floatscope.capture.attention import AttentionCall, full_precision
from floatscope.capture.backends import BACKENDS, log_backend, reduce_attention
from floatscope.capture.edited_attention import attend_with_edits
from floatscope.capture.experts import Routing
from floatscope.capture.key_stats import KeyStats, compute_key_stats
from floatscope.capture.plan import Baseline, Plan, build_plan, can_share_plan
from floatscope.capture.reducer import Reducer
from floatscope.capture.reductions import (
    KEY_STATS_FIELDS,
    LayerSums,
    build_fields,
    build_row_fields,
    pool_key_regions,
    rank_keys,
)
from floatscope.capture.verify import check_call
from floatscope.capture.visibility import Visibility
from floatscope.errors import UserError, unknown_choice
from floatscope.schema import EXPERT_FIELDS, FIELDS, SHARED, MaskKind, check_fields, fields_at_level

CHUNK_BYTES = 2**26
"""`finish` handles layers together up to this much received attention: few launches, bounded memory."""
LAYER_BYTES = 2**23
"""A layer's received attention is stored complete until `finish` up to this size: fewer launches during the forward."""


@dataclass(frozen=True)
class Watch:
    """What to capture of every head at every step.

    Args:
        level: one of "summary", "heads", "rows", "full"; each includes the fields of those before it (see
            `schema.FIELDS`). Larger levels take more memory and disk; "full" stores the attention matrix.
        fields: capture exactly these fields instead of a level, e.g. `("received", "uniform")`.
        reducers: reductions of your own (`fs.Reducer`), stored beside the fields.
        verify: recompute every call dense in float64 and compare (captured == executed). Slow; for short inputs.
        backend: "auto", "triton", "blocked" or "dense".
        influence: also capture how far the logit of each committed token moves with the embedding of each position.
            This takes a second forward per step, with gradients, and a backward per commit.
        experts: also capture which experts of a mixture process each token, and with which weights.

    Example:
        watch = fs.Watch(level="heads")
        out = fs.decode(fs.load("twin:mdm"), "What floats?", new_tokens=4, watch=watch)
        out.trace.arrays["received_heads"].shape  # (step, layer, head, group, key)
    """

    level: str = "summary"
    fields: tuple[str, ...] | None = None
    reducers: tuple[Reducer, ...] = ()
    verify: bool = False
    backend: str = "auto"
    influence: bool = False
    experts: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.fields, str):
            raise UserError(
                f"fields must be a tuple of names, got the string '{self.fields}'; write ('{self.fields}',)"
            )
        if self.fields is not None:
            object.__setattr__(self, "fields", tuple(self.fields))
        check_fields(self.selected_fields)
        reducers = tuple(self.reducers if isinstance(self.reducers, Sequence) else [self.reducers])
        for reducer in reducers:
            if not isinstance(reducer, Reducer) or not hasattr(reducer, "name") or not hasattr(reducer, "axes"):
                raise UserError(
                    f"{reducer!r} is not a valid reducer; give an instance of a subclass of fs.Reducer with a name and"
                    " axes"
                )
        object.__setattr__(self, "reducers", reducers)
        if self.backend not in BACKENDS:
            raise unknown_choice("backend", self.backend, BACKENDS)
        names = [r.name for r in reducers]
        for name in names:
            if name in FIELDS or names.count(name) > 1:
                raise UserError(f"a reducer is named '{name}', which is already in use; give it another name")

    @property
    def selected_fields(self) -> tuple[str, ...]:
        """The names of the fields to capture: `fields`, or those of `level`; and those of the experts."""
        fields = fields_at_level(self.level) if self.fields is None else self.fields
        return tuple(dict.fromkeys((*fields, *EXPERT_FIELDS))) if self.experts else fields

    @property
    def captures_experts(self) -> bool:
        """Whether a field of the experts is selected."""
        return not set(EXPERT_FIELDS).isdisjoint(self.selected_fields)

    @property
    def field_names(self) -> tuple[str, ...]:
        """The names a trace stores: the selected fields, and `influence` if it is captured."""
        return (*self.selected_fields, "influence") if self.influence else self.selected_fields


@dataclass(frozen=True)
class Layer:
    """Where an attention call happens. The functions return None if the model does not show what they need.

    block           the name of the block that holds it; None outside of blocks
    output_gram     returns W_OᵀW_O per head, [head, dim, dim]
    residual_norms  returns the norms of the residual stream that enters the layer, [batch, query]
    """

    name: str
    block: str | None = None
    output_gram: Callable[[], Tensor | None] = lambda: None
    residual_norms: Callable[[], Tensor | None] = lambda: None


CallEditor = Callable[[AttentionCall, int, CanvasState], AttentionCall]
"""(call, layer index, canvas) → the call with the edits of an intervention."""
FirstCall = Callable[[AttentionCall, str], None]
"""(call, layer name): is called at an attention call outside a begun forward, and may begin one."""


class Watcher:
    """Captures the attention of one forward at a time: `begin`, the forward, `finish`.

    Args:
        watch: what to capture.
        predicting_rows: whether to capture predicting rows, which needs the commits of each step.
        edit_call: adds the edits of an intervention to each attention call.
        on_first_call: may call `begin` at the first attention call of a forward; without it, a call outside a begun
            forward runs and is not captured.

    Attributes:
        layers: the layer names of the last forward, in order.
    """

    def __init__(
        self,
        watch: Watch,
        predicting_rows: bool = False,
        edit_call: CallEditor | None = None,
        on_first_call: FirstCall | None = None,
    ) -> None:
        self.watch, self.predicting_rows, self.edit_call = watch, predicting_rows, edit_call
        self.on_first_call = on_first_call
        self.fields = frozenset(watch.selected_fields)
        self.layers: list[str] = []
        self._layer_visibility: list[int] = []
        self._canvas: CanvasState | None = None
        self._cached_carry: list[tuple[Tensor, Tensor]] = []  # by layer boundary: first valid column, rollout

    def begin(self, canvas: CanvasState, first_row: int | None = None) -> None:
        """Start the forward of `canvas.step`: the next attention calls belong to it.

        `first_row` is the first row that may be predicting; by default it follows from the masks.
        """
        self._canvas = canvas
        self._plans: list[Plan] = []
        self._sums: list[LayerSums] = []
        self._calls: list[AttentionCall] = []  # of each layer, for the predicting rows
        self._layer_fields: list[dict[str, Tensor]] = []  # fields that are complete before `finish`
        self._carry: Tensor | None = None
        self._first_row = _first_candidate_row(canvas) if self.predicting_rows and first_row is None else first_row or 0
        self.layers, self._layer_visibility = [], []
        self._blocks: list[str | None] = []  # of each layer
        self._routing: dict[str | None, Routing] = {}  # of each block

    @property
    def is_watching(self) -> bool:
        """Whether a forward has begun and is not finished."""
        return self._canvas is not None

    def follows_prefix(self, canvas: CanvasState) -> bool:
        """Whether a forward that only fills a cache must be watched too: a rollout continues that of the prefix."""
        return "rollout" in self.fields and canvas.regions.member is not None

    def attend(self, call: AttentionCall, layer: Layer) -> Float[Tensor, "batch head query value_dim"]:
        """Run one attention call and return its output; if a forward is watched, reduce it too."""
        call = replace(call, visibility=call.visibility.to(call.query.device))
        if self._canvas is None and self.on_first_call is not None:
            self.on_first_call(call, layer.name)
        if self.edit_call is not None and self._canvas is not None:
            call = self.edit_call(call, len(self._sums), self._canvas)
        result = attend_with_edits(call)
        if self._canvas is None:
            return result.output
        with full_precision():
            if not torch.is_grad_enabled():
                self._reduce(call, result.output, result.lse, layer, self._canvas)
                return result.output
            with torch.no_grad():
                self._reduce(_detach(call), result.output.detach(), result.lse, layer, self._canvas)
        return result.output

    def record_routing(self, block: str | None, routing: Routing) -> None:
        """Store the choice of a block's router; outside of a watched forward nothing is stored."""
        if self._canvas is None:
            return
        if block in self._routing:
            raise UserError(
                f"block '{block}' calls experts more than once in one forward, so a token has no single choice of"
                " experts; leave experts out"
            )
        self._routing[block] = routing

    def discard(self) -> None:
        """End the step without a result, after a forward that failed."""
        self._canvas = None

    def finish(self, commits: Commits | None = None) -> StepCapture:
        """End the step: read the predicting rows of its commits and build the fields of every layer."""
        canvas = self._canvas
        if canvas is None:
            raise UserError("finish() was called without begin(): no forward is being watched")
        self._canvas = None
        commits = Commits.empty() if commits is None or not self.predicting_rows else commits
        if len(commits) and int(commits.row.min()) < self._first_row:
            raise ValueError(f"row {int(commits.row.min())} decided a commit, but no position it decides was masked")
        with torch.no_grad(), torch.autocast(canvas.tokens.device.type, enabled=False), full_precision():
            baselines = [plan.baseline(commits) for plan in self._plans]
            cpu_commits = commits.to(torch.device("cpu"))  # once, not for every layer
            rows = [_compute_predicting_rows(call, cpu_commits) for call in self._calls]
            layers = self._build_layers(commits, rows, baselines)
            for i, p in enumerate(rows):
                layers[i] |= build_row_fields(p, self._plans[self._layer_visibility[i]].member, commits, self.fields)
            for v, baseline in enumerate(baselines):  # once per visibility, with the first layer that has it
                first = self._layer_visibility.index(v)
                layers[first] |= {name: getattr(baseline, name) for name in SHARED if name in self.fields}
            for i, fields in self._build_expert_fields(canvas).items():
                layers[i] |= fields
            self._check_mass(canvas)  # last, because it waits for the device
        reductions = tuple(Reductions(i, layers[i] | self._layer_fields[i]) for i in range(len(layers)))
        self._sums, self._calls, self._layer_fields, self._routing = [], [], [], {}
        masks = tuple(plan.visibility.structure for plan in self._plans)
        queries = max((plan.visibility.queries for plan in self._plans), default=0)
        return StepCapture(reductions, tuple(self._layer_visibility), masks, queries)

    def _reduce(
        self, call: AttentionCall, output: Tensor, lse: Tensor | None, layer: Layer, canvas: CanvasState
    ) -> None:
        """Reduce one call, and store what `finish` needs of it."""
        visibility, index = call.visibility, len(self._sums)
        if visibility.keys != canvas.tokens.shape[1]:
            raise UserError(
                f"layer '{layer.name}' attends over {visibility.keys} keys but the canvas has"
                f" {canvas.tokens.shape[1]} positions: cross-attention and pruned caches are not captured; if the cache"
                " keeps only a sliding window, generate with use_cache=False"
            )
        if len(call.query) != len(canvas.tokens):
            raise UserError(
                f"layer '{layer.name}' attends in a batch of {len(call.query)} but the canvas has {len(canvas.tokens)}"
                " samples: heads or windows folded into the batch are not captured"
            )
        plan_index = self._find_plan(visibility, canvas, call.query.device)
        plan = self._plans[plan_index]
        carry = self._carry_into(index, plan)
        if index == canvas.step == 0:
            log_backend(call, lse is not None, self.watch.backend)
        result = reduce_attention(call, lse, plan.spec, carry, self.watch.backend)
        if self.watch.verify:
            check_call(call, output, plan.spec, carry, result, layer.name, canvas.step)
        fields: dict[str, Tensor] = {}
        if result.attended_carry is not None:
            fields["rollout"] = self._carry_out(index, result.attended_carry, plan)
        if "residual" in self.fields and (norms := layer.residual_norms()) is not None:
            fields["residual"] = _prepend_cached(norms, visibility.keys, torch.nan)
        for reducer in self.watch.reducers:
            fields[reducer.name] = reducer.run(call, lse)
        if "matrix" in self.fields:
            fields["matrix"] = _attention_matrix(call, lse)
        key_stats = self._compute_key_stats(call, output, plan, result.received, layer)
        is_half = call.query.dtype in (torch.float16, torch.bfloat16)
        received, regions = result.received, None
        if received.nbytes > LAYER_BYTES:  # too large to store for all layers: pool the regions now, store the groups
            regions = None if plan.member is None else pool_key_regions(received, plan.member)
            received = received[:, :, : plan.groups.shape[-1]].clone()
        self._sums.append(LayerSums(plan_index, is_half, received, result.mass, regions, result.entropy, key_stats))
        if self.predicting_rows:
            first = max(0, self._first_row - (visibility.keys - visibility.queries))
            query, visibility = call.query[:, :, first:].clone(), visibility.rows_from(first)
            edits = None if call.edits is None else call.edits.rows_from(first)
            self._calls.append(replace(call, query=query, value=call.key, visibility=visibility, edits=edits))
        self._layer_fields.append(fields)
        self.layers.append(layer.name)
        self._blocks.append(layer.block)
        self._layer_visibility.append(plan_index)

    def _compute_key_stats(
        self, call: AttentionCall, output: Tensor, plan: Plan, received: Tensor, layer: Layer
    ) -> KeyStats | None:
        if not self.fields & KEY_STATS_FIELDS:
            return None
        if key_stats_kernel.supports(call):
            return key_stats_kernel.compute_key_stats(call, output, plan.rows, layer.output_gram())
        needs_top = "score_at_mean_direction" in self.fields and call.visibility.kind is not MaskKind.FULL
        top = rank_keys(received[:, :, 0], plan) if needs_top else None
        return compute_key_stats(call, output, plan.rows, layer.output_gram(), top)

    def _find_plan(self, visibility: Visibility, canvas: CanvasState, device: torch.device) -> int:
        """The index of the plan for this visibility and device; a new plan if there is none."""
        for i, plan in enumerate(self._plans):
            if can_share_plan(plan.visibility, visibility) and plan.groups.device == device:
                return i
        regions, entropy = bool(self.fields & {"regions", "rollout", "row_regions"}), "head_stats" in self.fields
        self._plans.append(build_plan(visibility, canvas.to(device), regions=regions, entropy=entropy))
        return len(self._plans) - 1

    def _build_layers(
        self, commits: Commits, rows: Sequence[Tensor], baselines: Sequence[Baseline]
    ) -> list[dict[str, Tensor]]:
        """The fields of each layer, built for consecutive layers with the same plan at once."""
        out: list[dict[str, Tensor]] = []
        for plan_index, group in groupby(self._sums, key=lambda layer: layer.plan_index):
            layers = list(group)
            at_once = max(1, CHUNK_BYTES // layers[0].received.nbytes)
            for start in range(0, len(layers), at_once):
                chunk = layers[start : start + at_once]
                received = _sum_rows(rows[len(out) : len(out) + len(chunk)], commits, chunk[0].received)
                fields = build_fields(chunk, received, self._plans[plan_index], baselines[plan_index], self.fields)
                by_layer = {name: value.unbind(0) for name, value in fields.items()}
                out += [{name: values[i] for name, values in by_layer.items()} for i in range(len(chunk))]
        return out

    def _build_expert_fields(self, canvas: CanvasState) -> dict[int, dict[str, Tensor]]:
        """Layer → its expert fields. The experts of a block belong to its attention, the last if it has several."""
        layer_of_block = {block: i for i, block in enumerate(self._blocks)}
        if self._routing and not self._routing.keys() & layer_of_block.keys():
            raise UserError(
                f"the experts of {', '.join(map(repr, self._routing))} are in blocks without attention, so they belong"
                " to no layer of the trace; leave experts out"
            )
        built = {}
        for block, routing in self._routing.items():
            if block not in layer_of_block:  # a layer of another kind, such as a state space
                continue
            i = layer_of_block[block]
            visibility, batch = self._plans[self._layer_visibility[i]].visibility, len(canvas.tokens)
            if len(routing.ids) != batch * visibility.queries:
                raise UserError(
                    f"the experts of '{block}' get {len(routing.ids)} tokens, but its attention has"
                    f" {batch} × {visibility.queries} rows; leave experts out"
                )
            values = {"expert_ids": (routing.ids, -1), "expert_weights": (routing.weights, torch.nan)}
            built[i] = {
                name: _prepend_cached(value.unflatten(0, (batch, visibility.queries)), visibility.keys, fill)
                for name, (value, fill) in values.items()
                if name in self.fields
            }
        return built

    def _carry_into(self, index: int, plan: Plan) -> Tensor | None:
        """The rollout as it enters this layer, on all keys; None when `rollout` is not captured."""
        if plan.member is None or "rollout" not in self.fields:
            return None
        if index == 0:
            cached = plan.visibility.keys - plan.visibility.queries
            self._carry = plan.member[:, cached:]
            self._cached_carry = self._cached_carry if cached else []
        assert self._carry is not None
        self._carry = self._carry.to(plan.member.device)
        return self._with_cached_carry(index, self._carry, plan.visibility)

    def _carry_out(self, index: int, attended: Tensor, plan: Plan) -> Tensor:
        """Update Y ← ½·mean_h A Y + ½·Y, and return its mean over the rows of each region."""
        assert self._carry is not None
        assert plan.pool is not None
        self._carry = attended.lerp(self._carry, 0.5)
        return torch.bmm(plan.pool, self._with_cached_carry(index + 1, self._carry, plan.visibility))

    def _with_cached_carry(self, boundary: int, carry: Tensor, visibility: Visibility) -> Tensor:
        """Prepend the rows of a cached prefix, which never change: the values of earlier forwards are stored."""
        assert self._canvas is not None
        cached = visibility.keys - visibility.queries
        first = (self._canvas.valid.cumsum(-1) == 0).sum(-1)
        if cached:
            stored = self._cached_carry[boundary] if boundary < len(self._cached_carry) else (first, carry[:, :0])
            past_first, past = stored
            if past.shape[1] < cached:
                raise UserError("rollout needs the complete prefix: start watching before the cache is filled")
            past = move_columns(past, first - past_first, cached)  # samples may have moved to other columns
            carry = torch.cat([past.to(carry.device), carry], 1)
        if visibility.kind is not MaskKind.FULL:
            self._cached_carry[boundary : boundary + 1] = [(first, carry)]
        return carry

    def _check_mass(self, canvas: CanvasState) -> None:
        """Check that softmax rows sum to 1: the cheapest proof that the log-sum-exp belongs to these scores."""
        if not self._sums:
            return
        masses = [layer.received[:, :, 0].sum(-1) if layer.mass is None else layer.mass for layer in self._sums]
        device = canvas.tokens.device
        totals = torch.stack([mass.to(device) for mass in masses])  # [layer, batch, head]
        counts = [plan.groups[..., 0].sum(1, keepdim=True).to(device) for plan in self._plans]
        count = torch.stack(counts)[self._layer_visibility]
        error = (totals / count.clamp_min(1) - 1).abs()
        limit = 2e-2 if self._sums[0].is_half_precision else 1e-3
        is_bad = ((error > limit) | ~error.isfinite()) & (count > 0)
        if not bool(is_bad.any()):
            return
        layer, sample, head = is_bad.nonzero()[0].tolist()
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


def _first_candidate_row(canvas: CanvasState) -> int:
    """The first row that may be predicting: the row of the first mask, or the one before it (shifted logits)."""
    masked = canvas.masked.any(0).nonzero()
    return max(0, int(masked[0]) - 1) if len(masked) else max(0, canvas.tokens.shape[1] - 1)


def _compute_predicting_rows(call: AttentionCall, commits: Commits) -> Float[Tensor, "commit head key"]:
    """The predicting rows of one layer; the queries of a stored call are the last positions of the canvas."""
    return blocked.compute_rows(call, commits.sample, commits.row - (call.visibility.keys - call.visibility.queries))


def _prepend_cached(rows: Tensor, keys: int, fill: float | int) -> Tensor:
    """Fill up the rows of a forward, [batch, query, …], with those of cached positions, which it did not compute."""
    cached = keys - rows.shape[1]
    return torch.cat([rows.new_full((len(rows), cached, *rows.shape[2:]), fill), rows], 1) if cached else rows


def _detach(call: AttentionCall) -> AttentionCall:
    return replace(call, query=call.query.detach(), key=call.key.detach(), value=call.value.detach())


def _attention_matrix(call: AttentionCall, lse: Tensor | None) -> Tensor:
    B, H, Q, _ = call.query.shape
    out = torch.zeros(B, H, Q, call.visibility.keys, device=call.query.device)
    for block in blocked.iter_blocks(call, lse):
        out[block.batch, block.heads, block.rows, block.keys] = block.p
    return out


def _sum_rows(rows: Sequence[Tensor], commits: Commits, like: Tensor) -> Tensor | None:
    """What each key receives from its sample's predicting rows, [layer, batch, head, key]; None without commits."""
    if not rows or not len(commits):
        return None
    out = like.new_zeros(len(rows), *like[:, :, 0].shape)
    for total, p in zip(out, rows, strict=True):
        total.index_add_(0, commits.sample.to(p.device), p)
    return out
