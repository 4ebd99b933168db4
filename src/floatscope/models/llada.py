"""LLaDA's checkpoint layout. With its keys renamed LLaDA *is* a Llama called without the causal mask.

    model = open_llada(folder)

`write_random_llada` writes a small checkpoint with random weights in the same layout: something to look through before
trained weights are at hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from floatscope.errors import UserError
from floatscope.models.model import Model, ModelSpec

LAYER_KEYS = {
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
MODEL_KEYS = {
    "model.transformer.wte.weight": "model.embed_tokens.weight",
    "model.transformer.ln_f.weight": "model.norm.weight",
    "model.transformer.ff_out.weight": "lm_head.weight",
}
TINY = {"d_model": 64, "n_layers": 6, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 192, "embedding_size": 512}
FIXED = {"architectures": ["LLaDAModelLM"], "model_type": "llada", "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
NEEDED = {*TINY, "rms_norm_eps", "rope_theta", "mask_token_id", "eos_token_id"}
SPREAD = 0.3  # of the random weights: at a real initialiser's 0.02 so small a model attends to everything alike


def llama_key(key: str) -> str | None:
    """`model.transformer.blocks.3.attn_out.weight` → `model.layers.3.self_attn.o_proj.weight`; else None."""
    if key in MODEL_KEYS:
        return MODEL_KEYS[key]
    match = re.fullmatch(r"model\.transformer\.blocks\.(\d+)\.(\w+)\.weight", key)
    if match is None or match[2] not in LAYER_KEYS:
        return None
    return f"model.layers.{match[1]}.{LAYER_KEYS[match[2]]}.weight"


def open_llada(folder: str | Path) -> Model:
    """Open a LLaDA folder (config.json, model.safetensors) as a native Llama. No tensor may be missing or unknown."""
    folder = Path(folder)
    config = _config(folder)
    if config.get("architectures") != ["LLaDAModelLM"]:
        raise UserError(f"{folder} is no LLaDA checkpoint: its architectures are {config.get('architectures')}")
    if lacking := sorted(NEEDED - config.keys()):
        raise UserError(f"{folder / 'config.json'} lacks {', '.join(lacking)}: not a LLaDA config")
    module = _llama(config)
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise UserError(f"{folder} has no model.safetensors; give a checkpoint folder with its weights in one file")
    try:
        stored = load_file(weights)
    except SafetensorError as error:
        raise UserError(f"{weights} is damaged ({error}); fetch it again") from error
    tensors, unknown = {}, []
    for key, tensor in stored.items():
        renamed = llama_key(key)
        if renamed is None:
            unknown.append(key)
        else:
            tensors[renamed] = tensor
    wanted = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    missing = sorted(wanted.keys() - tensors.keys())
    unknown += sorted(tensors.keys() - wanted.keys())
    if missing or unknown:
        raise UserError(f"{folder}: missing tensors {missing or 'none'}, unexpected tensors {unknown or 'none'}")
    for key, tensor in tensors.items():
        if tuple(tensor.shape) != wanted[key]:
            raise UserError(f"{folder}: {key} is {tuple(tensor.shape)}, and its config.json asks for {wanted[key]}")
    module.load_state_dict(tensors)
    spec = ModelSpec(folder.name, "mdm", config["mask_token_id"], eos_id=config["eos_token_id"])
    return Model(module.eval(), spec)


def write_random_llada(folder: str | Path, seed: int = 0, **shape: int) -> Path:
    """A checkpoint with random weights in LLaDA's layout, `TINY` unless `shape` says otherwise."""
    folder = Path(folder)
    config: dict[str, Any] = {**FIXED, **TINY, "initializer_range": SPREAD, **shape}
    config |= {"mask_token_id": config["embedding_size"] - 1, "eos_token_id": config["embedding_size"] - 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _llama(config)
    names: dict[str, str] = {v: k for k, v in MODEL_KEYS.items()}
    for i in range(config["n_layers"]):
        names |= {
            f"model.layers.{i}.{v}.weight": f"model.transformer.blocks.{i}.{k}.weight" for k, v in LAYER_KEYS.items()
        }
    tensors: dict[str, Tensor] = {names[k]: v.contiguous() for k, v in module.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} has no config.json; give a checkpoint folder")
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is damaged ({error}); fetch it again") from error
    return config


def _llama(config: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config["embedding_size"],
            hidden_size=config["d_model"],
            intermediate_size=config["mlp_hidden_size"],
            num_hidden_layers=config["n_layers"],
            num_attention_heads=config["n_heads"],
            num_key_value_heads=config["n_kv_heads"],
            max_position_embeddings=config.get("max_sequence_length", 4096),
            rms_norm_eps=config["rms_norm_eps"],
            rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
            initializer_range=config.get("initializer_range", 0.02),
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
