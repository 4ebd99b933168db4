"""The names that diffusion models have for settings and tensors, translated to those of transformers classes.

llada_to_llama_key("model.transformer.wte.weight")          # "model.embed_tokens.weight"
llada_to_llama_config({"d_model": 4096, …})["hidden_size"]  # 4096

A config whose settings describe another network than the transformers class is refused with these settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from floatscope.errors import UserError, printable

Config = Mapping[str, Any]

LLADA_LAYER_KEYS = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
LLADA_KEYS = {
    "model.transformer.wte.weight": "model.embed_tokens.weight",
    "model.transformer.ln_f.weight": "model.norm.weight",
    "model.transformer.ff_out.weight": "lm_head.weight",  # the same leaf name as an MLP's, one level up
}
LLADA_SIZES = {  # LLaDA's name → Llama's
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "mlp_hidden_size": "intermediate_size",
    "embedding_size": "vocab_size",
    "max_sequence_length": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
}
LLAMA_SIZES = (  # the names of Llama and Qwen2
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
)
LLADA_BUILD = {  # with these settings a LLaDA is a Llama; a config with others describes another network
    "activation_type": "silu",
    "alibi": False,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "clip_qkv": None,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "multi_query_attention": None,
    "rope": True,
    "rope_scaling": None,
    "scale_logits": False,
}
LLAMA_BUILD = {  # the same for a config with Llama's names
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "use_sliding_window": False,
}
QWEN2_BUILD = {**LLAMA_BUILD, "attention_bias": True}  # always so, whether the config says it or not
LLADA2_LAYER_KEYS = {
    "attention.query.weight": "self_attn.q_proj.weight",  # the first of the QKV_PARTS
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.dense.weight": "self_attn.o_proj.weight",
    "attention.query_layernorm.weight": "self_attn.q_norm.weight",
    "attention.key_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias",
}
LLADA2_EMBEDDING = "model.word_embeddings.weight"
QKV_KEY = "attention.query_key_value.weight"
QKV_PARTS = ("attention.query.weight", "attention.key.weight", "attention.value.weight")
LLADA2_SIZES = {  # LLaDA2's name → Glm4Moe's; its `sliding_window` is missing here because its own code ignores it
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "moe_intermediate_size": "moe_intermediate_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "first_k_dense_replace": "first_k_dense_replace",
    "n_group": "n_group",
    "topk_group": "topk_group",
    "routed_scaling_factor": "routed_scaling_factor",
}
LLADA2_BUILD = {
    "hidden_act": "silu",
    "norm_head": False,
    "norm_topk_prob": True,
    "rope_scaling": None,
    "score_function": "sigmoid",
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "use_sliding_window": False,
}
LLADA_MOE_SIZES = {  # LLaDA-MoE's name → Qwen3Moe's
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "expert_intermediate_size": "moe_intermediate_size",
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
}
LLADA_MOE_BUILD = {
    "attention_bias": False,
    "clip_qkv": None,
    "hidden_act": "silu",
    "moe_router_enable_expert_bias": False,
    "moe_router_score_function": "softmax",
    "partial_rotary_factor": 1,
    "qk_layernorm": True,
    "rope_scaling": None,
    "routed_scaling_factor": 1,
    "shared_expert_intermediate_size": None,
}
QWEN3_MOE_SIZES = (
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)
DIT_SIZES = {  # MDLM's and BD3-LM's name → ours
    "vocab_size": "vocab_size",
    "hidden_dim": "hidden_size",
    "cond_dim": "conditioning_size",
    "n_blocks": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "model_length": "max_position_embeddings",
}
DIT_EMBEDDING = "backbone.vocab_embed.embedding"
BD3LM_BUILD = {"adaln": True, "causal": False, "cross_attn": True}
BD3LM_NOISE_RANGE = {"sampling_eps_min": 1e-3, "sampling_eps_max": 0.999}  # of training; files have it as tensors


def llada_to_llama_key(key: str) -> str:
    """Rename `model.transformer.blocks.3.attn_out.weight` to `model.layers.3.self_attn.o_proj.weight`, and so on."""
    match = re.fullmatch(r"model\.transformer\.blocks\.(\d+)\.(\w+)\.weight", key)
    if match and match[2] in LLADA_LAYER_KEYS:
        return f"model.layers.{match[1]}.{LLADA_LAYER_KEYS[match[2]]}.weight"
    return LLADA_KEYS.get(key, key)


def llama_to_llada_key(key: str) -> str:
    """The inverse of `llada_to_llama_key`."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", key)
    if match:
        return f"model.transformer.blocks.{match[1]}.{_invert(LLADA_LAYER_KEYS)[match[2]]}.weight"
    return _invert(LLADA_KEYS)[key]


