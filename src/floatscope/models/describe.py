"""What a checkpoint is and can do, without its weights.

print(describe("GSAI-ML/LLaDA-8B-Instruct").parameters)      # config and tokenizer are fetched, weights are not
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from floatscope.models import gguf
from floatscope.models.families import CAUSAL, Family
from floatscope.models.load import locate, open_checkpoint, shown_name
from floatscope.models.model import ModelSpec
from floatscope.models.text import Text


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
    """A folder, hub id, twin or .gguf file; refused with the reason if it cannot be opened."""
    if Path(name).suffix == ".gguf":
        return _gguf(Path(name).expanduser(), mask_id, shift)
    folder, commit = locate(str(name), revision, weights=False)
    here = commit is None
    opened = open_checkpoint(shown_name(name, folder, commit), folder, weights=here, mask_id=mask_id, shift=shift)
    module, config = opened.empty, opened.empty.config
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "hidden_size", None)
    return Description(
        spec=replace(opened.spec, revision=commit),
        opened_as=type(module).__name__,
        parameters=sum(p.numel() for p in module.parameters()),
        dtype=opened.folder.dtype if here else _stored_dtype(opened.folder.config),
        layers=getattr(config, "num_hidden_layers", None),
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or (width // heads if width and heads else None),
        vocabulary=module.get_input_embeddings().num_embeddings,
        tokens=_names(opened.spec, opened.text),
        template=opened.text is not None and opened.text.has_template,
        samplers=_samplers(opened.spec.family),
        not_watched=_obstacle(module),
        warnings=_warnings(opened.family, opened.spec, opened.text),
    )


def _gguf(path: Path, mask_id: int | None, shift: bool | None) -> Description:
    header = gguf.read_header(path)
    ids = {role: header.values.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "padding")}
    kind = "arm" if mask_id is None else "mdm"
    spec = ModelSpec(
        path.name,
        kind,
        mask_id,
        shift=CAUSAL.shift if shift is None else shift,
        layout=CAUSAL.name,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        pad_id=ids["padding"],
        context=header.get("context_length"),
    )
    heads, width = header.get("attention.head_count"), header.get("embedding_length")
    return Description(
        spec=spec,
        opened_as=f"transformers' class for {header.architecture}",
        parameters=header.parameters,
        dtype=None,
        layers=header.get("block_count"),
        heads=heads,
        kv_heads=header.get("attention.head_count_kv") or heads,
        head_dim=header.get("attention.key_length") or (width // heads if width and heads else None),
        vocabulary=header.values.get("tokenizer.ggml.tokens"),
        tokens={},
        template="tokenizer.chat_template" in header.values,
        samplers=_samplers(kind),
        not_watched=None,
    )


def _stored_dtype(config: dict[str, Any]) -> str | None:
    named = config.get("torch_dtype") or config.get("dtype")
    return None if named is None else str(named)


def _names(spec: ModelSpec, text: Text | None) -> dict[str, str | None]:
    roles = ("mask", "bos", "eos", "eot", "pad")
    return {} if text is None else {role: text.name_of(getattr(spec, f"{role}_id")) for role in roles}


def _samplers(family: str) -> tuple[str, ...]:
    from floatscope.decode.samplers import SAMPLERS

    return ("ar",) if family == "arm" else tuple(name for name in SAMPLERS if name != "ar")


def _obstacle(module: Any) -> str | None:
    """What changes the softmax itself, so that its attention cannot be captured exactly."""
    if getattr(module.config, "attn_logit_softcapping", None):
        return "a soft cap on the attention scores"
    if any(name.endswith(".sinks") for name, _ in module.named_parameters()):
        return "attention sinks as parameters"
    return None


def _warnings(family: Family, spec: ModelSpec, text: Text | None) -> tuple[str, ...]:
    said = [family.note] if family.note else []
    if text is None:
        said.append("no tokenizer: prompts are token ids")
    if family.kind == "arm" and spec.family == "mdm":
        said.append(
            "a causal model opened as a masked diffusion model; loading it checks that its causal mask can be dropped"
        )
    return tuple(said)
