"""Both hooks leave the output of a model unchanged, capture what it executes, and refuse what they cannot capture by
name."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import transformers  # imports its models when they are named
from torch import nn
from torch.nn import functional

import floatscope as fs
from floatscope.capture import hooks as hooks

DECODER = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
ENCODER = {k: v for k, v in DECODER.items() if k not in ("num_key_value_heads", "head_dim")}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
LAYER = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}

INTERFACE = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DECODER)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**DECODER, sliding_window=5)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**DECODER, **LAYER, query_pre_attn_scalar=3)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4)
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**ENCODER)),
    "distilbert": lambda: transformers.DistilBertForMaskedLM(
        transformers.DistilBertConfig(vocab_size=50, dim=32, hidden_dim=40, n_layers=2, n_heads=4)
    ),
    "modernbert": lambda: transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(**ENCODER, **SPECIAL, local_attention=6)
    ),
}
SDPA = {
    "t5": lambda: transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=50, d_model=32, d_ff=40, num_layers=2, num_heads=4, d_kv=8)
    )
}
T = 12


class Nano(nn.Module):
    """A tiny nanoGPT without transformers; the test gives its attention function."""

    def __init__(self, attention) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, 32)
        self.h = nn.ModuleList([Block(attention) for _ in range(2)])
        self.lm_head = nn.Linear(32, 50)

    def forward(self, ids):
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        return self.lm_head(x)


class Block(nn.Module):
    def __init__(self, attention) -> None:
        super().__init__()
        self.attn = Attn(attention)
        self.mlp = nn.Linear(32, 32)

    def forward(self, x):
        x = x + self.attn(functional.layer_norm(x, x.shape[-1:]))
        return x + self.mlp(x)


class Attn(nn.Module):
    def __init__(self, attention) -> None:
        super().__init__()
        self.attention = attention
        self.c_attn, self.c_proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        B, n, C = x.shape
        q, k, v = (y.view(B, n, 4, 8).transpose(1, 2) for y in self.c_attn(x).split(C, -1))
        return self.c_proj(self.attention(q, k, v).transpose(1, 2).reshape(B, n, C))


def build(make, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = make().eval()
    with torch.no_grad():  # larger weights: at a std of 0.02 every row is nearly uniform
        for p in model.parameters():
            if p.ndim == 2 and p.std() < 0.05:
                p.mul_(5)
    return model


def logits(model, *args, **kwargs) -> torch.Tensor:
    with torch.no_grad():
        return model(*args, **kwargs)[0]


@pytest.fixture
def ids():
    return torch.randint(3, 50, (3, T))


@pytest.fixture
def padding():
    """Left, none, right."""
    at = torch.arange(T)
    return torch.stack([at >= 4, at >= 0, at < 9]).long()


# --- outputs of a watched model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*INTERFACE, *SDPA])
def test_a_watched_model_gives_identical_output(name, ids):
    model = build((INTERFACE | SDPA)[name])
    before, implementation = logits(model, ids), model.config._attn_implementation
    with fs.watch(model, verify=True) as session:
        inside = logits(model, ids)
    assert torch.equal(inside, before)
    assert torch.equal(logits(model, ids), before)
    assert model.config._attn_implementation == implementation == "sdpa"
    assert session.hook == ("AttentionInterface" if name in INTERFACE else "scaled_dot_product_attention")
    assert len(session.layers) == 2


@pytest.mark.parametrize("name", [*INTERFACE, *SDPA])
def test_a_padded_batch_gives_the_same_output_at_valid_positions(name, ids, padding):
    model = build((INTERFACE | SDPA)[name])
    before = logits(model, ids, attention_mask=padding)
    with fs.watch(model, verify=True) as session:
        inside = logits(model, ids, attention_mask=padding)
    valid = padding.bool()
    torch.testing.assert_close(inside[valid], before[valid], rtol=1e-4, atol=1e-5)
    assert [int(trace.arrays["keys"][0]) for trace in session.traces] == [8, 12, 9]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_other_precisions_give_identical_output(name, dtype, ids):
    model = build(INTERFACE[name]).to(dtype)
    before = logits(model, ids)
    with fs.watch(model, verify=True):
        assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize(
    "make", [INTERFACE["llama"], lambda: Nano(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v))]
)
def test_autocast_gives_identical_output(make, ids):
    model = build(make)
    with torch.autocast("cpu", torch.bfloat16):
        before = logits(model, ids)
        with fs.watch(model, verify=True):
            assert torch.equal(logits(model, ids), before)


def test_gradients_flow_through_a_watched_forward(ids):
    model = build(INTERFACE["llama"])

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    before = gradients()
    with fs.watch(model):
        inside = gradients()
    assert all(torch.equal(a, b) for a, b in zip(inside, before, strict=True))


@pytest.mark.parametrize("name", [*INTERFACE, *SDPA])
def test_watching_never_uses_eager_attention(name, ids, padding):
    """Eager attention calls softmax over the keys; a watched forward never does."""
    model = build((INTERFACE | SDPA)[name])
    with mock.patch.object(functional, "softmax", side_effect=AssertionError("eager attention")):
        with fs.watch(model, fields=("received",)):
            logits(model, ids, attention_mask=padding)


def test_an_eager_model_is_eager_again_after_watching(ids):
    model = build(INTERFACE["llama"])
    model.set_attn_implementation("eager")
    before = logits(model, ids)
    with fs.watch(model, verify=True):
        torch.testing.assert_close(logits(model, ids), before, rtol=1e-4, atol=1e-5)
    assert model.config._attn_implementation == "eager"


def test_the_implementation_is_restored_after_an_exception(ids):
    model = build(INTERFACE["llama"])
    before = logits(model, ids)
    with pytest.raises(IndexError), fs.watch(model):
        logits(model, ids + 1000)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(logits(model, ids), before)
    with fs.watch(model) as session:  # the model can be watched again
        logits(model, ids)
    assert len(session.traces) == 3


def test_a_failing_forward_leaves_no_hooks_and_no_step(ids):
    model = build(INTERFACE["llama"])
    n_hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    with fs.watch(model) as session:
        with pytest.raises(IndexError):
            model(ids + 1000)
        logits(model, ids)
    assert [len(trace.arrays["keys"]) for trace in session.traces] == [1, 1, 1]
    assert not any(part in hooks._watchers for part in model.modules())
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == n_hooks


def test_another_model_in_the_block_is_not_captured(ids):
    watched, other = build(INTERFACE["llama"]), build(INTERFACE["gpt2"])
    before = logits(other, ids)
    with fs.watch(watched) as session:
        assert torch.equal(logits(other, ids), before)
        logits(watched, ids)
    assert [len(trace.arrays["keys"]) for trace in session.traces] == [1, 1, 1]


def test_two_models_can_be_watched_at_once(ids):
    models = [build(lambda: Nano(functional.scaled_dot_product_attention), seed) for seed in range(2)]
    alone = []
    for model in models:
        with fs.watch(model) as session:
            logits(model, ids)
        alone.append(session.traces[0].received())
    with fs.watch(models[0]) as first, fs.watch(models[1]) as second:
        for model in models:
            logits(model, ids)
    for session, expected in zip((first, second), alone, strict=True):
        torch.testing.assert_close(torch.tensor(session.traces[0].received()), torch.tensor(expected))


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INTERFACE)
def test_no_square_mask_is_built_under_padding(name, ids, padding):
    """The mask arrives at the attention as structure, without a boolean or additive [T, T] tensor."""
    model, masks = build(INTERFACE[name]), []
    original = hooks._attention_function

    def record(module, query, key, value, attention_mask, **kwargs):
        masks.append(attention_mask)
        return original(module, query, key, value, attention_mask, **kwargs)

    with mock.patch.object(hooks, "_attention_function", record), fs.watch(model):
        logits(model, ids, attention_mask=padding)
    hooks._register_functions(model)
    assert len(masks) == 2
    assert all(type(mask).__name__ == "Visibility" and mask.mask is None for mask in masks)
    assert all(torch.equal(mask.valid, padding.bool()) for mask in masks)


def test_layers_that_share_a_mask_share_a_visibility(ids):
    for name, expected in (("llama", [0, 0]), ("mistral", [0, 0]), ("gemma3", [0, 1]), ("modernbert", [0, 1])):
        model = build(INTERFACE[name])
        with fs.watch(model) as session:
            logits(model, ids)
        trace = session.traces[0]
        assert trace.arrays["layer_visibility"].tolist() == expected, name
        assert trace.arrays["uniform"].shape[1] == max(expected) + 1


def test_a_sliding_window_is_captured_as_a_window(ids):
    model = build(INTERFACE["mistral"])
    with fs.watch(model, level="full") as session:
        logits(model, ids)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    attention = torch.tensor(session.traces[0].arrays["matrix"])
    assert torch.equal(attention[0, 0, 0] > 0, (j <= i) & (j > i - 5))


def test_packed_sequences_do_not_see_each_other():
    model = build(INTERFACE["llama"])
    packed = torch.randint(3, 50, (1, T))
    places = torch.cat([torch.arange(5), torch.arange(7)])[None]
    packing = {"position_ids": places, "use_cache": False}
    before = logits(model, packed, **packing)
    with fs.watch(model, level="full", verify=True) as session:
        assert torch.equal(logits(model, packed, **packing), before)
    attention = session.traces[0].arrays["matrix"]
    assert not attention[..., 5:, :5].any()
    assert attention[..., 5:, 5:].any()


def test_a_four_dimensional_mask_of_the_caller_is_used(ids):
    model = build(INTERFACE["llama"])
    own = torch.rand(3, 1, T, T) > 0.4
    own |= torch.eye(T, dtype=torch.bool)
    for mask in (own, torch.where(own, 0.0, torch.finfo(torch.float32).min)):
        before = logits(model, ids, attention_mask=mask)
        with fs.watch(model, level="full", verify=True) as session:
            assert torch.equal(logits(model, ids, attention_mask=mask), before)
        for b, trace in enumerate(session.traces):
            assert not trace.arrays["matrix"][0][:, :, ~own[b, 0]].any()


def test_without_a_mask_the_module_decides_whether_it_is_causal():
    """transformers passes None where SDPA's is_causal suffices; a single query is the last one and sees every key."""
    module = nn.Module()
    for own, given, queries, kind in (
        (True, None, 5, "causal"),
        (False, None, 5, "full"),
        (True, False, 5, "full"),
        (False, True, 5, "causal"),
        (True, None, 1, "full"),
    ):
        module.is_causal = own
        assert hooks._read_visibility(module, None, given, queries, 5).kind == kind


