"""transformers' own `generate()` under `watch`, for many architectures: exact against eager attention, or refused.

The models are tiny, random and in float64. `generate()` with eager attention returns its matrices: the reference.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import floatscope as fs
from pairs import slow_except

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 64,
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {  # keys and values from a latent vector
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 4,
}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
PLAIN = """
Apertus Arcee Bert BioGpt BitNet Camembert Cohere Cohere2 Cwm Data2VecText Doge Electra Ernie
Ernie4_5 Exaone4 GPTNeoX Gemma Gemma3 Glm Glm4 Granite Helium HunYuanDenseV1 Jais2 Lfm2 Llama
Ministral Ministral3 Mistral ModernBertDecoder Moshi NanoChat Nemotron Olmo Olmo2 Olmo3 Persimmon
Phi Phi3 Qwen2 Qwen3 Roberta RobertaPreLayerNorm SeedOss SmolLM3 StableLm Starcoder2 XLMRoberta
"""
WITH_EXPERTS = """
Afmoe Dots1 Ernie4_5_Moe FlexOlmo Glm4Moe GraniteMoe GraniteMoeShared HunYuanMoEV1 JetMoe MiniMaxM2
Mixtral Olmoe PhiMoE Qwen2Moe Qwen3Moe
"""
WITH_OWN_CODE = """
Bloom CodeGen GPTJ GPTNeoXJapanese Mamba Mpt OpenAIGPT RemBert RoFormer Rwkv
"""
EXACT: dict[str, dict] = {
    **{name: {} for name in PLAIN.split()},
    **dict.fromkeys(("CTRL", "GPT2", "GPTBigCode"), GPT2),
    **dict.fromkeys(WITH_EXPERTS.split(), EXPERTS),
    **{name: {**EXPERTS, **LATENT} for name in ("DeepseekV2", "DeepseekV3", "MiniCPM3", "Youtu")},
    "Llama4": {**EXPERTS, "intermediate_size_mlp": 40},
    "OPT": {"ffn_dim": 40, "word_embed_proj_dim": 32},
    "OlmoHybrid": HYBRID,
    "Qwen3Next": {**EXPERTS, **HYBRID},
}
OTHER_SIZES = {**GPT2, "n_layers": 2, "n_heads": 4, "d_model": 32, "rotary_dim": 4}
REFUSED: dict[str, tuple[dict, str]] = {
    "Gemma2": ({}, r"uses a soft cap on the scores \(`softcap`\)"),
    "VaultGemma": ({}, r"uses a soft cap on the scores \(`softcap`\)"),
    "GptOss": (EXPERTS, r"uses attention sinks as parameters \(`s_aux`\)"),
    "DiffLlama": ({}, "computes attention more than once in one forward"),
    "RecurrentGemma": ({"num_hidden_layers": 3}, "but its mask was made for"),
    "Mistral with a short window": ({"sliding_window": 6}, "attends over 6 keys but the canvas has 8 positions"),
    **dict.fromkeys(WITH_OWN_CODE.split(), (OTHER_SIZES, "no attention was seen in this forward")),
}
CLASSES = {
    "Bert": ("BertLMHeadModel", "BertConfig"),
    "BitNet": ("BitNetForCausalLM", "BitNetConfig"),
    "CTRL": ("CTRLLMHeadModel", "CTRLConfig"),
    "GPT2": ("GPT2LMHeadModel", "GPT2Config"),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig"),
    "Llama4": ("Llama4ForCausalLM", "Llama4TextConfig"),
    "OpenAIGPT": ("OpenAIGPTLMHeadModel", "OpenAIGPTConfig"),
    "PhiMoE": ("PhimoeForCausalLM", "PhimoeConfig"),
    "Mistral with a short window": ("MistralForCausalLM", "MistralConfig"),
}
CASES = [(name, pads) for name in EXACT for pads in (0, 3) if (name, pads) != ("Doge", 3)]  # its eager rows are NaN
QUICK = (("Llama", 0), ("Llama", 3), ("Mixtral", 0), ("DeepseekV3", 3))


@pytest.fixture(autouse=True)
def _finite_eager_masks():
    """Eager attention hides by the minimum of float64, which is −∞ in its fp32 softmax: padding rows would be NaN."""
    masks = transformers.AttentionMaskInterface
    original = masks()["eager"]
    masks.register("eager", lambda *args, **kwargs: original(*args, **{**kwargs, "dtype": torch.float32}))
    yield
    masks.register("eager", original)


def build(name: str, settings: dict, seed: int = 0) -> nn.Module:
    model_class, config_class = CLASSES.get(name, (f"{name}ForCausalLM", f"{name}Config"))
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**{**SIZES, **settings})
    model = getattr(transformers, model_class)(config).double().eval()
    model.set_experts_implementation("eager")  # the fused one has no float64
    with torch.no_grad():
        for weight in model.parameters():  # at the usual std every row is nearly uniform; biases are 0
            if weight.ndim > 1 or not weight.any():
                weight.normal_(0, 0.2)
    return model


def generate(model: nn.Module, ids: torch.Tensor, padding: torch.Tensor, **settings):
    return model.generate(
        ids,
        attention_mask=padding,
        max_new_tokens=4,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **settings,
    )


@pytest.mark.parametrize("case", slow_except(CASES, *QUICK), ids=str)
def test_generate_is_captured_exactly(case):
    """Without padding the logits are bit-equal; with it they are equal up to rounding, as attention runs without it."""
    name, pads = case
    model = build(name, EXACT[name])
    ids, starts = torch.randint(3, 48, (2, 7)), [0, pads]
    padding = torch.ones_like(ids)
    padding[1, :pads] = 0
    plain = generate(model, ids, padding)
    with fs.watch(model, level="full", verify=True) as session:
        watched = generate(model, ids, padding)
    assert torch.equal(watched.sequences, plain.sequences)
    for ours, theirs in zip(watched.logits, plain.logits, strict=True):
        assert torch.allclose(ours, theirs, 1e-9, 1e-9) if pads else torch.equal(ours, theirs)
    model.set_attn_implementation("eager")
    eager = generate(model, ids, padding, output_attentions=True)
    assert torch.equal(eager.sequences, plain.sequences)
    assert len(eager.attentions) == 4
    for b, (trace, start) in enumerate(zip(session.traces, starts, strict=True)):
        assert trace.arrays["keys"].tolist() == [n - start for n in (7, 8, 9, 10)]
        assert trace.arrays["queries"].tolist() == [7 - start, 1, 1, 1]
        for t, layers in enumerate(eager.attentions):
            matrices = [layer[b, :, start if t == 0 else 0 :, start:] for layer in layers if layer is not None]
            assert len(matrices) == len(session.layers)
            for i, matrix in enumerate(matrices):
                expected = matrix.numpy()  # [head, query, key]
                captured = trace.arrays["matrix"][t, i, :, : expected.shape[1], : expected.shape[2]]
                np.testing.assert_allclose(captured, expected, rtol=1e-4, atol=2e-5)
                mean = expected.mean((0, 1))
                np.testing.assert_allclose(trace.received(layer=i, view="row")[t, : len(mean)], mean, 1e-3, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused_by_name(name):
    settings, message = REFUSED[name]
    model = build(name, settings)
    ids = torch.randint(3, 48, (2, 7))
    with fs.watch(model), pytest.raises(fs.UserError, match=message):
        generate(model, ids, torch.ones_like(ids))
    generate(model, ids, torch.ones_like(ids))  # and runs again without a watch


def test_at_least_forty_architectures_are_exact():
    assert len(EXACT) >= 40
