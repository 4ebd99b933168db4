"""The reduction of `backends` in plain torch, for every mask on every device: probabilities are added up in blocks.

    for block in iter_blocks(call, lse):
        block.p                                      # [batch, head, rows, keys], fp32

A block is a few heads × a few query rows × the keys those rows may see. Its size is a budget of elements (about the L2
cache on a CPU), so memory does not grow with T². Scores are computed in base 2, because exp2 is 2.5 times as fast as
exp on a CPU, and the row's log-sum-exp is subtracted inside the same matrix product, as one more column of q against
ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from floatscope.capture.attention import AttentionCall, full_precision
from floatscope.capture.reduction_spec import TILE, ReductionResult, ReductionSpec
from floatscope.capture.visibility import HIDDEN_SCORE

LOG2E = 1.4426950408889634
LN2 = 1 / LOG2E
CPU_BLOCK, CUDA_BLOCK = 2**19, 2**26  # elements


@dataclass(frozen=True)
class Block:
    """Probabilities of some rows of some heads on the keys `keys`; every other key has probability 0.

    Row i stands at key index offset + i. `offset` is 0 except in cached steps, whose rows are the last positions.
    """

    batch: slice
    heads: slice
    rows: slice
    keys: slice
    p: Float[Tensor, "b h rows keys"]
    offset: int


def iter_blocks(call: AttentionCall, lse: Tensor | None) -> Iterator[Block]:
    """Yield the attention matrix in fp32, a block at a time. The memory of `p` is reused: copy what you keep."""
    for block, _, total, sink_share in _iter_powers(call, lse):
        block.p.mul_(_normalizer(total, sink_share)[..., None])
        yield block


def reduce_attention(
    call: AttentionCall, lse: Tensor | None, spec: ReductionSpec, carry: Tensor | None = None
) -> ReductionResult:
    """The reduction of `backends.reduce_attention`, block by block."""
    B, H, Q, _ = call.query.shape
    G, K = spec.weights.shape[-1], call.visibility.keys
    weights = spec.weights.float().transpose(1, 2).contiguous()  # [b, g, q]
    received = weights.new_zeros(B, H, G, K)
    mean_x = None if spec.entropy_weights is None else weights.new_zeros(B, H, Q)  # Σ_j p·log2 p of each row
    wide = None if carry is None else F.pad(carry, (0, -carry.shape[-1] % TILE))  # 16 columns take half as long as 13
    attended = None if wide is None else weights.new_zeros(B, Q, wide.shape[-1])
    totals = weights.new_zeros(B, H, Q)
    sink_shares = None if call.edits is None or call.edits.sink is None else torch.ones_like(totals)
    for block, x, total, sink_share in _iter_powers(call, lse):  # divide the sums by `total`, not the block
        b, p = block.batch.start, block.p[0]
        totals[b, block.heads, block.rows] = total
        if sink_shares is not None and sink_share is not None:
            sink_shares[b, block.heads, block.rows] = sink_share
        normalizer = _normalizer(total, sink_share)
        w = weights[b, None, :, block.rows] * normalizer[:, None]  # [h, g, rows]
        received[b, block.heads, :, block.keys] += torch.bmm(w, p)
        if attended is not None and wide is not None:
            columns = p.flatten(0, 1) @ wide[b, block.keys]  # [h * rows, c]
            attended[b, block.rows] += (columns.view(*total.shape, -1) * normalizer[..., None]).sum(0)
        if mean_x is not None:
            mean_x[b, block.heads, block.rows] = x[0].mul_(p).sum(-1)
    if attended is not None and carry is not None:
        attended = attended[..., : carry.shape[-1]] / H
    entropy = None
    if mean_x is not None and spec.entropy_weights is not None:
        divisors = _nonzero(totals)
        bits = divisors.log2() - mean_x / divisors
        if sink_shares is not None:  # s is the sink share: the entropy of s·p
            bits = sink_shares * bits - torch.xlogy(sink_shares, sink_shares) * LOG2E
        bits = bits * spec.entropy_weights[:, None]
        entropy = (bits.sum(-1, dtype=torch.float64) * LN2).float()  # float64: padding must not change the last digit
    mass = ((totals if lse is not None else (totals > 0)) * weights[:, :1]).sum(-1)
    return ReductionResult(received, entropy, attended, mass)


def compute_rows(
    call: AttentionCall, sample: Int[Tensor, " row"], row: Int[Tensor, " row"]
) -> Float[Tensor, "row head key"]:
    """Compute complete rows A[sample, :, row, :] of single queries, each with its own softmax."""
    visibility, edits, device = call.visibility, call.edits, call.query.device
    keys = slice(0, visibility.keys)
    out = torch.zeros(len(sample), call.query.shape[1], visibility.keys, device=device)
    for samples, indices in _group_by_sample(call, sample.tolist()):
        b, index = torch.tensor(samples, device=device), torch.tensor(indices, device=device)
        rows = row.to(device)[index]  # [sample, row]
        x = _row_scores(call, b, rows)
        b, rows, index = (n.flatten() for n in (b[:, None].expand_as(rows), rows, index))
        if edits is not None:
            edits.add_biases(x, rows, keys, rows + visibility.offset, b=b)
        if (bias := visibility.row_bias(b, rows)) is not None:
            x += bias.transpose(0, 1)
        if (visible := visibility.row_mask(b, rows)) is not None:
            visible = visible.transpose(0, 1)  # [h, row, key]
            x.masked_fill_(~visible, HIDDEN_SCORE)
        p = torch.softmax(x, -1)
        if visible is not None or edits is not None:
            p = p.masked_fill(x < HIDDEN_SCORE / 2, 0.0)  # a row that sees nothing is all zeros
        if edits is not None:
            edits.move_mass(p, rows, keys, visible, b=b)
            if (sink_share := edits.share_beside_sink(x.logsumexp(-1))) is not None:
                p *= sink_share[..., None]
        out[index] = p.transpose(0, 1)
    return out


def _group_by_sample(call: AttentionCall, sample: list[int]) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Yield a few samples at a time with the indices of their rows.

    A sample with fewer rows than others repeats its first row, so that the indices form a rectangle.
    """
    indices: dict[int, list[int]] = {}
    for index, b in enumerate(sample):
        indices.setdefault(b, []).append(index)
    longest = max(map(len, indices.values()), default=0)
    filled = [(b, own + own[:1] * (longest - len(own))) for b, own in indices.items()]
    step = max(1, CUDA_BLOCK // 4 // call.key[0].numel())
    for i in range(0, len(filled), step):
        samples, rows = zip(*filled[i : i + step], strict=True)
        yield list(samples), list(rows)


def _row_scores(call: AttentionCall, b: Tensor, rows: Int[Tensor, "sample n"]) -> Float[Tensor, "head row key"]:
    """The scores of `rows` of the samples `b`; the rows of a sample are adjacent in the result."""
    KV, keys, dim = call.key.shape[1:]
    q = call.query[b[:, None], :, rows].float() * call.scaling  # [sample, row, head, dim]
    q = q.transpose(1, 2).unflatten(1, (KV, call.repeats)).flatten(2, 3)  # [sample, kv, rep * row, dim]
    n_kv = max(1, CUDA_BLOCK // 4 // (len(b) * keys * dim))
    parts = [q[:, i : i + n_kv] @ call.key[b, i : i + n_kv].float().mT for i in range(0, KV, n_kv)]
    x: Tensor = torch.cat(parts, 1).unflatten(2, (call.repeats, -1)).flatten(1, 2)  # [sample, head, row, key]
    return x.transpose(0, 1).flatten(1, 2)


def _iter_powers(call: AttentionCall, lse: Tensor | None) -> Iterator[tuple[Block, Tensor, Tensor, Tensor | None]]:
    """Yield blocks of 2^x, x, the sum of each row, and the share a virtual sink leaves to it (None without a sink).

    With `lse` a row sums to 1 up to the rounding of `lse`; the caller divides by the sum.
    """
    for batch, rows, keys, part in call.unpadded_parts():
        if part.visibility.queries and part.visibility.keys:
            part_lse = None if lse is None else lse[batch, :, rows]
            yield from _iter_unpadded(part, part_lse, batch.start, rows.start, keys.start)


def _iter_unpadded(
    call: AttentionCall, lse: Tensor | None, b0: int, q0: int, k0: int
) -> Iterator[tuple[Block, Tensor, Tensor, Tensor | None]]:
    """`_iter_powers` of a part without padding that starts at (b0, q0, k0) of the padded call."""
    visibility, rep, edits = call.visibility, call.repeats, call.edits
    B, _, Q, _ = call.query.shape
    KV = call.key.shape[1]
    n_rows, n_kv = _block_size(call)
    query = (call.query.float() * (call.scaling * LOG2E)).unflatten(1, (KV, rep))  # [b, kv, rep, q, d]
    key = call.key.float()
    if lse is not None:
        shift = (lse.float() * -LOG2E).unflatten(1, (KV, rep))[..., None]
        query = torch.cat([query, shift], -1)
        key = torch.cat([key, torch.ones_like(key[..., :1])], -1)
    key = key.transpose(-1, -2)  # [b, kv, d, k]
    # Two buffers for all blocks: fresh memory for each would cost as much in page faults as the arithmetic.
    size = n_kv * rep * n_rows * visibility.keys
    scores, powers = (torch.empty(size, device=call.query.device) for _ in range(2))
    with full_precision():
        for b in range(B):
            for kv in range(0, KV, n_kv):
                kv_heads = slice(kv, min(kv + n_kv, KV))
                heads = slice(kv_heads.start * rep, kv_heads.stop * rep)
                for i in range(0, Q, n_rows):
                    rows = slice(i, min(i + n_rows, Q))
                    keys = visibility.key_span(rows)
                    q = query[b, kv_heads, :, rows].flatten(1, 2)  # [n, rep * rows, d]
                    n, m, k = len(q), q.shape[1], keys.stop - keys.start
                    x = torch.bmm(q, key[b, kv_heads, :, keys], out=scores[: n * m * k].view(n, m, k))
                    x = x.view(1, n * rep, -1, k)  # [1, h, rows, k]
                    if edits is not None:
                        index = torch.arange(rows.start, rows.stop, device=x.device)
                        edits.add_biases(x[0], index, keys, index + visibility.offset, LOG2E, heads, b)
                    if not visibility.is_unmasked:
                        _apply_mask(call, x, b, heads, rows, keys)
                    row_max = x.new_zeros(1, 1, 1, 1)
                    if lse is None:
                        row_max = x.amax(-1, keepdim=True).clamp_min(HIDDEN_SCORE / 2)
                        x -= row_max
                    p = torch.exp2(x, out=powers[: n * m * k].view(x.shape))
                    total = p[0].sum(-1)  # [h, rows]
                    sink_share = None
                    if edits is not None and edits.sink is not None:
                        row_lse = (row_max[0, ..., 0] + total.log2()) * LN2 if lse is None else lse[b, heads, rows]
                        sink_share = edits.share_beside_sink(row_lse, heads)
                    if edits is not None and edits.moves:
                        visible = visibility.block_mask(rows, keys, x.device)
                        if visible is not None:
                            visible = _select_sample(visible, b)[0, heads if visibility.is_per_head else slice(None)]
                        edits.move_mass(p[0], index, keys, visible, heads, b)
                        x = torch.where(p > 0, p, 1.0).log2()
                    batch = slice(b0 + b, b0 + b + 1)
                    offset = visibility.offset - q0 + k0
                    block = Block(batch, heads, _shift(rows, q0), _shift(keys, k0), p, offset)
                    yield block, x, total, sink_share


def _block_size(call: AttentionCall) -> tuple[int, int]:
    """The numbers of rows and KV heads in a block."""
    width, KV = call.repeats * call.visibility.keys, call.key.shape[1]
    if call.query.device.type == "cpu":
        rows = max(16, min(256, CPU_BLOCK // width))
        return rows, min(KV, max(2, CPU_BLOCK // (rows * width)))  # at least two heads, for two cores
    rows = max(16, min(1024, CUDA_BLOCK // width))
    return rows, max(1, min(KV, CUDA_BLOCK // (rows * width)))


def _apply_mask(call: AttentionCall, x: Tensor, b: int, heads: slice, rows: slice, keys: slice) -> None:
    """Add the additive mask and hide what is not visible, in place."""
    visibility = call.visibility
    per_head = heads if visibility.is_per_head else slice(None)
    if (bias := visibility.block_bias(rows, keys)) is not None:
        x += _select_sample(bias, b)[:, per_head] * LOG2E
    if (visible := visibility.block_mask(rows, keys, x.device)) is not None:
        x.masked_fill_(~_select_sample(visible, b)[:, per_head], HIDDEN_SCORE)


def _normalizer(total: Tensor, sink_share: Tensor | None) -> Tensor:
    """The factor that turns the powers of a row into probabilities."""
    return 1 / _nonzero(total) if sink_share is None else sink_share / _nonzero(total)


def _nonzero(total: Tensor) -> Tensor:
    """Row sums to divide by: the sum of a row that sees nothing is 0 and becomes 1, so the row stays all zeros."""
    return total.masked_fill(total == 0, 1.0)


def _select_sample(mask: Tensor, b: int) -> Tensor:
    """One sample of a mask that the whole batch may share."""
    return mask[b : b + 1] if len(mask) > 1 else mask


def _shift(piece: slice, by: int) -> slice:
    return slice(piece.start + by, piece.stop + by)
