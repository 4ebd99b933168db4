"""Every field of `FIELDS` equals a slow computation from the eager attention of the same model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

from floatscope.canvas import CanvasState, Commits, Reductions, Regions
from floatscope.capture import watcher as watcher_module
from floatscope.capture.hooks import attach
from floatscope.capture.plan import build_plan
from floatscope.capture.visibility import Visibility
from floatscope.capture.watcher import Watch, Watcher
from floatscope.errors import UserError
from floatscope.schema import EXPERT_FIELDS, FIELDS, GROUPS, MIN_VISIBLE_ROWS, QUANTITIES, RANKS, SHARED, State

B, T, H, KV, D, LAYERS, WINDOW = 3, 26, 4, 2, 8, 3, 7
MASKS = ("full", "causal", "window")
START = (0, 5, 11)  # each sample's first valid position
SHAPE = {
    "vocab_size": 50,
    "hidden_size": H * D,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": H,
    "num_key_value_heads": KV,
    "head_dim": D,
    "initializer_range": 0.3,
}


@dataclass(frozen=True)
class EagerLayer:
    """One layer of the eager model, in float64."""

    A: Tensor  # [batch, head, query, key]
    q: Tensor  # [batch, head, query, dim]
    k: Tensor  # [batch, head, key, dim], repeated for every query head
    v: Tensor
    hidden: Tensor  # [batch, position, width], entering the layer
    W_O: Tensor  # [width, head, dim]


def make_model(kind: str, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    if kind == "window":
        return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=WINDOW)).eval()
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


def make_canvas(seed: int = 0, starts: tuple[int, ...] = START) -> CanvasState:
    """Left-padded prompts, some positions masked, some committed, three regions that overlap."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randint(1, 4, (len(starts), T), generator=generator)
    states[torch.arange(T) < torch.tensor(starts)[:, None]] = int(State.PAD)
    spans = [{"early": [(s, s + 4)], "late": [(T - 6, T)], "both": [(s + 2, s + 5), (T - 2, T)]} for s in starts]
    tokens = torch.randint(0, 50, (len(starts), T), generator=generator)
    return CanvasState(tokens, states, step=4, regions=Regions.from_spans(spans, T))


def make_commits(canvas: CanvasState) -> Commits:
    """Two commits in the first sample, one in the second, none in the third; the row before predicts each."""
    position = torch.tensor([T - 3, T - 1, T - 8])
    return Commits(torch.tensor([0, 0, 1]), position, position - 1, torch.tensor([1, 2, 3]), torch.rand(3))


def inputs(canvas: CanvasState, kind: str) -> dict[str, object]:
    valid = canvas.valid.long()
    return {
        "input_ids": canvas.tokens,
        "attention_mask": valid,
        "position_ids": (valid.cumsum(-1) - 1).clamp_min(0),
        "is_causal": kind != "full",
        "use_cache": False,
    }


def watch_layers(kind: str, model: torch.nn.Module, canvas: CanvasState, watch: Watch) -> tuple[Reductions, ...]:
    watcher = Watcher(watch, predicting_rows=True)
    with torch.no_grad(), attach(model, watcher):
        watcher.begin(canvas)
        model(**inputs(canvas, kind))
        return watcher.finish(make_commits(canvas)).layers


