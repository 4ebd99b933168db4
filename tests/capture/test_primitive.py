"""R[g, j] = Σ_i W[i, g] · A[i, j]: streamed by blocks it equals the dense matrix in float64, whatever the mask."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from calls import KINDS, TENSORS, Mask, call_of, mask, masks, off, probabilities, small_blocks
from hypothesis import example, given, settings
from hypothesis import strategies as st

from floatscope.capture import blocked, dense
from floatscope.capture.ask import ReductionSpec, row_mean, tiles
from floatscope.capture.attention import Attention, attend
from floatscope.capture.received import backend_for, receive
from floatscope.errors import UserError

few = settings(max_examples=60)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LIMIT = {torch.float32: 5e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3}
"""Norm-wise, single rows included: one row has nothing to average out the rounding of fp32 scores."""


def ask_of(m: Mask, groups: int, seed: int = 0) -> ReductionSpec:
    """`all`, then one-row groups, then random weights; nobody counts who stands on padding or sees nothing."""
    noise = torch.Generator().manual_seed(seed)
    counts = m.standing & m.table.all(1).any(-1)
    weights = torch.rand(m.batch, m.queries, groups, generator=noise)
    weights[..., 0] = 1.0
    for g in range(1, groups // 2):
        weights[..., g] = torch.arange(m.queries) == (7 * g) % m.queries
    seen = m.table.sum(-1).float().mean(1)
    return ReductionSpec(weights * counts[..., None], row_mean(counts, seen))


def by_definition(call: Attention, m: Mask, ask: ReductionSpec, carry: torch.Tensor | None):
    A = probabilities(call, m)
    received = torch.einsum("bhij,big->bhgj", A, ask.weights.double())
    rows = -torch.where(A > 0, A * A.clamp_min(1e-300).log(), 0.0).sum(-1)
    entropy = (rows * ask.entropy.double()[:, None]).sum(-1)
    return received, entropy, None if carry is None else (A @ carry.double()[:, None]).mean(1)


@few
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
def test_streamed_equals_dense(m, heads, dtype, groups, scaling, lse_known, small, seed):
    heads = (3, 1) if m.kind == "additive per head" else heads
    call = call_of(m, *heads, dtype=dtype, scaling=scaling, seed=seed)
    ask = ask_of(m, groups, seed)
    carry = torch.rand(m.batch, m.keys, 3)
    with small_blocks() if small else nullcontext():
        lse = attend(call).lse if lse_known else None
        got = receive(call, lse, ask, carry, "blocked")
    received, entropy, carried = by_definition(call, m, ask, carry)
    counts = (ask.weights[..., 0] > 0)[..., None]
    assert off(got.received, received) <= LIMIT[dtype]
    assert torch.allclose(got.entropy.double(), entropy, atol=LIMIT[dtype] * 2)
    assert off((got.carried * counts).flatten(1), (carried * counts).flatten(1)) <= LIMIT[dtype]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lse_known", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_key_is_right_to_five_digits_in_float32(kind, lse_known, seed):
    """On an input long enough to be cut into many blocks: 1e-5 per key, one-row groups included, 1e-6 norm-wise."""
    m = mask(kind, 1, 160, 160, size=40, seed=seed)
    call = call_of(m, heads=3, dim=32, seed=seed)
    ask = ask_of(m, 20, seed)
    got = receive(call, attend(call).lse if lse_known else None, ask, None, "blocked").received.double()
    want = by_definition(call, m, ask, None)[0]
    many = (ask.weights[0] > 0).sum(0) > 1
    assert float(((got - want).abs() / want)[want > 1e-6].max()) <= 1e-5
    assert off(got[:, :, many], want[:, :, many]) <= 1e-6
    assert off(got[:, :, ~many], want[:, :, ~many]) <= LIMIT[torch.float32]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["full", "causal", "window"])
def test_a_single_row_in_half_precision_is_right_to_three_digits(kind, dtype, seed):
    m = mask(kind, 2, 70, 70, "left", size=40, seed=seed)
    call = call_of(m, heads=4, repeats=2, dim=16, dtype=dtype, seed=seed)
    rows = torch.eye(70).expand(2, 70, 70) * m.standing[..., None]
    got = receive(call, attend(call).lse, ReductionSpec(rows), None, "blocked").received
    assert off(got, probabilities(call, m)[:, :] * m.standing[:, None, :, None]) <= 1e-3


@pytest.mark.parametrize("side", ["left", "right", "holes"])
@pytest.mark.parametrize("kind", KINDS)
def test_pad_keys_receive_nothing(kind, side):
    m = mask(kind, 3, 12, 12, side)
    call = call_of(m)
    for backend in ("blocked", "dense"):
        got = receive(call, attend(call).lse, ask_of(m, 3), None, backend).received
        assert torch.equal(got.masked_fill(~m.valid[:, None, None], 0), got)


@pytest.mark.parametrize("kind", TENSORS)
def test_a_row_that_sees_nothing_gives_nothing(kind):
    """With or without the kernel's log-sum-exp, which such a row does not have."""
    blind = torch.tensor([2, 5])
    m = mask(kind, 2, 8, 8)
    m.tensor[:, :, blind] = False if m.tensor.dtype == torch.bool else -torch.inf
    call = call_of(m)
    everyone = torch.ones(2, 8, 1)
    want = torch.einsum("bhij,big->bhgj", probabilities(call, m), everyone.double())
    for lse in (attend(call).lse, None):
        got = receive(call, lse, ReductionSpec(everyone, torch.ones(2, 8)), None, "blocked")
        assert off(got.received, want) <= 1e-6
        assert got.entropy.isfinite().all()
    assert torch.equal(blocked.rows(call, torch.tensor([0, 1]), blind), torch.zeros(2, 3, 8))


