"""An adapter: what makes another model of a base, in a few small matrices that lie beside it.

    adapter = read_adapter(Path("sibling"))       # adapter.json and adapter.safetensors, checked
    check_base(adapter, Path("base.gguf"))        # the weights it was made for, by sha256
    adapted = adapt_model(model, adapter)         # W + up · down for every W it names, and the mask's embedding

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

from floatscope.errors import UserError, join_names, printable, reason
from floatscope.models.files import fingerprint, read_folder, read_json
from floatscope.models.model import Model, ModelSpec

ABOUT, TENSORS = "adapter.json", "adapter.safetensors"
KEPT: dict[str, Any] = {  # what adapter.json says
    "base_name": str,
    "base_sha256": str,
    "mask_id": int | None,
    "mask_token": str | None,
    "rank": int | None,
}
SHA256 = "sha256"  # and this, of the tensors
UP, DOWN, MASK = ".up", ".down", "mask_embedding"


@dataclass(frozen=True)
class Adapter:
    """`tensors`: NAME.up and NAME.down for a matrix NAME of the base, NAME for a weight that is replaced, and the
    embedding of the mask."""

    base_name: str
    base_sha256: str
    mask_id: int | None  # the first id the base does not have: a new row; None: it stays autoregressive
    mask_token: str | None
    rank: int | None  # None: whole weights
    tensors: Mapping[str, Tensor] = field(repr=False)
    name: str = ""  # of its folder
    weights: str = ""  # fingerprint of its files

    @property
    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in KEPT}

    @property
    def parameters(self) -> int:
        return sum(t.numel() for t in self.tensors.values())


def is_adapter(folder: Path) -> bool:
    return (folder / ABOUT).is_file()


def write_adapter(folder: Path, adapter: Adapter) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: t.contiguous() for k, t in adapter.tensors.items()}, folder / TENSORS, {"format": "pt"})
    about = {**adapter.as_json, SHA256: _sha256(folder / TENSORS)}
    (folder / ABOUT).write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_adapter(folder: Path) -> Adapter:
    if not is_adapter(folder):
        within = f", such as {folder / 'adapter'}" if is_adapter(folder / "adapter") else ""
        what = f"is no adapter: it has no {ABOUT}" if folder.is_dir() else "is not there"
        raise UserError(f"{folder} {what}; give a folder `floatscope adapt` has written{within}")
    about = read_json(folder / ABOUT)
    wrong = [
        name
        for name, kind in {**KEPT, SHA256: str}.items()
        if name not in about or not isinstance(about[name], kind) or isinstance(about[name], bool)
    ]
    if wrong:
        raise UserError(f"{folder / ABOUT} is damaged (no proper {join_names(wrong)}); fetch it again")
    try:
        with safe_open(folder / TENSORS, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / TENSORS} is missing or damaged ({reason(error)}); fetch it again") from error
    if _sha256(folder / TENSORS) != about[SHA256]:
        raise UserError(f"{folder / TENSORS} is not the one {ABOUT} speaks of; get both from where they were made")
    if wild := [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]:
        raise UserError(f"{folder / TENSORS} is damaged ({join_names(wild, 1)} is not finite); fetch it again")
    weights = fingerprint(folder / ABOUT, folder / TENSORS)
    return Adapter(**{name: about[name] for name in KEPT}, tensors=tensors, name=_name(folder), weights=weights)


def _name(folder: Path) -> str:
    """`sibling/adapter`, for most adapters lie in a folder of that name; else the folder's own."""
    *_, above, own = folder.resolve().parts
    return f"{above}/{own}" if own == "adapter" else own


def base_digest(path: Path) -> str:
    """sha256 of a checkpoint's weights: of one file as sha256sum prints it, of several over the lines it prints."""
    files = [path] if path.is_file() else list(read_folder(path).files)
    digests = [_sha256(file) for file in files]
    if len(digests) == 1:
        return digests[0]
    lines = (f"{digest}  {file.name}\n" for digest, file in zip(digests, files, strict=True))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def check_base(adapter: Adapter, base: Path) -> None:
    found = base_digest(base)
    if found != adapter.base_sha256:
        raise UserError(
            f"the adapter belongs to {printable(adapter.base_name)} with sha256 {printable(adapter.base_sha256)[:12]}…,"
            f" and {base} has {found[:12]}…; give the base it was made from"
        )


def adapt_model(model: Model, adapter: Adapter) -> Model:
    """The base with the adapter worked into its weights."""
    spec = adapted(model.spec, adapter)
    merge(model.module, adapter)
    return replace(model, spec=spec)


