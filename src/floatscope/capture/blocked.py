"""The primitive in plain torch, for every mask on every device: probabilities pass by in blocks and are added up.

A block is a few heads × a few query rows × the keys those rows may see. Its size is a budget of elements (about the L2
cache on a CPU), so memory does not grow with T². Scores are computed in base 2, exp2 being 2.5 times as fast as exp on
a CPU, and the row's log-sum-exp is subtracted inside the same matrix product, as one more column of q against ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from floatscope.capture.ask import TILE, Received, ReductionSpec
from floatscope.capture.attention import Attention, full_precision
from floatscope.capture.visibility import HIDDEN

LOG2E = 1.4426950408889634
LN2 = 1 / LOG2E
CPU_BLOCK, CUDA_BLOCK = 2**19, 2**26  # elements


@dataclass(frozen=True)
class Block:
    """Probabilities of some rows of some heads, on the keys of `keys`; every other key has probability 0."""

    batch: slice
    heads: slice
    rows: slice
    keys: slice
    p: Float[Tensor, "b h rows keys"]
    offset: int  # row i stands at key offset + i: 0 but for cached steps, whose rows are the last positions


def blocks(call: Attention, lse: Tensor | None) -> Iterator[Block]:
    """All of A, a block at a time, in fp32. The memory of `p` is reused: copy what should outlive the iteration."""
    for at, _, total, kept in _powers(call, lse):
        at.p.mul_(_share(total, kept)[..., None])
        yield at


def receive(call: Attention, lse: Tensor | None, ask: ReductionSpec, carry: Tensor | None = None) -> Received:
    B, H, Q, _ = call.query.shape
    G, K = ask.weights.shape[-1], call.visible.keys
    weights = ask.weights.float().transpose(1, 2).contiguous()  # [b, g, q]
    received = weights.new_zeros(B, H, G, K)
    mean_x = None if ask.entropy is None else weights.new_zeros(B, H, Q)  # Σ_j p·log2 p, row by row
    wide = None if carry is None else F.pad(carry, (0, -carry.shape[-1] % TILE))  # 16 columns take half as long as 13
    carried = None if wide is None else weights.new_zeros(B, Q, wide.shape[-1])
    totals = weights.new_zeros(B, H, Q)
    keeps = None if call.changes is None or call.changes.sink is None else torch.ones_like(totals)
    for at, x, total, kept in _powers(call, lse):  # rows sum to `total`: what is added up is divided, not the block
        b, p = at.batch.start, at.p[0]
        totals[b, at.heads, at.rows] = total
        if keeps is not None and kept is not None:
            keeps[b, at.heads, at.rows] = kept
        share = _share(total, kept)
        w = weights[b, None, :, at.rows] * share[:, None]  # [h, g, rows]
        received[b, at.heads, :, at.keys] += torch.bmm(w, p)
        if carried is not None and wide is not None:
            columns = p.flatten(0, 1) @ wide[b, at.keys]  # [h * rows, c]
            carried[b, at.rows] += (columns.view(*total.shape, -1) * share[..., None]).sum(0)
        if mean_x is not None:
            mean_x[b, at.heads, at.rows] = x[0].mul_(p).sum(-1)
    if carried is not None and carry is not None:
        carried = carried[..., : carry.shape[-1]] / H
    entropy = None
    if mean_x is not None and ask.entropy is not None:
        whole = _or_one(totals)
        bits = whole.log2() - mean_x / whole
        if keeps is not None:  # Σ k·p log(k·p)
            bits = keeps * bits - torch.xlogy(keeps, keeps) * LOG2E
        bits = bits * ask.entropy[:, None]
        entropy = (
            bits.sum(-1, dtype=torch.float64) * LN2
        ).float()  # in float64 padding does not show in the last digit
    mass = ((totals if lse is not None else (totals > 0)) * weights[:, :1]).sum(-1)
    return Received(received, entropy, carried, mass)


def rows(call: Attention, sample: Tensor, row: Tensor) -> Float[Tensor, "chosen head key"]:
    """Whole rows A[sample, :, row, :] of chosen queries, by their own softmax: [chosen, head, key]."""
    see, changes, keys, device = call.visible, call.changes, slice(0, call.visible.keys), call.query.device
    out = torch.zeros(len(sample), call.query.shape[1], see.keys, device=device)
    for some, places in _together(call, sample.tolist()):
        b, place = torch.tensor(some, device=device), torch.tensor(places, device=device)
        at = row.to(device)[place]  # [sample, row]
        x = _scores(call, b, at)
        b, at, place = (n.flatten() for n in (b[:, None].expand_as(at), at, place))
        if changes is not None:
            changes.add_biases(x, at, keys, at + see.offset, b=b)
        if (bias := see.bias_in(b, at)) is not None:
            x += bias.transpose(0, 1)
        if (seen := see.allowed_in(b, at)) is not None:
            seen = seen.transpose(0, 1)  # [h, row, key]
            x.masked_fill_(~seen, HIDDEN)
        p = torch.softmax(x, -1)
        if seen is not None or changes is not None:
            p = p.masked_fill(x < HIDDEN / 2, 0.0)  # a row that sees nothing is all zeros
        if changes is not None:
            changes.move_mass(p, at, keys, seen, b=b)
            if (kept := changes.kept(x.logsumexp(-1))) is not None:
                p *= kept[..., None]
        out[place] = p.transpose(0, 1)
    return out


def _together(call: Attention, sample: list[int]) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Some samples at a time, each with the places of its rows; where it has fewer than others its first again."""
    places: dict[int, list[int]] = {}
    for place, b in enumerate(sample):
        places.setdefault(b, []).append(place)
    most = max(map(len, places.values()), default=0)
    filled = [(b, at + at[:1] * (most - len(at))) for b, at in places.items()]
    step = max(1, CUDA_BLOCK // 4 // call.key[0].numel())
    for i in range(0, len(filled), step):
        some, rows = zip(*filled[i : i + step], strict=True)
        yield list(some), list(rows)


def _scores(call: Attention, b: Tensor, at: Tensor) -> Float[Tensor, "head row key"]:
    """Of rows `at` of samples `b`, those of a sample next to each other."""
    KV, keys, dim = call.key.shape[1:]
    q = call.query[b[:, None], :, at].float() * call.scaling  # [sample, row, head, dim]
    q = q.transpose(1, 2).unflatten(1, (KV, call.repeats)).flatten(2, 3)  # [sample, kv, rep * row, dim]
    n_kv = max(1, CUDA_BLOCK // 4 // (len(b) * keys * dim))
    parts = [q[:, i : i + n_kv] @ call.key[b, i : i + n_kv].float().mT for i in range(0, KV, n_kv)]
    x: Tensor = torch.cat(parts, 1).unflatten(2, (call.repeats, -1)).flatten(1, 2)  # [sample, head, row, key]
    return x.transpose(0, 1).flatten(1, 2)


def _powers(call: Attention, lse: Tensor | None) -> Iterator[tuple[Block, Tensor, Tensor, Tensor | None]]:
    """Blocks of 2^x, with x and the sum of each row: 1 but for the rounding of `lse`, which the caller divides out; and
    what a virtual sink leaves of each row, if there is one."""
    for batch, rows, keys, one in call.samples():
        if one.visible.queries and one.visible.keys:
            part = None if lse is None else lse[batch, :, rows]
            yield from _unpadded(one, part, batch.start, rows.start, keys.start)


def _unpadded(
    call: Attention, lse: Tensor | None, b0: int, q0: int, k0: int
) -> Iterator[tuple[Block, Tensor, Tensor, Tensor | None]]:
    """The same for a call without padding, whose slices stand at b0, q0 and k0 of the whole."""
    see, rep, changes = call.visible, call.repeats, call.changes
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
    size = n_kv * rep * n_rows * see.keys
    scores, powers = (torch.empty(size, device=call.query.device) for _ in range(2))
    with full_precision():
        for b in range(B):
            for kv in range(0, KV, n_kv):
                group = slice(kv, min(kv + n_kv, KV))
                heads = slice(group.start * rep, group.stop * rep)
                for i in range(0, Q, n_rows):
                    rows = slice(i, min(i + n_rows, Q))
                    keys = see.span(rows)
                    q = query[b, group, :, rows].flatten(1, 2)  # [n, rep * rows, d]
                    n, m, k = len(q), q.shape[1], keys.stop - keys.start
                    x = torch.bmm(q, key[b, group, :, keys], out=scores[: n * m * k].view(n, m, k))
                    x = x.view(1, n * rep, -1, k)  # [1, h, rows, k]
                    if changes is not None:
                        at = torch.arange(rows.start, rows.stop, device=x.device)
                        changes.add_biases(x[0], at, keys, at + see.offset, LOG2E, heads, b)
                    if not see.plain:
                        _mask(call, x, b, heads, rows, keys)
                    top = x.amax(-1, keepdim=True).clamp_min(HIDDEN / 2) if lse is None else x.new_zeros(1, 1, 1, 1)
                    if lse is None:
                        x -= top
                    p = torch.exp2(x, out=powers[: n * m * k].view(x.shape))
                    total = p[0].sum(-1)  # [h, rows]
                    kept = None
                    if changes is not None and changes.sink is not None:
                        row = (top[0, ..., 0] + total.log2()) * LN2 if lse is None else lse[b, heads, rows]
                        kept = changes.kept(row, heads)
                    if changes is not None and changes.moves:
                        seen = see.allowed(rows, keys, x.device)
                        if seen is not None:
                            seen = _of(seen, b)[0, heads if see.per_head else slice(None)]
                        changes.move_mass(p[0], at, keys, seen, heads, b)
                        x = torch.where(p > 0, p, 1.0).log2()
                    here = slice(b0 + b, b0 + b + 1)
                    whole = see.offset - q0 + k0
                    yield Block(here, heads, _shift(rows, q0), _shift(keys, k0), p, whole), x, total, kept


def _block_size(call: Attention) -> tuple[int, int]:
    """Rows and KV heads of a block."""
    width, KV = call.repeats * call.visible.keys, call.key.shape[1]
    if call.query.device.type == "cpu":
        rows = max(16, min(256, CPU_BLOCK // width))
        return rows, min(KV, max(2, CPU_BLOCK // (rows * width)))  # two heads at least, for two cores
    rows = max(16, min(1024, CUDA_BLOCK // width))
    return rows, max(1, min(KV, CUDA_BLOCK // (rows * width)))


def _mask(call: Attention, x: Tensor, b: int, heads: slice, rows: slice, keys: slice) -> None:
    """Add the bias and hide what is not visible, in place."""
    see = call.visible
    per_head = heads if see.per_head else slice(None)
    if (bias := see.bias(rows, keys)) is not None:
        x += _of(bias, b)[:, per_head] * LOG2E
    if (seen := see.allowed(rows, keys, x.device)) is not None:
        x.masked_fill_(~_of(seen, b)[:, per_head], HIDDEN)


def _share(total: Tensor, kept: Tensor | None) -> Tensor:
    """What a power is to be multiplied with to be a probability."""
    return 1 / _or_one(total) if kept is None else kept / _or_one(total)


def _or_one(total: Tensor) -> Tensor:
    """Row sums to divide by: a row that sees nothing has 0, and stays all zeros."""
    return total.masked_fill(total == 0, 1.0)


def _of(mask: Tensor, b: int) -> Tensor:
    """One sample of a mask that may be shared by the whole batch."""
    return mask[b : b + 1] if len(mask) > 1 else mask


def _shift(piece: slice, by: int) -> slice:
    return slice(piece.start + by, piece.stop + by)
