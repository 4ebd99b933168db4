"""Attention under a structured mask as a Triton kernel on CUDA, with or without one bias.

    if supports(call):
        output, lse = attend(call)
        lse = compute_lse(call)          # where another kernel gives the output but not its log-sum-exp

A program owns a block of queries and loops over the keys they may see, as flash attention does: a block-causal mask or
a window is arithmetic on positions, never a tensor. A bias is added to the scores of the selected rows; a row's own key
is never hidden from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from floatscope.capture import received_kernel
from floatscope.capture.attention import AttentionCall

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only install; `received_kernel.unsupported_reason` reports it
    triton = None

if triton is not None:

    @triton.jit
    def _attend(
        Q, K, V, SPAN, BIAS, SELECTED, OUT, LSE,
        sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sbb, sbh, n_q, n_k, offset, size, scale, H,
        REP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
        MASK: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, OUTPUT: tl.constexpr, BIASED: tl.constexpr,
        HAS_SELECTION: tl.constexpr,
    ):  # fmt: skip
        tile, bh = tl.program_id(0), tl.program_id(1)
        b, h = bh // H, bh % H
        i = tile * BM + tl.arange(0, BM)
        d = tl.arange(0, D)
        first, stop = 0, n_k
        if PADDED:
            first, stop = tl.load(SPAN + 2 * b), tl.load(SPAN + 2 * b + 1)
        ok = i < n_q
        q = tl.load(Q + b * sqb + h * sqh + i[:, None].to(tl.int64) * sqt + d[None, :], mask=ok[:, None], other=0.0)
        row_max = tl.full((BM,), -1e30, tl.float32)
        total = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, D if OUTPUT else 1), tl.float32)
        at, last = i + offset, tile * BM + BM - 1 + offset
        sees_to, begin, end = at + 1, first, stop  # a row sees the keys before `sees_to`
        if MASK == "block":
            sees_to = first + (tl.maximum(at - first, 0) // size + 1) * size
            end = tl.minimum(stop, first + (tl.maximum(last - first, 0) // size + 1) * size)
        elif MASK != "full":
            end = tl.minimum(stop, last + 1)
        if MASK == "window":
            begin = tl.maximum(first, tile * BM + offset - size + 1)
        for j0 in range(begin // BN * BN, end, BN):
            j = j0 + tl.arange(0, BN)
            inside = (j >= first) & (j < stop)
            kp = K + b * skb + (h // REP) * skh + j[None, :].to(tl.int64) * skt + d[:, None]
            k = tl.load(kp, mask=inside[None, :], other=0.0)
            if HALF:
                s = tl.dot(q, k)
            else:
                s = tl.dot(q, k, input_precision="ieee")
            x = s * scale
            if BIASED:
                bias = tl.load(BIAS + b * sbb + h * sbh + j, mask=inside, other=0.0)
                bias = tl.maximum(bias * 1.4426950408889634, -1e30)
                own = (at[:, None] == j[None, :]) & (bias < -1e29)[None, :]
                added = tl.where(own, 0.0, bias[None, :])
                if HAS_SELECTION:
                    selected = tl.load(SELECTED + b * n_q + i, mask=ok, other=0)
                    added = tl.where(selected[:, None] != 0, added, 0.0)
                x += added
            visible = inside[None, :]
            if MASK != "full":
                visible = visible & (j[None, :] < sees_to[:, None])
            if MASK == "window":
                visible = visible & (j[None, :] > (at - size)[:, None])
            x = tl.where(visible & (x > -1e29), x, -1e30)
            new_max = tl.maximum(row_max, tl.max(x, 1))
            p = tl.where(x > -1e29, tl.exp2(x - new_max[:, None]), 0.0)
            rescale = tl.exp2(row_max - new_max)
            total = total * rescale + tl.sum(p, 1)
            if OUTPUT:
                vp = V + b * svb + (h // REP) * svh + j[:, None].to(tl.int64) * svt + d[None, :]
                v = tl.load(vp, mask=inside[:, None], other=0.0)
                acc = acc * rescale[:, None]
                if HALF:
                    acc = tl.dot(p.to(v.dtype), v, acc)
                else:
                    acc = tl.dot(p, v, acc, input_precision="ieee")
            row_max = new_max
        valid = total > 0
        if PADDED:
            valid = valid & (at >= first) & (at < stop)
        total = tl.where(valid, total, 1.0)
        lse = tl.where(valid, (row_max + tl.log2(total)) / 1.4426950408889634, 1e30)
        tl.store(LSE + bh * n_q + i, lse, mask=ok)
        if OUTPUT:
            out = tl.where(valid[:, None], acc / total[:, None], 0.0)
            tl.store(OUT + (bh * n_q + i)[:, None].to(tl.int64) * D + d[None, :], out, mask=ok[:, None])


def supports(call: AttentionCall) -> bool:
    """Whether this kernel can run the call: a mask with structure, no gradient, and no edit of the softmax but one bias."""
    visibility, edits = call.visibility, call.edits
    if call.value.shape[-1] != call.query.shape[-1]:
        return False
    if edits is not None and edits.changes_attention and not received_kernel.has_single_bias(edits):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in (call.query, call.key, call.value)):
        return False  # the kernel has no backward
    if visibility.valid is not None and visibility.offset + visibility.queries != visibility.keys:
        return False  # the padding of the keys says nothing about such rows
    return received_kernel.unsupported_reason(call) is None


def attend(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of a call; padding rows are 0 and 1e30."""
    out = torch.empty(call.query.shape, device=call.query.device, dtype=call.query.dtype)
    return out, _launch(call, out)


def compute_lse(call: AttentionCall) -> Tensor:
    """Return the log-sum-exp of each row of a call; 1e30 on padding rows."""
    return _launch(call, None)


def block_sizes(dim: int, is_half: bool) -> dict[str, int]:
    """Block sizes whose q, k, v and sums fit the registers and the shared memory of a Hopper GPU."""
    if not is_half:
        rows = 32 if dim <= 256 else 16
        return {"BM": rows, "BN": rows, "num_warps": 4, "num_stages": 2 if dim <= 256 else 1}
    if dim <= 128:
        return {"BM": 128, "BN": 64, "num_warps": 8 if dim == 128 else 4, "num_stages": 2}
    return {"BM": 64, "BN": 64 if dim == 256 else 32, "num_warps": 8, "num_stages": 2}


def _launch(call: AttentionCall, out: Tensor | None) -> Tensor:
    """Fill `out`, if there is one, and return the log-sum-exp."""
    visibility, (B, H, n_q, D) = call.visibility, call.query.shape
    bias, selected = received_kernel.single_bias(call)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.query, call.key, call.value))
    is_half = call.query.dtype != torch.float32
    lse = torch.empty(B, H, n_q, device=q.device)
    size = block_sizes(D, is_half)
    _attend[(triton.cdiv(n_q, size["BM"]), B * H)](
        q, k, v, None if visibility.valid is None else visibility.valid_spans(q.device), bias, selected, out, lse,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *received_kernel.bias_strides(bias), n_q, visibility.keys,
        visibility.offset, visibility.size, call.scaling * received_kernel.LOG2E, H,
        REP=call.repeats, D=D, MASK=visibility.kind.value, PADDED=visibility.valid is not None, HALF=is_half,
        OUTPUT=out is not None, BIASED=bias is not None, HAS_SELECTION=selected is not None, **size,
    )  # fmt: skip
    return lse
