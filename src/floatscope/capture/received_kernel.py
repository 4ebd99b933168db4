"""The reduction of `backends` as one Triton kernel on CUDA: full, causal, block-causal and windowed, with padding.

A program owns a block of keys and loops over the queries that may see one of them. It recomputes the scores kᵀq once, turns them into
probabilities with the log-sum-exp of the model's own kernel, and multiplies them with the group weights: O(T·G) memory,
no online softmax, no rescaling. The same probabilities yield three results:

    R[g, j]    accumulated in registers by the program that owns key j
    entropy    Σ_i w_i Σ_j p·log p, in the same way
    A · carry  a sum over keys, so several programs add to it: by Hopper's copy engine (one bulk reduction per block
               instead of a thousand atomics; plain atomics elsewhere) and in fixed point, because integer sums do not
               depend on their order

In bf16 and fp16 the probabilities enter the product as fp16, scaled by 2^15 so that they are normal numbers down to
2e-9: 11 bits instead of bf16's 8, an error of 3e-4 for a single row. In fp32 all products are fp32.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

from floatscope.capture.attention import AttentionCall
from floatscope.capture.edit_tensors import EditTensors
from floatscope.capture.reduction_spec import TILE, ReductionResult, ReductionSpec
from floatscope.errors import UserError

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # a CPU-only install; `unsupported_reason` reports it
    triton = None

LOG2E = 1.4426950408889634
SHIFT = 15  # fp16 stores p · 2^15
HEAD_DIMS = (16, 32, 64, 128, 256, 512)
FIXED = 2.0**24  # fixed point of A · carry: steps of 6e-8, no overflow up to 127 heads


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why this kernel cannot run the call, or None if it can."""
    visibility, D = call.visibility, call.query.shape[-1]
    if triton is None:
        return "triton is not installed"
    if not call.query.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the tensors are on {call.query.device.type}"
    if call.query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{call.query.dtype} is not float32, bfloat16 or float16"
    if not visibility.structure.is_known:
        return f"{visibility.kind} masks use the blocked backend"
    if call.edits is not None and call.edits.changes_attention and not has_single_bias(call.edits):
        return "moved mass, virtual sinks and several biases use the blocked backend"
    if D not in HEAD_DIMS:
        return f"head dimension {D} is not a power of two between 16 and 512"
    if visibility.has_padding_holes:
        return "the padding has holes"
    return None