def adapted(spec: ModelSpec, adapter: Adapter) -> ModelSpec:
    """What is known of the base, as that of a masked diffusion model whose rows decide the next position.

    Without a mask it stays autoregressive."""
    if spec.paradigm != "arm":
        raise UserError(f"{spec.name} is no autoregressive model, and adapters are made from those")
    both = None if spec.weights is None else hashlib.sha256(f"{spec.weights} {adapter.weights}".encode()).hexdigest()
    spec = replace(spec, name=f"{spec.name}+{adapter.name}", architecture="adapted", weights=both)
    return spec if adapter.mask_id is None else replace(spec, paradigm="mdm", mask_id=adapter.mask_id, shift=True)


def merge(module: Any, adapter: Adapter) -> None:
    """In place; a sum is made in float32 and rounded once. A module on the meta device gets its shapes checked."""
    rows = module.get_input_embeddings().num_embeddings
    if adapter.mask_id is not None and not 0 <= adapter.mask_id <= rows:
        raise UserError(
            f"its adapter's mask id {adapter.mask_id} is none of the token ids 0 … {rows - 1}, nor the next"
        )
    if adapter.mask_id == rows:
        with_new_row(module)
    weights = dict(module.named_parameters())
    _check_whole(module, weights, adapter)
    embedding = next(name for name, p in weights.items() if p is module.get_input_embeddings().weight)
    for name in sorted(_named(adapter)):
        _check_shapes(name, weights[name], adapter)
        _put(weights[name], _changed(weights[name], name, adapter))
    if MASK in adapter.tensors:
        row = weights[embedding][adapter.mask_id]
        if adapter.tensors[MASK].shape != row.shape:
            raise UserError(f"its adapter's {MASK} does not fit an embedding of {len(row)}")
        _put(row, adapter.tensors[MASK])


def projections(module: Any) -> Iterator[tuple[str, Any]]:
    """Every linear map of the network but the one to the vocabulary: what an adapter with a rank changes."""
    from transformers.pytorch_utils import Conv1D

    head = module.get_output_embeddings()
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear | Conv1D) and part is not head:
            yield name, part


def _check_whole(module: Any, weights: Mapping[str, Tensor], adapter: Adapter) -> None:
    """Nothing is missing, and nothing is there that the base does not have."""
    if strange := _named(adapter) - weights.keys():
        raise UserError(f"its adapter changes weights the base does not have: {join_names(strange)}")
    if adapter.rank is None:
        wanted = set(weights)
    else:
        wanted = {f"{name}.weight{part}" for name, _ in projections(module) for part in (UP, DOWN)}
        wanted |= set() if adapter.mask_id is None else {MASK}
    if lost := wanted - adapter.tensors.keys():
        raise UserError(f"its adapter lacks {join_names(lost)}; fetch it again")
    if more := adapter.tensors.keys() - wanted:
        raise UserError(f"its adapter has more than it should: {join_names(more)}; fetch it again")


def _named(adapter: Adapter) -> set[str]:
    """The weights of the base that it changes."""
    return {name.removesuffix(UP).removesuffix(DOWN) for name in adapter.tensors} - {MASK}


@torch.no_grad()
def with_new_row(module: Any) -> None:
    """One more token id: the mean of the others, which is seldom the most likely."""
    module.resize_token_embeddings(module.get_input_embeddings().num_embeddings + 1, mean_resizing=False)
    for part in (module.get_input_embeddings(), module.get_output_embeddings()):
        if part is not None:
            part.weight[-1] = part.weight[:-1].mean(0)


def _changed(weight: Tensor, name: str, adapter: Adapter) -> Tensor:
    if name in adapter.tensors:
        return adapter.tensors[name]
    up, down = (adapter.tensors[name + part].to(weight.device, torch.float32) for part in (UP, DOWN))
    return weight.float() + up @ down


def _check_shapes(name: str, weight: Tensor, adapter: Adapter) -> None:
    whole, up, down = (adapter.tensors.get(name + part) for part in ("", UP, DOWN))
    if whole is not None:
        fits = whole.shape == weight.shape
    else:
        (rows, columns), rank = weight.shape, adapter.rank
        fits = (tuple(up.shape), tuple(down.shape)) == ((rows, rank), (rank, columns))  # type: ignore[union-attr]
    if not fits:
        ranked = "" if adapter.rank is None else f" with rank {adapter.rank}"
        raise UserError(f"its adapter does not fit {name}, which is {tuple(weight.shape)}{ranked}")


@torch.no_grad()
def _put(weight: Tensor | nn.Parameter, value: Tensor) -> None:
    weight.copy_(value)
