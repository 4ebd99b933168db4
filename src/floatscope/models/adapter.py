"""Adapters: a few small matrices that turn a base into another model.

    adapter = read_adapter(Path("sibling"))       # adapter.json and adapter.safetensors, checked
    check_base(adapter, Path("base.gguf"))        # its sha256 must be that of the base the adapter was trained on
    adapted = adapt_model(model, adapter)         # W + lora_B · lora_A for every W it names, and the mask's embedding

`floatscope adapt` writes such folders; `load("base.gguf+sibling")` opens them with their base.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from floatscope.errors import UserError, join_names, printable, summarize_error
from floatscope.files.digests import fingerprint, sha256_file
from floatscope.files.json_files import read_json
from floatscope.models.checkpoint import DOWNLOAD_AGAIN, read_checkpoint
from floatscope.models.model import Model
from floatscope.models.spec import ModelSpec

ADAPTER_FILE, TENSORS_FILE = "adapter.json", "adapter.safetensors"
ADAPTER_FIELDS: dict[str, Any] = {  # the keys of adapter.json and their types
    "base_name": str,
    "base_sha256": str,
    "mask_id": int | None,
    "mask_token": str | None,
    "rank": int | None,
}
SHA256 = "sha256"  # one more key: the digest of the tensors
LORA_B, LORA_A = ".up", ".down"  # suffixes of the names in adapter.safetensors
MASK_EMBEDDING = "mask_embedding"


@dataclass(frozen=True)
class Adapter:
    """An adapter as it is stored.

    The tensors are lora_B and lora_A of every changed matrix (`NAME.up` [rows, rank] and `NAME.down` [rank, columns]),
    replaced weights under their own `NAME`, and the embedding of the mask token.
    """

    base_name: str
    base_sha256: str
    mask_id: int | None  # may be the first id the base does not have: a new row; None: it stays autoregressive
    mask_token: str | None
    rank: int | None  # None: it replaces complete weights
    tensors: Mapping[str, Tensor] = field(repr=False)
    name: str = ""  # of its folder
    weights: str = ""  # fingerprint of its files

    @property
    def as_json(self) -> dict[str, Any]:
        """The content of adapter.json, without the digest."""
        return {name: getattr(self, name) for name in ADAPTER_FIELDS}

    @property
    def parameters(self) -> int:
        """The number of weights in the adapter."""
        return sum(t.numel() for t in self.tensors.values())


def is_adapter(folder: Path) -> bool:
    """Whether a folder contains an adapter."""
    return (folder / ADAPTER_FILE).is_file()


def write_adapter(folder: Path, adapter: Adapter) -> None:
    """Write adapter.json and adapter.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: t.contiguous() for k, t in adapter.tensors.items()}, folder / TENSORS_FILE, {"format": "pt"})
    content = {**adapter.as_json, SHA256: sha256_file(folder / TENSORS_FILE)}
    (folder / ADAPTER_FILE).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter and check it: its keys, its digest, and that its numbers are finite."""
    if not is_adapter(folder):
        hint = f", such as {folder / 'adapter'}" if is_adapter(folder / "adapter") else ""
        problem = f"is not an adapter: it has no {ADAPTER_FILE}" if folder.is_dir() else "does not exist"
        raise UserError(f"{folder} {problem}; give a folder that `floatscope adapt` wrote{hint}")
    content = read_json(folder / ADAPTER_FILE, DOWNLOAD_AGAIN)
    wrong = [
        name
        for name, kind in {**ADAPTER_FIELDS, SHA256: str}.items()
        if name not in content or not isinstance(content[name], kind) or isinstance(content[name], bool)
    ]
    if wrong:
        raise UserError(f"{folder / ADAPTER_FILE} is damaged (no valid {join_names(wrong)}); {DOWNLOAD_AGAIN}")
    path = folder / TENSORS_FILE
    try:
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is missing or damaged ({summarize_error(error)}); {DOWNLOAD_AGAIN}") from error
    if sha256_file(path) != content[SHA256]:
        raise UserError(f"{path} does not have the digest in {ADAPTER_FILE}; copy both files again from their source")
    if infinite := [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]:
        raise UserError(f"{path} is damaged ({join_names(infinite, 1)} is not finite); {DOWNLOAD_AGAIN}")
    weights = fingerprint(folder / ADAPTER_FILE, path)
    return Adapter(
        **{name: content[name] for name in ADAPTER_FIELDS}, tensors=tensors, name=_display_name(folder), weights=weights
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
    """Raise a `UserError` if the weights at `base` are not those the adapter was trained on."""
    digest = sha256_weights(base)
    if digest != adapter.base_sha256:
        raise UserError(
            f"the adapter belongs to {printable(adapter.base_name)} with sha256 {printable(adapter.base_sha256)[:12]}…,"
            f" and {base} has {digest[:12]}…; give the base it was trained on"
        )


def adapt_model(model: Model, adapter: Adapter) -> Model:
    """Merge the adapter into the weights of the base, in place, and return the model with its new spec."""
    spec = adapt_spec(model.spec, adapter)
    merge_adapter(model.module, adapter)
    return replace(model, spec=spec)


def adapt_spec(spec: ModelSpec, adapter: Adapter) -> ModelSpec:
    """Return the spec of the adapted model: a shifted masked diffusion model, or autoregressive without a mask."""
    if spec.paradigm != "arm":
        raise UserError(f"{spec.name} is not an autoregressive model; an adapter needs an autoregressive base")
    both = None if spec.weights is None else hashlib.sha256(f"{spec.weights} {adapter.weights}".encode()).hexdigest()
    spec = replace(spec, name=f"{spec.name}+{adapter.name}", architecture="adapted", weights=both)
    return spec if adapter.mask_id is None else replace(spec, paradigm="mdm", mask_id=adapter.mask_id, shift=True)


def merge_adapter(module: Any, adapter: Adapter) -> None:
    """Add the adapter to the weights of a module, in place; sums are computed in float32 and rounded once.

    With a module on the meta device, only names and shapes are checked.
    """
    rows = module.get_input_embeddings().num_embeddings
    if adapter.mask_id is not None and not 0 <= adapter.mask_id <= rows:
        raise UserError(f"its adapter's mask id {adapter.mask_id} is not a valid token id; expected 0 … {rows}")
    if adapter.mask_id == rows:
        add_token_row(module)
    weights = dict(module.named_parameters())
    _check_names(module, weights, adapter)
    embedding = next(name for name, p in weights.items() if p is module.get_input_embeddings().weight)
    for name in sorted(_changed_weights(adapter)):
        _check_shapes(name, weights[name], adapter)
        _assign(weights[name], _merged_weight(weights[name], name, adapter))
    if MASK_EMBEDDING in adapter.tensors:
        row = weights[embedding][adapter.mask_id]
        if adapter.tensors[MASK_EMBEDDING].shape != row.shape:
            raise UserError(f"its adapter's {MASK_EMBEDDING} does not fit an embedding of {len(row)}")
        _assign(row, adapter.tensors[MASK_EMBEDDING])


def linear_layers(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the linear layers that an adapter with a rank changes: all except the one to the vocabulary."""
    from transformers.pytorch_utils import Conv1D

    head = module.get_output_embeddings()
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear | Conv1D) and layer is not head:
            yield name, layer


