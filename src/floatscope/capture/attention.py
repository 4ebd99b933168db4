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
from jaxtyping import Float, Int
from torch import Tensor

from floatscope.capture.changes import NOWHERE, Changes, Move
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
    """Run the call as the model would. Rows of padding come out as zeros."""
    return _attend(call) if call.changes is None else _changed(call, call.changes)


def _attend(call: Attention) -> Attended:
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
        mask = _expanded(see, rows, keys, call.query)
        piece = replace(call, query=call.query[:, :, rows], key=call.key[:, :, keys], value=call.value[:, :, keys])
        part = _kernel(piece, mask, False)
        outputs.append(part.output)
        lses.append(part.lse)
    known = [lse for lse in lses if lse is not None]
    return Attended(torch.cat(outputs, 2), torch.cat(known, 2) if len(known) == len(lses) else None)


def _expanded(see: Visibility, rows: slice, keys: slice, like: Tensor) -> Tensor | None:
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


# --- under an intervention --------------------------------------------------------------------------------------------

UNSEEN = -8192.0
"""The score a hidden key gets in the kernel: far below any other, and a number that every type has."""


def _changed(call: Attention, changes: Changes) -> Attended:
    done = _attend(_biased(call, changes)) if changes.biases else _attend(replace(call, changes=None))
    output = done.output[..., : call.value.shape[-1]].float()
    lse = _log_sum_exp(call) if done.lse is None else done.lse
    if any(bias.hides for bias in changes.biases):
        output, lse = _own_keys(call, changes, output, lse)
    if changes.moves:  # all of what was there before
        output = output + sum(_moved(call, move, lse) for move in changes.moves)
    if (kept := changes.kept(lse)) is not None:
        output = output * kept[..., None]
    if changes.silent is not None:
        output = output.masked_fill(changes.silent[:, None, None], 0.0)
    return Attended(output.to(call.query.dtype), lse)


