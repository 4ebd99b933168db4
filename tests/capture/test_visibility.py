"""A mask stored as structure equals the mask entry by entry."""

from __future__ import annotations

import pytest
import torch
from calls import KINDS, STRUCTURED, Mask, make_mask, masks
from hypothesis import given
from hypothesis import strategies as st

from example_counts import examples
from floatscope.capture.visibility import Visibility, normalize_padding
from floatscope.errors import UserError

few_examples = examples(40)


def full_slices(visibility: Visibility) -> tuple[slice, slice]:
    return slice(0, visibility.queries), slice(0, visibility.keys)


def expand(visibility: Visibility, like: torch.Tensor) -> torch.Tensor:
    visible = visibility.block_mask(*full_slices(visibility))
    return torch.ones_like(like) if visible is None else visible.expand_as(like)


def dense_uniform(m: Mask, weights: torch.Tensor) -> torch.Tensor:
    """u[g, j] by definition: rows spread their weight over the keys they see; mean over heads."""
    table = m.table.double()
    attention = table / table.sum(-1, keepdim=True).clamp_min(1)
    return torch.einsum("bhij,big->bhgj", attention, weights.double()).mean(1)


@pytest.mark.parametrize("side", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (1, 9), (4, 9)])
def test_block_mask_equals_every_pair(kind, side, queries, keys):
    m = make_mask(kind, 3, queries, keys, side)
    assert torch.equal(expand(m.visibility, m.table), m.table)


@few_examples
@given(masks(), st.data())
def test_block_mask_is_a_block_of_the_complete_mask(m, data):
    i, j = data.draw(st.integers(0, m.queries - 1)), data.draw(st.integers(0, m.keys - 1))
    rows = slice(i, data.draw(st.integers(i + 1, m.queries)))
    keys = slice(j, data.draw(st.integers(j + 1, m.keys)))
    block = m.visibility.block_mask(rows, keys)
    expected = m.table[:, :, rows, keys]
    assert torch.equal(torch.ones_like(expected) if block is None else block.expand_as(expected), expected)


@few_examples
@given(masks(), st.data())
def test_no_key_outside_the_key_span_is_visible(m, data):
    i = data.draw(st.integers(0, m.queries - 1))
    rows = slice(i, data.draw(st.integers(i + 1, m.queries)))
    span, visible = m.visibility.key_span(rows), m.table[:, :, rows].any((0, 1, 2))
    assert 0 <= span.start < span.stop <= m.keys
    visible[span] = False
    assert not visible.any()


@pytest.mark.parametrize("kind", ["causal", "window", "block"])
@pytest.mark.parametrize(("queries", "keys", "offset"), [(9, 4, 0), (4, 9, 0), (6, 4, -2), (3, 9, 2)])
def test_queries_may_start_at_any_offset(kind, queries, keys, offset):
    """SDPA aligns a rectangular causal mask with key 0: there may be more queries than keys, or rows that see none."""
    m = Mask(kind, 1, queries, keys, offset, 2, None, None)
    visibility = m.visibility
    assert torch.equal(expand(visibility, m.table), m.table)
    assert torch.equal(visibility.count_visible_keys("cpu")[0], m.table[0].sum(-1).float())
    for i in range(queries):
        span = visibility.key_span(slice(i, i + 1))
        assert 0 <= span.start < span.stop <= keys
        assert not m.table[0, 0, i, : span.start].any()
        assert not m.table[0, 0, i, span.stop :].any()


@few_examples
@given(masks(kinds=("full", "causal", "window", "block")))
def test_a_mask_that_is_known_to_show_all_hides_no_valid_key(m):
    valid = torch.ones(m.batch, m.keys, dtype=torch.bool) if m.valid is None else m.valid
    shows_all = bool((m.table == valid[:, None, None]).all())
    if m.valid is None:
        assert m.visibility.is_known_to_show_all == shows_all
    else:
        assert shows_all or not m.visibility.is_known_to_show_all


@few_examples
@given(masks())
def test_visible_keys_are_counted_for_each_row(m):
    expected = m.table.sum(-1).float()
    assert torch.equal(m.visibility.count_visible_keys("cpu").expand_as(expected), expected)


@few_examples
@given(masks(), st.integers(1, 4))
def test_column_sum_is_the_transposed_table_times_x(m, columns):
    x = torch.randn(m.batch, m.queries, columns)
    expected = m.table.double().transpose(-1, -2) @ x.double()[:, None]
    torch.testing.assert_close(m.visibility.column_sum(x).double().expand_as(expected), expected, rtol=1e-5, atol=1e-5)


@few_examples
@given(masks(), st.integers(1, 4))
def test_uniform_received_equals_dense_uniform_attention(m, groups):
    weights = torch.rand(m.batch, m.queries, groups)
    actual = m.visibility.uniform_received(weights)
    torch.testing.assert_close(actual.double(), dense_uniform(m, weights), rtol=1e-5, atol=1e-6)


@few_examples
@given(masks())
def test_uniform_received_of_all_valid_rows_adds_up_to_their_number(m):
    rows = m.valid_rows
    actual = m.visibility.uniform_received(rows[..., None].float())
    torch.testing.assert_close(actual.sum(-1)[:, 0], rows.sum(-1).float())


@few_examples
@given(masks())
def test_a_sample_without_its_padding_sees_the_same_keys(m):
    for b in range(m.batch):
        one, rows, keys = m.visibility.unpadded_sample(b)
        table = m.table[b : b + 1]
        assert torch.equal(expand(one, table[:, :, rows, keys]), table[:, :, rows, keys])
        assert not table[:, :, :, : keys.start].any()
        assert not table[:, :, :, keys.stop :].any()
        if m.valid is not None:  # every valid row remains
            assert int(m.valid_rows[b, rows].sum()) == int(m.valid_rows[b].sum())


