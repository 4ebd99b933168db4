"""One attention call, and how it runs with the model's own fused kernel.

    result = attend(AttentionCall(q, k, v, Visibility.causal(512, 512), scaling=q.shape[-1] ** -0.5))
    result.output, result.lse                 # [batch, head, query, value_dim], [batch, head, query]

PyTorch chooses the fused kernel exactly as `F.scaled_dot_product_attention` does (cuDNN on Hopper); it is called by
name because only that returns the log-sum-exp. Padding is cut away instead of masked: each sample runs on its own valid
span, so a padded batch gives the result of single samples and no mask is built. Masks that these kernels do not know
(windows, blocks, rules) are expanded for a block of queries at a time, never to [T, T]; on CUDA `attention_kernel` runs
windows and blocks without a mask (`edited_attention` chooses).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend

from floatscope.capture.edit_tensors import EditTensors
from floatscope.capture.visibility import HIDDEN_SCORE, Visibility
from floatscope.compat import (
    choose_sdpa_kernel,
    run_cpu_flash_kernel,
    run_cudnn_kernel,
    run_efficient_kernel,
    run_flash_kernel,
)
from floatscope.schema import MaskKind

MASK_BLOCK = 2**24
"""Elements of an expanded mask that exist at a time, where a kernel needs a mask."""

CUDA_KERNELS = {
    SDPBackend.CUDNN_ATTENTION: run_cudnn_kernel,
    SDPBackend.FLASH_ATTENTION: run_flash_kernel,
    SDPBackend.EFFICIENT_ATTENTION: run_efficient_kernel,
}
"""The kernels that return the log-sum-exp."""


@dataclass(frozen=True)
class AttentionCall:
    """softmax(scaling · q kᵀ, where visible) v, with q and k as the kernel receives them.

    That is after RoPE, with KV heads not repeated. `edits` holds the tensors of an intervention; None: no intervention.
    """

    query: Float[Tensor, "batch head query dim"]
    key: Float[Tensor, "batch kv_head key dim"]
    value: Float[Tensor, "batch kv_head key value_dim"]
    visibility: Visibility
    scaling: float
    edits: EditTensors | None = None

    @property
    def repeats(self) -> int:
        """Query heads per KV head: query head h reads KV head h // repeats."""
        return self.query.shape[1] // self.key.shape[1]

    def unpadded_parts(self) -> Iterator[tuple[slice, slice, slice, AttentionCall]]:
        """Yield (batch, query, key) slices and the call inside them, without padding; one part if nothing is padded."""
        if self.visibility.valid is None:
            everything = slice(0, len(self.query)), slice(0, self.visibility.queries), slice(0, self.visibility.keys)
            yield *everything, self
            return
        for b in range(len(self.query)):
            visibility, rows, keys = self.visibility.unpadded_sample(b)
            q, k, v = self.query[b : b + 1, :, rows], self.key[b : b + 1, :, keys], self.value[b : b + 1, :, keys]
            edits = None if self.edits is None else self.edits.crop(b, rows, keys)
            yield slice(b, b + 1), rows, keys, AttentionCall(q, k, v, visibility, self.scaling, edits)


@dataclass(frozen=True)
class AttentionResult:
    """The output of a call, and the log-sum-exp of each row (1e30 on padding rows; None if the kernel returns none)."""

    output: Float[Tensor, "batch head query value_dim"]
    lse: Float[Tensor, "batch head query"] | None


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute fp32 products in fp32, whatever the caller set for the model (TF32 keeps 10 bits)."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def attend(call: AttentionCall) -> AttentionResult:
    """Run a call without edits as the model would; padding rows are zeros.

    `edited_attention.attend_with_edits` runs calls with edits.
    """
    assert call.edits is None
    if call.visibility.valid is None:
        return _attend_unpadded(call)
    B, H, Q, _ = call.query.shape
    out = call.query.new_zeros(B, H, Q, call.value.shape[-1])
    lse = torch.full((B, H, Q), -HIDDEN_SCORE, device=out.device)
    has_lse = True
    for batch, rows, _, part in call.unpadded_parts():
        if part.visibility.queries == 0 or part.visibility.keys == 0:
            continue
        result = _attend_unpadded(part)
        out[batch, :, rows] = result.output
        if result.lse is None:
            has_lse = False
        else:
            lse[batch, :, rows] = result.lse
    return AttentionResult(out, lse if has_lse else None)


