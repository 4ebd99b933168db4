"""Block-causal attention of a transformers module: a row sees its own block and all blocks before it.

    use_block_causal(module, 32)      # from now on module(input_ids) attends block-causally
    find_block_size(module)           # 32

Row i sees key j if ⌊j / size⌋ ≤ ⌊i / size⌋; blocks count from the first valid token of a sample. The module runs
transformers' SDPA with a boolean mask. The size is a part of the name of its attention implementation
(`block_causal_32`), so a copy of its config has it too, and a watch finds it and passes on the structure instead of a
mask. With a key-value cache the same rule holds: queries stand after the cached keys.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from floatscope.capture.visibility import Rule, Visibility
from floatscope.compat import (
    attention_name,
    has_attention_name,
    mask_kind,
    sdpa_attention_function,
    uses_attention_interface,
)
from floatscope.errors import UserError

NAME_PATTERN = re.compile(r"(?:\w+_)?block_causal_(\d+)")


def block_causal_name(size: int) -> str:
    """The name of the attention implementation with blocks of `size` positions."""
    return f"block_causal_{size}"


def use_block_causal(module: nn.Module, size: int) -> None:
    """Give a transformers module block-causal attention, for every forward from now on."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if not uses_attention_interface(module):
        raise UserError(
            f"{type(module).__name__} does not use transformers' AttentionInterface, so it cannot attend in blocks of"
            f" {size}; leave out block_size="
        )
    name = block_causal_name(size)
    AttentionInterface.register(name, sdpa_attention_function())
    AttentionMaskInterface.register(name, partial(_expand_mask, size))
    module.set_attn_implementation(name)  # type: ignore[operator]


def find_block_size(module: nn.Module) -> int | None:
    """The block size of a module, watched or not; None if its attention is not block-causal."""
    return config_block_size(getattr(module, "config", None))


def config_block_size(config: Any) -> int | None:
    """The block size in the config of a module."""
    match = NAME_PATTERN.fullmatch(str(attention_name(config))) if has_attention_name(config) else None
    return None if match is None else int(match[1])


def block_visibility(
    size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Rule | None = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Visibility:
    """The structure of a block-causal mask, from the arguments of a mask function of transformers."""
    if mask_kind(mask_function) is None:  # a sliding window, chunks, or several sequences in one row
        raise UserError(
            "block-causal attention cannot be combined with another mask of the model; give padding as a 2-D"
            " attention_mask, one sequence in each row"
        )
    valid = valid_keys(attention_mask, kv_length, int(kv_offset))
    return Visibility.block(q_length, kv_length, size, valid, int(q_offset) - int(kv_offset))


def valid_keys(attention_mask: Tensor | None, length: int, offset: int) -> Tensor | None:
    """The padding of the keys from a 2-D attention mask of transformers, which may be shorter; None: no padding."""
    if attention_mask is None:
        return None
    valid = F.pad(attention_mask.bool(), (0, max(0, length + offset - attention_mask.shape[-1])))
    return valid[:, offset : offset + length]


def _expand_mask(size: int, *, device: torch.device | str = "cpu", **arguments: Any) -> Tensor:
    """The mask function of transformers: a boolean mask [batch|1, 1, query, key]."""
    visibility = block_visibility(size, **arguments)
    visible = visibility.block_mask(slice(0, visibility.queries), slice(0, visibility.keys), device)
    assert visible is not None
    return visible
