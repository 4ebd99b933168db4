"""Merge an adapter into the weights of its base: W + lora_B · lora_A, and the embeddings of single tokens.

    merge_adapter(module, adapter)       # names and shapes are checked before anything is changed in a layer

The merged module is an ordinary module of transformers: nothing of the adapter is left to compute in a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from floatscope.errors import UserError, join_names
from floatscope.models.checkpoint import DOWNLOAD_AGAIN
from floatscope.models.peft_format import LORA_A, LORA_B, REMEDY, TOKEN_ROWS, split_name

if TYPE_CHECKING:
    from floatscope.models.adapter import Adapter

OLD_LORA_B, OLD_LORA_A, OLD_MASK_EMBEDDING = ".weight.up", ".weight.down", "mask_embedding"  # names of 0.6


def merge_adapter(module: Any, adapter: Adapter, rename_key: Callable[[str], str] = str) -> None:
    """Add the adapter to the weights of a module, in place; sums are computed in float32 and rounded once.

    With a module on the meta device, only names and shapes are checked. `rename_key` turns the name of a weight in the
    checkpoint of the base into that in the module.
    """
    rows = module.get_input_embeddings().num_embeddings
    if adapter.mask_id is not None and not 0 <= adapter.mask_id <= rows:
        raise UserError(f"its adapter's mask id {adapter.mask_id} is not a valid token id; expected 0 … {rows}")
    if adapter.mask_id == rows:
        add_token_row(module)
    if adapter.rank is None:
        _replace_weights(module, adapter.tensors)
        return
    tensors = _rename_tensors(_upgrade_tensors(module, adapter.tensors), rename_key)
    layers = _check_names(module, adapter, tensors)
    for name, layer in layers.items():
        _add_product(name, layer, tensors[name + LORA_A], tensors[name + LORA_B])
    if adapter.token_ids:
        _replace_rows(module, tensors[_embedding_name(module) + TOKEN_ROWS], adapter.token_ids)


def linear_layers(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the linear layers that `floatscope adapt` trains: all except the one to the vocabulary."""
    head = module.get_output_embeddings()
    return ((name, layer) for name, layer in _all_linear_layers(module).items() if layer is not head)


def is_transposed(layer: nn.Module) -> bool:
    """Whether a linear layer stores its matrix as [inputs, outputs], as the Conv1D of GPT-2 does."""
    return not isinstance(layer, nn.Linear)


@torch.no_grad()
def add_token_row(module: Any) -> None:
    """Add one token id to the embeddings; its row is the mean of the others, which is rarely the most likely token."""
    module.resize_token_embeddings(module.get_input_embeddings().num_embeddings + 1, mean_resizing=False)
    for layer in (module.get_input_embeddings(), module.get_output_embeddings()):
        if layer is not None:
            layer.weight[-1] = layer.weight[:-1].mean(0)


def _all_linear_layers(module: Any) -> dict[str, Any]:
    from transformers.pytorch_utils import Conv1D

    return {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear | Conv1D)}


def _embedding_name(module: Any) -> str:
    embedding = module.get_input_embeddings()
    names: Iterator[str] = (name for name, part in module.named_modules() if part is embedding)
    return next(names)