@pytest.mark.parametrize(
    "attention",
    [
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.7),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, torch.ones(T, T).tril(2).bool()),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=alibi()[None], scale=1.0),
        lambda q, k, v: functional.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
    ],
    ids=["full", "causal", "positional", "boolean", "alibi", "keywords", "gqa"],
)
def test_every_call_style_of_sdpa_gives_identical_output(attention, ids):
    model = build(lambda: Nano(attention))
    with torch.no_grad():
        before = model(ids)
        with fs.watch(model, verify=True) as session:
            inside = model(ids)
    assert torch.equal(inside, before)
    assert session.hook == "scaled_dot_product_attention"
    assert session.layers == ["h.0.attn", "h.1.attn"]
    assert len(session.traces) == 3


@pytest.mark.parametrize(
    "attention",
    [
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=alibi()),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k[:1], v[:1]),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k[:, :1], v[:, :1]),
    ],
    ids=["a mask of three axes", "keys shared by the batch", "keys shared by the heads"],
)
def test_calls_without_a_fused_kernel_agree_within_rounding(attention, ids):
    model = build(lambda: Nano(attention))
    with torch.no_grad():
        before = model(ids)
        with fs.watch(model, verify=True):
            torch.testing.assert_close(model(ids), before, rtol=1e-5, atol=1e-5)


