"""R[g, j] = Σ_i W[i, g] · A[i, j]: computed by blocks it equals the dense matrix in float64, for every mask."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from calls import (
    KINDS,
    TENSORS,
    Mask,
    make_call,
    make_mask,
    make_spec,
    masks,
    probabilities,
    relative_error,
    small_blocks,
)
from hypothesis import example, given
from hypothesis import strategies as st

from example_counts import examples
from floatscope.capture import blocked, dense
from floatscope.capture.attention import AttentionCall, attend
from floatscope.capture.backends import reduce_attention, select_backend
from floatscope.capture.reduction_spec import ReductionSpec, entropy_row_weights, split_tiles
from floatscope.errors import UserError
from pairs import every_pair

few_examples = examples(60)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LIMIT = {torch.float32: 5e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3}
"""Relative norm error, single rows included: a single row does not average out the rounding of fp32 scores."""


def by_definition(call: AttentionCall, m: Mask, spec: ReductionSpec, carry: torch.Tensor | None):
    A = probabilities(call, m)
    received = torch.einsum("bhij,big->bhgj", A, spec.weights.double())
    rows = -torch.where(A > 0, A * A.clamp_min(1e-300).log(), 0.0).sum(-1)
    entropy = (rows * spec.entropy_weights.double()[:, None]).sum(-1)
    return received, entropy, None if carry is None else (A @ carry.double()[:, None]).mean(1)


@few_examples
@given(
    masks(largest=20),
    st.sampled_from([(1, 1), (3, 1), (4, 2), (4, 4), (6, 3)]),
    st.sampled_from(DTYPES),
    st.integers(1, 40),
    st.sampled_from([None, 0.05, 0.7]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_blocked_equals_dense(m, heads, dtype, groups, scaling, has_lse, small, seed):
    heads = (3, 1) if m.kind == "additive per head" else heads
    call = make_call(m, *heads, dtype=dtype, scaling=scaling, seed=seed)
    spec = make_spec(m, groups, seed)
    carry = torch.rand(m.batch, m.keys, 3)
    with small_blocks() if small else nullcontext():
        lse = attend(call).lse if has_lse else None
        result = reduce_attention(call, lse, spec, carry, "blocked")
    received, entropy, attended = by_definition(call, m, spec, carry)
    counts = (spec.weights[..., 0] > 0)[..., None]
    assert relative_error(result.received, received) <= LIMIT[dtype]
    assert torch.allclose(result.entropy.double(), entropy, atol=LIMIT[dtype] * 2)
    assert relative_error((result.attended_carry * counts).flatten(1), (attended * counts).flatten(1)) <= LIMIT[dtype]


@every_pair(kind=KINDS, has_lse=[True, False], seed=range(3))
def test_every_key_is_exact_to_five_digits_in_float32(kind, has_lse, seed):
    """On an input of many blocks: 1e-5 per key, single-row groups included, and a relative norm error of 1e-6."""
    m = make_mask(kind, 1, 160, 160, size=40, seed=seed)
    call = make_call(m, heads=3, dim=32, seed=seed)
    spec = make_spec(m, 20, seed)
    result = reduce_attention(call, attend(call).lse if has_lse else None, spec, None, "blocked").received.double()
    expected = by_definition(call, m, spec, None)[0]
    many = (spec.weights[0] > 0).sum(0) > 1
    assert float(((result - expected).abs() / expected)[expected > 1e-6].max()) <= 1e-5
    assert relative_error(result[:, :, many], expected[:, :, many]) <= 1e-6
    assert relative_error(result[:, :, ~many], expected[:, :, ~many]) <= LIMIT[torch.float32]


@every_pair(kind=["full", "causal", "window"], dtype=[torch.bfloat16, torch.float16], seed=range(3))
def test_a_single_row_in_half_precision_is_exact_to_three_digits(kind, dtype, seed):
    m = make_mask(kind, 2, 70, 70, "left", size=40, seed=seed)
    call = make_call(m, heads=4, repeats=2, dim=16, dtype=dtype, seed=seed)
    rows = torch.eye(70).expand(2, 70, 70) * m.valid_rows[..., None]
    result = reduce_attention(call, attend(call).lse, ReductionSpec(rows), None, "blocked").received
    assert relative_error(result, probabilities(call, m)[:, :] * m.valid_rows[:, None, :, None]) <= 1e-3


@pytest.mark.parametrize("side", ["left", "right", "holes"])
@pytest.mark.parametrize("kind", KINDS)
def test_pad_keys_receive_nothing(kind, side):
    m = make_mask(kind, 3, 12, 12, side)
    call = make_call(m)
    for backend in ("blocked", "dense"):
        result = reduce_attention(call, attend(call).lse, make_spec(m, 3), None, backend).received
        assert torch.equal(result.masked_fill(~m.valid[:, None, None], 0), result)


@pytest.mark.parametrize("kind", TENSORS)
def test_a_row_that_sees_nothing_gives_nothing(kind):
    """With or without the kernel's log-sum-exp, which is not finite for such a row."""
    blind = torch.tensor([2, 5])
    m = make_mask(kind, 2, 8, 8)
    m.tensor[:, :, blind] = False if m.tensor.dtype == torch.bool else -torch.inf
    call = make_call(m)
    all_rows = torch.ones(2, 8, 1)
    expected = torch.einsum("bhij,big->bhgj", probabilities(call, m), all_rows.double())
    for lse in (attend(call).lse, None):
        result = reduce_attention(call, lse, ReductionSpec(all_rows, torch.ones(2, 8)), None, "blocked")
        assert relative_error(result.received, expected) <= 1e-6
        assert result.entropy.isfinite().all()
    assert torch.equal(blocked.compute_rows(call, torch.tensor([0, 1]), blind), torch.zeros(2, 3, 8))


