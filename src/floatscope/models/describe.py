"""What a checkpoint is and can do, without its weights.

print(describe("GSAI-ML/LLaDA-8B-Instruct").parameters)      # config and tokenizer are fetched, weights are not
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from floatscope.errors import UserError, guard_reading, name_in_errors, printable
from floatscope.models import gguf
from floatscope.models.adapter import adapted, check_base, read_adapter
from floatscope.models.families import CAUSAL, Architecture
from floatscope.models.fetched import file_name, is_fetched
from floatscope.models.load import as_path, empty_module, locate, open_checkpoint, parted, shown_name, weights_of
from floatscope.models.model import ModelSpec
from floatscope.models.spec import infer
from floatscope.models.text import ModelTokenizer


@dataclass(frozen=True)
class Description:
    spec: ModelSpec
    opened_as: str  # the transformers class
    parameters: int
    dtype: str | None
    layers: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    vocabulary: int | None
    tokens: dict[str, str | None]  # role → the token's name, where there is one
    template: bool
    samplers: tuple[str, ...]
    not_watched: str | None  # why its attention cannot be captured; None: it can
    warnings: tuple[str, ...] = ()

    @property
    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def describe(
    name: str | Path, *, mask_id: int | None = None, shift: bool | None = None, revision: str | None = None
) -> Description:
    """A folder, hub id, twin, .gguf file or fetched model; refused with the reason if it cannot be opened."""
    with guard_reading(name):
        base, adapter = parted(name)
        if adapter is not None:
            return _adapted(name, describe(base, revision=revision), weights_of(base, revision), adapter)
        path = as_path(name)
        if path.suffix == ".gguf":
            return _gguf(file_name(name, path), path, mask_id, shift)
        return _folder(name, mask_id, shift, revision)


def _adapted(name: str | Path, told: Description, base: Path, folder: Path) -> Description:
    adapter = read_adapter(folder)
    check_base(adapter, base)
    with name_in_errors(folder):
        spec = adapted(told.spec, adapter)
    return replace(
        told,
        spec=replace(spec, name=str(name)) if is_fetched(name) else spec,
        tokens={**told.tokens, "mask": adapter.mask_token},
        samplers=_samplers(spec.paradigm),
        warnings=(
            *told.warnings,
            f"its base is {adapter.base_name}; the adapter has {adapter.parameters:,} parameters",
        ),
    )


def _folder(name: str | Path, mask_id: int | None, shift: bool | None, revision: str | None) -> Description:
    folder, commit = locate(name, revision, weights=False)
    here = commit is None
    opened = open_checkpoint(shown_name(name, folder, commit), folder, weights=here, mask_id=mask_id, shift=shift)
    spec, dtype = replace(opened.spec, revision=commit), _stored_dtype(opened.folder.config)
    parameters = sum(p.numel() for p in opened.empty.parameters())
    return _described(
        spec, opened.family, opened.empty, opened.text, parameters, opened.folder.dtype if here else dtype
    )


def _gguf(name: str, path: Path, mask_id: int | None, shift: bool | None) -> Description:
    header = gguf.read_header(path)
    config, text = gguf.read_config(path), gguf.read_text(path)
    with name_in_errors(path):
        empty = empty_module(gguf.class_of(config), config)
        tied = set(getattr(empty, "all_tied_weights_keys", {}))
        needed = sum(t.numel() for k, t in empty.named_parameters() if k not in tied)
        if needed > header.parameters:
            raise UserError(f"tensors are missing: {needed:,} weights are needed, and it holds {header.parameters:,}")
        spec = infer(name, CAUSAL, {}, empty, text, mask_id=mask_id, shift=shift)
    return _described(spec, CAUSAL, empty, text, header.parameters, None)


def _described(
    spec: ModelSpec, family: Architecture, module: Any, text: ModelTokenizer | None, parameters: int, dtype: str | None
) -> Description:
    config = module.config
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    return Description(
        spec=spec,
        opened_as=type(module).__name__,
        parameters=parameters,
        dtype=dtype,
        layers=getattr(config, "num_hidden_layers", None),
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or (width // heads if width and heads else None),
        vocabulary=module.get_input_embeddings().num_embeddings,
        tokens=_names(spec, text),
        template=text is not None and text.has_template,
        samplers=_samplers(spec.paradigm),
        not_watched=_obstacle(module),
        warnings=_warnings(family, spec, text),
    )


def _stored_dtype(config: dict[str, Any]) -> str | None:
    named = config.get("torch_dtype") or config.get("dtype")
    return None if named is None else printable(named)


def _names(spec: ModelSpec, text: ModelTokenizer | None) -> dict[str, str | None]:
    roles = ("mask", "bos", "eos", "eot", "pad")
    return {} if text is None else {role: text.name_of(getattr(spec, f"{role}_id")) for role in roles}


def _samplers(family: str) -> tuple[str, ...]:
    from floatscope.sampling.samplers import SAMPLERS

    return ("ar",) if family == "arm" else tuple(name for name in SAMPLERS if name != "ar")


def _obstacle(module: Any) -> str | None:
    """What changes the softmax itself, or computes it where nobody can watch, so that it cannot be captured exactly."""
    if not (module._supports_attention_backend or module._supports_sdpa):
        return "it computes its attention, if it has any, in code of its own"
    if getattr(module.config, "attn_logit_softcapping", None):
        return "a soft cap on the attention scores"
    if any(name.endswith(".sinks") for name, _ in module.named_parameters()):
        return "attention sinks as parameters"
    return None


def _warnings(family: Architecture, spec: ModelSpec, text: ModelTokenizer | None) -> tuple[str, ...]:
    said = [family.note] if family.note else []
    if text is None:
        said.append("no tokenizer: prompts are token ids")
    if family.paradigm == "arm" and spec.paradigm == "mdm":
        said.append(
            "a causal model opened as a masked diffusion model; loading it checks that its causal mask can be dropped"
        )
    return tuple(said)
