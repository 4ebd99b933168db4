"""The reference: the complete attention matrix in float64, written to be obviously right. For tests and `verify` only.

A = attention_matrix(call)                       # [batch, head, query, key]
"""

from __future__ import annotations

from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor

from floatscope.capture.attention import AttentionCall
from floatscope.capture.edit_tensors import NO_KEY, EditTensors
from floatscope.capture.reduction_spec import ReductionResult, ReductionSpec


def attention_matrix(call: AttentionCall) -> Float[Tensor, "batch head query key"]:
    """A[i, j] in float64; rows that see nothing are zero."""
    key = call.key.double().repeat_interleave(call.repeats, 1)
    scores = call.query.double() @ key.transpose(-1, -2) * call.scaling
    rows, keys = slice(0, call.visibility.queries), slice(0, call.visibility.keys)
    bias, visible = call.visibility.block_bias(rows, keys), call.visibility.block_mask(rows, keys, scores.device)
    if bias is not None:
        scores = scores + bias.double()
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if call.edits is not None:
        return _edited_matrix(call, call.edits, scores, visible)
    return torch.softmax(scores, -1).nan_to_num(0.0) if visible is not None else torch.softmax(scores, -1)


def attention_output(call: AttentionCall) -> Float[Tensor, "batch head query value_dim"]:
    """A · v in float64, with silent heads set to zero."""
    output = attention_matrix(call) @ call.value.double().repeat_interleave(call.repeats, 1)
    if call.edits is not None and call.edits.silent_heads is not None:
        output[:, call.edits.silent_heads] = 0
    return output


def reduce_attention(
    call: AttentionCall, lse: Tensor | None, spec: ReductionSpec, carry: Tensor | None = None
) -> ReductionResult:
    """The reduction of `backends.reduce_attention` by definition; `lse` is not used."""
    A = attention_matrix(call)
    received = torch.einsum("bhij,big->bhgj", A, spec.weights.double())
    entropy = None
    if spec.entropy_weights is not None:
        entropy = (-torch.xlogy(A, A).sum(-1) * spec.entropy_weights[:, None].double()).sum(-1)
    attended = None if carry is None else torch.einsum("bhij,bjc->bic", A, carry.double()) / A.shape[1]
    return ReductionResult(received, entropy, attended)


def _edited_matrix(call: AttentionCall, edits: EditTensors, scores: Tensor, visible: Tensor | None) -> Tensor:
    """The definition of `EditTensors`, one line of its text after the other."""
    B, H, Q, K = scores.shape
    positions = torch.arange(Q, device=scores.device)[:, None] + call.visibility.offset
    is_own = torch.arange(K, device=scores.device) == positions
    for bias in edits.biases:
        selected = torch.ones(B, Q, dtype=torch.bool, device=scores.device) if bias.queries is None else bias.queries
        added = bias.keys.double()[:, :, None].expand(B, H, Q, K)
        is_exempt = is_own & (added == -torch.inf)
        scores = torch.where(selected[:, None, :, None] & ~is_exempt, scores + added, scores)
    sink = scores.new_full((H,), -torch.inf) if edits.sink is None else edits.sink.double()
    with_sink = torch.cat([scores, sink[:, None, None].expand(B, H, Q, 1)], -1)
    A = torch.softmax(with_sink, -1).nan_to_num(0.0)[..., :K]
    sees = torch.ones_like(A, dtype=torch.bool) if visible is None else visible.expand_as(A)
    before, A = A, A.clone()
    for move in edits.moves:
        for b, h, r in product(range(B), range(H), range(move.source.shape[-1])):
            source = int(move.source[b, h, r])
            target = None if move.target is None else int(move.target[b, h, r])
            if NO_KEY in (source, target):
                continue
            rows = sees[b, h, :, source] & (sees[b, h, :, target] if target is not None else True)
            rows = rows if move.queries is None else rows & move.queries[b]
            mass = before[b, h, :, source] * rows
            A[b, h, :, source] -= mass
            if target is None:
                A[b, h] += mass[:, None] * sees[b, h] / sees[b, h].sum(-1, keepdim=True).clamp_min(1)
            else:
                A[b, h, :, target] += mass
    return A