@few_examples
@given(masks(), st.sampled_from([(4, 2), (4, 4), (3, 1)]), st.sampled_from(DTYPES))
def test_the_dense_reference_equals_the_definition(m, heads, dtype):
    heads = (3, 1) if m.kind == "additive per head" else heads
    call, spec, carry = make_call(m, *heads, dtype=dtype), make_spec(m, 3), torch.rand(m.batch, m.keys, 2)
    received, entropy, attended = by_definition(call, m, spec, carry)
    result = dense.reduce_attention(call, None, spec, carry)
    torch.testing.assert_close(dense.attention_matrix(call), probabilities(call, m))
    torch.testing.assert_close(result.received, received)
    torch.testing.assert_close(result.entropy, entropy)
    torch.testing.assert_close(result.attended_carry, attended)


@pytest.mark.parametrize("backend", ["blocked", "dense"])
@pytest.mark.parametrize("kind", ["full", "causal", "boolean"])
def test_grouped_heads_equal_repeated_keys(kind, backend):
    m = make_mask(kind, 2, 11, 11)
    grouped = make_call(m, heads=6, repeats=3)
    again = [x.repeat_interleave(3, 1) for x in (grouped.key, grouped.value)]
    repeated = AttentionCall(grouped.query, *again, grouped.visibility, grouped.scaling)
    spec = make_spec(m, 5)
    one, other = (reduce_attention(c, attend(c).lse, spec, None, backend) for c in (grouped, repeated))
    torch.testing.assert_close(one.received, other.received)
    torch.testing.assert_close(one.entropy, other.entropy)