def _upgrade_tensors(module: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by today's names; 0.6 stored factors `up · down` of the matrix as the base has it."""
    layers, upgraded = _all_linear_layers(module), {}
    for name, tensor in tensors.items():
        layer = name.removesuffix(OLD_LORA_B).removesuffix(OLD_LORA_A)
        if name == OLD_MASK_EMBEDDING:
            upgraded[_embedding_name(module) + TOKEN_ROWS] = tensor[None]
        elif layer == name:
            upgraded[name] = tensor
        elif layer in layers and is_transposed(layers[layer]):
            suffix = LORA_A if name.endswith(OLD_LORA_B) else LORA_B
            upgraded[layer + suffix] = tensor.transpose(0, -1)
        else:
            upgraded[layer + (LORA_B if name.endswith(OLD_LORA_B) else LORA_A)] = tensor
    return upgraded


def _rename_tensors(tensors: Mapping[str, Tensor], rename_key: Callable[[str], str]) -> dict[str, Tensor]:
    """Return the tensors by the names of the module's layers, which may differ from those of the checkpoint."""
    renamed = {}
    for name, tensor in tensors.items():
        layer, suffix = split_name(name)
        renamed[rename_key(f"{layer}.weight").removesuffix(".weight") + suffix] = tensor
    return renamed


def _check_names(module: Any, adapter: Adapter, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Check that the adapter has all tensors it needs and no others; return the layers it changes."""
    layers = _all_linear_layers(module)
    changed = {split_name(name)[0] for name in tensors if name.endswith((LORA_A, LORA_B))}
    if unknown := changed - layers.keys():
        raise UserError(f"its adapter changes weights the base does not have: {join_names(unknown)}")
    if shared := [n for n in changed if layers[n].weight is module.get_input_embeddings().weight]:
        raise UserError(
            f"its adapter changes {shared[0]}, which shares its weights with the embedding, and the sum would change"
            f" both; {REMEDY}"
        )
    if adapter.base_sha256 is not None:
        changed = {name for name, _ in linear_layers(module)}
    expected = {name + suffix for name in changed for suffix in (LORA_A, LORA_B)}
    expected |= {_embedding_name(module) + TOKEN_ROWS} if adapter.token_ids else set()
    if missing := expected - tensors.keys():
        raise UserError(f"its adapter has no {join_names(missing)}; {DOWNLOAD_AGAIN}")
    if unexpected := tensors.keys() - expected:
        raise UserError(f"its adapter has unexpected tensors: {join_names(unexpected)}; {DOWNLOAD_AGAIN}")
    return {name: layers[name] for name in sorted(changed)}


def _replace_weights(module: Any, tensors: Mapping[str, Tensor]) -> None:
    weights = dict(module.named_parameters())
    if unknown := tensors.keys() - weights.keys():
        raise UserError(f"its adapter changes weights the base does not have: {join_names(unknown)}")
    if missing := weights.keys() - tensors.keys():
        raise UserError(f"its adapter has no {join_names(missing)}; {DOWNLOAD_AGAIN}")
    for name, weight in weights.items():
        if tensors[name].shape != weight.shape:
            raise UserError(f"its adapter does not fit {name}, which is {tuple(weight.shape)}")
        _assign(weight, tensors[name])


def _add_product(name: str, layer: Any, lora_a: Tensor, lora_b: Tensor) -> None:
    weight = layer.weight
    outputs, inputs = reversed(weight.shape) if is_transposed(layer) else weight.shape
    fits = lora_a.ndim == lora_b.ndim == 2 and lora_a.shape[0] == lora_b.shape[1]
    if not fits or (lora_b.shape[0], lora_a.shape[1]) != (outputs, inputs):
        shapes = f"lora_A is {tuple(lora_a.shape)} and lora_B {tuple(lora_b.shape)}"
        raise UserError(f"its adapter does not fit {name}.weight, which is {tuple(weight.shape)}: {shapes}")
    lora_a, lora_b = (tensor.to(weight.device, torch.float32) for tensor in (lora_a, lora_b))
    _assign(weight, weight.float() + (lora_a.T @ lora_b.T if is_transposed(layer) else lora_b @ lora_a))


def _replace_rows(module: Any, rows: Tensor, token_ids: tuple[int, ...]) -> None:
    weight = module.get_input_embeddings().weight
    if max(token_ids) >= len(weight):
        raise UserError(f"its adapter replaces the embedding of token {max(token_ids)}; the base has {len(weight)}")
    if rows.shape != (len(token_ids), weight.shape[1]):
        raise UserError(f"its adapter's token rows do not fit an embedding of {weight.shape[1]}")
    for token_id, row in zip(token_ids, rows, strict=True):
        _assign(weight[token_id], row)


@torch.no_grad()
def _assign(weight: Tensor | nn.Parameter, value: Tensor) -> None:
    weight.copy_(value)