def alibi() -> torch.Tensor:
    distance = (torch.arange(T)[:, None] - torch.arange(T)).abs()
    return -(2.0 ** -torch.arange(1, 5))[:, None, None] * distance


def test_three_dimensional_queries_are_the_heads_of_one_sequence(ids):
    model = build(
        lambda: Nano(lambda q, k, v: functional.scaled_dot_product_attention(q[0], k[0], v[0], is_causal=True)[None])
    )
    with torch.no_grad():
        before = model(ids[:1])
        with fs.watch(model, verify=True) as session:
            torch.testing.assert_close(model(ids[:1]), before, rtol=1e-5, atol=1e-5)
    assert session.traces[0].arrays["top_key"].shape[2] == 4  # heads


def test_batch_and_heads_in_one_axis_are_refused(ids):
    def folded(q, k, v):
        return functional.scaled_dot_product_attention(*(x.flatten(0, 1) for x in (q, k, v))).unflatten(0, q.shape[:2])

    model = build(lambda: Nano(folded))
    with fs.watch(model), pytest.raises(fs.UserError, match=r"layer 'h\.0\.attn'.* batch of 1 .* 3"):
        logits(model, ids)


def last_five(q, k, v):
    """Only the last five positions are queries; SDPA aligns their causal mask with key 0."""
    return functional.pad(functional.scaled_dot_product_attention(q[:, :, -5:], k, v, is_causal=True), (0, 0, T - 5, 0))


