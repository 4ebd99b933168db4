"""One attention call, and running it with the model's own fastest kernel.

`attend(call)` gives the output and the log-sum-exp of every row. Which fused kernel runs is PyTorch's choice, the same
one `F.scaled_dot_product_attention` would make (cuDNN on Hopper); it is called by name only because that is how to get
its log-sum-exp. Padding is handled by not computing it: each sample runs on its own valid span, so a padded batch gives
what single samples give, and no mask is built. Where a structure has no kernel (windows, blocks, rules), queries run in
blocks with an expanded mask, never [T, T].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from floatscope.capture.changes import Changes
from floatscope.capture.visibility import HIDDEN, Visibility

MASK_BLOCK = 2**24
"""Elements of an expanded mask alive at a time, where a kernel needs one."""

FLASH, EFFICIENT, CUDNN = 1, 2, 3  # torch.nn.attention.SDPBackend, as torch._fused_sdp_choice returns them


@dataclass(frozen=True)
class Attention:
    """softmax(scaling · q kᵀ, where visible) v, with q and k as the kernel gets them: after RoPE, KV unrepeated."""

    query: Float[Tensor, "batch head query dim"]
    key: Float[Tensor, "batch kv_head key dim"]
    value: Float[Tensor, "batch kv_head key value_dim"]
    visible: Visibility
    scaling: float
    changes: Changes | None = None  # what an intervention makes of it

    @property
    def repeats(self) -> int:
        """Query heads per KV head: query head h reads KV head h // repeats."""
        return self.query.shape[1] // self.key.shape[1]

    def samples(self) -> Iterator[tuple[slice, slice, slice, Attention]]:
        """(batch, query, key) slices and the call inside them, padding cut away; one piece when nothing is padded."""
        if self.visible.valid is None:
            everything = slice(0, len(self.query)), slice(0, self.visible.queries), slice(0, self.visible.keys)
            yield *everything, self
            return
        for b in range(len(self.query)):
            visible, rows, keys = self.visible.sample(b)
            q, k, v = self.query[b : b + 1, :, rows], self.key[b : b + 1, :, keys], self.value[b : b + 1, :, keys]
            changes = None if self.changes is None else self.changes.cut(b, rows, keys)
            yield slice(b, b + 1), rows, keys, Attention(q, k, v, visible, self.scaling, changes)


@dataclass(frozen=True)
class Attended:
    output: Float[Tensor, "batch head query value_dim"]
    lse: Float[Tensor, "batch head query"] | None  # None: this kernel does not tell; 1e30 on padding rows


@contextmanager
def full_precision() -> Iterator[None]:
    """fp32 products in fp32, whatever the caller allowed for the model (TF32 keeps 10 bits)."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def attend(call: Attention) -> Attended:
    """Run the call as the model would. Rows of padding come out as zeros. Under an intervention: `changed.attend`."""
    assert call.changes is None
    if call.visible.valid is None:
        return _unpadded(call)
    B, H, Q, _ = call.query.shape
    out = call.query.new_zeros(B, H, Q, call.value.shape[-1])
    lse = torch.full((B, H, Q), -HIDDEN, device=out.device)
    known = True
    for batch, rows, _, one in call.samples():
        if one.visible.queries == 0 or one.visible.keys == 0:
            continue
        part = _unpadded(one)
        out[batch, :, rows] = part.output
        if part.lse is None:
            known = False
        else:
            lse[batch, :, rows] = part.lse
    return Attended(out, lse if known else None)


def _unpadded(call: Attention) -> Attended:
    see = call.visible
    square = see.offset == 0 and see.queries == see.keys
    if see.kind == "full" and see.valid is None:
        return _kernel(call, None, False)
    if see.kind == "causal" and see.valid is None and (square or see.queries == 1):
        # One cached query sees every key; SDPA's is_causal would align it with key 0.
        last_sees_all = see.queries == 1 and see.offset == see.keys - 1
        if square or last_sees_all:
            return _kernel(call, None, square and see.queries > 1)
    return _by_blocks(call)


def _by_blocks(call: Attention) -> Attended:
    see, heads = call.visible, call.query.shape[1] if call.visible.per_head else 1
    step = max(1, MASK_BLOCK // (see.keys * heads * len(call.query)))
    outputs, lses = [], []
    for i in range(0, see.queries, step):
        rows = slice(i, min(i + step, see.queries))
        keys = see.span(rows)
        mask = expanded(see, rows, keys, call.query)
        piece = replace(call, query=call.query[:, :, rows], key=call.key[:, :, keys], value=call.value[:, :, keys])
        part = _kernel(piece, mask, False)
        outputs.append(part.output)
        lses.append(part.lse)
    known = [lse for lse in lses if lse is not None]
    return Attended(torch.cat(outputs, 2), torch.cat(known, 2) if len(known) == len(lses) else None)


def expanded(see: Visibility, rows: slice, keys: slice, like: Tensor) -> Tensor | None:
    """What a kernel adds to the scores of some rows: the caller's own additive mask as it is, else 0 or -inf."""
    additive = see.mask is not None and see.mask.is_floating_point()
    own = see.mask[:, :, rows, keys] if see.mask is not None and additive else like.new_zeros(())
    if additive and see.valid is None:
        return own.clone() if own.is_cuda else own  # CUDA kernels read masks from an aligned start
    seen = see.allowed(rows, keys, like.device)
    return None if seen is None else torch.where(seen, own, -torch.inf)


def _kernel(call: Attention, mask: Tensor | None, causal: bool) -> Attended:
    q, k, v, scale = call.query, call.key, call.value, call.scaling
    grouped = call.repeats > 1
    aten = torch.ops.aten
    if mask is not None and grouped and q.is_cuda:  # no fused CUDA kernel takes both
        k, v, grouped = k.repeat_interleave(call.repeats, 1), v.repeat_interleave(call.repeats, 1), False
    choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
    if q.device.type == "cpu" and choice == FLASH:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return Attended(out, lse)
    if q.is_cuda and mask is None and q.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0:
        if choice == CUDNN:
            ran = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
            out, lse = ran[:2]
            return Attended(out, lse.reshape(out.shape[:3]))
        if choice == FLASH:
            out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
            return Attended(out, lse)
        if choice == EFFICIENT:
            out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
            return Attended(out, lse[..., : q.shape[2]])  # the kernel pads rows to a multiple of 32
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return Attended(out, None)
