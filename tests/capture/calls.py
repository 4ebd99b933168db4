"""Attention calls to test with, and what they mean, index by index in float64, without any of the code under test."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

from floatscope.capture import attention, blocked
from floatscope.capture.attention import Attention
from floatscope.capture.visibility import Visibility

STRUCTURED = ("full", "causal", "window", "block", "rule")
TENSORS = ("boolean", "boolean per sample", "additive", "additive per head")
KINDS = STRUCTURED + TENSORS


@dataclass(frozen=True)
class Mask:
    """A mask of some kind; `table` and `bias` spell it out."""

    kind: str
    batch: int
    queries: int
    keys: int
    offset: int
    size: int
    valid: Tensor | None  # [batch, key]
    tensor: Tensor | None  # for the kinds of TENSORS

    @property
    def visibility(self) -> Visibility:
        Q, K, valid, offset = self.queries, self.keys, self.valid, self.offset
        if self.kind in TENSORS:
            assert self.tensor is not None
            return Visibility.by_mask(self.tensor, Q, K, valid)
        if self.kind == "rule":
            return Visibility.by_rule(Q, K, ragged, valid, offset, batch=self.batch)
        if self.kind in ("full", "causal"):
            return getattr(Visibility, self.kind)(Q, K, valid, offset)
        return getattr(Visibility, self.kind)(Q, K, self.size, valid, offset)

    @cached_property
    def table(self) -> Tensor:
        """Who sees whom, [batch, head|1, query, key], by asking for every pair."""
        heads = self.tensor.shape[1] if self.kind in TENSORS else 1
        rows, keys = range(self.queries), range(self.keys)
        sees = [self._sees(b, h) for b in range(self.batch) for h in range(heads)]
        seen = torch.tensor([[[see(i, j) for j in keys] for i in rows] for see in sees])
        return seen.reshape(self.batch, heads, self.queries, self.keys)

    @property
    def bias(self) -> Tensor:
        """What is added to visible scores, [batch|1, head|1, query, key] in float64."""
        if not self.kind.startswith("additive"):
            return torch.zeros(1, 1, self.queries, self.keys, dtype=torch.float64)
        return self.tensor.double().nan_to_num(neginf=0.0)

    @property
    def standing(self) -> Tensor:
        """Queries that stand on a valid key, [batch, query]."""
        valid = torch.ones(self.batch, self.keys, dtype=torch.bool) if self.valid is None else self.valid
        return valid[:, self.offset : self.offset + self.queries]

    def _sees(self, b: int, h: int) -> Callable[[int, int], bool]:
        """Whether query i of head h in sample b sees key j."""
        valid = [True] * self.keys if self.valid is None else self.valid[b].tolist()
        first, at, size = valid.index(True), self.offset, self.size
        entries = None if self.tensor is None else self.tensor[b % len(self.tensor), h].tolist()
        rules: dict[str, Callable[[int, int], bool]] = {
            "full": lambda i, j: True,
            "causal": lambda i, j: j <= at + i,
            "window": lambda i, j: at + i - size < j <= at + i,
            "block": lambda i, j: (j - first) // size <= (at + i - first) // size,
            "rule": lambda i, j: (j + 2 * (at + i) + b) % 3 != 0 or j == at + i,
        }
        rules |= {kind: lambda i, j: entries[i][j] is True for kind in TENSORS[:2]}
        rules |= {kind: lambda i, j: entries[i][j] > -math.inf for kind in TENSORS[2:]}
        shows = rules[self.kind]
        return lambda i, j: valid[j] and shows(i, j)


def ragged(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A rule with no structure to exploit, different for every sample."""
    return ((k + 2 * q + b) % 3 != 0) | (k == q)


def pads(batch: int, keys: int, side: str, seed: int) -> Tensor | None:
    """Key padding on one side, none, or with holes; every sample keeps its last two keys (first two on the right)."""
    if side == "none":
        return None
    noise = torch.Generator().manual_seed(seed)
    if side == "holes":
        valid = torch.rand(batch, keys, generator=noise) > 0.3
        valid[:, -1] = valid[:, 0] = True
        return valid
    length = torch.randint(min(2, keys), keys + 1, (batch, 1), generator=noise)
    at = torch.arange(keys)
    return at >= keys - length if side == "left" else at < length