def test_a_rectangular_causal_mask_is_aligned_with_key_zero(ids):
    model = build(lambda: Nano(last_five))
    with torch.no_grad():
        before = model(ids)
        with fs.watch(model, fields=("received", "matrix"), verify=True) as session:
            torch.testing.assert_close(model(ids), before)
    for trace in session.traces:
        matrix = torch.tensor(trace.arrays["matrix"])
        assert torch.equal(matrix[0, 0, 0, -5:] > 0, torch.ones(5, T).tril().bool())


def test_fewer_queries_than_positions_do_not_shorten_the_residual(ids):
    model = build(lambda: Nano(last_five))
    with fs.watch(model, fields=("residual",)) as session:
        logits(model, ids)
    assert session.traces[0].arrays["residual"].shape == (1, 2, T)


def test_five_dimensional_queries_are_refused(ids):
    model = build(lambda: Nano(lambda q, k, v: functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]))
    with (
        fs.watch(model),
        pytest.raises(fs.UserError, match=r"layer 'h\.0\.attn' attends with queries of shape \(1, 3, 4,"),
    ):
        logits(model, ids)


# --- output projections and residual streams --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*INTERFACE, *SDPA, "nano"])
def test_the_output_projection_is_found(name, ids):
    """|W_O v| of every layer is a number, so a drain can be distinguished from a sink."""
    model = build((INTERFACE | SDPA | {"nano": lambda: Nano(functional.scaled_dot_product_attention)})[name])
    with fs.watch(model, fields=("moments", "residual")) as session:
        logits(model, ids)
    trace = session.traces[0]
    output_norm = trace.arrays["moments"][..., trace.coords["quantity"].index("output_norm"), 1]
    assert not math.isnan(output_norm.sum())
    assert trace.arrays["residual"].shape == (1, 2, T)


@pytest.mark.parametrize("name", ["gpt2", "bert", "nano"])
def test_the_output_norm_is_the_norm_of_the_projected_value(name):
    ids = torch.randint(3, 50, (1, 20))
    model = build((INTERFACE | {"nano": lambda: Nano(functional.scaled_dot_product_attention)})[name])
    values = []

    def record(self, call, layer):
        values.append(call.value)
        return original(self, call, layer)

    original = hooks.Watcher.attend
    with mock.patch.object(hooks.Watcher, "attend", record), fs.watch(model, fields=("top", "top_key")) as session:
        logits(model, ids)
    weights = {
        "gpt2": lambda i: model.transformer.h[i].attn.c_proj.weight.T,
        "bert": lambda i: model.bert.encoder.layer[i].attention.output.dense.weight,
        "nano": lambda i: model.h[i].attn.c_proj.weight,
    }[name]
    trace = session.traces[0]
    for i in range(2):
        W = weights(i).detach().unflatten(1, (4, 8))  # [out, head, dim]
        expected = torch.einsum("ohd,hjd->hjo", W, values[i][0]).norm(dim=-1)  # [head, key]
        key = torch.tensor(trace.arrays["top_key"])[0, i, :, 0].long()  # group `all`, [head, rank]
        actual = torch.tensor(trace.arrays["top"])[0, i, :, 0, :, trace.coords["top_stat"].index("output_norm")]
        is_key = key >= 0
        assert is_key.any()
        torch.testing.assert_close(
            actual.float()[is_key], expected.gather(1, key.clamp_min(0))[is_key], rtol=2e-3, atol=2e-3
        )


def test_a_projection_of_another_shape_is_not_used_as_output_projection(ids):
    class Misnamed(Attn):
        def __init__(self, attention) -> None:
            super().__init__(attention)
            self.o_proj = nn.Linear(7, 5)  # first in the list of names, but of another shape

    model = build(lambda: Nano(functional.scaled_dot_product_attention))
    model.h[0].attn = Misnamed(functional.scaled_dot_product_attention)
    del model.h[1].attn.c_proj
    model.h[1].attn.forward = lambda x: (
        x + 0 * functional.scaled_dot_product_attention(*[x.view(3, T, 4, 8).transpose(1, 2)] * 3).sum()
    )
    with fs.watch(model, fields=("moments",)) as session:
        logits(model, ids)
    trace = session.traces[0]
    output_norm = trace.arrays["moments"][0, :, :, trace.coords["quantity"].index("output_norm"), 1]
    assert not math.isnan(output_norm[0].sum())