if triton is not None:

    @triton.jit
    def _receive(
        Q, K, LSE, W, E, E_WEIGHT, E_TOTAL, Y, SPAN, BIAS, SELECTED, R, ENT, OUT,
        sqb, sqh, sqt, skb, skh, skt, sbb, sbh, n_q, n_k, offset, size, scale, H, n_y, y0,
        REP: tl.constexpr, D: tl.constexpr, G: tl.constexpr,
        BM: tl.constexpr, BN: tl.constexpr,
        MASK: tl.constexpr, PADDED: tl.constexpr, EVEN: tl.constexpr, ENTROPY: tl.constexpr, CARRY: tl.constexpr,
        BULK: tl.constexpr, HALF: tl.constexpr, SHIFT: tl.constexpr, FIXED: tl.constexpr, BIASED: tl.constexpr, HAS_SELECTION: tl.constexpr,
    ):  # fmt: skip
        tile, bh = tl.program_id(0), tl.program_id(1)
        b, h = bh // H, bh % H
        j = tile * BN + tl.arange(0, BN)
        d = tl.arange(0, D)
        g = tl.arange(0, G)
        first, stop = 0, n_k
        if PADDED:
            first, stop = tl.load(SPAN + 2 * b), tl.load(SPAN + 2 * b + 1)
        inside = (j >= first) & (j < stop)
        kp = K + b * skb + (h // REP) * skh + j[:, None].to(tl.int64) * skt + d[None, :]
        if EVEN:
            k = tl.load(kp)
        else:
            k = tl.load(kp, mask=inside[:, None], other=0.0)
        if BIASED:
            bias = tl.load(BIAS + b * sbb + h * sbh + j, mask=inside, other=0.0)
            bias = tl.maximum(bias * 1.4426950408889634, -1e30)
        acc = tl.zeros((BN, G), tl.float32)
        ent = tl.zeros((BN,), tl.float32)
        if CARRY:
            present = inside[:, None] & (y0 + g < n_y)[None, :]
            y = tl.load(Y + (b * n_k + j)[:, None] * n_y + (y0 + g)[None, :], mask=present, other=0.0)
            if HALF:
                y = y.to(tl.float16)
        seen_from, from_first = j, tile * BN  # where the first query stands that sees key j, and the tile's first key
        if MASK == "block":
            seen_from = first + tl.maximum(j - first, 0) // size * size
            from_first = first + tl.maximum(tile * BN - first, 0) // size * size
        begin, end = 0, n_q
        if MASK != "full":
            begin = tl.maximum(from_first - offset, 0) // BM * BM
        if MASK == "window":
            end = tl.minimum(n_q, tile * BN + BN - 1 + size - offset)
        for i0 in range(begin, end, BM):
            i = i0 + tl.arange(0, BM)
            qp = Q + b * sqb + h * sqh + i[None, :].to(tl.int64) * sqt + d[:, None]
            wp = W + (b * n_q + i)[:, None] * G + g[None, :]
            lp = LSE + bh * n_q + i
            if EVEN:
                q, w, lse = tl.load(qp), tl.load(wp), tl.load(lp)
            else:
                ok = i < n_q
                q = tl.load(qp, mask=ok[None, :], other=0.0)
                w = tl.load(wp, mask=ok[:, None], other=0.0)
                lse = tl.load(lp, mask=ok, other=1e30)
            if HALF:
                s = tl.dot(k, q)
            else:
                s = tl.dot(k, q, input_precision="ieee")
            x = s * scale - (lse * 1.4426950408889634 - SHIFT)[None, :]
            if BIASED:  # a row's own key is not hidden from it
                own = ((i + offset)[None, :] == j[:, None]) & (bias < -1e29)[:, None]
                added = tl.where(own, 0.0, bias[:, None])
                if HAS_SELECTION:
                    selected = tl.load(SELECTED + b * n_q + i, mask=i < n_q, other=0)
                    added = tl.where(selected[None, :] != 0, added, 0.0)
                x += added
            if MASK != "full":
                if i0 + offset < tile * BN + BN:
                    x = tl.where((i + offset)[None, :] >= seen_from[:, None], x, -1e30)
            if MASK == "window":
                if i0 + BM + offset > tile * BN + size:
                    x = tl.where((i + offset)[None, :] < (j + size)[:, None], x, -1e30)
            if not EVEN:
                x = tl.where(inside[:, None], x, -1e30)
            p = tl.exp2(x)
            if ENTROPY:
                if MASK != "full":
                    e = tl.load(E + b * n_q + i, mask=i < n_q, other=0.0)
                    ent += tl.sum(p * x * e[None, :], 1)
                else:  # all rows see the same number of keys, so their common weight is applied at the end
                    ent += tl.sum(p * x, 1)
            if HALF:
                ph = p.to(tl.float16)
                acc = tl.dot(ph, w, acc)
                if CARRY:
                    out = tl.dot(tl.trans(ph), y) * (FIXED / (1 << SHIFT))
            else:
                acc = tl.dot(p, w, acc, input_precision="ieee")
                if CARRY:
                    out = tl.dot(tl.trans(p), y, input_precision="ieee") * FIXED
            if CARRY:
                fixed = (out + 0.5).to(tl.int32)  # rows past n_q are 0
                if BULK:
                    OUT.atomic_add([b * n_q + i0, 0], fixed)
                else:
                    op = OUT + (b * n_q + i)[:, None] * G + g[None, :]
                    tl.atomic_add(op, fixed, mask=(i < n_q)[:, None], sem="relaxed")
        rp = R + bh * G * n_k + g[None, :] * n_k + j[:, None]
        tl.store(rp, acc * (1.0 / (1 << SHIFT)), mask=(j < n_k)[:, None])
        if ENTROPY:  # x was shifted; rows sum to 1, so the shift is a constant, split evenly over the programs
            bits = tl.sum(ent, 0) * (1.0 / (1 << SHIFT))
            if MASK == "full":
                bits *= tl.load(E_WEIGHT + b)
            bits = SHIFT * tl.load(E_TOTAL + b) / tl.num_programs(0) - bits
            tl.store(ENT + bh * tl.num_programs(0) + tile, bits / 1.4426950408889634)


def block_sizes(dim: int, is_half: bool, has_carry: bool) -> dict[str, int]:
    """The fastest of eleven block sizes measured on one H200 (docs/benchmarks.md); for 512, what fits shared memory."""
    if not is_half:
        size = (32, 64) if dim <= 64 else (32, 32) if dim <= 256 else (16, 32)
        return {"BM": size[0], "BN": size[1], "num_warps": 4, "num_stages": 2 if dim <= 256 else 1}
    size = (64, 128) if dim <= 256 else (32, 64)
    stages = 3 if has_carry and dim <= 128 else 2
    return {"BM": size[0], "BN": size[1], "num_warps": 8 if dim == 256 else 4, "num_stages": stages}


def reduce_attention(
    call: AttentionCall, lse: Tensor | None, spec: ReductionSpec, carry: Tensor | None = None
) -> ReductionResult:
    """The reduction of `backends.reduce_attention`, 16 columns of weights and of carry per launch."""
    if lse is None:
        raise UserError("the triton backend needs the log-sum-exp of the model's kernel; use backend='blocked'")
    weights = spec.fp16_tiles if call.query.dtype != torch.float32 else [(tile, None) for tile in spec.fp32_tiles]
    n_carry = 0 if carry is None else carry.shape[-1]
    received, attended, entropy = [], [], None
    for t in range(max(len(weights), triton.cdiv(n_carry, TILE))):
        w, scale = weights[min(t, len(weights) - 1)]
        R, shares, out = _launch(
            call, lse, w, spec if t == 0 else None, carry if t * TILE < n_carry else None, t * TILE
        )
        if shares is not None:
            entropy = shares.sum(-1)
        if t < len(weights):
            received.append(R if scale is None else R * scale[:, None, :, None])
        if out is not None:
            attended.append(out)
    return ReductionResult(
        _join_tiles(received, 2)[:, :, : spec.weights.shape[-1]],
        entropy,
        _join_tiles(attended, -1)[..., :n_carry] * (1 / (FIXED * call.query.shape[1])) if n_carry else None,
    )


def has_single_bias(edits: EditTensors) -> bool:
    """Whether one bias is the only edit that changes the attention matrix."""
    return len(edits.biases) == 1 and not edits.moves and edits.sink is None


def single_bias(call: AttentionCall) -> tuple[Tensor | None, Tensor | None]:
    """The bias of every head and key, and the rows that get it (None: all rows); (None, None) without a bias."""
    if call.edits is None or not call.edits.biases:
        return None, None
    bias = call.edits.biases[0]
    selected = None if bias.queries is None else bias.queries.contiguous().view(torch.uint8)
    return bias.keys.float().expand(-1, call.query.shape[1], -1), selected


def bias_strides(bias: Tensor | None) -> tuple[int, int]:
    """The batch and head strides of a bias; zeros without one."""
    return (0, 0) if bias is None else (bias.stride(0), bias.stride(1))


def _launch(
    call: AttentionCall, lse: Tensor, w: Tensor, spec: ReductionSpec | None, y: Tensor | None, y0: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """One launch: 16 columns of weights and, if given, the entropy of `spec` and 16 columns of carry from `y0` on."""
    visibility, is_half = call.visibility, call.query.dtype != torch.float32
    B, H, n_q, D = call.query.shape
    n_k, device = visibility.keys, call.query.device
    q, k = _contiguous_rows(call.query), _contiguous_rows(call.key)
    size = block_sizes(D, is_half, y is not None)
    n_tiles = triton.cdiv(n_k, size["BN"])
    R = torch.empty(B, H, TILE, n_k, device=device)
    e = e_weight = e_total = shares = out = target = None
    if spec is not None and spec.entropy_weights is not None:
        e, e_weight, e_total = spec.entropy_weights, spec.shared_entropy_weight, spec.entropy_total
        shares = torch.empty(B, H, n_tiles, device=device)
    bulk = call.query.is_cuda and _has_copy_engine(device)
    if y is not None:
        y = y.contiguous()
        target = out = torch.zeros(B, n_q, TILE, device=device, dtype=torch.int32)
        if bulk:
            target = TensorDescriptor.from_tensor(out.view(-1, TILE), [size["BM"], TILE])
    bias, selected = single_bias(call)
    even = visibility.valid is None and n_q % size["BM"] == 0 and n_k % size["BN"] == 0
    _receive[(n_tiles, B * H)](
        q, k, lse.contiguous(), w, e, e_weight, e_total, y,
        None if visibility.valid is None else visibility.valid_spans(device),
        bias, selected, R, shares, target, *q.stride()[:3], *k.stride()[:3], *bias_strides(bias), n_q, n_k,
        visibility.offset, visibility.size, call.scaling * LOG2E, H, 0 if y is None else y.shape[-1], y0,
        REP=call.repeats, D=D, G=TILE, MASK=visibility.kind.value, PADDED=visibility.valid is not None, EVEN=even,
        ENTROPY=e is not None, CARRY=y is not None, BULK=bulk, HALF=is_half, SHIFT=SHIFT if is_half else 0, FIXED=FIXED,
        BIASED=bias is not None, HAS_SELECTION=selected is not None, **size,
    )  # fmt: skip
    return R, shares, out


@cache
def _has_copy_engine(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _join_tiles(tiles: list[Tensor], dim: int) -> Tensor:
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim)


def _contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
