"""Write a module as a checkpoint folder in the format of a diffusion model or of transformers.

    write_checkpoint("twin", llama_module, "llada", tokenizer=tokenizer, extra_config={"mask_token_id": 260})

`load` opens what is written here: config.json, safetensors in one file or in shards with an index, and the tokenizer.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn

from floatscope.capture.block_causal import config_block_size
from floatscope.errors import UserError, unknown_choice
from floatscope.models.checkpoint import INDEX_FILE
from floatscope.models.conversions import (
    BD3LM_NOISE_RANGE,
    QKV_KEY,
    QKV_PARTS,
    dit_to_bd3lm_config,
    dit_to_mdlm_config,
    dit_to_mdlm_key,
    glm4_moe_to_llada2_config,
    glm4_moe_to_llada2_key,
    llama_to_llada_config,
    llama_to_llada_key,
    qwen3_moe_to_llada_moe_config,
)
from floatscope.models.prepared_checkpoint import unstack_experts

LLADA_HEADER = {  # real configs name their own code, which is never run
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig", "AutoModel": "modeling_llada.LLaDAModelLM"},
}
DREAM_HEADER = {
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "auto_map": {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"},
}
HEADERS = {  # a file format → its architecture and its model_type
    "llada2": ("LLaDA2MoeModelLM", "llada2_moe"),
    "llada-moe": ("LLaDAMoEModelLM", "llada"),
    "sdar": ("SDARForCausalLM", "sdar"),
    "sdar-moe": ("SDARMoeForCausalLM", "sdar_moe"),
    "fast-dllm-v2": ("Fast_dLLM_QwenForCausalLM", "Fast_dLLM_Qwen"),
    "a2d": ("A2DQwen3LMHeadModel", "a2d-qwen3"),
    "mdlm": ("MDLM", "mdlm"),
    "bd3lm": ("BD3LM", "bd3lm"),
}
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class FileFormat:
    """How a transformers module is written: its config, its tensors and the files of its tokenizer."""

    transformers_class: str  # the class it is written from; "": any
    convert_config: Callable[[Any], dict[str, Any]]
    convert_tensors: Callable[[Tensors], Tensors]
    write_tokenizer: Callable[[Any, Path], None]


def write_checkpoint(
    folder: str | Path,
    module: nn.Module,
    file_format: str = "native",
    *,
    tokenizer: Any = None,
    extra_config: Mapping[str, int | str] | None = None,
    shards: int = 1,
) -> Path:
    """Write a transformers module as a checkpoint folder.

    Args:
        folder: where to write; created if it does not exist.
        module: a transformers module of the class that the format is written from, such as a Llama for "llada".
        file_format: a key of `FILE_FORMATS`: the format of a diffusion model, or "native" for that of transformers.
        tokenizer: a transformers tokenizer to write beside it.
        extra_config: settings for config.json that the module's config does not have, such as `mask_token_id`.
        shards: the number of weight files; fewer if no limit on their size gives that number.

    Returns:
        The folder.

    Example:
        fs.write_checkpoint("copy", fs.load("twin:arm").module)
    """
    tensors, folder = checkpoint_tensors(module, file_format, shards), Path(folder)
    row = FILE_FORMATS[file_format]
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder, tensors, shards)
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    architectures = {"architectures": [type(module).__name__]}
    config = {**architectures, **row.convert_config(module.config), "torch_dtype": dtype, **(extra_config or {})}
    _write_json(folder / "config.json", config)
    if tokenizer is not None:
        row.write_tokenizer(tokenizer, folder)
    return folder


def checkpoint_tensors(module: nn.Module, file_format: str, shards: int = 1) -> dict[str, Tensor]:
    """Return the tensors that are written, by the names of the format; raise if the module cannot be written."""
    if file_format not in FILE_FORMATS:
        raise unknown_choice("file format", file_format, FILE_FORMATS)
    row = FILE_FORMATS[file_format]
    if row.transformers_class and type(module).__name__ != row.transformers_class:
        raise UserError(
            f"the file format '{file_format}' needs a {row.transformers_class}, got {type(module).__name__}"
        )
    tied = getattr(module, "all_tied_weights_keys", {})
    stored = {k: t.detach().cpu() for k, t in module.state_dict().items() if k not in tied}
    tensors = {k: t.contiguous() for k, t in row.convert_tensors(stored).items()}
    if not 1 <= shards <= len(tensors):
        raise UserError(f"{shards} shards for {len(tensors)} tensors; give 1 to {len(tensors)}")
    return tensors


def _write_weights(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    split = _split_into_shards(tensors, shards)
    for file, names in split.filename_to_tensors.items():
        # Renamed into place: a model that is open from an older file of this name keeps that file.
        save_file({name: tensors[name] for name in names}, folder / f"{file}.new", {"format": "pt"})
        os.replace(folder / f"{file}.new", folder / file)
    if split.is_sharded:
        _write_json(folder / INDEX_FILE, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


def _split_into_shards(tensors: dict[str, Tensor], shards: int) -> StateDictSplit:
    """Split the tensors in their order; the limit of a shard is the smallest that needs no more than `shards`."""
    limits = range(sum(tensor.nbytes for tensor in tensors.values()) + 1)
    split = partial(split_torch_state_dict_into_shards, tensors, filename_pattern="model{suffix}.safetensors")
    limit = bisect_left(limits, True, key=lambda size: len(split(max_shard_size=size).filename_to_tensors) <= shards)
    return split(max_shard_size=limits[limit])


def _write_native_tokenizer(tokenizer: Any, folder: Path) -> None:
    tokenizer.save_pretrained(str(folder))


def _write_dream_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write vocab.json and merges.txt of a byte-level BPE, special tokens apart, and Dream's own class."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["id"]: token for token in backend["added_tokens"]}
    vocabulary = {token: i for token, i in backend["model"]["vocab"].items() if i not in added}
    _write_json(folder / "vocab.json", vocabulary)
    merges = (" ".join(pair) for pair in backend["model"]["merges"])
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    _write_json(folder / "added_tokens.json", {token["content"]: i for i, token in added.items()})
    special = {f"{role}_token": getattr(tokenizer, f"{role}_token") for role in ("bos", "eos", "pad", "mask")}
    _write_json(folder / "special_tokens_map.json", {k: v for k, v in special.items() if v is not None})
    config = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": {str(i): {k: v for k, v in token.items() if k != "id"} for i, token in added.items()},
        "chat_template": tokenizer.chat_template,
        "errors": "replace",
        **special,
    }
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON as transformers does."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def _native_config(config: Any) -> dict[str, Any]:
    """Return the config as transformers writes it, without what `write_checkpoint` adds itself."""
    return {k: v for k, v in config.to_dict().items() if k not in ("architectures", "dtype")}


def _llada_config(config: Any) -> dict[str, Any]:
    return {**llama_to_llada_config(config), **LLADA_HEADER}


def _dream_config(config: Any) -> dict[str, Any]:
    """Return Qwen2's config with the base of the rotation where Dream's config has it."""
    native = _native_config(config)
    theta = native.pop("rope_parameters")["rope_theta"]
    return {**native, "rope_theta": theta, **DREAM_HEADER}


def _block_config(file_format: str) -> Callable[[Any], dict[str, Any]]:
    """Return the conversion for a model that has the settings of its transformers class."""

    def convert(config: Any) -> dict[str, Any]:
        native = _native_config(config)
        theta = native.pop("rope_parameters")["rope_theta"]
        if "num_local_experts" in native:  # a name of transformers 5 alone
            native["num_experts"] = native.pop("num_local_experts")
        return {**native, "rope_theta": theta, **_header(file_format)}

    return convert


def _header(file_format: str, auto_class: str = "AutoModelForCausalLM") -> dict[str, Any]:
    architecture, model_type = HEADERS[file_format]
    code = {auto_class: f"modeling_{model_type}.{architecture}"}  # named as in real configs, and never run
    return {"architectures": [architecture], "model_type": model_type, "auto_map": code}


def _llada2_config(config: Any) -> dict[str, Any]:
    return {**glm4_moe_to_llada2_config(config), **_header("llada2")}


def _llada_moe_config(config: Any) -> dict[str, Any]:
    return {**qwen3_moe_to_llada_moe_config(config), **_header("llada-moe")}


def _mdlm_config(config: Any) -> dict[str, Any]:
    return {**dit_to_mdlm_config(config), **_header("mdlm", "AutoModelForMaskedLM")}


def _bd3lm_config(config: Any) -> dict[str, Any]:
    size = config_block_size(config)
    blocks = {} if size is None else {"block_size": size}
    return {**dit_to_bd3lm_config(config), **blocks, **_header("bd3lm", "AutoModelForMaskedLM")}


def _rename_to_mdlm(tensors: Tensors) -> Tensors:
    return {dit_to_mdlm_key(key): tensor for key, tensor in tensors.items()}


def _convert_to_bd3lm(tensors: Tensors) -> Tensors:
    return {**_rename_to_mdlm(tensors), **{key: torch.tensor(value) for key, value in BD3LM_NOISE_RANGE.items()}}


def _rename_to_llada(tensors: Tensors) -> Tensors:
    return {llama_to_llada_key(key): tensor for key, tensor in tensors.items()}


def _convert_to_llada2(tensors: Tensors) -> Tensors:
    """Rename the tensors, one for each expert, and join the projections of queries, keys and values."""
    theirs = {glm4_moe_to_llada2_key(key): tensor for key, tensor in unstack_experts(tensors).items()}
    for layer in [key.removesuffix(QKV_PARTS[0]) for key in theirs if key.endswith(QKV_PARTS[0])]:
        theirs[layer + QKV_KEY] = torch.cat([theirs.pop(layer + part) for part in QKV_PARTS])
    return theirs


FILE_FORMATS = {
    "llada": FileFormat("LlamaForCausalLM", _llada_config, _rename_to_llada, _write_native_tokenizer),
    "dream": FileFormat("Qwen2ForCausalLM", _dream_config, dict, _write_dream_tokenizer),
    "llada2": FileFormat("Glm4MoeForCausalLM", _llada2_config, _convert_to_llada2, _write_native_tokenizer),
    "llada-moe": FileFormat("Qwen3MoeForCausalLM", _llada_moe_config, unstack_experts, _write_native_tokenizer),
    "sdar": FileFormat("Qwen3ForCausalLM", _block_config("sdar"), dict, _write_native_tokenizer),
    "sdar-moe": FileFormat("Qwen3MoeForCausalLM", _block_config("sdar-moe"), unstack_experts, _write_native_tokenizer),
    "fast-dllm-v2": FileFormat("Qwen2ForCausalLM", _block_config("fast-dllm-v2"), dict, _write_native_tokenizer),
    "a2d": FileFormat("Qwen3ForCausalLM", _block_config("a2d"), dict, _write_native_tokenizer),
    "mdlm": FileFormat("DiTForMaskedLM", _mdlm_config, _rename_to_mdlm, _write_native_tokenizer),
    "bd3lm": FileFormat("DiTForMaskedLM", _bd3lm_config, _convert_to_bd3lm, _write_native_tokenizer),
    "native": FileFormat("", _native_config, dict, _write_native_tokenizer),
}
