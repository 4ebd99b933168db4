"""`key_stats.compute_key_stats` for full visibility on CUDA: two Triton kernels instead of a dozen passes over q, k, v.

The first kernel adds up the queries, and the norms of queries and outputs, in a few slices per head. The second reads
every key and value once. The result is that of `key_stats.compute_key_stats`, which handles every other case.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from floatscope.capture.attention import AttentionCall
from floatscope.capture.key_stats import BASE_STATS, KeyStats, QueryRows
from floatscope.schema import MaskKind

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only install; `supports` reports it
    triton = None

ROWS = 128  # queries one program adds up


def supports(call: AttentionCall) -> bool:
    """Whether the kernels can run the call: full visibility, on CUDA, a head dimension that is a power of two."""
    on_device = call.query.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    has_dim = call.query.shape[-1] in (16, 32, 64, 128, 256) and call.query.shape[-1] == call.value.shape[-1]
    return triton is not None and on_device and call.visibility.kind is MaskKind.FULL and has_dim


if triton is not None:

    @triton.jit
    def _queries(
        Q, O, VALID, SHARE, SUMS, sqb, sqh, sqt, sob, soh, sot, n_q, H, D: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        piece, bh = tl.program_id(0), tl.program_id(1)
        b, h = bh // H, bh % H
        d = tl.arange(0, D)
        total, unit = tl.zeros((D,), tl.float32), tl.zeros((D,), tl.float32)
        q_norm, o_norm = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
        for i0 in range(0, ROWS, BM):
            i = piece * ROWS + i0 + tl.arange(0, BM)
            ok = i < n_q
            ok = ok & (tl.load(VALID + b * n_q + i, mask=ok, other=0) != 0)
            at = i[:, None].to(tl.int64)
            q = tl.load(Q + b * sqb + h * sqh + at * sqt + d[None, :], mask=ok[:, None], other=0.0).to(tl.float32)
            o = tl.load(O + b * sob + h * soh + at * sot + d[None, :], mask=ok[:, None], other=0.0).to(tl.float32)
            norm = tl.sqrt(tl.sum(q * q, 1))
            total += tl.sum(q, 0)
            unit += tl.sum(q / tl.maximum(norm, 1e-30)[:, None], 0)
            q_norm += norm
            o_norm += tl.sqrt(tl.sum(o * o, 1))
        at = SUMS + (bh * tl.num_programs(0) + piece) * (2 * D + 2)
        share = tl.load(SHARE + b)
        tl.store(at + d, total * share)
        tl.store(at + D + d, unit * share)
        tl.store(at + 2 * D, tl.sum(o_norm, 0) * share)
        tl.store(at + 2 * D + 1, tl.sum(q_norm, 0) * share)

    @triton.jit
    def _keys(
        K, V, GRAM, MEANS, VALID, OUT, skb, skh, skt, svb, svh, svt, n_k, scaling, H,
        REP: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, PADDED: tl.constexpr, PROJECTED: tl.constexpr,
        SPLIT: tl.constexpr,
    ):  # fmt: skip
        tile, bh = tl.program_id(0), tl.program_id(1)
        b, h = bh // H, bh % H
        d = tl.arange(0, D)
        j = tile * BN + tl.arange(0, BN)
        inside = j < n_k
        if PADDED:
            inside = inside & (tl.load(VALID + b * n_k + j, mask=inside, other=0) != 0)
        mean = tl.load(MEANS + bh * (2 * D + 2) + d)
        unit = tl.load(MEANS + bh * (2 * D + 2) + D + d)
        row = j[:, None].to(tl.int64)
        k = tl.load(K + b * skb + (h // REP) * skh + row * skt + d[None, :], mask=inside[:, None], other=0.0)
        raw = tl.load(V + b * svb + (h // REP) * svh + row * svt + d[None, :], mask=inside[:, None], other=0.0)
        k, v = k.to(tl.float32), raw.to(tl.float32)
        k_norm = tl.sqrt(tl.sum(k * k, 1))
        out = OUT + bh * 5 * n_k + j
        tl.store(out, tl.sum(k * mean[None, :], 1) * scaling, mask=j < n_k)
        tl.store(out + n_k, tl.sum(k * unit[None, :], 1) / tl.maximum(k_norm, 1e-30), mask=j < n_k)
        tl.store(out + 2 * n_k, k_norm, mask=j < n_k)
        tl.store(out + 3 * n_k, tl.sqrt(tl.sum(v * v, 1)), mask=j < n_k)
        if PROJECTED:
            gram = tl.load(GRAM + h * D * D + d[:, None] * D + d[None, :])
            if SPLIT:  # bf16 values are exact; the Gram matrix is split into two bf16 terms of 8 bits each
                high = gram.to(tl.bfloat16)
                low = (gram - high.to(tl.float32)).to(tl.bfloat16)
                projected = tl.dot(raw, high, tl.dot(raw, low))
            else:
                projected = tl.dot(v, gram, input_precision="tf32x3")
            tl.store(out + 4 * n_k, tl.sqrt(tl.maximum(tl.sum(projected * v, 1), 0.0)), mask=j < n_k)
        else:
            tl.store(out + 4 * n_k, tl.where(inside, float("nan"), 0.0), mask=j < n_k)


def compute_key_stats(call: AttentionCall, output: Tensor, rows: QueryRows, gram: Tensor | None) -> KeyStats:
    """Compute the statistics of every head and key in fp32; the arguments are those of `key_stats`."""
    B, H, n_q, D = call.query.shape
    n_k, device = call.visibility.keys, call.query.device
    q, k, v, o = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.query, call.key, call.value, output))
    pieces = triton.cdiv(n_q, ROWS)
    sums = torch.empty(B, H, pieces, 2 * D + 2, device=device)
    _queries[(pieces, B * H)](
        q, o, rows.valid, rows.share, sums, *q.stride()[:3], *o.stride()[:3], n_q, H, D=D, BM=32, ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    means = sums.sum(2)
    out = torch.empty(B, H, len(BASE_STATS), n_k, device=device)
    pad = call.visibility.valid
    _keys[(triton.cdiv(n_k, 128), B * H)](
        k, v, gram, means, pad, out, *k.stride()[:3], *v.stride()[:3], n_k, call.scaling, H,
        REP=call.repeats, D=D, BN=128, PADDED=pad is not None, PROJECTED=gram is not None,
        SPLIT=v.dtype == torch.bfloat16, num_warps=8,
    )  # fmt: skip
    return KeyStats(out, means[..., 2 * D], means[..., 2 * D + 1])
