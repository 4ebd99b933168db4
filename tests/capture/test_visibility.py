"""A mask kept as structure says the same as the mask spelled out."""

from __future__ import annotations

import pytest
import torch
from calls import KINDS, STRUCTURED, Mask, mask, masks
from hypothesis import given, settings
from hypothesis import strategies as st

from floatscope.capture.visibility import Visibility, padding
from floatscope.errors import UserError

few = settings(max_examples=40)


def everywhere(see: Visibility) -> tuple[slice, slice]:
    return slice(0, see.queries), slice(0, see.keys)


def spelled_out(see: Visibility, like: torch.Tensor) -> torch.Tensor:
    seen = see.allowed(*everywhere(see))
    return torch.ones_like(like) if seen is None else seen.expand_as(like)


def dense_uniform(m: Mask, weights: torch.Tensor) -> torch.Tensor:
    """u[g, j] by definition: rows share out their weight over the keys they see; mean over heads."""
    table = m.table.double()
    attention = table / table.sum(-1, keepdim=True).clamp_min(1)
    return torch.einsum("bhij,big->bhgj", attention, weights.double()).mean(1)


@pytest.mark.parametrize("side", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (1, 9), (4, 9)])
def test_allowed_equals_asking_for_every_pair(kind, side, queries, keys):
    m = mask(kind, 3, queries, keys, side)
    assert torch.equal(spelled_out(m.visibility, m.table), m.table)


@few
@given(masks(), st.data())
def test_allowed_of_a_block_is_that_block_of_the_whole(m, data):
    i, j = data.draw(st.integers(0, m.queries - 1)), data.draw(st.integers(0, m.keys - 1))
    rows = slice(i, data.draw(st.integers(i + 1, m.queries)))
    keys = slice(j, data.draw(st.integers(j + 1, m.keys)))
    part = m.visibility.allowed(rows, keys)
    want = m.table[:, :, rows, keys]
    assert torch.equal(torch.ones_like(want) if part is None else part.expand_as(want), want)


@few
@given(masks(), st.data())
def test_nothing_outside_the_span_is_seen(m, data):
    i = data.draw(st.integers(0, m.queries - 1))
    rows = slice(i, data.draw(st.integers(i + 1, m.queries)))
    span, seen = m.visibility.span(rows), m.table[:, :, rows].any((0, 1, 2))
    assert 0 <= span.start < span.stop <= m.keys
    seen[span] = False
    assert not seen.any()


@pytest.mark.parametrize("kind", ["causal", "window", "block"])
@pytest.mark.parametrize(("queries", "keys", "offset"), [(9, 4, 0), (4, 9, 0), (6, 4, -2), (3, 9, 2)])
def test_queries_may_stand_anywhere(kind, queries, keys, offset):
    """SDPA aligns a rectangular causal mask with key 0: there may be more queries than keys, or rows that see none."""
    m = Mask(kind, 1, queries, keys, offset, 2, None, None)
    see = m.visibility
    assert torch.equal(spelled_out(see, m.table), m.table)
    assert torch.equal(see.seen_keys("cpu")[0], m.table[0].sum(-1).float())
    for i in range(queries):
        span = see.span(slice(i, i + 1))
        assert 0 <= span.start < span.stop <= keys
        assert not m.table[0, 0, i, : span.start].any()
        assert not m.table[0, 0, i, span.stop :].any()


@few
@given(masks())
def test_seen_keys_counts_each_row(m):
    want = m.table.sum(-1).float()
    assert torch.equal(m.visibility.seen_keys("cpu").expand_as(want), want)


@few
@given(masks(), st.integers(1, 4))
def test_sum_over_seeing_is_the_transposed_table_times_x(m, columns):
    x = torch.randn(m.batch, m.queries, columns)
    want = m.table.double().transpose(-1, -2) @ x.double()[:, None]
    torch.testing.assert_close(m.visibility.sum_over_seeing(x).double().expand_as(want), want, rtol=1e-5, atol=1e-5)


@few
@given(masks(), st.integers(1, 4))
def test_uniform_is_the_received_attention_of_dense_uniform_attention(m, groups):
    weights = torch.rand(m.batch, m.queries, groups)
    got = m.visibility.uniform(weights)
    torch.testing.assert_close(got.double(), dense_uniform(m, weights), rtol=1e-5, atol=1e-6)


