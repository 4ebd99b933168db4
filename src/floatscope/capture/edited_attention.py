"""Attention as a watched model runs it, with the model's own kernel, and with the edits of an intervention if any.

    result = attend_with_edits(replace(call, edits=edits))       # the definition of the edits is in `edit_tensors`

A bias becomes extra dimensions of q and k, whose product is the bias. A row's own hidden key, moved mass and the share
of a virtual sink are added afterwards, from the log-sum-exp. On CUDA `attention_kernel` runs a single bias, the masks
that torch's kernels would need as a tensor, and gives the log-sum-exp where torch's kernel does not.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from floatscope.capture import attention, attention_kernel
from floatscope.capture.attention import MASK_BLOCK, AttentionCall, AttentionResult, expand_mask
from floatscope.capture.edit_tensors import NO_KEY, EditTensors, MoveTensors
from floatscope.capture.visibility import HIDDEN_SCORE

HIDDEN_KEY_BIAS = -8192.0
"""The bias that hides a key in the kernel: far below any score, and representable in every dtype."""
BIAS_UNIT = 16.0  # a power of two: 8192 / scaling would overflow fp16


def attend_with_edits(call: AttentionCall) -> AttentionResult:
    """Run the call as the model would, with its edits if it has any."""
    edits = call.edits
    if edits is None:
        return _attend_unedited(call)
    output, lse = _attend_biased(call, edits)
    if edits.moves:  # each move reads the mass from before all moves
        output = output + sum(_moved_output(call, move, lse) for move in edits.moves)
    if (share := edits.share_beside_sink(lse)) is not None:
        output = output * share[..., None]
    if edits.silent_heads is not None:
        output = output.masked_fill(edits.silent_heads[:, None, None], 0.0)
    return AttentionResult(output.to(call.query.dtype), lse)


def _attend_unedited(call: AttentionCall) -> AttentionResult:
    """The call without edits: by torch's kernel where that needs no mask, else by our own if it supports the call."""
    if attention.needs_mask(call.visibility) and attention_kernel.supports(call):
        return AttentionResult(*attention_kernel.attend(call))
    result = attention.attend(call)
    if result.lse is None and attention_kernel.supports(call):
        return replace(result, lse=attention_kernel.compute_lse(call))
    return result


def _attend_biased(call: AttentionCall, edits: EditTensors) -> tuple[Tensor, Tensor]:
    """The output (fp32, or final in the model's dtype from the CUDA kernel) and the log-sum-exp, with the biases."""
    if edits.biases and attention_kernel.supports(call):
        return attention_kernel.attend(call)
    result = _attend_unedited(_widen(call, edits) if edits.biases else replace(call, edits=None))
    output = result.output[..., : call.value.shape[-1]].float()
    lse = _log_sum_exp(call) if result.lse is None else result.lse
    return _restore_own_keys(call, edits, output, lse) if any(b.hides_keys for b in edits.biases) else (output, lse)


