"""Adapters: a few small matrices that turn a base into another model.

    adapter = read_adapter(Path("sibling"))       # checked; in PEFT's format, with facts of our own in adapter.json
    check_base(adapter, Path("base.gguf"))        # its sha256 must be that of the base the adapter was trained on
    adapted = adapt_model(model, adapter)         # W + lora_B · lora_A for every W it names, and the mask's embedding

`floatscope adapt` writes such folders; `load("base.gguf+sibling")` opens them with their base. A folder of peft has no
adapter.json: such an adapter changes the weights of its base and leaves everything else as it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from floatscope.errors import UserError, join_names, name_in_errors, printable, summarize_error
from floatscope.files.digests import fingerprint, sha256_file
from floatscope.files.json_files import write_json
from floatscope.files.records import Record, read_typed
from floatscope.models.adapter_merge import merge_adapter
from floatscope.models.architectures import ARCHITECTURES
from floatscope.models.checkpoint import DOWNLOAD_AGAIN, read_checkpoint
from floatscope.models.model import Model
from floatscope.models.peft_format import (
    CONFIG_FILE,
    MODEL_FILE,
    PICKLE_FILE,
    PREFIX,
    TOKEN_ROWS,
    LoraConfig,
    lora_config_json,
    read_lora_config,
    split_name,
)
from floatscope.models.spec import ModelSpec
from floatscope.schema import Paradigm

ADAPTER_FILE = "adapter.json"
OWN_TENSORS_FILE = "adapter.safetensors"  # complete weights, for which PEFT has no format, and all tensors of 0.6
OWN_MARK = {"floatscope": ADAPTER_FILE}  # in the header of adapter_model.safetensors: that file belongs beside it


class AdapterRecord(Record):
    """The type of adapter.json."""

    base_name: str
    base_sha256: str
    mask_id: int | None
    mask_token: str | None
    rank: int | None
    sha256: str  # of the tensors


@dataclass(frozen=True)
class Adapter:
    """An adapter as it is stored.

    The tensors have PEFT's names without their prefix: `LAYER.lora_A.weight` [rank, inputs], `LAYER.lora_B.weight`
    [outputs, rank], and `EMBEDDING.token_adapter.trainable_tokens_delta` [tokens, width], which replaces embeddings.
    Without a rank they are complete weights under their own names.
    """

    base_name: str
    base_sha256: str | None  # None: written by peft, which does not store it
    mask_id: int | None  # may be the first id the base does not have: a new row; None: the paradigm stays
    mask_token: str | None
    rank: int | None  # None: it replaces complete weights
    tensors: Mapping[str, Tensor] = field(repr=False)
    other_token_ids: tuple[int, ...] = ()  # whose embeddings it replaces, if it has no mask
    name: str = ""  # of its folder
    weights: str = ""  # fingerprint of its files

    @property
    def as_json(self) -> dict[str, Any]:
        """The content of adapter.json, without the digest."""
        return {name: getattr(self, name) for name in AdapterRecord.__struct_fields__ if name != "sha256"}

    @property
    def parameters(self) -> int:
        """The number of weights in the adapter."""
        return sum(t.numel() for t in self.tensors.values())

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens whose embeddings it replaces."""
        return self.other_token_ids if self.mask_id is None else (self.mask_id,)


def is_adapter(folder: Path) -> bool:
    """Whether a folder contains an adapter."""
    return (folder / ADAPTER_FILE).is_file() or (folder / CONFIG_FILE).is_file()


def tensors_file(folder: Path) -> Path:
    """Return the file with the tensors of the adapter in a folder."""
    is_peft = (folder / CONFIG_FILE).is_file() or (folder / MODEL_FILE).is_file()
    return folder / (MODEL_FILE if is_peft else OWN_TENSORS_FILE)