@few
@given(masks(), st.sampled_from([(4, 2), (4, 4), (3, 1)]), st.sampled_from(DTYPES))
def test_the_reference_itself_equals_the_definition(m, heads, dtype):
    heads = (3, 1) if m.kind == "additive per head" else heads
    call, ask, carry = call_of(m, *heads, dtype=dtype), ask_of(m, 3), torch.rand(m.batch, m.keys, 2)
    received, entropy, carried = by_definition(call, m, ask, carry)
    got = dense.receive(call, None, ask, carry)
    torch.testing.assert_close(dense.matrix(call), probabilities(call, m))
    torch.testing.assert_close(got.received, received)
    torch.testing.assert_close(got.entropy, entropy)
    torch.testing.assert_close(got.carried, carried)


@pytest.mark.parametrize("backend", ["blocked", "dense"])
@pytest.mark.parametrize("kind", ["full", "causal", "boolean"])
def test_grouped_heads_equal_repeated_keys(kind, backend):
    m = mask(kind, 2, 11, 11)
    grouped = call_of(m, heads=6, repeats=3)
    again = [x.repeat_interleave(3, 1) for x in (grouped.key, grouped.value)]
    repeated = Attention(grouped.query, *again, grouped.visible, grouped.scaling)
    ask = ask_of(m, 5)
    one, other = (receive(c, attend(c).lse, ask, None, backend) for c in (grouped, repeated))
    torch.testing.assert_close(one.received, other.received)
    torch.testing.assert_close(one.entropy, other.entropy)


