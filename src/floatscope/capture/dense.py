"""The reference: the whole matrix in float64, written to be obviously right. Tests and `verify` only."""

from __future__ import annotations

from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor

from floatscope.capture.ask import Received, ReductionSpec
from floatscope.capture.attention import Attention
from floatscope.capture.changes import NOWHERE, Changes


def matrix(call: Attention) -> Float[Tensor, "batch head query key"]:
    """A[i, j] in float64; rows that see nothing are zero."""
    key = call.key.double().repeat_interleave(call.repeats, 1)
    scores = call.query.double() @ key.transpose(-1, -2) * call.scaling
    rows, keys = slice(0, call.visible.queries), slice(0, call.visible.keys)
    bias, seen = call.visible.bias(rows, keys), call.visible.allowed(rows, keys, scores.device)
    if bias is not None:
        scores = scores + bias.double()
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    if call.changes is not None:
        return _changed(call, call.changes, scores, seen)
    return torch.softmax(scores, -1).nan_to_num(0.0) if seen is not None else torch.softmax(scores, -1)


def output(call: Attention) -> Float[Tensor, "batch head query value_dim"]:
    made = matrix(call) @ call.value.double().repeat_interleave(call.repeats, 1)
    if call.changes is not None and call.changes.silent is not None:
        made[:, call.changes.silent] = 0
    return made


def _changed(call: Attention, changes: Changes, scores: Tensor, seen: Tensor | None) -> Tensor:
    """The definition of `Changes`, row by row of its text."""
    B, H, Q, K = scores.shape
    own = torch.arange(K, device=scores.device) == torch.arange(Q, device=scores.device)[:, None] + call.visible.offset
    for bias in changes.biases:
        chosen = torch.ones(B, Q, dtype=torch.bool, device=scores.device) if bias.queries is None else bias.queries
        added = bias.keys.double()[:, :, None].expand(B, H, Q, K)
        exempt = own & (added == -torch.inf)
        scores = torch.where(chosen[:, None, :, None] & ~exempt, scores + added, scores)
    sink = scores.new_full((H,), -torch.inf) if changes.sink is None else changes.sink.double()
    with_sink = torch.cat([scores, sink[:, None, None].expand(B, H, Q, 1)], -1)
    A = torch.softmax(with_sink, -1).nan_to_num(0.0)[..., :K]
    sees = torch.ones_like(A, dtype=torch.bool) if seen is None else seen.expand_as(A)
    before, A = A, A.clone()
    for move in changes.moves:
        for b, h, r in product(range(B), range(H), range(move.source.shape[-1])):
            a = int(move.source[b, h, r])
            p = None if move.target is None else int(move.target[b, h, r])
            if NOWHERE in (a, p):
                continue
            rows = sees[b, h, :, a] & (sees[b, h, :, p] if p is not None else True)
            rows = rows if move.queries is None else rows & move.queries[b]
            mass = before[b, h, :, a] * rows
            A[b, h, :, a] -= mass
            if p is None:
                A[b, h] += mass[:, None] * sees[b, h] / sees[b, h].sum(-1, keepdim=True).clamp_min(1)
            else:
                A[b, h, :, p] += mass
    return A


def receive(call: Attention, lse: Tensor | None, ask: ReductionSpec, carry: Tensor | None = None) -> Received:
    """The primitive by definition; `lse` is not used."""
    A = matrix(call)
    received = torch.einsum("bhij,big->bhgj", A, ask.weights.double())
    entropy = None
    if ask.entropy is not None:
        entropy = (-torch.xlogy(A, A).sum(-1) * ask.entropy[:, None].double()).sum(-1)
    carried = None if carry is None else torch.einsum("bhij,bjc->bic", A, carry.double()) / A.shape[1]
    return Received(received, entropy, carried)