def llada_to_llama_config(config: Config) -> dict[str, Any]:
    """Translate LLaDA's config.json to the arguments of a LlamaConfig."""
    _check_build(config, LLADA_BUILD, "this LLaDA has another structure than a Llama")
    config = {"max_sequence_length": 4096, **config}
    config["n_kv_heads"] = config.get("n_kv_heads") or config.get("n_heads")
    sizes = _require(config, LLADA_SIZES)
    rope = {"rope_type": "default", **_require(config, {"rope_theta": "rope_theta"})}
    return {
        **sizes,
        "rope_parameters": rope,
        "tie_word_embeddings": bool(config.get("weight_tying")),
        **_special_token_ids(config),
    }


def llama_to_llada_config(llama: Any) -> dict[str, Any]:
    """The inverse of `llada_to_llama_config`: LLaDA's config.json for a LlamaConfig."""
    sizes = {theirs: getattr(llama, ours) for theirs, ours in LLADA_SIZES.items()}
    rope = {"rope_theta": llama.rope_parameters["rope_theta"], "rope_full_precision": True}
    return {**LLADA_BUILD, **sizes, **rope, "vocab_size": llama.vocab_size, "weight_tying": llama.tie_word_embeddings}


def dream_to_qwen2_config(config: Config) -> dict[str, Any]:
    """Check that Dream's config describes a Qwen2, and drop what its own code adds."""
    return _check_llama_config(config, QWEN2_BUILD, "this Dream has another structure than a Qwen2")


def illada_to_llama_config(config: Config) -> dict[str, Any]:
    """Translate iLLaDA's config.json, with LLaDA's names or Llama's, to the arguments of a LlamaConfig."""
    if "d_model" in config:
        return llada_to_llama_config(config)
    tied = {"tie_word_embeddings": True, **config}
    return _check_llama_config(tied, LLAMA_BUILD, "this iLLaDA has another structure than a Llama")


def fast_dllm_to_qwen2_config(config: Config) -> dict[str, Any]:
    """Check that the config of a Fast-dLLM v2 describes a Qwen2, and drop what its own code adds."""
    return _check_llama_config(config, QWEN2_BUILD, "this Fast-dLLM has another structure than a Qwen2")


def sdar_to_qwen3_config(config: Config) -> dict[str, Any]:
    """Check that the config of an SDAR describes a Qwen3, and drop what its own code adds."""
    width = {"head_dim": config.get("head_dim") or 128}  # the default of its own code
    settings = _check_llama_config(config, {**LLAMA_BUILD, **width}, "this SDAR has another structure than a Qwen3")
    return {**settings, **width}


def sdar_moe_to_qwen3_moe_config(config: Config) -> dict[str, Any]:
    """Check that the config of an SDAR with experts describes a Qwen3Moe, and drop what its own code adds."""
    experts = {} if config.get("num_local_experts") is None else {"num_experts": config["num_local_experts"]}
    config = {"decoder_sparse_step": 1, "mlp_only_layers": [], **experts, **config}  # transformers 5 renames the number
    return {**sdar_to_qwen3_config(config), **_require(config, {n: n for n in QWEN3_MOE_SIZES})}


def llada_moe_to_qwen3_moe_config(config: Config) -> dict[str, Any]:
    """Translate the config of a LLaDA-MoE to the arguments of a Qwen3MoeConfig."""
    _check_build(config, LLADA_MOE_BUILD, "this LLaDA-MoE has another structure than a Qwen3Moe")
    config = {**config, "num_key_value_heads": config.get("num_key_value_heads") or config.get("num_attention_heads")}
    sizes = _require(config, {**LLADA_MOE_SIZES, "qk_layernorm": "use_qk_norm"})
    if not sizes.pop("use_qk_norm"):
        raise UserError("its config.json has no qk_layernorm, and a Qwen3Moe normalises queries and keys")
    frequencies = _as_list(config.get("moe_layer_freq")) or [1]
    is_dense = [not frequency for frequency in frequencies]
    return {
        **sizes,
        "head_dim": _quotient(sizes["hidden_size"], sizes["num_attention_heads"]),
        "intermediate_size": config.get("dense_intermediate_size") if any(is_dense) else 1,  # 1: no layer uses it
        "mlp_only_layers": [layer for layer, dense in enumerate(is_dense) if dense],
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,  # fixed in its own code, whatever the config says
        "rope_parameters": {"rope_type": "default", "rope_theta": _rope_theta(config)},
        "tie_word_embeddings": bool(config.get("tie_word_embeddings")),
        **_special_token_ids(config),
    }