@pytest.mark.parametrize("kind", STRUCTURED)
def test_padding_on_one_side_is_removed_completely(kind):
    for side in ("left", "right"):
        m = make_mask(kind, 3, 9, 9, side, seed=1)
        for b in range(3):
            one, rows, keys = m.visibility.unpadded_sample(b)
            assert one.valid is None
            assert (one.queries, one.keys) == (rows.stop - rows.start, keys.stop - keys.start)
            assert one.keys == m.valid[b].sum()


@pytest.mark.parametrize("kind", ["full", "causal", "window", "block"])
def test_left_padding_does_not_shift_windows_and_blocks(kind):
    alone = make_mask(kind, 1, 6, 6).visibility
    padded = Mask(kind, 1, 9, 9, 0, 4, torch.arange(9)[None] >= 3, None).visibility
    assert torch.equal(
        expand(padded, torch.ones(1, 1, 9, 9, dtype=torch.bool))[:, :, 3:, 3:],
        expand(alone, torch.ones(1, 1, 6, 6, dtype=torch.bool)),
    )


def test_a_sample_that_is_all_padding_sees_nothing():
    valid = torch.tensor([[False] * 4, [True] * 4])
    for kind in ("full", "causal"):
        one, rows, keys = getattr(Visibility, kind)(4, 4, valid).unpadded_sample(0)
        assert (one.queries, one.keys) == (0, 0)
        assert (rows.stop - rows.start, keys.stop - keys.start) == (0, 0)


def test_padding_without_padded_keys_is_none():
    assert normalize_padding(torch.ones(2, 5, dtype=torch.long)) is None
    assert normalize_padding(None) is None
    assert torch.equal(normalize_padding(torch.tensor([[0, 1]])), torch.tensor([[False, True]]))


def test_a_float_mask_of_zeros_and_ones_is_refused():
    tril = torch.ones(1, 1, 5, 5).tril()
    with pytest.raises(
        UserError, match=r"floating point but contains only 0 and 1.*pass mask\.bool\(\), or 0 for visible"
    ):
        Visibility.from_mask(tril, 5, 5)
    Visibility.from_mask(torch.zeros(5, 5), 5, 5)  # all zeros adds nothing: fine
    Visibility.from_mask(torch.where(tril.bool(), 0.0, -torch.inf), 5, 5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_an_integer_mask_is_refused(dtype):
    with pytest.raises(UserError, match=f"must be boolean or additive floating point, got {dtype}"):
        Visibility.from_mask(torch.ones(5, 5, dtype=dtype), 5, 5)


def test_a_mask_of_another_size_is_refused():
    with pytest.raises(UserError, match=r"mask of shape \(1, 1, 5, 4\) does not fit 5 queries and 5 keys"):
        Visibility.from_mask(torch.ones(1, 1, 5, 4, dtype=torch.bool), 5, 5)


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min, -1e9, torch.finfo(torch.float16).min])
def test_every_common_hidden_value_hides(hidden):
    """exp of such a score is exactly 0 in float64; counted as visible, it would distort the uniform baseline."""
    visible = torch.ones(6, 6, dtype=torch.bool).tril()
    visibility = Visibility.from_mask(torch.where(visible, 0.0, hidden), 6, 6)
    assert torch.equal(visibility.block_mask(*full_slices(visibility))[0, 0], visible)
    assert torch.equal(visibility.count_visible_keys("cpu")[0, 0], torch.arange(1.0, 7.0))


def find_padding_slowly(mask: torch.Tensor) -> list[list[bool]]:
    """mask: [batch, query, key], the queries at the last keys."""
    out = []
    for rows in mask.tolist():
        Q, K = len(rows), len(rows[0])
        is_padding = []
        for p in range(K):
            row = p - (K - Q)
            is_seen = any(rows[i][p] for i in range(Q))
            is_blind = row >= 0 and not any(rows[row])
            is_key_mask = row >= 0 and Q > 1 and all(rows[i] == rows[0] for i in range(Q))
            is_padding.append(row >= 0 and not is_seen and (is_blind or is_key_mask))
        start = next((p for p in range(K) if not is_padding[p]), K)
        stop = next((p + 1 for p in reversed(range(K)) if not is_padding[p]), 0)
        out.append([p < start or p >= stop for p in range(K)])
    return out


@pytest.mark.parametrize("seed", range(40))
def test_padding_in_a_mask_is_what_no_row_sees_and_sees_nothing(seed):
    generator = torch.Generator().manual_seed(seed)
    B, K = 3, int(torch.randint(1, 8, (), generator=generator))
    Q = int(torch.randint(1, K + 1, (), generator=generator))
    valid = torch.rand(B, K, generator=generator) > 0.4
    structures = (torch.ones(Q, K), torch.ones(Q, K).tril(K - Q), torch.ones(Q, K).tril(K - Q - 1))
    mask = structures[seed % 3].bool() & valid[:, None]
    if seed % 2:
        mask = mask & valid[:, K - Q :, None]
    expected = find_padding_slowly(mask)
    for tensor in (mask[:, None], torch.where(mask, 0.5, -torch.inf)[:, None].expand(B, 2, Q, K)):
        padding = Visibility.from_mask(tensor, Q, K).find_padding()
        assert (torch.zeros(B, K).bool() if padding is None else padding).tolist() == expected


def test_a_strictly_causal_mask_has_no_padding():
    """No row sees the last key, but its own row sees others."""
    assert Visibility.from_mask(torch.ones(5, 5).tril(-1).bool(), 5, 5).find_padding() is None
