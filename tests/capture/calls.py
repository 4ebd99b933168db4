"""Attention calls to test with, and their meaning index by index in float64, without any of the code under test."""

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
from floatscope.capture.attention import AttentionCall
from floatscope.capture.reduction_spec import ReductionSpec, entropy_row_weights
from floatscope.capture.visibility import Visibility

STRUCTURED = ("full", "causal", "window", "block", "rule")
TENSORS = ("boolean", "boolean per sample", "additive", "additive per head")
KINDS = STRUCTURED + TENSORS


@dataclass(frozen=True)
class Mask:
    """A mask of some kind; `table` and `bias` give it entry by entry."""

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
            return Visibility.from_mask(self.tensor, Q, K, valid)
        if self.kind == "rule":
            return Visibility.from_rule(Q, K, ragged_rule, valid, offset, batch=self.batch)
        if self.kind in ("full", "causal"):
            return getattr(Visibility, self.kind)(Q, K, valid, offset)
        return getattr(Visibility, self.kind)(Q, K, self.size, valid, offset)

    @cached_property
    def table(self) -> Tensor:
        """Which query sees which key, [batch, head|1, query, key], pair by pair."""
        heads = self.tensor.shape[1] if self.kind in TENSORS else 1
        rows, keys = range(self.queries), range(self.keys)
        sees = [self._sees(b, h) for b in range(self.batch) for h in range(heads)]
        visible = torch.tensor([[[sees_pair(i, j) for j in keys] for i in rows] for sees_pair in sees])
        return visible.reshape(self.batch, heads, self.queries, self.keys)

    @property
    def bias(self) -> Tensor:
        """What is added to visible scores, [batch|1, head|1, query, key] in float64."""
        if not self.kind.startswith("additive"):
            return torch.zeros(1, 1, self.queries, self.keys, dtype=torch.float64)
        return self.tensor.double().nan_to_num(neginf=0.0)

    @property
    def valid_rows(self) -> Tensor:
        """True for query rows at a valid key, [batch, query]."""
        valid = torch.ones(self.batch, self.keys, dtype=torch.bool) if self.valid is None else self.valid
        return valid[:, self.offset : self.offset + self.queries]

    def _sees(self, b: int, h: int) -> Callable[[int, int], bool]:
        """Whether query i of head h in sample b sees key j."""
        valid = [True] * self.keys if self.valid is None else self.valid[b].tolist()
        first, at, size = valid.index(True), self.offset, self.size
        entries = None if self.tensor is None else self.tensor[b % len(self.tensor), h].tolist()
        pair_rules: dict[str, Callable[[int, int], bool]] = {
            "full": lambda i, j: True,
            "causal": lambda i, j: j <= at + i,
            "window": lambda i, j: at + i - size < j <= at + i,
            "block": lambda i, j: (j - first) // size <= (at + i - first) // size,
            "rule": lambda i, j: (j + 2 * (at + i) + b) % 3 != 0 or j == at + i,
        }
        pair_rules |= {kind: lambda i, j: entries[i][j] is True for kind in TENSORS[:2]}
        pair_rules |= {kind: lambda i, j: entries[i][j] > -math.inf for kind in TENSORS[2:]}
        rule = pair_rules[self.kind]
        return lambda i, j: valid[j] and rule(i, j)