def mask(kind: str, batch: int = 2, queries: int = 9, keys: int = 9, side: str = "none", size: int = 4, seed: int = 0):
    """A mask of the given kind; every query keeps sight of its own key."""
    noise = torch.Generator().manual_seed(seed)
    offset, tensor = keys - queries, None
    if kind in TENSORS:
        shape = (batch if kind == "boolean per sample" else 1, 3 if kind == "additive per head" else 1, queries, keys)
        tensor = torch.rand(shape, generator=noise) > 0.4
        tensor[..., torch.arange(queries), torch.arange(queries) + offset] = True
        if kind.startswith("additive"):
            distance = (torch.arange(queries)[:, None] + offset - torch.arange(keys)).abs()
            slope = 2.0 ** -torch.arange(1, shape[1] + 1)[:, None, None]  # ALiBi's
            tensor = torch.where(tensor, -slope * distance, -torch.inf)
    return Mask(kind, batch, queries, keys, offset, size, pads(batch, keys, side, seed), tensor)


@st.composite
def masks(draw, kinds=KINDS, sides=("none", "left", "right", "holes"), largest: int = 12) -> Mask:
    keys = draw(st.integers(2, largest))
    queries = draw(st.one_of(st.just(keys), st.integers(1, keys)))
    return mask(
        draw(st.sampled_from(kinds)),
        draw(st.integers(1, 3)),
        queries,
        keys,
        draw(st.sampled_from(sides)),
        draw(st.integers(1, 5)),
        draw(st.integers(0, 9)),
    )


def call_of(m: Mask, heads: int = 3, repeats: int = 1, dim: int = 8, dtype=torch.float32, scaling=None, seed: int = 0):
    """Random q, k, v under a mask; scores spread about as in a trained model (σ ≈ 2)."""
    noise = torch.Generator().manual_seed(seed)

    def normal(n: int, length: int, width: int) -> Tensor:
        return torch.randn(m.batch, n, length, width, generator=noise)

    scaling = dim**-0.5 if scaling is None else scaling
    q, k = normal(heads, m.queries, dim) * 2, normal(heads // repeats, m.keys, dim)
    v = normal(heads // repeats, m.keys, dim)
    return Attention(q.to(dtype), k.to(dtype), v.to(dtype), m.visibility, scaling)


def probabilities(call: Attention, m: Mask) -> Tensor:
    """A [batch, head, query, key] in float64; rows that see nothing are zero."""
    H = call.query.shape[1]
    reads = [h // (H // call.key.shape[1]) for h in range(H)]
    scores = call.scaling * call.query.double() @ call.key.double()[:, reads].transpose(-1, -2) + m.bias
    e = torch.where(m.table, (scores - scores.amax(-1, keepdim=True)).exp(), 0.0)
    # The largest score may be hidden; float64 has room for the difference.
    return e / e.sum(-1, keepdim=True).clamp_min(1e-300)


def values(call: Attention) -> Tensor:
    """v in float64, repeated for every query head."""
    H = call.query.shape[1]
    return call.value.double()[:, [h // (H // call.value.shape[1]) for h in range(H)]]


def off(got: Tensor, want: Tensor) -> float:
    """Largest ‖got − want‖ / ‖want‖ along the last axis."""
    got, want = got.double(), want.double()
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-30)).max())


@contextmanager
def small_blocks(elements: int = 64) -> Iterator[None]:
    """Blocks of a few elements, so that small inputs are cut as large ones are."""
    with (
        mock.patch.object(blocked, "CPU_BLOCK", elements),
        mock.patch.object(blocked, "CUDA_BLOCK", 4 * elements),
        mock.patch.object(attention, "MASK_BLOCK", elements),
    ):
        yield