def llada2_to_glm4_moe_config(config: Config) -> dict[str, Any]:
    """Translate the config of a LLaDA2 to the arguments of a Glm4MoeConfig."""
    width, rope = llada2_head_dim(config), {**_as_dict(config.get("rope_parameters")), **config}
    factor = rope.get("partial_rotary_factor") or 0.5  # the default of its own code
    is_number = type(width) is int and type(factor) in (int, float)
    rotary = {"rotary_dim": int(width * factor) if is_number else None, "rope_type": "default"}  # type: ignore[operator]
    _check_build(rope, {**LLADA2_BUILD, **rotary}, "this LLaDA2 has another structure than a Glm4Moe")
    sizes = _require(config, LLADA2_SIZES)
    if type(sizes["n_shared_experts"]) is not int or sizes["n_shared_experts"] < 1:
        given = printable(repr(sizes["n_shared_experts"]))
        raise UserError(f"its config.json has num_shared_experts {given}, and a Glm4Moe has at least 1")
    return {
        **sizes,
        "head_dim": width,
        "attention_bias": False,
        "norm_topk_prob": sizes["num_experts_per_tok"] != 1,  # its own code does not normalise a single expert's weight
        "num_mtp_layers": 0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _rope_theta(config),
            "partial_rotary_factor": factor,
        },
        "tie_word_embeddings": bool(config.get("tie_word_embeddings")),
        "use_qk_norm": True,
        **_special_token_ids(config),
    }


def llada2_head_dim(config: Config) -> int | None:
    """The width of a head of a LLaDA2."""
    return config.get("head_dim") or _quotient(config.get("hidden_size"), config.get("num_attention_heads"))


def llada2_to_glm4_moe_key(key: str) -> str:
    """Rename `model.layers.3.attention.dense.weight` to `model.layers.3.self_attn.o_proj.weight`, and so on."""
    match = re.fullmatch(r"(model\.layers\.\d+)\.(.+)", key)
    if match and match[2] in LLADA2_LAYER_KEYS:
        return f"{match[1]}.{LLADA2_LAYER_KEYS[match[2]]}"
    return "model.embed_tokens.weight" if key == LLADA2_EMBEDDING else key


def glm4_moe_to_llada2_config(glm: Any) -> dict[str, Any]:
    """The inverse of `llada2_to_glm4_moe_config`: LLaDA2's config.json for a Glm4MoeConfig."""
    sizes = {theirs: getattr(glm, ours) for theirs, ours in LLADA2_SIZES.items()}
    rope = {name: glm.rope_parameters[name] for name in ("rope_theta", "partial_rotary_factor")}
    own = {"head_dim": glm.head_dim, "sliding_window": 4096, "tie_word_embeddings": glm.tie_word_embeddings}
    return {**LLADA2_BUILD, **sizes, **rope, **own}


def glm4_moe_to_llada2_key(key: str) -> str:
    """The inverse of `llada2_to_glm4_moe_key`."""
    match = re.fullmatch(r"(model\.layers\.\d+)\.(.+)", key)
    names = _invert(LLADA2_LAYER_KEYS)
    if match and match[2] in names:
        return f"{match[1]}.{names[match[2]]}"
    return LLADA2_EMBEDDING if key == "model.embed_tokens.weight" else key


def qwen3_moe_to_llada_moe_config(qwen: Any) -> dict[str, Any]:
    """The inverse of `llada_moe_to_qwen3_moe_config`: LLaDA-MoE's config.json for a Qwen3MoeConfig."""
    sizes = {theirs: getattr(qwen, ours) for theirs, ours in LLADA_MOE_SIZES.items()}
    dense = set(qwen.mlp_only_layers)
    return {
        **LLADA_MOE_BUILD,
        **sizes,
        "rope_theta": qwen.rope_parameters["rope_theta"],
        "dense_intermediate_size": qwen.intermediate_size,
        "moe_layer_freq": [int(layer not in dense) for layer in range(qwen.num_hidden_layers)],
        "norm_topk_prob": None,
        "tie_word_embeddings": qwen.tie_word_embeddings,
    }


