"""What a checkpoint is and supports, without its weights.

describe("GSAI-ML/LLaDA-8B-Instruct").parameters      # fetches the config and the tokenizer, but no weights
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from floatscope.errors import explain_read_errors, name_in_errors, printable
from floatscope.models import gguf
from floatscope.models.adapter import adapt_spec, check_base, read_adapter
from floatscope.models.architectures import CAUSAL, Architecture
from floatscope.models.bases import is_base_name
from floatscope.models.names import display_name, find_checkpoint, find_weights, resolve_path, split_adapter
from floatscope.models.prepared_checkpoint import build_empty_module, layer_configs, prepare_checkpoint
from floatscope.models.spec import ModelSpec, infer_spec
from floatscope.models.tokenizer import ModelTokenizer
from floatscope.schema import Paradigm


@dataclass(frozen=True)
class Description:
    """The facts that `floatscope models NAME` prints."""

    spec: ModelSpec
    transformers_class: str
    parameters: int
    dtype: str | None
    layers: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    vocab_size: int | None
    tokens: dict[str, str | None]  # a role such as "mask" → the name of its token
    has_chat_template: bool
    samplers: tuple[str, ...]
    capture_obstacle: str | None  # why its attention cannot be captured; None: it can
    warnings: tuple[str, ...] = ()

    @property
    def as_json(self) -> dict[str, Any]:
        """The description as a JSON object."""
        return asdict(self)


def describe(
    name: str | Path,
    *,
    mask_id: int | None = None,
    shift: bool | None = None,
    block_size: int | None = None,
    revision: str | None = None,
) -> Description:
    """Describe a model by any name that `load` accepts; raise a `UserError` with the reason if it cannot be opened.

    The arguments are those of `load`.
    """
    overrides: dict[str, Any] = {"mask_id": mask_id, "shift": shift, "block_size": block_size}
    with explain_read_errors(name):
        base, adapter = split_adapter(name)
        if adapter is not None:
            return _describe_adapted(name, describe(base, revision=revision), find_weights(base, revision), adapter)
        path = resolve_path(name)
        if path.suffix == ".gguf":
            return _describe_gguf(display_name(name, path), path, overrides)
        return _describe_folder(name, overrides, revision)


def _describe_adapted(name: str | Path, base: Description, base_path: Path, folder: Path) -> Description:
    adapter = read_adapter(folder)
    check_base(adapter, base_path)
    with name_in_errors(folder):
        spec = adapt_spec(base.spec, adapter)
    note = f"its base is {adapter.base_name}; the adapter has {adapter.parameters:,} parameters"
    return replace(
        base,
        spec=replace(spec, name=str(name)) if is_base_name(name) else spec,
        tokens={**base.tokens, "mask": adapter.mask_token},
        samplers=_samplers(spec),
        warnings=(*base.warnings, note),
    )


def _describe_folder(name: str | Path, overrides: dict[str, Any], revision: str | None) -> Description:
    folder, commit = find_checkpoint(name, revision, weights=False)
    is_local = commit is None
    prepared = prepare_checkpoint(display_name(name, folder, commit), folder, weights=is_local, **overrides)
    checkpoint, module = prepared.checkpoint, prepared.empty_module
    return _build_description(
        spec=replace(prepared.spec, revision=commit),
        architecture=prepared.architecture,
        module=module,
        tokenizer=prepared.tokenizer,
        parameters=sum(p.numel() for p in module.parameters()),
        dtype=checkpoint.dtype if is_local else _config_dtype(checkpoint.config),
        has_published_size=overrides["block_size"] is None
        and not any(checkpoint.config.get(setting) for setting in prepared.architecture.block_settings),
    )


def _describe_gguf(name: str, path: Path, overrides: dict[str, Any]) -> Description:
    header = gguf.read_header(path)
    gguf.check_network(path, header)
    config, tokenizer = gguf.read_config(path), gguf.read_tokenizer(path)
    with name_in_errors(path):
        module = build_empty_module(gguf.causal_class(config), config)
        gguf.check_size(header, module)
        spec = infer_spec(name, CAUSAL, {}, module, tokenizer, **overrides)
    return _build_description(spec, CAUSAL, module, tokenizer, header.parameters, None)


def _build_description(
    spec: ModelSpec,
    architecture: Architecture,
    module: Any,
    tokenizer: ModelTokenizer | None,
    parameters: int,
    dtype: str | None,
    has_published_size: bool = False,
) -> Description:
    config = layer_configs(module.config)[0]
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    return Description(
        spec=spec,
        transformers_class=type(module).__name__,
        parameters=parameters,
        dtype=dtype,
        layers=getattr(config, "num_hidden_layers", None),
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or (width // heads if width and heads else None),
        vocab_size=module.get_input_embeddings().num_embeddings,
        tokens=_token_names(spec, tokenizer),
        has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
        samplers=_samplers(spec),
        capture_obstacle=_capture_obstacle(module),
        warnings=_warnings(architecture, spec, tokenizer, has_published_size),
    )


def _config_dtype(config: dict[str, Any]) -> str | None:
    dtype = config.get("torch_dtype") or config.get("dtype")
    return None if dtype is None else printable(dtype)


def _token_names(spec: ModelSpec, tokenizer: ModelTokenizer | None) -> dict[str, str | None]:
    roles = ("mask", "bos", "eos", "eot", "pad")
    return {} if tokenizer is None else {role: tokenizer.id_to_token(getattr(spec, f"{role}_id")) for role in roles}


def _samplers(spec: ModelSpec) -> tuple[str, ...]:
    from floatscope.sampling.samplers import SAMPLERS

    if spec.canvas_size is not None:
        return ("renoise",)
    return ("ar",) if spec.paradigm is Paradigm.ARM else tuple(name for name in SAMPLERS if name != "ar")


def _capture_obstacle(module: Any) -> str | None:
    """What changes the softmax itself, or computes it out of reach, so that it cannot be captured exactly."""
    if not (module._supports_attention_backend or module._supports_sdpa):
        return "it computes its attention, if it has any, in its own code"
    if getattr(module.config, "attn_logit_softcapping", None):
        return "a soft cap on the attention scores"
    if any(name.endswith(".sinks") for name, _ in module.named_parameters()):
        return "attention sinks as parameters"
    return None


def _warnings(
    architecture: Architecture, spec: ModelSpec, tokenizer: ModelTokenizer | None, has_published_size: bool
) -> tuple[str, ...]:
    warnings = [architecture.note] if architecture.note else []
    if spec.block_size is not None and has_published_size:
        warnings.append(
            f"its config names no block size; {spec.block_size} is that of its authors, and block_size= gives another"
        )
    if tokenizer is None:
        warnings.append(
            "no tokenizer: prompts are token ids; for texts, copy the files of its tokenizer (tokenizer.json, …) into a"
            " folder with the checkpoint"
        )
    if architecture.paradigm is Paradigm.ARM and spec.paradigm is Paradigm.MDM:
        warnings.append(
            "a causal model opened as a masked diffusion model; loading it checks that its causal mask can be dropped"
        )
    return tuple(warnings)
