"""Experts of mixtures: the recorded ids and weights equal a router that is computed by hand from its hidden states."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import floatscope as fs
from floatscope.capture.experts import Routing, find_experts, track_experts
from floatscope.compat import experts_per_token
from floatscope.errors import UserError
from floatscope.pipelines.trace import plan_trace

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN = {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 8, "mlp_only_layers": [1]}
GLM = {
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "head_dim": 8,
}
MIXTURES = {  # name → a model, and the layers with experts
    "glm4": (Glm4MoeForCausalLM, Glm4MoeConfig, {**SIZES, **GLM}, [1, 2]),
    "qwen3": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {**SIZES, **QWEN, "norm_topk_prob": True}, [0, 2]),
    "qwen3-unnormalised": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {**SIZES, **QWEN, "norm_topk_prob": False}, [0, 2]),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {**SIZES, "num_local_experts": 8}, [0, 1, 2]),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, {**SIZES, "num_experts": 8, "norm_topk_prob": False}, [0, 1, 2]),
}


def build(name, seed):
    model_class, config_class, settings, layers = MIXTURES[name]
    torch.manual_seed(seed)
    module = model_class(config_class(**settings, initializer_range=0.3)).eval()
    for part, value in module.named_buffers():
        if part.endswith("e_score_correction_bias"):
            value.normal_(0, 0.3)
    return module, layers


def route_by_hand(config, name, gate, state):
    """The choice for one token, in float64: a list of (expert, weight)."""
    logits = [float(gate.weight[e].detach().double() @ state.double()) for e in range(8)]
    if name == "glm4":
        scores = [1 / (1 + np.exp(-x)) for x in logits]
        biased = [s + float(b) for s, b in zip(scores, gate.e_score_correction_bias, strict=True)]
        groups = [range(2 * g, 2 * g + 2) for g in range(4)]
        best = sorted(range(4), key=lambda g: -sum(biased[e] for e in groups[g]))[:2]
        allowed = [e for g in best for e in groups[g]]
        chosen = sorted(allowed, key=lambda e: -biased[e])[:3]
        total = sum(scores[e] for e in chosen)
        return [(e, scores[e] / total * 2.5) for e in chosen]
    p = np.exp(np.array(logits) - max(logits))
    p /= p.sum()
    chosen = sorted(range(8), key=lambda e: -p[e])[:3]
    total = sum(p[e] for e in chosen) if name == "mixtral" or getattr(config, "norm_topk_prob", False) else 1
    return [(e, p[e] / total) for e in chosen]


def expected_routing(module, name, layers, ids, attention_mask=None):
    """[layer, batch, position, rank] ids and weights, from the hidden states of an unwatched forward."""
    seen = {}
    handles = []
    for layer in layers:
        mlp = module.model.layers[layer].mlp

        def remember(mlp, args, layer=layer):
            seen[layer] = args[0]

        handles.append(mlp.register_forward_pre_hook(remember))
    with torch.no_grad():
        module(ids, attention_mask=attention_mask)
    for handle in handles:
        handle.remove()
    batch, length = ids.shape
    expert_ids = np.full((3, batch, length, 3), -1)
    weights = np.full((3, batch, length, 3), np.nan)
    for layer in layers:
        gate = module.model.layers[layer].mlp.gate
        for b in range(batch):
            for t in range(length):
                choice = route_by_hand(module.config, name, gate, seen[layer][b, t])
                choice = sorted(choice, key=lambda pair: -pair[1])
                expert_ids[layer, b, t] = [e for e, _ in choice]
                weights[layer, b, t] = [w for _, w in choice]
    return expert_ids, weights


def assert_routing(trace, step, expert_ids, weights):
    """`expert_ids`, `weights` [layer, position, rank] are those of one step."""
    n = expert_ids.shape[1]
    np.testing.assert_array_equal(trace.arrays["expert_ids"][step, :, :n], expert_ids)
    np.testing.assert_allclose(trace.arrays["expert_weights"][step, :, :n], weights, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MIXTURES)
def test_the_recorded_experts_are_those_of_the_router(name, seed):
    module, layers = build(name, seed)
    ids = torch.randint(3, 64, (2, 11))
    with fs.watch(module, experts=True) as session, torch.no_grad():
        module(ids)
    expert_ids, weights = expected_routing(module, name, layers, ids)
    for b, trace in enumerate(session.traces):
        assert trace.arrays["expert_ids"].dtype == np.int16
        assert trace.arrays["expert_weights"].dtype == np.float16
        assert trace.axes["expert_ids"] == ("step", "layer", "key", "expert_rank")
        assert_routing(trace, 0, expert_ids[:, b], weights[:, b])


@pytest.mark.parametrize("name", MIXTURES)
def test_the_experts_of_a_foreign_generate_are_those_of_each_forward(name):
    """With a cache a forward has its new rows only; the others are −1 and NaN."""
    module, layers = build(name, 5)
    ids = torch.randint(3, 64, (1, 6))
    with fs.watch(module, experts=True) as session:
        out = module.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    (trace,) = session.traces
    expert_ids, weights = expected_routing(module, name, layers, out[:, :-1])
    assert_routing(trace, 0, expert_ids[:, 0, :6], weights[:, 0, :6])
    for step in range(1, 4):
        row = 5 + step
        assert_routing(trace, step, *(np.full((3, row, 3), fill) for fill in (-1, np.nan)))
        np.testing.assert_array_equal(trace.arrays["expert_ids"][step, :, row], expert_ids[:, 0, row])
        np.testing.assert_allclose(trace.arrays["expert_weights"][step, :, row], weights[:, 0, row], rtol=1e-3)
        assert (trace.arrays["expert_ids"][step, :, row + 1 :] == -1).all()


@pytest.mark.parametrize("name", MIXTURES)
def test_a_padded_sample_has_the_experts_of_one_alone(name):
    module, _ = build(name, 6)
    long, short = torch.randint(3, 64, (9,)), torch.randint(3, 64, (4,))
    padded = torch.stack([long, torch.cat([torch.zeros(5, dtype=torch.long), short])])
    with fs.watch(module, experts=True) as session, torch.no_grad():
        module(padded, attention_mask=(padded > 0).long())
    for trace, alone in zip(session.traces, (long, short), strict=True):
        with fs.watch(module, experts=True) as single, torch.no_grad():
            module(alone[None])
        np.testing.assert_array_equal(trace.arrays["expert_ids"], single.traces[0].arrays["expert_ids"])
        np.testing.assert_allclose(
            trace.arrays["expert_weights"], single.traces[0].arrays["expert_weights"], rtol=2e-3, atol=1e-5
        )


def test_the_forecast_of_a_traced_mixture_counts_its_experts(tmp_path):
    sizes = {"layers": 2, "width": 32, "heads": 4, "ffn": 48, "context": 128}
    model = fs.load(fs.write_random(tmp_path / "m", "llada-moe", **sizes), device="cpu")
    job = plan_trace(model, ["a text"], tmp_path / "run", watch=fs.Watch(experts=True), new_tokens=4, chat=False)
    list(job)
    (trace,) = fs.open_run(tmp_path / "run")
    for name in ("expert_ids", "expert_weights"):
        assert job.forecast.bytes[name] == trace.arrays[name].nbytes > 0


@pytest.mark.parametrize("architecture", ["llada2", "sdar-moe", "llada-moe"])
@pytest.mark.parametrize("seed", range(2))
def test_a_decoded_batch_has_the_experts_of_its_prompts_alone_and_of_the_router(architecture, seed, tmp_path):
    sizes = {"layers": 3, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "context": 128}
    model = fs.load(fs.write_random(tmp_path / "m", architecture, seed=seed, **sizes), device="cpu")
    prompts = [list(range(5, 16)), [7, 8, 9]]
    settings = {"new_tokens": 8, "stop": False, "chat": False, "watch": fs.Watch(experts=True)}
    together = fs.decode(model, prompts, samples=["a", "b"], **settings)
    for b, name in enumerate("ab"):
        alone = fs.decode(model, prompts[b], samples=[name], **settings)
        ids, weights = (alone.trace.arrays[field] for field in ("expert_ids", "expert_weights"))
        np.testing.assert_array_equal(together.traces[b].arrays["expert_ids"], ids)
        np.testing.assert_allclose(together.traces[b].arrays["expert_weights"], weights, rtol=2e-3, atol=1e-5)
        for t, step in enumerate(alone.steps):
            seen: list[Routing] = []
            with torch.no_grad(), track_experts(model.module, seen.append):
                model.forward(step.before)
            recorded = np.flatnonzero((ids[t, -1, : step.before.tokens.shape[1]] >= 0).all(1))  # a cache has the others
            assert step.before.masked[0, recorded].any()
            layers = [i for i in range(3) if (ids[t, i, recorded] >= 0).all()]
            for layer, routing in zip(layers, seen, strict=True):
                np.testing.assert_array_equal(ids[t, layer, recorded], routing.ids[recorded])


def test_an_arm_with_a_cache_has_one_row_of_experts_per_step(tmp_path):
    module, layers = build("mixtral", 2)
    module.save_pretrained(tmp_path / "m")
    model = fs.load(tmp_path / "m", device="cpu")
    watch = fs.Watch(experts=True)
    out = fs.decode(model, [5, 6, 7, 8, 9], new_tokens=4, stop=False, chat=False, watch=watch)
    expert_ids, weights = expected_routing(module, "mixtral", layers, out.tokens[:, :-1].cpu())
    assert_routing(out.trace, 0, expert_ids[:, 0, :5], weights[:, 0, :5])
    for step in range(1, 4):
        recorded = out.trace.arrays["expert_ids"][step]
        np.testing.assert_array_equal(recorded[:, 4 + step], expert_ids[:, 0, 4 + step])
        assert (np.delete(recorded, 4 + step, 1) == -1).all()
    (final,) = fs.final_state(out, watch)
    assert (final.arrays["expert_ids"] >= 0).all()


class Experts(torch.nn.Module):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states


class Block(torch.nn.Module):
    """Attends and routes through SDPA, `calls` times, with all tokens or all but one."""

    def __init__(self, calls=1, attends=True, dropped=0):
        super().__init__()
        self.experts, self.calls, self.attends, self.dropped = Experts(), calls, attends, dropped

    def forward(self, hidden_states):
        x = hidden_states
        if self.attends:
            q = x.unflatten(-1, (2, 4)).transpose(1, 2)
            x = torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        flat = x.flatten(0, 1)[self.dropped :]
        for _ in range(self.calls):
            weights, ids = flat.topk(3, sorted=False)
            self.experts(flat, ids, top_k_weights=weights)
        return x


class Network(torch.nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.embedding, self.blocks = torch.nn.Embedding(16, 8), torch.nn.ModuleList(blocks)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return x


def test_experts_of_a_model_of_ones_own_join_the_attention_of_their_block():
    """The second block has experts and no attention, so the trace has no layer for them."""
    module, ids = Network(Block(calls=0), Block(attends=False), Block()), torch.arange(10).reshape(2, 5)
    with fs.watch(module, experts=True) as session, torch.no_grad():
        out = module(ids)
    assert session.hook == "scaled_dot_product_attention"
    for b, trace in enumerate(session.traces):
        assert (trace.arrays["expert_ids"][0, 0] == -1).all()
        top = out[b].sort(dim=-1, descending=True, stable=True)
        np.testing.assert_array_equal(trace.arrays["expert_ids"][0, 1], top.indices[:, :3])
        np.testing.assert_allclose(trace.arrays["expert_weights"][0, 1], top.values[:, :3].detach(), rtol=1e-3)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([Block(calls=2)], "block 'blocks.0' calls experts more than once in one forward"),
        ([Block(dropped=1)], "the experts of 'blocks.0' get 9 tokens, but its attention has 2 × 5 rows"),
        ([Block(calls=0), Block(attends=False)], "the experts of 'blocks.1' are in blocks without attention"),
    ],
)
def test_experts_that_belong_to_no_row_or_layer_are_refused(blocks, message):
    module = Network(*blocks)
    with pytest.raises(UserError, match=message), fs.watch(module, experts=True), torch.no_grad():
        module(torch.arange(10).reshape(2, 5))


@pytest.mark.parametrize("name", ["GptOss", "DeepseekV3", "Qwen2Moe", "Olmoe", "Phimoe"])
def test_the_experts_of_other_mixtures_are_found(name):
    config = getattr(transformers, f"{name}Config")(num_hidden_layers=4)
    with torch.device("meta"):
        module = getattr(transformers, f"{name}ForCausalLM")(config)
    assert find_experts(module)
    assert experts_per_token(config) > 0


def test_watching_the_experts_changes_no_logit_and_leaves_no_hook():
    module, _ = build("glm4", 0)
    ids = torch.randint(3, 64, (1, 9))
    with torch.no_grad():
        plain = module(ids).logits
        with fs.watch(module) as session:
            watched = module(ids).logits
        with fs.watch(module, experts=True) as with_experts:
            assert torch.equal(module(ids).logits, watched)
        assert torch.equal(module(ids).logits, plain)
    assert "expert_ids" not in session.traces[0].arrays
    others = with_experts.traces[0].arrays
    for name, array in session.traces[0].arrays.items():
        np.testing.assert_array_equal(array, others[name])
    copy.deepcopy(module)


def test_single_fields_can_be_named():
    module, _ = build("qwen3", 0)
    with fs.watch(module, fields=("received", "expert_ids")) as session, torch.no_grad():
        module(torch.randint(3, 64, (1, 9)))
    assert "expert_ids" in session.traces[0].arrays
    assert "expert_weights" not in session.traces[0].arrays


def test_equal_weights_are_ordered_by_id():
    seen, module = [], Experts()
    with track_experts(module, seen.append):
        module(torch.zeros(1, 4), torch.tensor([[6, 2, 5, 1]]), top_k_weights=torch.tensor([[0.2, 0.3, 0.3, 0.2]]))
    assert seen[0].ids.tolist() == [[2, 5, 1, 6]]
    assert seen[0].weights.tolist() == [pytest.approx([0.3, 0.3, 0.2, 0.2])]


def test_a_model_without_experts_is_refused_in_one_sentence(tmp_path):
    model = fs.load(fs.write_random(tmp_path / "m", "llada", layers=1), device="cpu")
    message = "LlamaForCausalLM has no experts that can be recorded.*leave experts out"
    with pytest.raises(UserError, match=message):
        fs.decode(model, [1, 2, 3], new_tokens=2, watch=fs.Watch(experts=True))
    with pytest.raises(UserError, match=message):
        fs.trace(model, ["text"], tmp_path / "run", new_tokens=2, watch=fs.Watch(experts=True))
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=message), fs.watch(model, experts=True):
        pass
    with pytest.raises(UserError, match=message):
        find_experts(model.module)


def test_a_trace_without_experts_says_how_to_record_them(tmp_path):
    model = fs.load(fs.write_random(tmp_path / "m", "llada", layers=1), device="cpu")
    trace = fs.decode(model, [1, 2, 3], new_tokens=2, chat=False, watch=fs.Watch()).trace
    with pytest.raises(UserError, match="does not store 'expert_ids': trace with --experts"):
        trace.require("expert_ids")