def _widen(call: AttentionCall, edits: EditTensors) -> AttentionCall:
    """The call with the biases as extra dimensions: q is 1 there in the selected rows, and k is the bias.

    In dtypes of few bits a bias takes several dimensions that add up to it.
    """
    B, H, Q, D = call.query.shape
    pieces = 1 if call.query.dtype in (torch.float32, torch.float64) else 3
    is_shared = all(bias.keys.shape[1] == 1 for bias in edits.biases)
    key, value = (x if is_shared else x.repeat_interleave(call.repeats, 1) for x in (call.key, call.value))
    left, right = [call.query], [key]
    for bias in edits.biases:
        rest = bias.keys.clamp_min(HIDDEN_KEY_BIAS).float() / (call.scaling * BIAS_UNIT)
        selected = torch.ones(B, Q, device=rest.device) if bias.queries is None else bias.queries
        column = (selected * BIAS_UNIT).to(call.query.dtype)[:, None, :, None].expand(-1, H, -1, -1)
        for _ in range(pieces):
            piece = rest.to(key.dtype)
            rest = rest - piece.float()
            left.append(column)
            right.append(piece[..., None].expand(-1, key.shape[1], -1, -1))
    width = D + -(-pieces * len(edits.biases) // 8) * 8
    q, k = (F.pad(torch.cat(x, -1), (0, width - D - pieces * len(edits.biases))) for x in (left, right))
    value = F.pad(value, (0, width - value.shape[-1])) if width > value.shape[-1] else value
    return AttentionCall(q, k, value, call.visibility, call.scaling)


def _restore_own_keys(call: AttentionCall, edits: EditTensors, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Add the own key of each row from which it is hidden: one more term of the row's softmax."""
    keys = slice(call.visibility.offset, call.visibility.offset + call.visibility.queries)
    score = call.query.new_zeros(lse.shape, dtype=torch.float32)
    is_hidden = torch.zeros_like(lse, dtype=torch.bool)
    for bias in edits.biases:
        number = bias.keys[:, :, keys]
        if bias.queries is not None:
            number = torch.where(bias.queries[:, None], number, 0.0)
        is_hidden = is_hidden | (number == -torch.inf)
        score = score + number.masked_fill(number == -torch.inf, 0.0)
    if (sees_own := call.visibility.can_see_own_key(is_hidden.device)) is not None:
        is_hidden = is_hidden & sees_own
    if (mask := call.visibility.mask) is not None and mask.is_floating_point():
        score = score + mask[:, :, :, keys].diagonal(dim1=-2, dim2=-1).float()
    key, value = (x[:, :, keys].repeat_interleave(call.repeats, 1).float() for x in (call.key, call.value))
    score = score + (call.query.float() * key).sum(-1) * call.scaling
    own = torch.where(is_hidden, score, -torch.inf)
    total = torch.logaddexp(lse.float(), own)
    others, restored = ((x - total).exp().nan_to_num(0.0)[..., None] for x in (lse, own))  # NaN: the row sees no key
    return output * others + value * restored, total


def _log_sum_exp(call: AttentionCall) -> Float[Tensor, "batch head query"]:
    """The log-sum-exp where the kernel returns none, a block of rows at a time."""
    B, H, Q, _ = call.query.shape
    out = torch.full((B, H, Q), -HIDDEN_SCORE, device=call.query.device)
    step = max(1, MASK_BLOCK // (call.visibility.keys * H))
    for batch, queries, _, part in call.unpadded_parts():
        key, edits = part.key.repeat_interleave(call.repeats, 1).float(), part.edits
        for b in range(len(part.query)):
            for i in range(0, part.visibility.queries, step):
                rows, keys = slice(i, min(i + step, part.visibility.queries)), slice(0, part.visibility.keys)
                x = part.query[b, :, rows].float() @ key[b].mT * call.scaling
                mask = expand_mask(part.visibility, rows, keys, x)
                x = x if mask is None else x + mask.expand(len(part.query), -1, -1, -1)[b]
                if edits is not None:
                    index = torch.arange(rows.start, rows.stop, device=x.device)
                    edits.add_biases(x, index, keys, index + part.visibility.offset, b=b)
                out[batch.start + b, :, queries.start + i : queries.start + rows.stop] = x.logsumexp(-1)
    return out


def _moved_output(call: AttentionCall, move: MoveTensors, lse: Tensor) -> Float[Tensor, "batch head query value_dim"]:
    """What a move adds to the output: the mass of each source times the difference of the values."""
    source = move.source.clamp_min(0)
    moves = (move.source != NO_KEY)[:, :, None] & call.visibility.can_see(source)
    value = call.value.repeat_interleave(call.repeats, 1)
    if is_spread := move.target is None:
        target_value = call.visibility.mean_over_visible_keys(value)
    else:
        target = move.target.clamp_min(0)
        moves = moves & (move.target != NO_KEY)[:, :, None] & call.visibility.can_see(target)
        target_value = _gather_keys(value, target).float()
    if move.queries is not None:
        moves = moves & move.queries[:, None, :, None]
    mass = torch.where(moves, (_score_keys(call, source) - lse[..., None]).exp(), 0.0)  # [b, h, query, rank]
    removed = mass @ _gather_keys(value, source).float()
    added = mass.sum(-1, keepdim=True) * target_value if is_spread else mass @ target_value
    return added - removed


def _score_keys(call: AttentionCall, keys: Int[Tensor, "batch head rank"]) -> Float[Tensor, "batch head query rank"]:
    """The scores of every row for a few keys of each head, biases included."""
    key = _gather_keys(call.key.repeat_interleave(call.repeats, 1), keys).float()
    x = call.query.float() @ key.mT * call.scaling
    positions = torch.arange(call.visibility.queries, device=x.device) + call.visibility.offset
    is_own = keys[:, :, None] == positions[:, None]
    if (mask := call.visibility.mask) is not None and mask.is_floating_point():
        index = keys[:, :, None].expand(-1, -1, x.shape[2], -1)
        x = x + mask.expand(*x.shape[:3], -1).gather(-1, index).float()
    for bias in call.edits.biases if call.edits is not None else ():
        number = bias.keys.expand(-1, x.shape[1], -1).gather(-1, keys)[:, :, None]
        if bias.queries is not None:
            number = torch.where(bias.queries[:, None, :, None], number, 0.0)
        x = x + number.masked_fill((number == -torch.inf) & is_own, 0.0)
    return x


def _gather_keys(x: Float[Tensor, "batch head key dim"], keys: Tensor) -> Float[Tensor, "batch head rank dim"]:
    return x.gather(2, keys[..., None].expand(*keys.shape, x.shape[-1]))
