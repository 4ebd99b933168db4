"""An attention call under an intervention, run with the model's own kernel.

What `Changes` means is in its module. Here a bias is one more dimension of q and k, in which their product is the bias;
a row's own hidden key, moved mass and the share of a virtual sink are put in afterwards, from the log-sum-exp. On CUDA
one bias has a kernel of its own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from floatscope.capture import attention, biased_kernel
from floatscope.capture.attention import MASK_BLOCK, Attended, Attention, expanded
from floatscope.capture.changes import NOWHERE, Changes, Move
from floatscope.capture.visibility import HIDDEN

UNSEEN = -8192.0
"""The score a hidden key gets in the kernel: far below any other, and a number that every type has."""
UNIT = 16.0  # a power of two: 8192 / scaling would be too large for fp16


def attend(call: Attention) -> Attended:
    """Run the call as the model would, with what an intervention makes of it."""
    changes = call.changes
    if changes is None:
        return attention.attend(call)
    output, lse = _softmax(call, changes)
    if changes.moves:  # all of what was there before
        output = output + sum(_moved(call, move, lse) for move in changes.moves)
    if (kept := changes.kept(lse)) is not None:
        output = output * kept[..., None]
    if changes.silent is not None:
        output = output.masked_fill(changes.silent[:, None, None], 0.0)
    return Attended(output.to(call.query.dtype), lse)


def _softmax(call: Attention, changes: Changes) -> tuple[Tensor, Tensor]:
    """The output, in fp32 unless it is done, and the log-sum-exp; with the biases."""
    if biased_kernel.serves(call):
        return biased_kernel.attend(call)
    if not changes.biases:
        done = attention.attend(replace(call, changes=None))
    else:
        done = attention.attend(_biased(call, changes))
    output = done.output[..., : call.value.shape[-1]].float()
    lse = _log_sum_exp(call) if done.lse is None else done.lse
    return _own_keys(call, changes, output, lse) if any(bias.hides for bias in changes.biases) else (output, lse)


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
                mask = expanded(one.visible, rows, keys, x)
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
