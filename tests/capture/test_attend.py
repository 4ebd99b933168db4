"""A watched call runs as it would have run unwatched: bit for bit where the same kernel runs, padding left out."""

from __future__ import annotations

import pytest
import torch
from calls import KINDS, TENSORS, Mask, call_of, mask, masks, off, probabilities, small_blocks, values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from floatscope.capture.attention import Attention, attend
from floatscope.capture.visibility import Visibility

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def sdpa(call: Attention, m: Mask) -> torch.Tensor:
    """What a model that knows nothing of floatscope would get."""
    given = None
    if m.kind in TENSORS:
        given = m.tensor
    elif m.kind not in ("full", "causal") or m.valid is not None:
        given = m.table
    return functional.scaled_dot_product_attention(
        call.query,
        call.key,
        call.value,
        attn_mask=given,
        is_causal=given is None and m.kind == "causal",
        scale=call.scaling,
        enable_gqa=call.repeats > 1,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [9, 130])
@pytest.mark.parametrize("kind", KINDS)
def test_unpadded_attention_is_what_sdpa_gives_bit_for_bit(kind, length, dtype):
    m = mask(kind, 2, length, length, size=length // 2)
    repeats = 1 if kind == "additive per head" else 3
    call = call_of(m, heads=3, repeats=repeats, dim=16, dtype=dtype, scaling=0.3)
    assert torch.equal(attend(call).output, sdpa(call, m))


@settings(max_examples=60)
@given(masks(largest=20), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 99))
def test_output_and_log_sum_exp_are_those_of_the_definition(m, dtype, small, seed):
    call = call_of(m, dtype=dtype, seed=seed)
    if small:
        with small_blocks():
            got = attend(call)
    else:
        got = attend(call)
    A = probabilities(call, m)
    rows = m.standing[:, None] & m.table.any(-1)  # who counts
    want = (A @ values(call)) * rows[..., None]
    assert off((got.output * rows[..., None]).flatten(-2), want.flatten(-2)) <= ROUNDING[dtype]
    scores = call.scaling * call.query.double() @ call.key.double().transpose(-1, -2) + m.bias
    lse = scores.masked_fill(~m.table, -torch.inf).logsumexp(-1)
    error = torch.where(rows, got.lse.double() - lse, 0.0)
    assert float(error.abs().max()) <= (1e-5 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["full", "causal", "window", "block", "rule"])
def test_padded_equals_unpadded_exactly(kind, side, dtype):
    m = mask(kind, 3, 40, 40, side, seed=1)
    call = call_of(m, heads=4, repeats=2, dtype=dtype)
    got = attend(call)
    for b in range(3):
        visible, rows, keys = m.visibility.sample(b)
        q, k, v = call.query[b : b + 1, :, rows], call.key[b : b + 1, :, keys], call.value[b : b + 1, :, keys]
        alone = attend(Attention(q.clone(), k.clone(), v.clone(), visible, call.scaling))
        assert torch.equal(got.output[b, :, rows], alone.output[0])
        assert torch.equal(got.lse[b, :, rows], alone.lse[0])
        assert not got.output[b, :, ~m.valid[b]].any()  # rows of padding come out as zeros


def test_garbage_in_the_padding_changes_nothing():
    m = mask("causal", 2, 20, 20, "left")
    call = call_of(m)
    dirty = [x.masked_fill(~m.valid[:, None, :, None], torch.nan) for x in (call.query, call.key, call.value)]
    assert torch.equal(attend(Attention(*dirty, call.visible, call.scaling)).output, attend(call).output)


@pytest.mark.parametrize("kind", ["full", "causal", "boolean"])
def test_grouped_heads_equal_repeated_keys(kind):
    m = mask(kind, 2, 30, 30)
    grouped = call_of(m, heads=6, repeats=3)
    again = [x.repeat_interleave(3, 1) for x in (grouped.key, grouped.value)]
    repeated = Attention(grouped.query, *again, grouped.visible, grouped.scaling)
    assert torch.equal(attend(grouped).output, attend(repeated).output)


@pytest.mark.parametrize("queries", [1, 4])
def test_cached_queries_see_the_whole_prefix(queries):
    """SDPA's own is_causal would align them with key 0."""
    m = mask("causal", 2, 12, 12)
    whole = call_of(m)
    last = Attention(
        whole.query[:, :, -queries:], whole.key, whole.value, Visibility.causal(queries, 12), whole.scaling
    )
    torch.testing.assert_close(attend(last).output, attend(whole).output[:, :, -queries:])


@pytest.mark.parametrize(("queries", "keys"), [(9, 4), (4, 9)])
def test_a_causal_mask_aligned_with_key_zero_is_sdpas(queries, keys):
    q, k, v = torch.randn(2, 3, queries, 8), torch.randn(2, 3, keys, 8), torch.randn(2, 3, keys, 8)
    got = attend(Attention(q, k, v, Visibility.causal(queries, keys, offset=0), 8**-0.5)).output
    torch.testing.assert_close(got, functional.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_values_may_be_wider_than_keys():
    q, k, v = torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 12)
    got = attend(Attention(q, k, v, Visibility.causal(9, 9), 8**-0.5)).output
    torch.testing.assert_close(got, functional.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_mask_stays_float32_on_half_precision_scores(dtype):
    m = mask("additive per head", 2, 64, 64)
    m.tensor.mul_(0.337)  # not representable in half precision
    call = call_of(m, dtype=dtype)
    got = attend(call)
    assert torch.equal(got.output, sdpa(call, m))
    scores = call.scaling * call.query.double() @ call.key.double().transpose(-1, -2) + m.tensor.double()
    assert float((got.lse.double() - scores.logsumexp(-1)).abs().max()) <= 1e-3


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min, -1e9])
def test_rows_that_see_nothing_come_out_as_the_models_mask_makes_them(hidden):
    """Zeros under -inf; under a finite "minus infinity" PyTorch spreads the row evenly. Neither is ours to change."""
    q = torch.randn(1, 2, 6, 8)
    additive = torch.zeros(1, 1, 6, 6)
    additive[:, :, 2] = hidden
    got = attend(Attention(q, q, q, Visibility.by_mask(additive, 6, 6), 8**-0.5)).output
    assert torch.equal(got, functional.scaled_dot_product_attention(q, q, q, attn_mask=additive))