@pytest.mark.parametrize("kind", ["full", "causal", "window", "block"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_equals_unpadded_exactly(kind, side):
    m = mask(kind, 3, 12, 12, side, seed=2)
    call, ask, carry = call_of(m, heads=4, repeats=2), ask_of(m, 4), torch.rand(3, 12, 2)
    batched = receive(call, attend(call).lse, ask, carry, "blocked")
    for b in range(3):
        at = m.valid[b].nonzero()[:, 0]
        at = slice(int(at[0]), int(at[-1]) + 1)
        n = at.stop - at.start
        alone = Mask(kind, 1, n, n, 0, m.size, None, None)
        q, k, v = (x[b : b + 1, :, at] for x in (call.query, call.key, call.value))
        one = Attention(q, k, v, alone.visibility, call.scaling)
        single = ReductionSpec(ask.weights[b : b + 1, at], ask.entropy[b : b + 1, at])
        got = receive(one, attend(one).lse, single, carry[b : b + 1, at], "blocked")
        assert torch.equal(batched.received[b, :, :, at], got.received[0])
        assert torch.equal(batched.entropy[b], got.entropy[0])
        assert torch.equal(batched.carried[b, at], got.carried[0])


@few
@given(masks(kinds=("full", "causal", "window", "block", "rule"), largest=16))
def test_uniform_attention_has_lift_one_under_every_mask(m):
    """With all scores alike the received attention is what `uniform` expects, so their ratio is 1."""
    call = call_of(m)
    flat = Attention(torch.zeros_like(call.query), call.key, call.value, call.visible, call.scaling)
    weights = ask_of(m, 3).weights
    got = receive(flat, attend(flat).lse, ReductionSpec(weights), None, "blocked").received
    expected = m.visibility.uniform(weights)[:, None]
    lift = (got / expected)[(expected > 0).expand_as(got)]
    torch.testing.assert_close(lift, torch.ones_like(lift), rtol=1e-5, atol=1e-5)


@few
@given(masks(largest=16), st.integers(0, 99), st.sampled_from([1, 64, 400, 2**19]))
def test_chosen_rows_are_rows_of_the_matrix(m, seed, elements):
    """Some of the rows, in any order, however few are read at a time."""
    heads = (3, 1) if m.kind == "additive per head" else (4, 2)
    call = call_of(m, *heads, seed=seed)
    sample, row = m.table.all(1).any(-1).nonzero(as_tuple=True)
    draw = torch.Generator().manual_seed(seed)
    some = torch.randperm(len(sample), generator=draw)[: 1 + seed * len(sample) // 99]
    sample, row = sample[some], row[some]
    with small_blocks(elements):
        got = blocked.rows(call, sample, row)
    want = probabilities(call, m)[sample, :, row]
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7)


def test_no_chosen_rows_are_an_empty_stack():
    nothing = torch.zeros(0, dtype=torch.long)
    assert blocked.rows(call_of(mask("full")), nothing, nothing).shape == (0, 3, 9)


@example(16)
@example(17)
@given(st.integers(1, 50))
@settings(max_examples=10)
def test_tiles_are_sixteen_wide_and_put_together_the_columns(n):
    columns = torch.rand(2, 5, n)
    cut = tiles(columns)
    assert {t.shape[-1] for t in cut} == {16}
    assert torch.equal(torch.cat(cut, -1)[..., :n], columns)
    assert not torch.cat(cut, -1)[..., n:].any()


def test_row_mean_turns_entropies_into_the_mean_of_normalised_ones():
    valid = torch.tensor([[True, True, True, False]])
    seen = torch.tensor([[1.0, 2.0, 4.0, 4.0]])
    entropy = torch.tensor([[0.0, 0.3, 0.9, 1.0]])
    want = (0.3 / torch.tensor(2.0).log() + 0.9 / torch.tensor(4.0).log()) / 2  # a row with one key has no spread
    torch.testing.assert_close((row_mean(valid, seen) * entropy).sum(), want)
    assert not row_mean(torch.zeros(1, 3, dtype=torch.bool), torch.ones(1, 3)).any()


def test_an_unknown_backend_names_the_ones_there_are():
    with pytest.raises(
        UserError, match=r"unknown backend 'blokced' \(did you mean 'blocked'\?\); allowed: auto, triton"
    ):
        backend_for(call_of(mask("full")), wanted="blokced")


def test_triton_asked_for_where_it_cannot_serve_says_why():
    with pytest.raises(UserError, match=r"triton backend does not serve this call: .*; use backend='auto'"):
        backend_for(call_of(mask("full")), wanted="triton")
    with pytest.raises(UserError, match="does not give its log-sum-exp"):
        backend_for(call_of(mask("full")), lse_known=False, wanted="triton")
    assert backend_for(call_of(mask("full"))) == "blocked"
