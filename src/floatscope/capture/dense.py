"""The reference: the whole matrix in float64, written to be obviously right. Tests and `verify` only."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from floatscope.capture.ask import Ask, Received
from floatscope.capture.attention import Attention


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
    return torch.softmax(scores, -1).nan_to_num(0.0) if seen is not None else torch.softmax(scores, -1)


def output(call: Attention) -> Float[Tensor, "batch head query value_dim"]:
    return matrix(call) @ call.value.double().repeat_interleave(call.repeats, 1)


def receive(call: Attention, lse: Tensor | None, ask: Ask, carry: Tensor | None = None) -> Received:
    """The primitive by definition; `lse` is not used."""
    A = matrix(call)
    received = torch.einsum("bhij,big->bhgj", A, ask.weights.double())
    entropy = None
    if ask.entropy is not None:
        entropy = (-torch.xlogy(A, A).sum(-1) * ask.entropy[:, None].double()).sum(-1)
    carried = None if carry is None else torch.einsum("bhij,bjc->bic", A, carry.double()) / A.shape[1]
    return Received(received, entropy, carried)