@pytest.mark.parametrize("kind", ["full", "causal", "window", "block"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_equals_unpadded_exactly(kind, side):
    m = make_mask(kind, 3, 12, 12, side, seed=2)
    call, spec, carry = make_call(m, heads=4, repeats=2), make_spec(m, 4), torch.rand(3, 12, 2)
    batched = reduce_attention(call, attend(call).lse, spec, carry, "blocked")
    for b in range(3):
        at = m.valid[b].nonzero()[:, 0]
        at = slice(int(at[0]), int(at[-1]) + 1)
        n = at.stop - at.start
        alone = Mask(kind, 1, n, n, 0, m.size, None, None)
        q, k, v = (x[b : b + 1, :, at] for x in (call.query, call.key, call.value))
        one = AttentionCall(q, k, v, alone.visibility, call.scaling)
        single = ReductionSpec(spec.weights[b : b + 1, at], spec.entropy_weights[b : b + 1, at])
        result = reduce_attention(one, attend(one).lse, single, carry[b : b + 1, at], "blocked")
        assert torch.equal(batched.received[b, :, :, at], result.received[0])
        assert torch.equal(batched.entropy[b], result.entropy[0])
        assert torch.equal(batched.attended_carry[b, at], result.attended_carry[0])


@few_examples
@given(masks(kinds=("full", "causal", "window", "block", "rule"), largest=16))
def test_uniform_attention_has_lift_one_under_every_mask(m):
    """With equal scores the received attention equals the uniform baseline, so their ratio is 1."""
    call = make_call(m)
    flat = AttentionCall(torch.zeros_like(call.query), call.key, call.value, call.visibility, call.scaling)
    weights = make_spec(m, 3).weights
    result = reduce_attention(flat, attend(flat).lse, ReductionSpec(weights), None, "blocked").received
    expected = m.visibility.uniform_received(weights)[:, None]
    lift = (result / expected)[(expected > 0).expand_as(result)]
    torch.testing.assert_close(lift, torch.ones_like(lift), rtol=1e-5, atol=1e-5)


@few_examples
@given(masks(largest=16), st.integers(0, 99), st.sampled_from([1, 64, 400, 2**19]))
def test_single_rows_are_rows_of_the_matrix(m, seed, elements):
    """Any subset of rows, in any order, with blocks of any size."""
    heads = (3, 1) if m.kind == "additive per head" else (4, 2)
    call = make_call(m, *heads, seed=seed)
    sample, row = m.table.all(1).any(-1).nonzero(as_tuple=True)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(sample), generator=generator)[: 1 + seed * len(sample) // 99]
    sample, row = sample[order], row[order]
    with small_blocks(elements):
        result = blocked.compute_rows(call, sample, row)
    expected = probabilities(call, m)[sample, :, row]
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-7)


def test_no_rows_give_an_empty_tensor():
    nothing = torch.zeros(0, dtype=torch.long)
    assert blocked.compute_rows(make_call(make_mask("full")), nothing, nothing).shape == (0, 3, 9)


@example(16)
@example(17)
@given(st.integers(1, 50))
@examples(10)
def test_tiles_are_sixteen_wide_and_join_to_the_columns(n):
    columns = torch.rand(2, 5, n)
    cut = split_tiles(columns)
    assert {t.shape[-1] for t in cut} == {16}
    assert torch.equal(torch.cat(cut, -1)[..., :n], columns)
    assert not torch.cat(cut, -1)[..., n:].any()


def test_entropy_row_weights_give_the_mean_of_normalised_entropies():
    valid = torch.tensor([[True, True, True, False]])
    visible_keys = torch.tensor([[1.0, 2.0, 4.0, 4.0]])
    entropy = torch.tensor([[0.0, 0.3, 0.9, 1.0]])
    expected = (0.3 / torch.tensor(2.0).log() + 0.9 / torch.tensor(4.0).log()) / 2  # a row with one key has no spread
    torch.testing.assert_close((entropy_row_weights(valid, visible_keys) * entropy).sum(), expected)
    assert not entropy_row_weights(torch.zeros(1, 3, dtype=torch.bool), torch.ones(1, 3)).any()


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(
        UserError, match=r"unknown backend 'blokced' \(did you mean 'blocked'\?\); allowed: auto, triton"
    ):
        select_backend(make_call(make_mask("full")), backend="blokced")


def test_a_forced_triton_backend_says_why_it_does_not_support_a_call():
    with pytest.raises(UserError, match=r"triton backend does not support this call: .*; use backend='auto'"):
        select_backend(make_call(make_mask("full")), backend="triton")
    with pytest.raises(UserError, match="does not return its log-sum-exp"):
        select_backend(make_call(make_mask("full")), has_lse=False, backend="triton")
    assert select_backend(make_call(make_mask("full"))) == "blocked"
