"""Attention with one bias as one Triton kernel: full, causal and key-padded, on CUDA.

A program owns a block of queries and walks over the keys, as flash attention does, and adds the bias of a key to its
scores in the rows that have it; a row's own key is never hidden from it. It gives the output and the log-sum-exp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from floatscope.capture import kernel
from floatscope.capture.attention import Attention

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only install; `kernel.unserved` says so
    triton = None

if triton is not None:

    @triton.jit
    def _attend(
        Q, K, V, SPAN, BIAS, CHOSEN, OUT, LSE,
        sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sbb, sbh, n_q, n_k, offset, scale, H,
        REP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
        CAUSAL: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, SOME: tl.constexpr,
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
        most = tl.full((BM,), -1e30, tl.float32)
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
            if SOME:
                chosen = tl.load(CHOSEN + b * n_q + i, mask=ok, other=0)
                added = tl.where(chosen[:, None] != 0, added, 0.0)
            x = s * scale + added
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & ((i + offset)[:, None] >= j[None, :])
            x = tl.where(seen & (x > -1e29), x, -1e30)
            higher = tl.maximum(most, tl.max(x, 1))
            p = tl.where(x > -1e29, tl.exp2(x - higher[:, None]), 0.0)
            fade = tl.exp2(most - higher)
            total = total * fade + tl.sum(p, 1)
            acc = acc * fade[:, None]
            if HALF:
                acc = tl.dot(p.to(v.dtype), v, acc)
            else:
                acc = tl.dot(p, v, acc, input_precision="ieee")
            most = higher
        stands = (i + offset >= first) & (i + offset < stop) & (total > 0)
        whole = tl.where(stands, total, 1.0)
        out = tl.where(stands[:, None], acc / whole[:, None], 0.0)
        lse = tl.where(stands, (most + tl.log2(whole)) / 1.4426950408889634, 1e30)
        tl.store(OUT + (bh * n_q + i)[:, None].to(tl.int64) * D + d[None, :], out, mask=ok[:, None])
        tl.store(LSE + bh * n_q + i, lse, mask=ok)


def serves(call: Attention) -> bool:
    """Whether this kernel takes the call: one bias, and nothing else that a row's softmax depends on."""
    changes = call.changes
    if changes is None or not kernel.one_bias(changes) or call.value.shape[-1] != call.query.shape[-1]:
        return False
    return kernel.unserved(call) is None


def attend(call: Attention) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp."""
    see, (B, H, n_q, D) = call.visible, call.query.shape
    bias, chosen = kernel.bias_of(call)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.query, call.key, call.value))
    half = call.query.dtype != torch.float32
    out = torch.empty(B, H, n_q, D, device=q.device, dtype=q.dtype)
    lse = torch.empty(B, H, n_q, device=q.device)
    size = {"BM": 128, "BN": 64} if half and D <= 128 else {"BM": 32, "BN": 32}
    _attend[(triton.cdiv(n_q, size["BM"]), B * H)](
        q, k, v, None if see.valid is None else see.spans(q.device), bias, chosen, out, lse,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *kernel.strides_of(bias), n_q, see.keys, see.offset, call.scaling * kernel.LOG2E, H,
        REP=call.repeats, D=D, CAUSAL=see.kind == "causal", PADDED=see.valid is not None, HALF=half,
        SOME=chosen is not None,
        num_warps=8 if half and D >= 128 else 4, num_stages=2, **size,
    )  # fmt: skip
    return out, lse
