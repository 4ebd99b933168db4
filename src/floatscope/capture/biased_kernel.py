"""Attention with one bias as a Triton kernel: full, causal and key-padded, on CUDA.

    if supports(call):
        output, lse = attend(call)

A program owns a block of queries and loops over the keys, as flash attention does. It adds the bias of a key to the
scores of the selected rows; a row's own key is never hidden from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from floatscope.capture import received_kernel
from floatscope.capture.attention import AttentionCall
from floatscope.schema import MaskKind

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only install; `received_kernel.unsupported_reason` reports it
    triton = None

if triton is not None:

    @triton.jit
    def _attend(
        Q, K, V, SPAN, BIAS, SELECTED, OUT, LSE,
        sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sbb, sbh, n_q, n_k, offset, scale, H,
        REP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
        CAUSAL: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, HAS_SELECTION: tl.constexpr,
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
        acc = tl.zeros((BM, D), tl.float32)
        end = n_k
        if CAUSAL:
            end = tl.minimum(n_k, tile * BM + BM + offset)
        for j0 in range(0, end, BN):
            j = j0 + tl.arange(0, BN)
            inside = (j >= first) & (j < stop)
            kp = K + b * skb + (h // REP) * skh + j[None, :].to(tl.int64) * skt + d[:, None]
            vp = V + b * svb + (h // REP) * svh + j[:, None].to(tl.int64) * svt + d[None, :]
            k = tl.load(kp, mask=inside[None, :], other=0.0)
            v = tl.load(vp, mask=inside[:, None], other=0.0)
            bias = tl.load(BIAS + b * sbb + h * sbh + j, mask=inside, other=0.0)
            bias = tl.maximum(bias * 1.4426950408889634, -1e30)
            if HALF:
                s = tl.dot(q, k)
            else:
                s = tl.dot(q, k, input_precision="ieee")
            own = ((i + offset)[:, None] == j[None, :]) & (bias < -1e29)[None, :]
            added = tl.where(own, 0.0, bias[None, :])
            if HAS_SELECTION:
                selected = tl.load(SELECTED + b * n_q + i, mask=ok, other=0)
                added = tl.where(selected[:, None] != 0, added, 0.0)
            x = s * scale + added
            visible = inside[None, :]
            if CAUSAL:
                visible = visible & ((i + offset)[:, None] >= j[None, :])
            x = tl.where(visible & (x > -1e29), x, -1e30)
            new_max = tl.maximum(row_max, tl.max(x, 1))
            p = tl.where(x > -1e29, tl.exp2(x - new_max[:, None]), 0.0)
            rescale = tl.exp2(row_max - new_max)
            total = total * rescale + tl.sum(p, 1)
            acc = acc * rescale[:, None]
            if HALF:
                acc = tl.dot(p.to(v.dtype), v, acc)
            else:
                acc = tl.dot(p, v, acc, input_precision="ieee")
            row_max = new_max
        valid = (i + offset >= first) & (i + offset < stop) & (total > 0)
        total = tl.where(valid, total, 1.0)
        out = tl.where(valid[:, None], acc / total[:, None], 0.0)
        lse = tl.where(valid, (row_max + tl.log2(total)) / 1.4426950408889634, 1e30)
        tl.store(OUT + (bh * n_q + i)[:, None].to(tl.int64) * D + d[None, :], out, mask=ok[:, None])
        tl.store(LSE + bh * n_q + i, lse, mask=ok)


def supports(call: AttentionCall) -> bool:
    """Whether this kernel can run the call: one bias, and no other edit that changes the softmax of a row."""
    edits = call.edits
    if edits is None or not received_kernel.has_single_bias(edits) or call.value.shape[-1] != call.query.shape[-1]:
        return False
    return received_kernel.unsupported_reason(call) is None


def attend(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of a call with one bias."""
    visibility, (B, H, n_q, D) = call.visibility, call.query.shape
    bias, selected = received_kernel.single_bias(call)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.query, call.key, call.value))
    is_half = call.query.dtype != torch.float32
    out = torch.empty(B, H, n_q, D, device=q.device, dtype=q.dtype)
    lse = torch.empty(B, H, n_q, device=q.device)
    size = {"BM": 128, "BN": 64} if is_half and D <= 128 else {"BM": 32, "BN": 32}
    _attend[(triton.cdiv(n_q, size["BM"]), B * H)](
        q, k, v, None if visibility.valid is None else visibility.valid_spans(q.device), bias, selected, out, lse,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *received_kernel.bias_strides(bias), n_q, visibility.keys,
        visibility.offset, call.scaling * received_kernel.LOG2E, H,
        REP=call.repeats, D=D, CAUSAL=visibility.kind is MaskKind.CAUSAL, PADDED=visibility.valid is not None, HALF=is_half,
        HAS_SELECTION=selected is not None,
        num_warps=8 if is_half and D >= 128 else 4, num_stages=2, **size,
    )  # fmt: skip
    return out, lse