# --- refused models --------------------------------------------------------------------------------------------------


def refusal(model: nn.Module, ids: torch.Tensor) -> str:
    with pytest.raises(fs.UserError) as error, fs.watch(model):
        model(ids)
    return str(error.value)


def test_a_soft_cap_is_refused_by_name(ids):
    message = refusal(build(lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**DECODER))), ids)
    assert "layer 'model.layers.0.self_attn' uses a soft cap on the scores (`softcap`)" in message


def test_sinks_as_parameters_are_refused_by_name(ids):
    config = transformers.GptOssConfig(**DECODER, num_local_experts=2, num_experts_per_tok=1)
    message = refusal(build(lambda: transformers.GptOssForCausalLM(config)), ids)
    assert "layer 'model.layers.0.self_attn' uses attention sinks as parameters (`s_aux`)" in message


def test_two_attention_calls_in_one_layer_are_refused_by_name(ids):
    """They are one layer, not two."""
    message = refusal(build(lambda: transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**DECODER))), ids)
    assert "layer 'model.layers.0.self_attn' computes attention more than once in one forward" in message

    def differential(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v) - functional.scaled_dot_product_attention(k, q, v) / 2

    assert "layer 'h.0.attn' computes attention more than once" in refusal(build(lambda: Nano(differential)), ids)


def test_a_layer_that_runs_several_times_is_several_layers(ids):
    config = transformers.AlbertConfig(**ENCODER | {"num_hidden_layers": 3}, embedding_size=16)
    model = build(lambda: transformers.AlbertForMaskedLM(config))
    with fs.watch(model, verify=True) as session:
        logits(model, ids)
    assert session.traces[0].received(layer=None).shape == (1, 3, T)


def test_calls_outside_of_any_layer_are_numbered(ids):
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 32)

        def forward(self, ids):
            x = self.embed(ids)
            for _ in range(3):
                q = x.unflatten(-1, (4, 8)).transpose(1, 2)
                x = x + functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
            return x

    model = build(Flat)
    for _ in range(2):
        with fs.watch(model, verify=True) as session:
            logits(model, ids)
        assert session.layers == ["Flat", "Flat (call 2)", "Flat (call 3)"]


def test_a_model_that_builds_its_own_mask_gets_a_tensor(ids, padding):
    """Doge adds a term per key and head to the mask."""
    model = build(lambda: transformers.DogeForCausalLM(transformers.DogeConfig(**DECODER)))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.A.normal_(0, 0.2)
    for mask in (torch.ones_like(ids), padding):
        before = logits(model, ids, attention_mask=mask)
        with fs.watch(model, level="full", verify=True) as session:
            inside = logits(model, ids, attention_mask=mask)
        assert torch.equal(inside, before)
        assert [int(trace.arrays["keys"][0]) for trace in session.traces] == mask.sum(1).tolist()
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("read", "name"), [(lambda mask: mask.dtype, r"mask\.dtype"), (lambda mask: mask[:, :, -1], r"mask\[…\]")]
)
def test_a_mask_that_is_read_as_a_tensor_is_refused(read, name, ids):
    model = build(INTERFACE["llama"])
    attention = model.model.layers[0].self_attn
    forward = attention.forward

    def read_mask(*args, attention_mask, **kwargs):
        assert not hasattr(attention_mask, "numel")
        read(attention_mask)
        return forward(*args, attention_mask=attention_mask, **kwargs)

    attention.forward = read_mask
    with fs.watch(model), pytest.raises(fs.UserError, match=rf"reads its attention mask as a tensor \(`{name}`\)"):
        logits(model, ids, attention_mask=torch.ones(3, T).tril().long().flip(0))


def test_a_mask_for_other_keys_is_refused(ids):
    """RecurrentGemma makes its mask from the cache of its first layer, which has no attention and stays empty."""
    config = transformers.RecurrentGemmaConfig(**DECODER | {"num_hidden_layers": 3}, attention_window_size=6)
    model = build(lambda: transformers.RecurrentGemmaForCausalLM(config))
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    message = r"layer 'model\.layers\.2\.temporal_block' attends from 1 queries over \d keys, but its mask was made for"
    for length in (3, 9):  # within the window and past it
        with fs.watch(model), pytest.raises(fs.UserError, match=message):
            model.generate(ids[:, :length], **settings)
        plain = model.generate(ids[:, :length], use_cache=False, **settings)
        with fs.watch(model, verify=True) as session:
            assert torch.equal(model.generate(ids[:, :length], use_cache=False, **settings), plain)
        assert session.traces[0].arrays["queries"].tolist() == list(range(length, length + 4))