def run_eager(kind: str, model: torch.nn.Module, canvas: CanvasState) -> list[EagerLayer]:
    """One forward with `eager` attention, with its q, k and v recorded."""
    model.set_attn_implementation("eager")
    modeling = modeling_mistral if kind == "window" else modeling_llama
    original, calls = modeling.eager_attention_forward, []

    def record_call(module, query, key, value, *args, **kwargs):
        calls.append((query.double(), key.double(), value.double()))
        return original(module, query, key, value, *args, **kwargs)

    with torch.no_grad(), mock.patch.object(modeling, "eager_attention_forward", record_call):
        out = model(**inputs(canvas, kind), output_attentions=True, output_hidden_states=True)
    layers = []
    for i, (q, k, v) in enumerate(calls):
        k, v = (x.repeat_interleave(H // KV, 1) for x in (k, v))
        W_O = model.model.layers[i].self_attn.o_proj.weight.detach().double().unflatten(1, (H, D))
        # Padding rows see nothing; eager spreads them evenly over all keys.
        A = out.attentions[i].double() * canvas.valid[:, None, :, None]
        layers.append(EagerLayer(A, q, k, v, out.hidden_states[i].double(), W_O))
    return layers


def table(kind: str, canvas: CanvasState) -> Tensor:
    """1 where a valid query sees a valid key, [batch, query, key]."""
    i, j = torch.arange(T)[:, None], torch.arange(T)
    visible = {"full": (i == i) & (j == j), "causal": j <= i, "window": (j <= i) & (j > i - WINDOW)}[kind]
    return (visible & canvas.valid[:, :, None] & canvas.valid[:, None]).double()


def groups(canvas: CanvasState) -> Tensor:
    """0/1 membership of `all`, `masked`, `committed`, `predicting`, [batch, query, 4]."""
    commits = make_commits(canvas)
    predicting = torch.zeros_like(canvas.valid)
    predicting[commits.sample, commits.row] = True
    rows = [canvas.valid, canvas.states == State.MASKED, canvas.states == State.COMMITTED, predicting]
    return torch.stack(rows, -1).double()


@dataclass(frozen=True)
class Expected:
    """The quantities that fields are computed from, [batch, …] in float64."""

    mean: Tensor  # [batch, head, group, key]
    uniform: Tensor  # [batch, group, key]
    lift: Tensor  # [batch, head, group, key]; NaN where not eligible
    columns: Tensor  # [batch, head, 6, key]


def expect(kind: str, canvas: CanvasState, layer: EagerLayer) -> Expected:
    W, visible = groups(canvas), table(kind, canvas)
    n = W.sum(1)
    mean = torch.einsum("bhij,big->bhgj", layer.A, W) / n[:, None, :, None]
    flat = visible / visible.sum(-1, keepdim=True).clamp_min(1)
    uniform = torch.einsum("bij,big->bgj", flat, W) / n[..., None]
    visible_rows = torch.einsum("bij,big->bgj", visible, W)
    eligible = (visible_rows >= n.clamp_max(MIN_VISIBLE_ROWS)[..., None]) & (visible_rows > 0)
    lift = torch.where(eligible[:, None], mean / uniform[:, None], torch.nan)
    qk = layer.q @ layer.k.transpose(-1, -2)
    cos = qk / layer.q.norm(dim=-1)[..., None] / layer.k.norm(dim=-1)[..., None, :]
    weights = visible[:, None] / visible.sum(1)[:, None, None].clamp_min(1)  # a mean over the queries that see the key
    output = torch.einsum("ohd,bhjd->bhjo", layer.W_O, layer.v)
    norm = (layer.q.norm(dim=-1)[..., None] * layer.k.norm(dim=-1)[..., None, :] * weights).sum(2)
    norms = [x.norm(dim=-1) for x in (layer.k, layer.v, output)]
    columns = [(qk * D**-0.5 * weights).sum(2), (cos * weights).sum(2), *norms, norm]
    return Expected(mean, uniform, lift, torch.stack(columns, 2))


@pytest.fixture(scope="module", params=MASKS)
def case(request):
    """(kind, canvas, watched layers, eager layers) of a left-padded batch."""
    kind = request.param
    model, canvas = make_model(kind), make_canvas()
    return kind, canvas, watch_layers(kind, model, canvas, Watch(level="full")), run_eager(kind, model, canvas)


def assert_near(actual: Tensor, expected: Tensor, rtol: float = 2e-4, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol, equal_nan=True)


def test_level_full_has_every_field(case):
    _, _, layers, _ = case
    assert len(layers) == LAYERS
    assert [reductions.layer for reductions in layers] == [0, 1, 2]
    dense = set(FIELDS) - set(EXPERT_FIELDS)  # the model has no experts
    assert set(layers[0].fields) == dense
    for later in layers[1:]:  # the layers share a visibility; shared fields come with the first layer
        assert set(later.fields) == dense - set(SHARED)


def test_the_matrix_equals_eager_attention(case):
    _, _, layers, eager = case
    for reductions, layer in zip(layers, eager, strict=True):
        assert_near(reductions.fields["matrix"], layer.A)


def test_received_is_the_group_mean_of_the_matrix(case):
    kind, canvas, layers, eager = case
    for reductions, layer in zip(layers, eager, strict=True):
        expected = expect(kind, canvas, layer).mean
        assert_near(reductions.fields["received_heads"], expected)
        assert_near(reductions.fields["received"], expected.mean(1))


def test_a_group_without_rows_is_nan(case):
    _, _, layers, _ = case
    predicting = GROUPS.index("predicting")
    for reductions in layers:  # the last sample has no commits
        assert reductions.fields["received"][2, predicting].isnan().all()
        assert not reductions.fields["received"][:2].isnan().any()


def test_pad_keys_receive_nothing(case):
    _, canvas, layers, _ = case
    pad = ~canvas.valid[:, None, None]
    for reductions in layers:
        assert not reductions.fields["received_heads"].nan_to_num().masked_select(pad).any()
        assert not reductions.fields["matrix"].masked_select(pad).any()


def test_uniform_is_the_mean_of_dense_uniform_attention(case):
    kind, canvas, layers, eager = case
    assert_near(layers[0].fields["uniform"], expect(kind, canvas, eager[0]).uniform)


def test_top_has_the_keys_of_largest_lift_with_their_statistics(case):
    kind, canvas, layers, eager = case
    for reductions, layer in zip(layers, eager, strict=True):
        expected = expect(kind, canvas, layer)
        for b in range(B):
            for h in range(H):
                for g in range(len(GROUPS)):
                    lift = expected.lift[b, h, g]
                    ranked = sorted(lift.isfinite().nonzero()[:, 0].tolist(), key=lambda j: -lift[j])[:RANKS]
                    missing = RANKS - len(ranked)
                    assert reductions.fields["top_key"][b, h, g].tolist() == ranked + [-1] * missing
                    rows = torch.cat([lift[ranked, None], expected.columns[b, h, :, ranked].T], 1)
                    assert_near(reductions.fields["top"][b, h, g, : len(ranked)], rows)
                    assert reductions.fields["top"][b, h, g, len(ranked) :].isnan().all()


def test_moments_are_sums_over_the_eligible_keys(case):
    kind, canvas, layers, eager = case
    for reductions, layer in zip(layers, eager, strict=True):
        expected = expect(kind, canvas, layer)
        over_all = torch.where(expected.lift[:, :, :1].isfinite(), expected.columns, torch.nan)
        values = torch.cat([expected.lift, over_all], 2)
        assert values.shape[2] == len(QUANTITIES)
        orders = [values.isfinite().sum(-1).double(), values.nansum(-1), values.square().nansum(-1)]
        assert_near(reductions.fields["moments"], torch.stack(orders, -1), atol=1e-4)


def test_key_stats_are_head_means(case):
    kind, canvas, layers, eager = case
    for reductions, layer in zip(layers, eager, strict=True):
        assert_near(reductions.fields["key_stats"], expect(kind, canvas, layer).columns.mean(1) * canvas.valid[:, None])


def test_contribution_is_attention_times_the_norm_of_the_projected_value(case):
    kind, canvas, layers, eager = case
    for reductions, layer in zip(layers, eager, strict=True):
        expected = expect(kind, canvas, layer)
        assert_near(reductions.fields["contribution"], (expected.mean * expected.columns[:, :, 4:5]).mean(1))


def test_score_at_mean_direction_equals_its_definition(case):
    """Mean over the first r + 1 top keys a of σ|k_a| q̄_a·m; m is the mean direction of the other eligible keys."""
    kind, canvas, layers, eager = case
    visible = table(kind, canvas)
    for reductions, layer in zip(layers, eager, strict=True):
        lift = expect(kind, canvas, layer).lift
        for b in range(B):
            for h in range(H):
                eligible = lift[b, h, 0].isfinite().nonzero()[:, 0].tolist()
                ranked = sorted(eligible, key=lambda j: -lift[b, h, 0, j])
                for n in range(1, RANKS + 1):
                    top, others = ranked[:n], ranked[n:]
                    if len(top) < n or not others:
                        assert reductions.fields["score_at_mean_direction"][b, h, n - 1].isnan()
                        continue
                    m = torch.stack([layer.k[b, h, j] / layer.k[b, h, j].norm() for j in others]).mean(0)
                    scores = []
                    for j in top:
                        q = layer.q[b, h, visible[b, :, j] > 0].mean(0)
                        scores.append(D**-0.5 * layer.k[b, h, j].norm() * (q @ m))
                    assert_near(reductions.fields["score_at_mean_direction"][b, h, n - 1], torch.stack(scores).mean())


def gini(x: Tensor) -> Tensor:
    """Half the mean absolute difference of all pairs, relative to the mean."""
    x = x[x.isfinite()]
    return (x[:, None] - x).abs().mean() / (2 * x.mean())


def test_head_stats_are_means_over_the_valid_rows(case):
    kind, canvas, layers, eager = case
    n = table(kind, canvas).sum(-1)  # [batch, query]
    for reductions, layer in zip(layers, eager, strict=True):
        expected = expect(kind, canvas, layer)
        output = layer.A @ layer.v
        for b in range(B):
            rows = canvas.valid[b]
            many = rows & (n[b] > 1)
            for h in range(H):
                entropy = -torch.xlogy(layer.A[b, h], layer.A[b, h]).sum(-1)
                stats = [
                    (entropy[many] / n[b, many].log()).mean(),
                    gini(expected.lift[b, h, 0]),
                    expected.mean[b, h, 0, START[b]],
                    output[b, h, rows].norm(dim=-1).mean(),
                    layer.q[b, h, rows].norm(dim=-1).mean(),
                ]
                assert_near(reductions.fields["head_stats"][b, h], torch.stack(stats))


def test_regions_are_the_mass_of_one_region_on_another(case):
    _, canvas, layers, eager = case
    member = canvas.regions.member.double()
    for reductions, layer in zip(layers, eager, strict=True):
        mass = torch.einsum("bir,bhij,bjs->bhrs", member, layer.A, member)
        assert_near(reductions.fields["regions"], mass / member.sum(1)[:, None, :, None])


def rollout_products(eager: list[EagerLayer]) -> list[Tensor]:
    """The product of ½A + ½I up to each layer, [batch, query, key]."""
    total, products = torch.eye(T, dtype=torch.float64).expand(B, T, T), []
    for layer in eager:
        total = (0.5 * layer.A.mean(1) + 0.5 * torch.eye(T)) @ total
        products.append(total)
    return products


def test_rollout_is_the_pooled_dense_product(case):
    _, canvas, layers, eager = case
    member = canvas.regions.member.double()
    for reductions, product in zip(layers, rollout_products(eager), strict=True):
        pooled = torch.einsum("bir,bij,bjs->brs", member, product, member) / member.sum(1)[..., None]
        assert_near(reductions.fields["rollout"], pooled)


def test_residual_is_the_norm_of_the_stream_entering_the_layer(case):
    _, canvas, layers, eager = case
    for reductions, layer in zip(layers, eager, strict=True):
        norms = reductions.fields["residual"]
        assert_near(norms[canvas.valid], layer.hidden.norm(dim=-1)[canvas.valid])


def test_predicting_rows_are_rows_of_the_matrix(case):
    _, canvas, layers, eager = case
    commits, member = make_commits(canvas), canvas.regions.member.double()
    for reductions, layer in zip(layers, eager, strict=True):
        rows = layer.A[commits.sample, :, commits.row]  # [commit, head, key]
        assert_near(reductions.fields["rows"], rows)
        assert_near(reductions.fields["row_regions"], torch.einsum("chj,cjs->chs", rows, member[commits.sample]))
        for c in range(len(commits)):
            for h in range(H):
                best = sorted(range(T), key=lambda j: -rows[c, h, j])[:RANKS]
                visible_keys = [j for j in best if rows[c, h, j] > 0]
                assert reductions.fields["row_key"][c, h, : len(visible_keys)].tolist() == visible_keys
                assert_near(reductions.fields["row_mass"][c, h, : len(visible_keys)], rows[c, h, visible_keys])
                assert not reductions.fields["row_mass"][c, h, len(visible_keys) :].nan_to_num().any()


@pytest.mark.parametrize("kind", MASKS)
def test_a_batch_equals_its_samples_alone(kind):
    model, canvas = make_model(kind, seed=1), make_canvas(1)
    together = watch_layers(kind, model, canvas, Watch(level="heads"))
    for b, start in enumerate(START):
        spans = Regions(canvas.regions.names, canvas.regions.member[b : b + 1, start:])
        alone = CanvasState(canvas.tokens[b : b + 1, start:], canvas.states[b : b + 1, start:], 4, spans)
        watcher = Watcher(Watch(level="heads"))
        with torch.no_grad(), attach(model, watcher):
            watcher.begin(alone)
            model(**inputs(alone, kind))
            single = watcher.finish().layers
        for actual, expected in zip(together, single, strict=True):
            for name in ("received_heads", "moments", "head_stats", "regions", "rollout", "residual"):
                g, w = actual.fields[name][b], expected.fields[name][0]
                g = g[..., start:] if "key" in FIELDS[name].axes else g
                # Only the batch has commits: leave the predicting group out.
                g, w = (x[:, :3] if name in ("received_heads", "moments") else x for x in (g, w))
                torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("backend", ["blocked", "dense"])
def test_backends_agree(backend):
    model, canvas = make_model("causal"), make_canvas()
    one, other = (watch_layers("causal", model, canvas, Watch(level="heads", backend=b)) for b in ("auto", backend))
    for a, b in zip(one, other, strict=True):
        for name in a.fields:
            torch.testing.assert_close(
                a.fields[name].float(), b.fields[name].float(), rtol=1e-4, atol=1e-5, equal_nan=True
            )


def test_the_chunk_size_does_not_change_results(monkeypatch):
    """Several layers at a time give the same fields as one at a time."""
    model, canvas = make_model("full"), make_canvas()
    together = watch_layers("full", model, canvas, Watch())
    monkeypatch.setattr(watcher_module, "CHUNK_BYTES", 1)
    for a, b in zip(together, watch_layers("full", model, canvas, Watch()), strict=True):
        assert a.fields.keys() == b.fields.keys()
        for name in a.fields:
            torch.testing.assert_close(a.fields[name], b.fields[name], equal_nan=True)


def test_only_selected_fields_are_captured():
    model, canvas = make_model("full"), make_canvas()
    layers = watch_layers("full", model, canvas, Watch(fields=("received", "residual")))
    assert [set(reductions.fields) for reductions in layers] == [{"received", "residual"}] * LAYERS


# --- an autoregressive model, one row at a time -----------------------------------------------------------------------


def decode_cached(model: torch.nn.Module, canvas: CanvasState, prefill: int, watch: Watch) -> list[list[Reductions]]:
    """The layers of each step: prefill, then one row per step, as `generate` does."""
    watcher, steps, past = Watcher(watch), [], None
    with torch.no_grad(), attach(model, watcher):
        for step, stop in enumerate(range(prefill, T + 1)):
            start = 0 if past is None else stop - 1
            member = canvas.regions.member[:, :stop]
            now = CanvasState(
                canvas.tokens[:, :stop], canvas.states[:, :stop], step, Regions(canvas.regions.names, member)
            )
            watcher.begin(now)
            valid = now.valid.long()
            position_ids = (valid.cumsum(-1) - 1).clamp_min(0)[:, start:]
            out = model(
                input_ids=now.tokens[:, start:],
                attention_mask=valid,
                position_ids=position_ids,
                past_key_values=past,
                use_cache=True,
            )
            past = out.past_key_values
            steps.append(watcher.finish().layers)
    return steps


@pytest.mark.parametrize("starts", [(0,), START])
@pytest.mark.parametrize("seed", range(2))
def test_cached_decoding_adds_up_to_one_forward_over_the_complete_sequence(starts, seed):
    """Causal rows never change, so the running sum of received attention and the rollout equal one forward."""
    model, canvas = make_model("causal", seed), make_canvas(seed, starts)
    fields = ("received_heads", "rollout", "head_stats", "residual")
    steps = decode_cached(model, canvas, 14, Watch(fields=fields))
    watcher = Watcher(Watch(fields=fields))
    with torch.no_grad(), attach(model, watcher):
        watcher.begin(canvas)
        model(**inputs(canvas, "causal"))
        complete = watcher.finish().layers
    for i in range(LAYERS):
        total = torch.zeros(len(starts), H, T)
        for t, layers in enumerate(steps):
            stop = 14 + t
            rows = canvas.valid[:, :stop].sum(-1) if t == 0 else torch.ones(len(starts))
            total[..., :stop] += layers[i].fields["received_heads"][:, :, 0] * rows[:, None, None]
        mean = total / canvas.valid.sum(-1)[:, None, None]
        torch.testing.assert_close(mean, complete[i].fields["received_heads"][:, :, 0], rtol=1e-4, atol=1e-5)
        last = steps[-1][i].fields
        torch.testing.assert_close(last["rollout"], complete[i].fields["rollout"], rtol=1e-4, atol=1e-5)
        assert last["residual"][:, :-1].isnan().all()  # rows of earlier steps are not in this forward
        torch.testing.assert_close(last["residual"][:, -1], complete[i].fields["residual"][:, -1], rtol=1e-4, atol=1e-5)


def test_rollout_of_a_cached_step_equals_the_rollout_of_the_prefix():
    model, canvas = make_model("causal"), make_canvas()
    steps = decode_cached(model, canvas, 14, Watch(fields=("rollout",)))
    for t in (0, 5):
        stop = 14 + t
        regions = Regions(canvas.regions.names, canvas.regions.member[:, :stop])
        prefix = CanvasState(canvas.tokens[:, :stop], canvas.states[:, :stop], 0, regions)
        watcher = Watcher(Watch(fields=("rollout",)))
        with torch.no_grad(), attach(model, watcher):
            watcher.begin(prefix)
            model(**inputs(prefix, "causal"))
            complete = watcher.finish().layers
        for actual, expected in zip(steps[t], complete, strict=True):
            torch.testing.assert_close(actual.fields["rollout"], expected.fields["rollout"], equal_nan=True)


def test_rollout_without_the_prefix_is_refused():
    model, canvas = make_model("causal"), make_canvas(0, (0,))
    with torch.no_grad():
        past = model(input_ids=canvas.tokens[:, :-1], use_cache=True).past_key_values
        watcher = Watcher(Watch(fields=("rollout",)))
        with attach(model, watcher):
            watcher.begin(canvas)
            with pytest.raises(UserError, match="rollout needs the complete prefix: start watching before"):
                model(input_ids=canvas.tokens[:, -1:], past_key_values=past, use_cache=True)


def test_a_row_that_predicts_two_commits_counts_twice():
    """In a shifted model row 0 predicts positions 0 and 1; the group mean stays a mean."""
    model, canvas = make_model("full"), make_canvas(0, (0,))
    canvas.states[:, :2] = int(State.MASKED)
    twice = torch.tensor([0, 0])
    commits = Commits(twice, torch.tensor([0, 1]), twice, twice, torch.rand(2))
    watcher = Watcher(Watch(fields=("received", "uniform", "rows")), predicting_rows=True)
    with torch.no_grad(), attach(model, watcher):
        watcher.begin(canvas)
        model(**inputs(canvas, "full"))
        layers = watcher.finish(commits).layers
    predicting = GROUPS.index("predicting")
    for reductions in layers:
        assert_near(reductions.fields["received"][0, predicting], reductions.fields["rows"].double().mean((0, 1)))
        assert math.isclose(float(reductions.fields["received"][0, predicting].sum()), 1.0, abs_tol=1e-4)


def test_a_commit_at_an_unmasked_position_raises():
    model, canvas = make_model("full"), make_canvas(0, (0,))
    canvas.states[:, :-2] = int(State.PROMPT)
    canvas.states[:, -2:] = int(State.MASKED)
    first = torch.tensor([0])
    watcher = Watcher(Watch(), predicting_rows=True)
    with torch.no_grad(), attach(model, watcher):
        watcher.begin(canvas)
        model(**inputs(canvas, "full"))
        with pytest.raises(ValueError, match="row 0 decided a commit, but no position it decides was masked"):
            watcher.finish(Commits(first, first, first, first, torch.rand(1)))


def test_without_predicting_rows_the_predicting_group_is_nan():
    """It is not 0, which would be a measurement."""
    model, canvas = make_model("full"), make_canvas()
    watcher = Watcher(Watch(fields=("received", "uniform")))
    with torch.no_grad(), attach(model, watcher):
        watcher.begin(canvas)
        model(**inputs(canvas, "full"))
        layers = watcher.finish(make_commits(canvas)).layers
    assert layers[0].fields["received"][:, GROUPS.index("predicting")].isnan().all()
    assert layers[0].fields["uniform"][:, GROUPS.index("predicting")].isnan().all()


def test_finish_without_begin_is_refused():
    with pytest.raises(UserError, match=r"finish\(\) was called without begin\(\): no forward is being watched"):
        Watcher(Watch()).finish()


def test_a_canvas_of_another_length_is_refused_by_layer_name():
    model, canvas = make_model("full"), make_canvas()
    watcher = Watcher(Watch())
    longer = replace(canvas, tokens=canvas.tokens.repeat(1, 2), states=canvas.states.repeat(1, 2), regions=Regions())
    with torch.no_grad(), attach(model, watcher):
        watcher.begin(longer)
        with pytest.raises(
            UserError, match=r"layer 'model\.layers\.0\.self_attn' attends over 26 keys but the canvas has 52"
        ):
            model(**inputs(canvas, "full"))


def test_a_mask_that_shows_heads_different_keys_is_refused():
    visible = Visibility.from_mask(torch.stack([torch.ones(6, 6), torch.ones(6, 6).tril()]).bool()[None], 6, 6)
    canvas = CanvasState(torch.zeros(1, 6, dtype=torch.long), torch.full((1, 6), int(State.PROMPT)))
    with pytest.raises(UserError, match="shows different keys to different heads"):
        build_plan(visible, canvas, regions=False, entropy=False)


def test_a_bias_that_hides_the_same_keys_from_every_head_is_accepted():
    bias = torch.randn(1, 2, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    canvas = CanvasState(torch.zeros(1, 6, dtype=torch.long), torch.full((1, 6), int(State.PROMPT)))
    plan = build_plan(Visibility.from_mask(bias, 6, 6), canvas, regions=False, entropy=False)
    causal = build_plan(Visibility.causal(6, 6), canvas, regions=False, entropy=False)
    for name in ("uniform", "visible_rows", "eligible"):
        torch.testing.assert_close(
            getattr(plan.baseline(Commits.empty()), name),
            getattr(causal.baseline(Commits.empty()), name),
            equal_nan=True,
        )


def test_visible_rows_and_eligible_follow_the_row_counts():
    canvas = CanvasState(torch.zeros(1, 40, dtype=torch.long), torch.full((1, 40), int(State.PROMPT)))
    expected = build_plan(Visibility.causal(40, 40), canvas, regions=False, entropy=False).baseline(Commits.empty())
    assert expected.visible_rows[0, 0].tolist() == list(range(40, 0, -1))
    assert expected.eligible[0, 0].tolist() == [n >= MIN_VISIBLE_ROWS for n in range(40, 0, -1)]


def test_rows_that_see_nothing_belong_to_no_region():
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    mask[..., 2, :] = False
    canvas = CanvasState(
        torch.zeros(1, 6, dtype=torch.long),
        torch.full((1, 6), int(State.PROMPT)),
        regions=Regions.from_spans([{"a": [(0, 3)], "b": [(3, 6)]}], 6),
    )
    plan = build_plan(Visibility.from_mask(mask, 6, 6), canvas, regions=True, entropy=True)
    assert plan.region_rows.tolist() == [[2.0, 3.0]]
    assert plan.spec.weights[0, 2].sum() == 0