def _biased(call: Attention, changes: Changes) -> Attention:
    """The call whose scores are the biased ones: for each bias q has a further dimension that is 1 in the chosen rows,
    and k one that is the bias; where numbers have few bits, several that add up to it."""
    B, H, Q, D = call.query.shape
    pieces = 1 if call.query.dtype in (torch.float32, torch.float64) else 3
    shared = all(bias.keys.shape[1] == 1 for bias in changes.biases)
    key, value = (x if shared else x.repeat_interleave(call.repeats, 1) for x in (call.key, call.value))
    left, right = [call.query], [key]
    for bias in changes.biases:
        rest = bias.keys.clamp_min(UNSEEN).float() / (call.scaling * UNIT)
        chosen = torch.ones(B, Q, device=rest.device) if bias.queries is None else bias.queries
        column = (chosen * UNIT).to(call.query.dtype)[:, None, :, None].expand(-1, H, -1, -1)
        for _ in range(pieces):
            piece = rest.to(key.dtype)
            rest = rest - piece.float()
            left.append(column)
            right.append(piece[..., None].expand(-1, key.shape[1], -1, -1))
    wide = D + -(-pieces * len(changes.biases) // 8) * 8
    q, k = (F.pad(torch.cat(x, -1), (0, wide - D - pieces * len(changes.biases))) for x in (left, right))
    value = F.pad(value, (0, wide - value.shape[-1])) if wide > value.shape[-1] else value
    return Attention(q, k, value, call.visible, call.scaling)


UNIT = 16.0  # a power of two: 8192 / scaling would be too large for fp16


def _own_keys(call: Attention, changes: Changes, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """A row whose own key is hidden has it nevertheless: one more term of its softmax."""
    at = slice(call.visible.offset, call.visible.offset + call.visible.queries)
    score = call.query.new_zeros(lse.shape, dtype=torch.float32)
    hidden = torch.zeros_like(lse, dtype=torch.bool)
    for bias in changes.biases:
        part = bias.keys[:, :, at]
        if bias.queries is not None:
            part = torch.where(bias.queries[:, None], part, 0.0)
        hidden = hidden | (part == -torch.inf)
        score = score + part.masked_fill(part == -torch.inf, 0.0)
    if (sees := call.visible.sees_own(hidden.device)) is not None:
        hidden = hidden & sees
    if (mask := call.visible.mask) is not None and mask.is_floating_point():
        score = score + mask[:, :, :, at].diagonal(dim1=-2, dim2=-1).float()
    key, value = (x[:, :, at].repeat_interleave(call.repeats, 1).float() for x in (call.key, call.value))
    score = score + (call.query.float() * key).sum(-1) * call.scaling
    own = torch.where(hidden, score, -torch.inf)
    total = torch.logaddexp(lse.float(), own)
    before, more = ((x - total).exp().nan_to_num(0.0)[..., None] for x in (lse, own))  # NaN: it sees nothing at all
    return output * before + value * more, total


def _log_sum_exp(call: Attention) -> Float[Tensor, "batch head query"]:
    """Where the kernel does not tell: some rows at a time."""
    see, (B, H, Q, _) = call.visible, call.query.shape
    out = torch.full((B, H, Q), -HIDDEN, device=call.query.device)
    step = max(1, MASK_BLOCK // (see.keys * H))
    for batch, where, _, one in call.samples():
        key, changes = one.key.repeat_interleave(call.repeats, 1).float(), one.changes
        for b in range(len(one.query)):
            for i in range(0, one.visible.queries, step):
                rows, keys = slice(i, min(i + step, one.visible.queries)), slice(0, one.visible.keys)
                x = one.query[b, :, rows].float() @ key[b].mT * call.scaling
                mask = _expanded(one.visible, rows, keys, x)
                x = x if mask is None else x + mask.expand(len(one.query), -1, -1, -1)[b]
                if changes is not None:
                    at = torch.arange(rows.start, rows.stop, device=x.device)
                    changes.add_biases(x, at, keys, at + one.visible.offset, b=b)
                out[batch.start + b, :, where.start + i : where.start + rows.stop] = x.logsumexp(-1)
    return out


def _moved(call: Attention, move: Move, lse: Tensor) -> Float[Tensor, "batch head query value_dim"]:
    """What a move adds to the output: the mass of each source times the difference of the values."""
    source = move.source.clamp_min(0)
    goes = (move.source != NOWHERE)[:, :, None] & call.visible.sees(source)
    value = call.value.repeat_interleave(call.repeats, 1)
    if spread := move.target is None:
        there = call.visible.mean_seen(value)
    else:
        target = move.target.clamp_min(0)
        goes = goes & (move.target != NOWHERE)[:, :, None] & call.visible.sees(target)
        there = _at(value, target).float()
    if move.queries is not None:
        goes = goes & move.queries[:, None, :, None]
    mass = torch.where(goes, (chosen_scores(call, source) - lse[..., None]).exp(), 0.0)  # [b, h, query, rank]
    taken, given = mass @ _at(value, source).float(), mass.sum(-1, keepdim=True) * there if spread else mass @ there
    return given - taken


def chosen_scores(call: Attention, keys: Int[Tensor, "batch head rank"]) -> Float[Tensor, "batch head query rank"]:
    """The scores of every row for a few keys of each head, biases included."""
    key = _at(call.key.repeat_interleave(call.repeats, 1), keys).float()
    x = call.query.float() @ key.mT * call.scaling
    stands = torch.arange(call.visible.queries, device=x.device) + call.visible.offset
    own = keys[:, :, None] == stands[:, None]
    if (mask := call.visible.mask) is not None and mask.is_floating_point():
        at = keys[:, :, None].expand(-1, -1, x.shape[2], -1)
        x = x + mask.expand(*x.shape[:3], -1).gather(-1, at).float()
    for bias in call.changes.biases if call.changes is not None else ():
        part = bias.keys.expand(-1, x.shape[1], -1).gather(-1, keys)[:, :, None]
        if bias.queries is not None:
            part = torch.where(bias.queries[:, None, :, None], part, 0.0)
        x = x + part.masked_fill((part == -torch.inf) & own, 0.0)
    return x


def _at(x: Float[Tensor, "batch head key dim"], keys: Tensor) -> Float[Tensor, "batch head rank dim"]:
    return x.gather(2, keys[..., None].expand(*keys.shape, x.shape[-1]))
