"""A checkpoint folder, prepared for loading: everything except the weights, checked.

    prepared = prepare_checkpoint("LLaDA-8B-Base", Path("LLaDA-8B-Base"))
    prepared.spec.mask_id, type(prepared.empty_module).__name__      # 126336, "LlamaForCausalLM"

The module is on the meta device: it has names and shapes, and takes no memory.
"""

from __future__ import annotations

import importlib
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from floatscope.errors import LIBRARY_ERRORS, UserError, join_names, name_in_errors, printable, summarize_error
from floatscope.files.digests import sha256_json
from floatscope.models.architectures import NATIVE_CLASSES, Architecture, find_architecture
from floatscope.models.checkpoint import SUPPORTED_DTYPES, TORCH_DTYPES, Checkpoint, read_checkpoint, read_config
from floatscope.models.names import unknown_architecture
from floatscope.models.silence import silence_libraries
from floatscope.models.spec import ModelSpec, infer_spec
from floatscope.models.tokenizer import ModelTokenizer
from floatscope.models.tokenizer_files import open_tokenizer
from floatscope.models.untrusted import check_untrusted, is_shipped

IGNORED_SETTINGS = (  # settings that do not describe the network: kernels from the hub, code, labels, …
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "_attn_implementation_autoset",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
    "auto_map",
    "chunk_size_feed_forward",
    "custom_generate",
    "distributed_config",
    "dtype",
    "fusion_config",
    "id2label",
    "kernel_config",
    "label2id",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "torch_dtype",
    "transformers_weights",
    "use_kernels",
    "written_by",
)
SIZES = (  # whole numbers of at least 1
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
EXPERT_TENSORS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # of all experts → of one
SCALES = ("rope_theta", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")  # numbers above 0


@dataclass(frozen=True)
class PreparedCheckpoint:
    """What is known about a checkpoint before its weights are read."""

    checkpoint: Checkpoint
    architecture: Architecture
    empty_module: Any  # the transformers module on the meta device
    tokenizer: ModelTokenizer | None
    spec: ModelSpec


def prepare_checkpoint(name: str, path: Path, *, weights: bool = True, **overrides: Any) -> PreparedCheckpoint:
    """Find the architecture, config, tokenizer and spec of a checkpoint folder, and check them against each other.

    Args:
        name: the name that the spec shows.
        path: the folder.
        weights: whether the weight files are there, so that their headers can be checked too.
        **overrides: `mask_id`, `shift` and `block_size`, as in `load`.
    """
    checkpoint = read_checkpoint(path) if weights else Checkpoint(path, read_config(path), (), {})
    with name_in_errors(path):
        match = find_architecture(checkpoint.config, checkpoint.tensors if weights else None)
        if match is None:
            raise unknown_architecture(checkpoint.config, checkpoint.tensors if weights else {})
        architecture, class_name = match
        checkpoint = checkpoint.split(lambda key: architecture.split_tensor(key, checkpoint.config))
        _check_config_limits(path, architecture, class_name, checkpoint.config)
        config = build_config(architecture, class_name, checkpoint.config)
        tokenizer = open_tokenizer(path, has_separator=architecture.has_separator)
        empty_module = build_empty_module(class_name, config)
        if weights:
            _check_tensors(checkpoint, architecture, empty_module)
        spec = infer_spec(name, architecture, checkpoint.config, empty_module, tokenizer, **overrides)
    return PreparedCheckpoint(checkpoint, architecture, empty_module, tokenizer, spec)


def _check_config_limits(path: Path, architecture: Architecture, class_name: str, config: dict[str, Any]) -> None:
    """Refuse a config that describes a network whose structure alone takes too much time or memory to build."""
    if is_shipped(path):
        return
    find_class(class_name)  # imported here once, and not in every child

    def build() -> None:
        build_empty_module(class_name, build_config(architecture, class_name, config))

    digest = sha256_json({"architecture": architecture.name, "class": class_name, "config": config})
    check_untrusted(path / "config.json", build, digest)


def build_config(architecture: Architecture, class_name: str, config: dict[str, Any]) -> Any:
    """Build the config of a transformers class; only settings of the network are taken from config.json."""
    from huggingface_hub.errors import StrictDataclassError

    settings = architecture.convert_config(config) if architecture.convert_config else _network_settings(config)
    settings.pop("model_type", None)  # the class has its own
    try:
        with silence_libraries():
            built = find_class(class_name).config_class.from_dict(settings)
    except (StrictDataclassError, *LIBRARY_ERRORS) as error:
        raise UserError(f"its config.json does not describe a {class_name} ({summarize_error(error)})") from error
    for part in layer_configs(built):
        _check_config(part)
    return built


def layer_configs(config: Any) -> list[Any]:
    """The config of the network that reads text; that of each layer, if its layers have different sizes."""
    text_config = config.get_text_config()
    is_heterogeneous = getattr(text_config, "is_heterogeneous", False)
    return text_config.per_layer_config[:] if is_heterogeneous else [text_config]


def find_class(name: str) -> Any:
    """Return the class of transformers, or of floatscope, with this name."""
    return getattr(importlib.import_module(NATIVE_CLASSES.get(name, "transformers")), name)


def _network_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Drop ignored settings, and decode infinite ones, at every depth."""
    return {k: _decode_setting(v) for k, v in config.items() if k not in IGNORED_SETTINGS}


def _decode_setting(value: Any) -> Any:
    """JSON has no infinity: transformers writes it as an object (Mamba2's `time_step_limit`)."""
    if isinstance(value, list):
        return [_decode_setting(item) for item in value]
    if not isinstance(value, dict):
        return value
    is_infinite = value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity")
    return float(value["__float__"]) if is_infinite else _network_settings(value)


def _check_config(config: Any) -> None:
    """Refuse values that transformers accepts, and then crashes on or computes nonsense with."""
    for name in SIZES:
        size = getattr(config, name, None)
        is_setting = not isinstance(getattr(type(config), name, None), property)  # XLNet answers -1: no limit
        if isinstance(size, int) and size < 1 and is_setting:
            raise UserError(f"its config has {name} {size}; expected at least 1")
    rope = getattr(config, "rope_parameters", None)
    scales = [(name, getattr(config, name, None)) for name in SCALES] + list(_rope_scales(rope))
    for name, scale in scales:
        if scale is not None and not (type(scale) in (int, float) and math.isfinite(scale) and scale > 0):
            raise UserError(f"its config has {name} {printable(repr(scale))}; expected a number above 0")
    pad, rows = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    if isinstance(pad, int) and isinstance(rows, int) and pad >= rows:
        raise UserError(f"its config has pad_token_id {pad}; expected a token id, 0 … {rows - 1}")
    kind = getattr(config, "position_embedding_type", None)
    if kind not in (None, "absolute"):
        raise UserError(f"its config has position_embedding_type {printable(kind)}, which transformers 5 has dropped")


def _rope_scales(rope: Any) -> Iterator[tuple[str, Any]]:
    """Yield the numbers of a rotation that must be above 0; a config may have one rotation per kind of layer."""
    for name, value in rope.items() if isinstance(rope, dict) else ():
        if isinstance(value, dict):
            yield from _rope_scales(value)
        elif name == "rope_theta" or name.endswith("factor"):
            yield from ((name, number) for number in (value if isinstance(value, list) else [value]))


def build_empty_module(class_name: str, config: Any) -> nn.Module:
    """Build a module on the meta device: names and shapes, no memory."""
    try:
        with silence_libraries(), torch.device("meta"):
            module: nn.Module = find_class(class_name)(config)
    except LIBRARY_ERRORS as error:
        raise UserError(f"its config.json does not describe a {class_name} ({summarize_error(error)})") from error
    return module


def _check_tensors(checkpoint: Checkpoint, architecture: Architecture, empty_module: nn.Module) -> None:
    """Check that no tensor is missing or unexpected and that shapes fit, before any weight is read.

    A transformers class may rename and merge tensors while it loads. So a mismatch is refused here only if we know the
    names ourselves, or if more weights are needed than are stored; loading finds the rest.
    """
    tied = set(getattr(empty_module, "all_tied_weights_keys", {}))
    needed: dict[str, Tensor] = empty_module.state_dict()
    if architecture.has_experts:
        experts = max((t.shape[0] for k, t in needed.items() if _is_expert_tensor(k)), default=0)
        if experts > len(checkpoint.tensors):
            raise UserError(f"its config.json has {experts} experts, but there are {len(checkpoint.tensors)} tensors")
        needed = unstack_experts(needed)
    names = module_keys(checkpoint, architecture, empty_module)
    stored = {name: checkpoint.tensors[key] for key, name in names.items()}
    counts = Counter(names.values())
    check_keys((), {key for key, name in names.items() if key == name and counts[name] > 1})
    missing, unexpected = needed.keys() - stored.keys() - tied, stored.keys() - needed.keys()
    needed_size = sum(t.numel() for k, t in needed.items() if k not in tied)
    if architecture.convert_config or needed_size > sum(s.size for s in stored.values()):
        check_keys(missing, unexpected)
    for key, tensor in stored.items():
        parameter = needed.get(key)
        if parameter is not None and tensor.shape != tuple(parameter.shape):
            raise UserError(f"its tensor {key} is {tensor.shape}, but its config.json needs {tuple(parameter.shape)}")
        is_weight = key.endswith(".weight") if parameter is None else parameter.is_floating_point()
        if is_weight and tensor.dtype not in TORCH_DTYPES:
            raise UserError(f"its tensor {printable(key)} is stored as {tensor.dtype}; {SUPPORTED_DTYPES}")


def unstack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with the experts of a mixture one by one, as files have them; the gates come first."""
    separate: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if not _is_expert_tensor(key):
            separate[key] = tensor
            continue
        prefix, _, name = key.rpartition(".")
        for expert, weights in enumerate(tensor.unbind(0)):
            parts = weights.chunk(len(EXPERT_TENSORS[name]))
            for part, values in zip(EXPERT_TENSORS[name], parts, strict=True):
                separate[f"{prefix}.{expert}.{part}.weight"] = values
    return separate


def _is_expert_tensor(key: str) -> bool:
    return key.rpartition(".")[0].endswith(".experts") and key.rpartition(".")[2] in EXPERT_TENSORS


def module_keys(checkpoint: Checkpoint, architecture: Architecture, empty_module: nn.Module) -> dict[str, str]:
    """Map the name of every stored tensor that is read to its name in the module."""
    needed = empty_module.state_dict().keys()
    prefix = getattr(empty_module, "base_model_prefix", "")  # GPT-2's files leave it out
    renamed = {
        k: architecture.rename_key(k) for k in checkpoint.tensors if not re.fullmatch(architecture.ignored_keys, k)
    }
    return {k: f"{prefix}.{n}" if n not in needed and f"{prefix}.{n}" in needed else n for k, n in renamed.items()}


def check_keys(missing: Collection[str], unexpected: Collection[str]) -> None:
    """Raise a `UserError` if there are missing or unexpected tensors."""
    if missing or unexpected:
        raise UserError(f"missing tensors: {join_names(missing)}; unexpected tensors: {join_names(unexpected)}")
