"""The architecture table: keys are renamed one to one, and unsupported checkpoints are refused by name."""

from __future__ import annotations

import pytest
import torch

import floatscope as fs
from floatscope.models.architectures import ARCHITECTURES, REFUSED, find_architecture
from floatscope.models.conversions import llada_to_llama_key, llama_to_llada_key
from floatscope.models.prepared_checkpoint import build_config, build_empty_module

LLADA2_MINI = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "eos_token_id": 156892,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 512,
    "n_group": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "pad_token_id": 156892,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 600000,
    "rotary_dim": 64,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_sliding_window": False,
    "vocab_size": 157184,
}
SDAR_4B = {
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "attention_bias": False,
    "eos_token_id": 151643,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLADA_8B = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "activation_type": "silu",
    "alibi": False,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 4096,
    "embedding_size": 126464,
    "eos_token_id": 126081,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "mask_token_id": 126336,
    "max_sequence_length": 4096,
    "mlp_hidden_size": 12288,
    "multi_query_attention": None,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "pad_token_id": 126081,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "vocab_size": 126464,
    "weight_tying": False,
}
DREAM_7B = {
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "mask_token_id": 151666,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "pad_token_id": 151643,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
ILLADA_8B = {
    "architectures": ["iLLaDAModelLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 155136,
}
A_KEY = {"llada": "model.transformer.wte.weight", "illada": "model.layers.0.self_attn.q_proj.weight"}


def build_module(config):
    row, class_name = find_architecture(config, None)
    return build_empty_module(class_name, build_config(row, class_name, config))


@pytest.mark.parametrize(
    ("config", "parameters", "tensors", "class_name"),
    [
        (LLADA_8B, 8_015_581_184, 291, "LlamaForCausalLM"),
        (DREAM_7B, 7_615_616_512, 339, "Qwen2ForCausalLM"),
        (LLADA2_MINI, 16_255_638_528, 299, "Glm4MoeForCausalLM"),
        (SDAR_4B, 4_411_424_256, 399, "Qwen3ForCausalLM"),
    ],
    ids=["llada", "dream", "llada2", "sdar"],
)
def test_the_real_configs_have_the_published_numbers_of_parameters(config, parameters, tensors, class_name):
    module = build_module(config)
    assert type(module).__name__ == class_name
    assert sum(p.numel() for p in module.parameters()) == parameters
    assert len(module.state_dict()) == tensors
    assert {p.device.type for p in module.parameters()} == {"meta"}


def test_illada_has_llamas_keys_and_a_tied_head():
    row, class_name = find_architecture(ILLADA_8B, [A_KEY["illada"]])
    assert row.name == "illada"
    module = build_empty_module(class_name, build_config(row, class_name, ILLADA_8B))
    assert round(sum(p.numel() for p in module.parameters()) / 1e9, 2) == 7.62  # as its card says
    assert row.find_mask_id(ILLADA_8B, None) == 5
    assert module.lm_head.weight is module.model.embed_tokens.weight


def test_a_setting_missing_from_an_illada_config_is_not_guessed():
    config = {k: v for k, v in ILLADA_8B.items() if k != "rope_theta"}
    row, class_name = find_architecture(config, [A_KEY["illada"]])
    with pytest.raises(fs.UserError, match=r"its config\.json has no rope_theta"):
        build_config(row, class_name, config)


def test_llada_keys_are_renamed_one_to_one():
    ours = list(build_module(LLADA_8B).state_dict())
    theirs = [llama_to_llada_key(key) for key in ours]
    assert len(set(theirs)) == len(theirs) == 291
    assert [llada_to_llama_key(key) for key in theirs] == ours
    assert (
        llama_to_llada_key("model.layers.31.self_attn.o_proj.weight") == "model.transformer.blocks.31.attn_out.weight"
    )
    assert llada_to_llama_key("model.transformer.blocks.3.ff_out.weight") == "model.layers.3.mlp.down_proj.weight"
    assert llada_to_llama_key("model.transformer.ff_out.weight") == "lm_head.weight"


def test_an_unknown_key_keeps_its_name():
    for key in ("model.transformer.blocks.x.q_proj.weight", "model.transformer.blocks.0.surprise.weight", "a.b"):
        assert llada_to_llama_key(key) == key


def test_rotation_and_norm_of_llada_follow_its_config():
    config = build_module(LLADA_8B).config
    assert config.rope_parameters["rope_theta"] == 500000.0
    assert (config.rms_norm_eps, config.head_dim, config.max_position_embeddings) == (1e-5, 128, 4096)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_type", "sequential"),
        ("alibi", True),
        ("rope", False),
        ("include_qkv_bias", True),
        ("attention_layer_norm", True),
        ("layer_norm_type", "low_precision"),
        ("activation_type", "swiglu"),
    ],
)
def test_a_llada_with_another_structure_is_refused(field, value):
    with pytest.raises(fs.UserError, match=rf"has {field} {value!r} \(expected .*\): this LLaDA has another structure"):
        build_module({**LLADA_8B, field: value})


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("LLaDA22MoeModelLM", "a newer LLaDA"),
        ("llada2_2ModelLM", "a newer LLaDA"),
        ("LLaDA3MoeModelLM", "a newer LLaDA"),
        ("LLaDA2MoeModelLMv3", "a newer LLaDA"),
        ("LlavaLLaDAModelLM", "LLaDA-V"),
        ("LLaDAVModelLM", "LLaDA-V"),
        ("LLaDA_VForCausalLM", "LLaDA-V"),
        ("MMadaModelLM", "LLaDA-V / MMaDA"),
        ("MMaDAModelLM", "LLaDA-V / MMaDA"),
        ("mmadaModel", "LLaDA-V / MMaDA"),
        ("NemotronLabsDiffusionModel", "Nemotron-Labs-Diffusion"),
        ("NemotronLabsDiffusionVLMModel", "Nemotron-Labs-Diffusion"),
        ("SEDD", "SEDD"),
        ("DiffusionGemmaModel", "parts of DiffusionGemma"),
    ],
)
@pytest.mark.parametrize("keys", [None, ["model.layers.0.self_attn.q_proj.weight", "model.transformer.wte.weight"]])
def test_unsupported_architectures_are_refused_by_name_with_the_reason(architecture, name, keys):
    with pytest.raises(fs.UserError) as error:
        find_architecture({"architectures": [architecture], "model_type": "llada"}, keys)
    assert str(error.value).startswith(name)
    assert f"({architecture}) cannot be opened: " in str(error.value) or "/" in name
    assert len(str(error.value)) > 50