def write_adapter(folder: Path, adapter: Adapter) -> None:
    """Write an adapter with its adapter.json: in PEFT's format, or with complete weights in adapter.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in adapter.tensors.items()}
    if adapter.rank is None:
        save_file(tensors, folder / OWN_TENSORS_FILE, {"format": "pt"})
    else:
        layers = {split_name(name)[0] for name in tensors if not name.endswith(TOKEN_ROWS)}
        stored = {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()}
        save_file(stored, folder / MODEL_FILE, {"format": "pt", **OWN_MARK})
        config = lora_config_json(adapter.base_name, adapter.rank, layers, adapter.token_ids)
        write_json(folder / CONFIG_FILE, config)
    content = {**adapter.as_json, "sha256": sha256_file(tensors_file(folder))}
    (folder / ADAPTER_FILE).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter and check it: its settings, its digest, and that its numbers are finite."""
    if not is_adapter(folder):
        hint = f", such as {folder / 'adapter'}" if is_adapter(folder / "adapter") else ""
        problem = f"is not an adapter: it has no {ADAPTER_FILE}" if folder.is_dir() else "does not exist"
        raise UserError(f"{folder} {problem}; give a folder that `floatscope adapt` or peft wrote{hint}")
    path, identity = tensors_file(folder), folder / ADAPTER_FILE
    config = None if path.name == OWN_TENSORS_FILE else read_lora_config(folder / CONFIG_FILE, DOWNLOAD_AGAIN)
    facts = read_typed(identity, AdapterRecord, DOWNLOAD_AGAIN) if identity.is_file() or config is None else None
    tensors, metadata = _read_tensors(path)
    if facts is None and OWN_MARK.items() <= metadata.items():
        raise UserError(f"{identity} is missing; {DOWNLOAD_AGAIN}")
    if facts is not None and sha256_file(path) != facts.sha256:
        raise UserError(f"{path} does not have the digest in {ADAPTER_FILE}; copy both files again from their source")
    if infinite := [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]:
        raise UserError(f"{path} is damaged ({join_names(infinite, 1)} is not finite); {DOWNLOAD_AGAIN}")
    if config is not None:
        if facts is not None:
            _check_same_facts(folder, config, facts)
        with name_in_errors(path):
            tensors = config.read_tensors(tensors)
    files = [file for file in (identity, folder / CONFIG_FILE, path) if file.is_file()]
    stored: dict[str, Any] = {"tensors": tensors, "name": _display_name(folder), "weights": fingerprint(*files)}
    if facts is not None:
        return Adapter(facts.base_name, facts.base_sha256, facts.mask_id, facts.mask_token, facts.rank, **stored)
    assert config is not None
    return Adapter(config.base_name, None, None, None, config.rank, other_token_ids=config.token_ids, **stored)


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file and the entries of its header."""
    if not path.is_file() and path.with_name(PICKLE_FILE).is_file():
        raise UserError(
            f"{path.with_name(PICKLE_FILE)} is a pickle, and reading a pickle runs the code in it; save the adapter"
            " again where you trust it (peft's save_pretrained writes safetensors)"
        )
    try:
        with safe_open(path, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is missing or damaged ({summarize_error(error)}); {DOWNLOAD_AGAIN}") from error


def _check_same_facts(folder: Path, config: LoraConfig, facts: AdapterRecord) -> None:
    """Check that adapter_config.json is the one that `floatscope adapt` writes for adapter.json."""
    mask_ids = () if facts.mask_id is None else (facts.mask_id,)
    is_scaled = config.is_rank_stabilized or config.rank_pattern or config.alpha_pattern or config.alpha != config.rank
    if is_scaled or (config.rank, config.token_ids) != (facts.rank, mask_ids):
        raise UserError(
            f"{folder / CONFIG_FILE} does not match {ADAPTER_FILE} in its rank, scaling or mask; copy both files again"
            " from their source"
        )


def _display_name(folder: Path) -> str:
    """Return the folder's name; with its parent's if it is called "adapter", as most are: `sibling/adapter`."""
    *_, parent, name = folder.resolve().parts
    return f"{parent}/{name}" if name == "adapter" else name


def sha256_weights(path: Path) -> str:
    """Return the sha256 of a checkpoint's weights; of several files, that of the lines sha256sum prints for them."""
    files = [path] if path.is_file() else list(read_checkpoint(path).files)
    digests = [sha256_file(file) for file in files]
    if len(digests) == 1:
        return digests[0]
    lines = (f"{digest}  {file.name}\n" for digest, file in zip(digests, files, strict=True))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def check_base(adapter: Adapter, base: Path) -> None:
    """Raise a `UserError` if the weights at `base` are not those the adapter was trained on.

    An adapter that peft wrote does not say it: its names and shapes are checked when it is merged.
    """
    if adapter.base_sha256 is None:
        return
    digest = sha256_weights(base)
    if digest != adapter.base_sha256:
        raise UserError(
            f"the adapter belongs to {printable(adapter.base_name)} with sha256 {printable(adapter.base_sha256)[:12]}…,"
            f" and {base} has {digest[:12]}…; give the base it was trained on"
        )


def adapt_model(model: Model, adapter: Adapter) -> Model:
    """Merge the adapter into the weights of the base, in place, and return the model with its new spec."""
    spec = adapt_spec(model.spec, adapter)
    row = next((row for row in ARCHITECTURES if row.name == model.spec.architecture), None)
    merge_adapter(model.module, adapter, str if row is None else row.rename_key)
    return replace(model, spec=spec)


def adapt_spec(spec: ModelSpec, adapter: Adapter) -> ModelSpec:
    """Return the spec of the adapted model.

    It is a shifted masked diffusion model if the adapter has a mask, and otherwise of the paradigm of its base.
    """
    both = None if spec.weights is None else hashlib.sha256(f"{spec.weights} {adapter.weights}".encode()).hexdigest()
    adapted = replace(spec, name=f"{spec.name}+{adapter.name}", weights=both)
    if adapter.base_sha256 is None:
        return adapted
    if spec.paradigm is not Paradigm.ARM:
        raise UserError(f"{spec.name} is not an autoregressive model; this adapter needs an autoregressive base")
    adapted = replace(adapted, architecture="adapted")
    return (
        adapted
        if adapter.mask_id is None
        else replace(adapted, paradigm=Paradigm.MDM, mask_id=adapter.mask_id, shift=True)
    )
