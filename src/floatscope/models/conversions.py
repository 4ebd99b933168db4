"""LLaDA's, iLLaDA's and Dream's own names for settings and tensors, translated to those of Llama and Qwen2.

llada_to_llama_key("model.transformer.wte.weight")          # "model.embed_tokens.weight"
llada_to_llama_config({"d_model": 4096, …})["hidden_size"]  # 4096
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


def _check_llama_config(config: Config, build: Config, difference: str) -> dict[str, Any]:
    """Check a config with the names of Llama or Qwen2: the same full attention in every layer, the default rotation."""
    sizes, rope = _require(config, {n: n for n in LLAMA_SIZES}), config.get("rope_parameters")
    derived = {
        "head_dim": _quotient(sizes["hidden_size"], sizes["num_attention_heads"]),
        "layer_types": ["full_attention"] * len(_as_list(config.get("layer_types"))),
        "rope_parameters": {"rope_type": "default", "rope_theta": _rope_theta(config)},
    }
    _check_build(config, {**build, **derived}, difference)
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