def split_llada2_qkv(key: str, config: Config) -> dict[str, int]:
    """The parts of a fused projection of queries, keys and values, and their rows; no parts for another tensor."""
    prefix, is_qkv = key.removesuffix(QKV_KEY), key.endswith(f".{QKV_KEY}")
    width, heads, kv_heads = (
        llada2_head_dim(config),
        config.get("num_attention_heads"),
        config.get("num_key_value_heads"),
    )
    if not is_qkv or not all(type(n) is int and n > 0 for n in (width, heads, kv_heads)):
        return {}
    counts = (heads * width, kv_heads * width, kv_heads * width)  # type: ignore[operator]
    return {f"{prefix}{part}": count for part, count in zip(QKV_PARTS, counts, strict=True)}


def mdlm_to_dit_config(config: Config) -> dict[str, Any]:
    """Translate the config of an MDLM to the arguments of a DiTConfig."""
    if config.get("time_conditioning"):
        raise UserError(
            "its config.json has time_conditioning true: its logits depend on the noise level of each step, and"
            " floatscope runs a model on tokens alone"
        )
    return {**_require(config, DIT_SIZES), **_special_token_ids(config)}


def bd3lm_to_dit_config(config: Config) -> dict[str, Any]:
    """Translate the config of a BD3-LM to the arguments of a DiTConfig; the spec takes its block size."""
    _check_build(config, BD3LM_BUILD, "this BD3-LM has another structure than those of its authors")
    return mdlm_to_dit_config(config)


def dit_to_mdlm_config(dit: Any) -> dict[str, Any]:
    """The inverse of `mdlm_to_dit_config`: MDLM's config.json for a DiTConfig."""
    sizes = {theirs: getattr(dit, ours) for theirs, ours in DIT_SIZES.items()}
    return {**sizes, "dropout": 0.1, "time_conditioning": False, "return_dict": False}


def dit_to_bd3lm_config(dit: Any) -> dict[str, Any]:
    """The inverse of `bd3lm_to_dit_config`, without the block size."""
    return {**dit_to_mdlm_config(dit), **BD3LM_BUILD, **BD3LM_NOISE_RANGE, "attn_backend": "flex", "var_min": True}


def mdlm_to_dit_key(key: str) -> str:
    """Rename the token embedding; all other tensors have the names of the authors."""
    return "backbone.vocab_embed.weight" if key == DIT_EMBEDDING else key


def dit_to_mdlm_key(key: str) -> str:
    """The inverse of `mdlm_to_dit_key`."""
    return DIT_EMBEDDING if key == "backbone.vocab_embed.weight" else key


def _check_llama_config(config: Config, build: Config, difference: str) -> dict[str, Any]:
    """Check a config with the names of Llama or Qwen2: the same full attention in every layer, the default rotation."""
    sizes, rope = _require(config, {n: n for n in LLAMA_SIZES}), config.get("rope_parameters")
    derived = {
        "head_dim": _quotient(sizes["hidden_size"], sizes["num_attention_heads"]),
        "layer_types": ["full_attention"] * len(_as_list(config.get("layer_types"))),
        "rope_parameters": {"rope_type": "default", "rope_theta": _rope_theta(config)},
    }
    _check_build(config, {**derived, **build}, difference)
    return {**sizes, "rope_parameters": rope or derived["rope_parameters"], **_special_token_ids(config)}


def _check_build(config: Config, build: Config, difference: str) -> None:
    """Compare a config with `build`, the required settings; a missing or null setting counts as equal."""
    differs = {k: v for k, v in build.items() if config.get(k) is not None and config[k] != v}
    if differs:
        settings = ", ".join(f"{k} {printable(repr(config[k]))} (expected {v!r})" for k, v in differs.items())
        raise UserError(f"its config.json has {settings}: {difference}")


def _rope_theta(config: Config) -> Any:
    """Return the base of the rotation, from the place of older configs or of transformers 5."""
    rope = config.get("rope_parameters")
    if "rope_theta" not in config and isinstance(rope, dict) and "rope_theta" in rope:
        return rope["rope_theta"]
    return _require(config, {"rope_theta": "rope_theta"})["rope_theta"]


def _quotient(width: Any, heads: Any) -> int | None:
    return width // heads if type(width) is int and type(heads) is int and heads > 0 else None


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _require(config: Config, names: Mapping[str, str]) -> dict[str, Any]:
    """Take the settings `names` (their name → ours) from a config that must have all of them."""
    if missing := sorted(names.keys() - config.keys()):
        raise UserError(f"its config.json has no {', '.join(missing)}")
    return {ours: config[theirs] for theirs, ours in names.items()}


def _special_token_ids(config: Config) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {n: config.get(n) for n in names}


def _invert(names: Mapping[str, str]) -> dict[str, str]:
    return {v: k for k, v in names.items()}