def test_dropout_in_training_is_refused_by_name(ids):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, attention_dropout=0.1)).train()
    message = refusal(model, ids)
    assert "layer 'model.layers.0.self_attn' applies dropout 0.1 to its attention; call model.eval() first" in message
    nano = build(lambda: Nano(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2)))
    assert "layer 'h.0.attn' applies dropout 0.2" in refusal(nano, ids)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (lambda: nn.MultiheadAttention(32, 4, batch_first=True), "layer"),
        (lambda: nn.TransformerEncoderLayer(32, 4, 40, batch_first=True), "layer.self_attn"),
    ],
)
def test_fused_layers_are_refused_by_name(layer, name, training, ids):
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer = nn.Embedding(50, 32), layer()

        def forward(self, ids):
            x = self.embed(ids)
            return self.layer(*[x] * 3) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)

    message = refusal(Holder().train(training), ids)
    assert f"layer '{name}' computes its attention inside one fused call (multi_head_attention_forward)" in message


def test_a_model_without_attention_is_refused(ids):
    assert "no attention was seen in this forward" in refusal(nn.Embedding(50, 32), ids)
    config = transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4)  # computes its own softmax
    assert "no attention was seen in this forward" in refusal(build(lambda: transformers.BloomForCausalLM(config)), ids)


def test_an_encoder_decoder_is_refused_and_its_encoder_is_not(ids):
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    model = build(
        lambda: transformers.BartModel(
            transformers.BartConfig(vocab_size=50, d_model=32, encoder_ffn_dim=40, decoder_ffn_dim=40, **sizes)
        )
    )
    assert "BartModel is an encoder-decoder" in refusal(model, ids)
    with fs.watch(model.encoder, verify=True) as session:
        logits(model.encoder, ids)
    assert len(session.layers) == 2


@pytest.mark.parametrize("make", [INTERFACE["llama"], lambda: Nano(functional.scaled_dot_product_attention)])
def test_watching_twice_is_refused(make, ids):
    model = build(make)
    with fs.watch(model) as session:
        with (
            pytest.raises(fs.UserError, match="already being watched; first leave the other `watch` block"),
            fs.watch(model),
        ):
            pass
        logits(model, ids)
    assert len(session.traces) == 3


def test_a_float_mask_of_zeros_and_ones_is_refused(ids):
    tril = torch.ones(T, T).tril()
    nano = build(lambda: Nano(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=tril)))
    assert "floating point but contains only 0 and 1" in refusal(nano, ids)
    llama = build(INTERFACE["llama"])
    with fs.watch(llama), pytest.raises(fs.UserError, match="floating point but contains only 0 and 1"):
        logits(llama, ids, attention_mask=tril[None, None].expand(3, 1, T, T))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("padded", [True, False])
def test_nan_in_the_scores_names_layer_head_and_step(value, padded, ids, padding):
    model = build(INTERFACE["llama"])
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.view(4, 8, 32)[2, 3] = value  # head 2 of layer 1
    kwargs = {"attention_mask": padding} if padded else {}
    with fs.watch(model), pytest.raises(fs.UserError) as error:
        logits(model, ids, **kwargs)
    message = str(error.value)
    assert (
        "NaN or inf in the attention scores at layer 1 ('model.layers.1.self_attn'), head 2, step 0, sample 0"
        in message
    )


def test_nan_in_the_padding_changes_nothing(ids, padding):
    model = build(INTERFACE["bert"])
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[0] = math.nan
    dirty = ids * padding
    with fs.watch(model) as session:
        logits(model, dirty, attention_mask=padding)
    assert all(not torch.tensor(trace.received()).isnan().any() for trace in session.traces)


def test_a_row_that_sees_nothing_is_not_counted(ids):
    """Left-padded rows under a mask of the caller: the watcher does not know which rows are padding."""
    blind = torch.ones(T, T).tril().bool()
    blind[:4] = False
    blind[:, :4] = False
    model = build(lambda: Nano(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=blind)))
    with fs.watch(model, verify=True) as session:
        logits(model, ids)
    for trace in session.traces:
        torch.testing.assert_close(torch.tensor(trace.received()).sum(-1), torch.ones(1, 2))