@few
@given(masks())
def test_uniform_of_all_valid_rows_adds_up_to_their_number(m):
    rows = m.standing
    got = m.visibility.uniform(rows[..., None].float())
    torch.testing.assert_close(got.sum(-1)[:, 0], rows.sum(-1).float())


@few
@given(masks())
def test_a_sample_cut_out_of_its_padding_sees_what_it_saw(m):
    for b in range(m.batch):
        one, rows, keys = m.visibility.sample(b)
        table = m.table[b : b + 1]
        assert torch.equal(spelled_out(one, table[:, :, rows, keys]), table[:, :, rows, keys])
        assert not table[:, :, :, : keys.start].any()
        assert not table[:, :, :, keys.stop :].any()
        if m.valid is not None:  # nobody who counts was cut away
            assert int(m.standing[b, rows].sum()) == int(m.standing[b].sum())


@pytest.mark.parametrize("kind", STRUCTURED)
def test_padding_on_one_side_is_cut_away_altogether(kind):
    for side in ("left", "right"):
        m = mask(kind, 3, 9, 9, side, seed=1)
        for b in range(3):
            one, rows, keys = m.visibility.sample(b)
            assert one.valid is None
            assert (one.queries, one.keys) == (rows.stop - rows.start, keys.stop - keys.start)
            assert one.keys == m.valid[b].sum()


@pytest.mark.parametrize("kind", ["full", "causal", "window", "block"])
def test_left_padding_moves_no_window_and_no_block(kind):
    alone = mask(kind, 1, 6, 6).visibility
    padded = Mask(kind, 1, 9, 9, 0, 4, torch.arange(9)[None] >= 3, None).visibility
    assert torch.equal(
        spelled_out(padded, torch.ones(1, 1, 9, 9, dtype=torch.bool))[:, :, 3:, 3:],
        spelled_out(alone, torch.ones(1, 1, 6, 6, dtype=torch.bool)),
    )


def test_a_sample_that_is_all_padding_sees_nothing():
    valid = torch.tensor([[False] * 4, [True] * 4])
    for kind in ("full", "causal"):
        one, rows, keys = getattr(Visibility, kind)(4, 4, valid).sample(0)
        assert (one.queries, one.keys) == (0, 0)
        assert (rows.stop - rows.start, keys.stop - keys.start) == (0, 0)


def test_padding_that_pads_nothing_is_none():
    assert padding(torch.ones(2, 5, dtype=torch.long)) is None
    assert padding(None) is None
    assert torch.equal(padding(torch.tensor([[0, 1]])), torch.tensor([[False, True]]))


def test_a_float_mask_of_zeros_and_ones_is_refused():
    tril = torch.ones(1, 1, 5, 5).tril()
    with pytest.raises(
        UserError, match=r"floating point but holds only 0 and 1.*pass mask\.bool\(\), or 0 for visible"
    ):
        Visibility.by_mask(tril, 5, 5)
    Visibility.by_mask(torch.zeros(5, 5), 5, 5)  # all zeros adds nothing: fine
    Visibility.by_mask(torch.where(tril.bool(), 0.0, -torch.inf), 5, 5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_an_integer_mask_is_refused(dtype):
    with pytest.raises(UserError, match=f"must be boolean or additive floating point, got {dtype}"):
        Visibility.by_mask(torch.ones(5, 5, dtype=dtype), 5, 5)


def test_a_mask_of_another_size_is_refused():
    with pytest.raises(UserError, match=r"mask of shape \(1, 1, 5, 4\) does not fit 5 queries and 5 keys"):
        Visibility.by_mask(torch.ones(1, 1, 5, 4, dtype=torch.bool), 5, 5)


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min, -1e9, torch.finfo(torch.float16).min])
def test_every_usual_way_of_writing_hidden_is_hidden(hidden):
    """exp of such a score is exactly 0 in float64; counted as visible, it would spoil what is expected of uniform."""
    visible = torch.ones(6, 6, dtype=torch.bool).tril()
    see = Visibility.by_mask(torch.where(visible, 0.0, hidden), 6, 6)
    assert torch.equal(see.allowed(*everywhere(see))[0, 0], visible)
    assert torch.equal(see.seen_keys("cpu")[0, 0], torch.arange(1.0, 7.0))