def ragged_rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A rule with no structure to exploit, different for every sample."""
    return ((k + 2 * q + b) % 3 != 0) | (k == q)


def draw_padding(batch: int, keys: int, side: str, seed: int) -> Tensor | None:
    """Key padding on one side, none, or with holes; the last two keys are valid (right: the first two)."""
    if side == "none":
        return None
    generator = torch.Generator().manual_seed(seed)
    if side == "holes":
        valid = torch.rand(batch, keys, generator=generator) > 0.3
        valid[:, -1] = valid[:, 0] = True
        return valid
    length = torch.randint(min(2, keys), keys + 1, (batch, 1), generator=generator)
    at = torch.arange(keys)
    return at >= keys - length if side == "left" else at < length


def make_mask(
    kind: str, batch: int = 2, queries: int = 9, keys: int = 9, side: str = "none", size: int = 4, seed: int = 0
):
    """A mask of this kind; every query sees its own key."""
    generator = torch.Generator().manual_seed(seed)
    offset, tensor = keys - queries, None
    if kind in TENSORS:
        shape = (batch if kind == "boolean per sample" else 1, 3 if kind == "additive per head" else 1, queries, keys)
        tensor = torch.rand(shape, generator=generator) > 0.4
        tensor[..., torch.arange(queries), torch.arange(queries) + offset] = True
        if kind.startswith("additive"):
            distance = (torch.arange(queries)[:, None] + offset - torch.arange(keys)).abs()
            slope = 2.0 ** -torch.arange(1, shape[1] + 1)[:, None, None]  # ALiBi's
            tensor = torch.where(tensor, -slope * distance, -torch.inf)
    return Mask(kind, batch, queries, keys, offset, size, draw_padding(batch, keys, side, seed), tensor)


@st.composite
def masks(draw, kinds=KINDS, sides=("none", "left", "right", "holes"), largest: int = 12) -> Mask:
    """Any mask up to `largest` keys."""
    keys = draw(st.integers(2, largest))
    queries = draw(st.one_of(st.just(keys), st.integers(1, keys)))
    return make_mask(
        draw(st.sampled_from(kinds)),
        draw(st.integers(1, 3)),
        queries,
        keys,
        draw(st.sampled_from(sides)),
        draw(st.integers(1, 5)),
        draw(st.integers(0, 9)),
    )


def make_call(
    m: Mask, heads: int = 3, repeats: int = 1, dim: int = 8, dtype=torch.float32, scaling=None, seed: int = 0
):
    """Random q, k, v under a mask; the scores have the spread of a trained model (σ ≈ 2)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(n: int, length: int, width: int) -> Tensor:
        return torch.randn(m.batch, n, length, width, generator=generator)

    scaling = dim**-0.5 if scaling is None else scaling
    q, k = normal(heads, m.queries, dim) * 2, normal(heads // repeats, m.keys, dim)
    v = normal(heads // repeats, m.keys, dim)
    return AttentionCall(q.to(dtype), k.to(dtype), v.to(dtype), m.visibility, scaling)


def make_spec(m: Mask, groups: int, seed: int = 0) -> ReductionSpec:
    """Groups: `all`, single rows, then random weights. Rows on padding and rows that see nothing have weight 0."""
    generator = torch.Generator().manual_seed(seed)
    counts = m.valid_rows & m.table.all(1).any(-1)
    weights = torch.rand(m.batch, m.queries, groups, generator=generator)
    weights[..., 0] = 1.0
    for g in range(1, groups // 2):
        weights[..., g] = torch.arange(m.queries) == (7 * g) % m.queries
    visible_keys = m.table.sum(-1).float().mean(1)
    return ReductionSpec(weights * counts[..., None], entropy_row_weights(counts, visible_keys))


def probabilities(call: AttentionCall, m: Mask) -> Tensor:
    """A [batch, head, query, key] in float64; rows that see nothing are zero."""
    H = call.query.shape[1]
    kv_heads = [h // (H // call.key.shape[1]) for h in range(H)]
    scores = call.scaling * call.query.double() @ call.key.double()[:, kv_heads].transpose(-1, -2) + m.bias
    e = torch.where(m.table, (scores - scores.amax(-1, keepdim=True)).exp(), 0.0)
    # The largest score may be hidden; float64 has room for the difference.
    return e / e.sum(-1, keepdim=True).clamp_min(1e-300)


def repeated_values(call: AttentionCall) -> Tensor:
    """v in float64, repeated for every query head."""
    H = call.query.shape[1]
    return call.value.double()[:, [h // (H // call.value.shape[1]) for h in range(H)]]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest ‖actual − expected‖ / ‖expected‖ along the last axis."""
    actual, expected = actual.double(), expected.double()
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)).max())


@contextmanager
def small_blocks(elements: int = 64) -> Iterator[None]:
    """Blocks of a few elements, so that small inputs are split like large ones."""
    with (
        mock.patch.object(blocked, "CPU_BLOCK", elements),
        mock.patch.object(blocked, "CUDA_BLOCK", 4 * elements),
        mock.patch.object(attention, "MASK_BLOCK", elements),
    ):
        yield
