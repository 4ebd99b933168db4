"""A watched call runs like an unwatched one: bit for bit where the same kernel runs, and without padding."""

from __future__ import annotations

import pytest
import torch
from calls import (
    KINDS,
    TENSORS,
    Mask,
    make_call,
    make_mask,
    masks,
    probabilities,
    relative_error,
    repeated_values,
    small_blocks,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from example_counts import examples
from floatscope.capture.attention import AttentionCall, attend
from floatscope.capture.visibility import Visibility
from pairs import every_pair

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def sdpa(call: AttentionCall, m: Mask) -> torch.Tensor:
    """The output of a model without floatscope."""
    attn_mask = None
    if m.kind in TENSORS:
        attn_mask = m.tensor
    elif m.kind not in ("full", "causal") or m.valid is not None:
        attn_mask = m.table
    return functional.scaled_dot_product_attention(
        call.query,
        call.key,
        call.value,
        attn_mask=attn_mask,
        is_causal=attn_mask is None and m.kind == "causal",
        scale=call.scaling,
        enable_gqa=call.repeats > 1,
    )


@every_pair(kind=KINDS, length=[9, 130], dtype=DTYPES)
def test_unpadded_attention_equals_sdpa_bit_for_bit(kind, length, dtype):
    m = make_mask(kind, 2, length, length, size=length // 2)
    repeats = 1 if kind == "additive per head" else 3
    call = make_call(m, heads=3, repeats=repeats, dim=16, dtype=dtype, scaling=0.3)
    assert torch.equal(attend(call).output, sdpa(call, m))


@examples(60)
@given(masks(largest=20), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 99))
def test_output_and_log_sum_exp_equal_the_definition(m, dtype, small, seed):
    call = make_call(m, dtype=dtype, seed=seed)
    if small:
        with small_blocks():
            result = attend(call)
    else:
        result = attend(call)
    A = probabilities(call, m)
    rows = m.valid_rows[:, None] & m.table.any(-1)  # the rows that count
    expected = (A @ repeated_values(call)) * rows[..., None]
    assert relative_error((result.output * rows[..., None]).flatten(-2), expected.flatten(-2)) <= ROUNDING[dtype]
    scores = call.scaling * call.query.double() @ call.key.double().transpose(-1, -2) + m.bias
    lse = scores.masked_fill(~m.table, -torch.inf).logsumexp(-1)
    error = torch.where(rows, result.lse.double() - lse, 0.0)
    assert float(error.abs().max()) <= (1e-5 if dtype == torch.float32 else 1e-3)


@every_pair(kind=["full", "causal", "window", "block", "rule"], side=["left", "right"], dtype=DTYPES)
def test_padded_equals_unpadded_exactly(kind, side, dtype):
    m = make_mask(kind, 3, 40, 40, side, seed=1)
    call = make_call(m, heads=4, repeats=2, dtype=dtype)
    result = attend(call)
    for b in range(3):
        visible, rows, keys = m.visibility.unpadded_sample(b)
        q, k, v = call.query[b : b + 1, :, rows], call.key[b : b + 1, :, keys], call.value[b : b + 1, :, keys]
        alone = attend(AttentionCall(q.clone(), k.clone(), v.clone(), visible, call.scaling))
        assert torch.equal(result.output[b, :, rows], alone.output[0])
        assert torch.equal(result.lse[b, :, rows], alone.lse[0])
        assert not result.output[b, :, ~m.valid[b]].any()  # padding rows are zeros


def test_garbage_in_the_padding_changes_nothing():
    m = make_mask("causal", 2, 20, 20, "left")
    call = make_call(m)
    dirty = [x.masked_fill(~m.valid[:, None, :, None], torch.nan) for x in (call.query, call.key, call.value)]
    assert torch.equal(attend(AttentionCall(*dirty, call.visibility, call.scaling)).output, attend(call).output)


@pytest.mark.parametrize("kind", ["full", "causal", "boolean"])
def test_grouped_heads_equal_repeated_keys(kind):
    m = make_mask(kind, 2, 30, 30)
    grouped = make_call(m, heads=6, repeats=3)
    again = [x.repeat_interleave(3, 1) for x in (grouped.key, grouped.value)]
    repeated = AttentionCall(grouped.query, *again, grouped.visibility, grouped.scaling)
    assert torch.equal(attend(grouped).output, attend(repeated).output)


@pytest.mark.parametrize("queries", [1, 4])
def test_cached_queries_see_the_complete_prefix(queries):
    """SDPA's own is_causal would align them with key 0."""
    m = make_mask("causal", 2, 12, 12)
    complete = make_call(m)
    last = AttentionCall(
        complete.query[:, :, -queries:], complete.key, complete.value, Visibility.causal(queries, 12), complete.scaling
    )
    torch.testing.assert_close(attend(last).output, attend(complete).output[:, :, -queries:])


@pytest.mark.parametrize(("queries", "keys"), [(9, 4), (4, 9)])
def test_a_causal_mask_aligned_with_key_zero_equals_sdpa(queries, keys):
    q, k, v = torch.randn(2, 3, queries, 8), torch.randn(2, 3, keys, 8), torch.randn(2, 3, keys, 8)
    result = attend(AttentionCall(q, k, v, Visibility.causal(queries, keys, offset=0), 8**-0.5)).output
    torch.testing.assert_close(result, functional.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_values_may_be_wider_than_keys():
    q, k, v = torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 12)
    result = attend(AttentionCall(q, k, v, Visibility.causal(9, 9), 8**-0.5)).output
    torch.testing.assert_close(result, functional.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_mask_stays_float32_on_half_precision_scores(dtype):
    m = make_mask("additive per head", 2, 64, 64)
    m.tensor.mul_(0.337)  # not representable in half precision
    call = make_call(m, dtype=dtype)
    result = attend(call)
    assert torch.equal(result.output, sdpa(call, m))
    scores = call.scaling * call.query.double() @ call.key.double().transpose(-1, -2) + m.tensor.double()
    assert float((result.lse.double() - scores.logsumexp(-1)).abs().max()) <= 1e-3


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min, -1e9])
def test_rows_that_see_nothing_follow_the_mask_of_the_model(hidden):
    """Zeros under -inf; uniform under a finite "minus infinity". Both are PyTorch's results and stay unchanged."""
    q = torch.randn(1, 2, 6, 8)
    additive = torch.zeros(1, 1, 6, 6)
    additive[:, :, 2] = hidden
    result = attend(AttentionCall(q, q, q, Visibility.from_mask(additive, 6, 6), 8**-0.5)).output
    assert torch.equal(result, functional.scaled_dot_product_attention(q, q, q, attn_mask=additive))