@pytest.mark.parametrize("architecture", ["LLaDAModelLM", "DreamVLModel", "LaViDaModel", "SDARForCausalLM"])
@pytest.mark.parametrize("setting", ["vision_config", "mm_vision_tower"])
def test_a_diffusion_model_with_an_image_encoder_is_refused(architecture, setting):
    with pytest.raises(fs.UserError, match=f"it reads images, which is not supported; its config.json has {setting}"):
        find_architecture({"architectures": [architecture], setting: {}}, None)


def test_model_type_is_ignored():
    assert find_architecture({"architectures": ["SomethingElse"], "model_type": "llama"}, None) is None
    row, class_name = find_architecture({"architectures": ["Qwen3ForCausalLM"], "model_type": "llada"}, None)
    assert (row.name, class_name) == ("causal", "Qwen3ForCausalLM")


@pytest.mark.parametrize("names", [None, [], "LlamaForCausalLM", [7], {}])
def test_a_config_must_name_architectures(names):
    with pytest.raises(fs.UserError, match=r"config\.json names no architectures"):
        find_architecture({"architectures": names}, None)


@pytest.mark.parametrize(
    ("architecture", "row_name", "class_name"),
    [
        ("LLaDA2MoeModelLM", "llada2", "Glm4MoeForCausalLM"),
        ("LLaDAMoEModelLM", "llada-moe", "Qwen3MoeForCausalLM"),
        ("LLaDAMoEModel", "llada-moe", "Qwen3MoeForCausalLM"),
        ("SDARForCausalLM", "sdar", "Qwen3ForCausalLM"),
        ("SDARMoeForCausalLM", "sdar-moe", "Qwen3MoeForCausalLM"),
        ("Fast_dLLM_QwenForCausalLM", "fast-dllm-v2", "Qwen2ForCausalLM"),
        ("A2DQwen3LMHeadModel", "a2d", "Qwen3ForCausalLM"),
        ("A2DLlamaLMHeadModel", "a2d", "LlamaForCausalLM"),
        ("MDLM", "mdlm", "DiTForMaskedLM"),
        ("BD3LM", "bd3lm", "DiTForMaskedLM"),
        ("ModernBertForMaskedLM", "bert", "ModernBertForMaskedLM"),
        ("XLMRobertaForMaskedLM", "roberta", "XLMRobertaForMaskedLM"),
        ("GPT2LMHeadModel", "causal", "GPT2LMHeadModel"),
        ("Gemma3ForCausalLM", "causal", "Gemma3ForCausalLM"),
    ],
)
def test_architectures_find_their_row(architecture, row_name, class_name):
    row, found_class = find_architecture({"architectures": [architecture]}, None)
    assert (row.name, found_class) == (row_name, class_name)


