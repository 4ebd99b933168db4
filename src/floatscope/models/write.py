"""A module → a checkpoint folder in the layout a real family has.

    write_checkpoint("twin", llama_module, "llada", tokenizer=tokenizer, ids={"mask_token_id": 260})

What is written here is what `load` opens: config.json, safetensors in one file or in shards with an index, tokenizer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from floatscope.errors import UserError, unknown_choice
from floatscope.models.families import llada_json, llada_key
from floatscope.models.files import INDEX, WHOLE

DREAM_JSON = {  # a Dream names its own code, which is never run
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "auto_map": {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"},
}
LLADA_JSON = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig", "AutoModel": "modeling_llada.LLaDAModelLM"},
}


@dataclass(frozen=True)
class Layout:
    """How a family writes what transformers calls by its own names."""

    of: str  # the transformers class
    config: Callable[[Any], dict[str, Any]]
    key: Callable[[str], str]
    tokenizer: Callable[[Any, Path], None]


def write_checkpoint(
    folder: str | Path,
    module: nn.Module,
    layout: str = "native",
    *,
    tokenizer: Any = None,
    ids: Mapping[str, int | str] | None = None,
    shards: int = 1,
) -> Path:
    """Write `module` in a layout of `LAYOUTS`; `ids` is what its config names beside the network (mask_token_id, …)."""
    tensors, folder = tensors_of(module, layout, shards), Path(folder)
    how = LAYOUTS[layout]
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder, tensors, shards)
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    named = {"architectures": [type(module).__name__]}
    config = {**named, **how.config(module.config), "torch_dtype": dtype, **(ids or {})}
    _write_json(folder / "config.json", config)
    if tokenizer is not None:
        how.tokenizer(tokenizer, folder)
    return folder


def tensors_of(module: nn.Module, layout: str, shards: int = 1) -> dict[str, Tensor]:
    """What is written of `module`, by the layout's keys, once it is clear that it can be."""
    if layout not in LAYOUTS:
        raise unknown_choice("layout", layout, LAYOUTS)
    how = LAYOUTS[layout]
    if how.of and type(module).__name__ != how.of:
        raise UserError(f"the layout '{layout}' is written from a {how.of}, got {type(module).__name__}")
    tied = getattr(module, "all_tied_weights_keys", {})
    tensors = {how.key(k): t.detach().cpu().contiguous() for k, t in module.state_dict().items() if k not in tied}
    if not 1 <= shards <= len(tensors):
        raise UserError(f"{shards} shards for {len(tensors)} tensors; give 1 to {len(tensors)}")
    return tensors


def _write_weights(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    names = list(tensors)
    parts = [names[len(names) * i // shards : len(names) * (i + 1) // shards] for i in range(shards)]
    files = [WHOLE] if shards == 1 else [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    for file, part in zip(files, parts, strict=True):
        # Renamed into place: a model that was opened from the file before keeps the old one under its feet.
        save_file({name: tensors[name] for name in part}, folder / f"{file}.new", {"format": "pt"})
        os.replace(folder / f"{file}.new", folder / file)
    if shards > 1:
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        where = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": where})


def _native_tokenizer(tokenizer: Any, folder: Path) -> None:
    tokenizer.save_pretrained(str(folder))


def _dream_tokenizer(tokenizer: Any, folder: Path) -> None:
    """As Dream has it: vocab.json and merges.txt of a byte-level BPE, special tokens aside, a class of its own."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["id"]: token for token in backend["added_tokens"]}
    plain = {token: i for token, i in backend["model"]["vocab"].items() if i not in added}
    _write_json(folder / "vocab.json", plain)
    merges = (" ".join(pair) for pair in backend["model"]["merges"])
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    _write_json(folder / "added_tokens.json", {token["content"]: i for i, token in added.items()})
    special = {f"{kind}_token": getattr(tokenizer, f"{kind}_token") for kind in ("bos", "eos", "pad", "mask")}
    _write_json(folder / "special_tokens_map.json", {k: v for k, v in special.items() if v is not None})
    about = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": {str(i): {k: v for k, v in token.items() if k != "id"} for i, token in added.items()},
        "chat_template": tokenizer.chat_template,
        "errors": "replace",
        **special,
    }
    _write_json(folder / "tokenizer_config.json", about)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def _own(config: Any) -> dict[str, Any]:
    """What transformers would write, but for what `write_checkpoint` says itself."""
    return {k: v for k, v in config.to_dict().items() if k not in ("architectures", "dtype")}


LAYOUTS = {
    "llada": Layout("LlamaForCausalLM", lambda c: {**llada_json(c), **LLADA_JSON}, llada_key, _native_tokenizer),
    "dream": Layout("Qwen2ForCausalLM", lambda c: {**_dream(c), **DREAM_JSON}, str, _dream_tokenizer),
    "native": Layout("", _own, str, _native_tokenizer),
}


def _dream(config: Any) -> dict[str, Any]:
    """Qwen2's words, with the rotation's base where Dream's config has it."""
    theirs = _own(config)
    theta = theirs.pop("rope_parameters")["rope_theta"]
    return {**theirs, "rope_theta": theta}