@torch.no_grad()
def add_token_row(module: Any) -> None:
    """Add one token id to the embeddings; its row is the mean of the others, which is rarely the most likely token."""
    module.resize_token_embeddings(module.get_input_embeddings().num_embeddings + 1, mean_resizing=False)
    for layer in (module.get_input_embeddings(), module.get_output_embeddings()):
        if layer is not None:
            layer.weight[-1] = layer.weight[:-1].mean(0)


def _check_names(module: Any, weights: Mapping[str, Tensor], adapter: Adapter) -> None:
    """Check that the adapter has all tensors it needs, and none that the base does not have."""
    if unknown := _changed_weights(adapter) - weights.keys():
        raise UserError(f"its adapter changes weights the base does not have: {join_names(unknown)}")
    if adapter.rank is None:
        expected = set(weights)
    else:
        expected = {f"{name}.weight{suffix}" for name, _ in linear_layers(module) for suffix in (LORA_B, LORA_A)}
        expected |= set() if adapter.mask_id is None else {MASK_EMBEDDING}
    if missing := expected - adapter.tensors.keys():
        raise UserError(f"its adapter has no {join_names(missing)}; {DOWNLOAD_AGAIN}")
    if unexpected := adapter.tensors.keys() - expected:
        raise UserError(f"its adapter has unexpected tensors: {join_names(unexpected)}; {DOWNLOAD_AGAIN}")


def _changed_weights(adapter: Adapter) -> set[str]:
    """The names of the base's weights that the adapter changes."""
    return {name.removesuffix(LORA_B).removesuffix(LORA_A) for name in adapter.tensors} - {MASK_EMBEDDING}


def _merged_weight(weight: Tensor, name: str, adapter: Adapter) -> Tensor:
    if name in adapter.tensors:
        return adapter.tensors[name]
    lora_b, lora_a = (adapter.tensors[name + part].to(weight.device, torch.float32) for part in (LORA_B, LORA_A))
    return weight.float() + lora_b @ lora_a


def _check_shapes(name: str, weight: Tensor, adapter: Adapter) -> None:
    replacement, lora_b, lora_a = (adapter.tensors.get(name + suffix) for suffix in ("", LORA_B, LORA_A))
    if replacement is not None:
        fits = replacement.shape == weight.shape
    else:
        (rows, columns), rank = weight.shape, adapter.rank
        fits = (tuple(lora_b.shape), tuple(lora_a.shape)) == ((rows, rank), (rank, columns))  # type: ignore[union-attr]
    if not fits:
        rank_text = "" if adapter.rank is None else f" with rank {adapter.rank}"
        raise UserError(f"its adapter does not fit {name}, which is {tuple(weight.shape)}{rank_text}")


@torch.no_grad()
def _assign(weight: Tensor | nn.Parameter, value: Tensor) -> None:
    weight.copy_(value)