def test_a_llada_with_llamas_keys_is_an_illada_and_with_neither_unknown():
    config = {"architectures": ["LLaDAModelLM"]}
    assert find_architecture(config, [A_KEY["llada"]])[0].name == "llada"
    assert find_architecture(config, [A_KEY["illada"]])[0].name == "illada"
    assert find_architecture(config, ["something.else"]) is None


def test_the_table_is_well_formed():
    names = [row.name for row in ARCHITECTURES]
    assert len(set(names)) == len(names)
    for row in ARCHITECTURES:
        assert row.paradigm in ("mdm", "arm")
        assert row.mask_source
    assert all(refusal.reason[0].islower() and not refusal.reason.endswith(".") for refusal in REFUSED)
    assert len({refusal.name for refusal in REFUSED}) == len(REFUSED)


def test_nothing_is_allocated_for_a_config_of_the_largest_size():
    module = build_module({**LLADA_8B, "embedding_size": 2**40, "vocab_size": 2**40})
    assert module.get_input_embeddings().weight.device == torch.device("meta")


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (LLADA_8B, "clip_qkv", 0.01),
        (LLADA_8B, "rope_scaling", {"type": "linear"}),
        (LLADA_8B, "multi_query_attention", True),
        (LLADA_8B, "layer_norm_with_affine", False),
        (DREAM_7B, "hidden_act", "gelu"),
        (DREAM_7B, "rope_scaling", {"type": "yarn"}),
        (DREAM_7B, "rope_parameters", {"rope_type": "linear", "factor": 8.0}),
        (DREAM_7B, "use_sliding_window", True),
        (DREAM_7B, "layer_types", ["sliding_attention"] * 28),
        (DREAM_7B, "head_dim", 64),
        (DREAM_7B, "attention_bias", False),
        (ILLADA_8B, "hidden_act", "gelu"),
        (ILLADA_8B, "attention_bias", True),
        (ILLADA_8B, "rope_scaling", {"type": "yarn"}),
    ],
)
def test_a_config_of_another_network_is_refused(config, field, value):
    row, class_name = find_architecture(config, [A_KEY["illada"]] if config is ILLADA_8B else None)
    with pytest.raises(fs.UserError, match=rf"has {field} .* \(expected .*\): this \w+ has another structure"):
        build_config(row, class_name, {**config, field: value})
    assert build_config(row, class_name, {**config, field: None})


def test_settings_that_a_dream_config_repeats_are_accepted():
    settings = {"head_dim": 128, "layer_types": ["full_attention"] * 28, "hidden_act": "silu", "attention_dropout": 0.0}
    assert build_module({**DREAM_7B, **settings}).config.num_hidden_layers == 28