def expand_mask(visibility: Visibility, rows: slice, keys: slice, like: Tensor) -> Tensor | None:
    """What a kernel adds to the scores of these rows: the caller's own additive mask unchanged, else 0 or -inf.

    None: nothing is hidden. `like` gives the dtype and the device.
    """
    mask = visibility.mask
    own = None if mask is None or not mask.is_floating_point() else mask[:, :, rows, keys]
    if own is not None and visibility.valid is None:
        return own.clone() if own.is_cuda else own  # CUDA kernels read masks from an aligned start
    visible = visibility.block_mask(rows, keys, like.device)
    return None if visible is None else torch.where(visible, like.new_zeros(()) if own is None else own, -torch.inf)


def needs_mask(visibility: Visibility) -> bool:
    """Whether torch's kernels need an expanded mask, because SDPA's `is_causal` does not say which keys a row sees.

    SDPA aligns a rectangular causal mask with key 0. Padding is cut away and needs no mask.
    """
    return not (visibility.is_known_to_show_all or _is_square_causal(visibility))


def _is_square_causal(visibility: Visibility) -> bool:
    return visibility.kind is MaskKind.CAUSAL and visibility.offset == 0 and visibility.queries == visibility.keys


def _attend_unpadded(call: AttentionCall) -> AttentionResult:
    visibility = call.visibility
    if visibility.valid is None and not needs_mask(visibility):
        return _run_kernel(call, None, not visibility.is_known_to_show_all)
    return _attend_by_blocks(call)


def _attend_by_blocks(call: AttentionCall) -> AttentionResult:
    """Run a block of queries at a time, with an expanded mask."""
    visibility, heads = call.visibility, call.query.shape[1] if call.visibility.is_per_head else 1
    step = max(1, MASK_BLOCK // (visibility.keys * heads * len(call.query)))
    outputs, lses = [], []
    for i in range(0, visibility.queries, step):
        rows = slice(i, min(i + step, visibility.queries))
        keys = visibility.key_span(rows)
        mask = expand_mask(visibility, rows, keys, call.query)
        block = replace(call, query=call.query[:, :, rows], key=call.key[:, :, keys], value=call.value[:, :, keys])
        result = _run_kernel(block, mask, False)
        outputs.append(result.output)
        lses.append(result.lse)
    known = [lse for lse in lses if lse is not None]
    return AttentionResult(torch.cat(outputs, 2), torch.cat(known, 2) if len(known) == len(lses) else None)


def _run_kernel(call: AttentionCall, mask: Tensor | None, causal: bool) -> AttentionResult:
    """Run the kernel that PyTorch chooses, by name where it then returns the log-sum-exp."""
    q, k, v, scale = call.query, call.key, call.value, call.scaling
    grouped = call.repeats > 1
    if mask is not None and grouped and q.is_cuda:  # no fused CUDA kernel takes both
        k, v, grouped = k.repeat_interleave(call.repeats, 1), v.repeat_interleave(call.repeats, 1), False
    choice = choose_sdpa_kernel(q, k, v, mask, causal=causal, scale=scale, grouped=grouped)
    if q.device.type == "cpu" and choice == SDPBackend.FLASH_ATTENTION:
        return AttentionResult(*run_cpu_flash_kernel(q, k, v, mask, causal, scale))
    if q.is_cuda and mask is None and q.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0 and choice in CUDA_KERNELS:
        return AttentionResult(*CUDA_KERNELS[choice](q, k, v, causal, scale))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return AttentionResult(out, None)
