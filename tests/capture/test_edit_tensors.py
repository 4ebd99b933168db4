"""Edits of an attention call: output, received attention, entropy and single rows equal a row-by-row computation in
float64."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from calls import Mask, make_call, make_mask, make_spec, masks, relative_error, repeated_values, small_blocks
from hypothesis import given
from hypothesis import strategies as st

from example_counts import examples
from floatscope.capture import blocked, dense
from floatscope.capture.attention import AttentionCall
from floatscope.capture.backends import reduce_attention, select_backend
from floatscope.capture.edit_tensors import NO_KEY, BiasTensors, EditTensors, MoveTensors
from floatscope.capture.edited_attention import attend_with_edits
from pairs import every_pair

few_examples = examples(80)
EDIT_NAMES = ("bias", "hide", "hide some rows", "sink", "move", "spread", "silent")


def draw_edits(name: str, m: Mask, heads: int, generator: torch.Generator) -> EditTensors:
    """One kind of edit with random operands."""

    def rows() -> torch.Tensor:
        return torch.rand(m.batch, m.queries, generator=generator) > 0.5

    def keys(n: int) -> torch.Tensor:  # distinct keys, some ranks empty
        order = torch.rand(m.batch, heads, m.keys, generator=generator).argsort(-1)[..., :n]
        return order.masked_fill(torch.rand(order.shape, generator=generator) < 0.2, NO_KEY)

    def numbers(width: int) -> torch.Tensor:
        return torch.randn(m.batch, width, m.keys, generator=generator) * 3

    n = min(3, m.keys)
    match name:
        case "bias":
            return EditTensors((BiasTensors(numbers(1)), BiasTensors(numbers(heads), rows())))
        case "hide":
            hidden = torch.rand(m.batch, heads, m.keys, generator=generator) < 0.6
            return EditTensors((BiasTensors(torch.where(hidden, -torch.inf, 0.0), hides_keys=True),))
        case "hide some rows":
            hidden = torch.rand(m.batch, 1, m.keys, generator=generator) < 0.9
            return EditTensors((BiasTensors(torch.where(hidden, -torch.inf, numbers(1)), rows(), hides_keys=True),))
        case "sink":
            sink = torch.randn(heads, generator=generator) * 4
            return EditTensors(sink=torch.where(torch.arange(heads) % 3 == 1, -torch.inf, sink))
        case "move":
            return EditTensors(moves=(MoveTensors(keys(n), keys(n).clamp_min(0), rows()),))
        case "spread":
            return EditTensors(moves=(MoveTensors(keys(n)),))
        case _:
            return EditTensors(silent_heads=torch.arange(heads) % 2 == 0)


def combine(parts: list[EditTensors]) -> EditTensors:
    moves = tuple(move for part in parts for move in part.moves)
    return EditTensors(
        tuple(bias for part in parts for bias in part.biases),
        next((part.sink for part in parts if part.sink is not None), None),
        moves[:1],  # two moves could take the same mass
        next((part.silent_heads for part in parts if part.silent_heads is not None), None),
    )


def edited_matrix(call: AttentionCall, m: Mask, edits: EditTensors) -> torch.Tensor:
    """The attention matrix, row by row; rows on padding and rows that see nothing are zero."""
    B, H, Q, _ = call.query.shape
    A = torch.zeros(B, H, Q, m.keys, dtype=torch.float64)
    table, added = m.table.expand(B, H, Q, m.keys), m.bias.expand(B, H, Q, m.keys)
    for b in range(B):
        for h in range(H):
            key = call.key[b, h // call.repeats].double()
            for i in range(Q):
                visible = [j for j in range(m.keys) if table[b, h, i, j]]
                score = {j: float(call.query[b, h, i].double() @ key[j]) * call.scaling for j in visible}
                score = {j: s + float(added[b, h, i, j]) for j, s in score.items()}
                for bias in edits.biases:
                    if bias.queries is not None and not bias.queries[b, i]:
                        continue
                    numbers = bias.keys[b, h if bias.keys.shape[1] > 1 else 0].tolist()
                    for j in visible:
                        if numbers[j] > -math.inf or j != m.offset + i:
                            score[j] += numbers[j]
                largest = max([s for s in score.values() if s > -math.inf], default=0.0)
                e = {j: math.exp(s - largest) for j, s in score.items()}
                extra = 0.0 if edits.sink is None else math.exp(float(edits.sink[h]) - largest)
                total = sum(e.values()) + extra
                p = {j: x / total for j, x in e.items()} if total else {}
                after = dict(p)
                for move in edits.moves:
                    if move.queries is not None and not move.queries[b, i]:
                        continue
                    for r, a in enumerate(move.source[b, h].tolist()):
                        to = visible if move.target is None else [int(move.target[b, h, r])]
                        if a in p and to and all(j in p for j in to):
                            after[a] -= p[a]
                            for j in to:
                                after[j] += p[a] / len(to)
                for j, x in after.items():
                    A[b, h, i, j] = x
    return A


@few_examples
@given(
    masks(largest=10),
    st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 3)]),
    st.lists(st.sampled_from(EDIT_NAMES), min_size=1, max_size=4, unique=True),
    st.booleans(),
    st.integers(0, 99),
)
def test_executed_and_captured_attention_equal_the_edited_matrix(m, heads, names, small, seed):
    heads = (3, 1) if m.kind == "additive per head" else heads
    generator = torch.Generator().manual_seed(seed)
    edits = combine([draw_edits(name, m, heads[0], generator) for name in names])
    call = replace(make_call(m, *heads, seed=seed), edits=edits)
    A = edited_matrix(call, m, edits)
    counted_rows = m.valid_rows & m.table.all(1).any(-1)  # [batch, query]
    spec, carry = make_spec(m, 5, seed), torch.rand(m.batch, m.keys, 3)
    with small_blocks(64 if small else 2**16):
        result = attend_with_edits(call)
        reduced = reduce_attention(call, result.lse, spec, carry, "blocked")
        without_lse = reduce_attention(call, None, spec, carry, "blocked")
    expected = A @ repeated_values(call)
    if edits.silent_heads is not None:
        expected[:, edits.silent_heads] = 0
    rows = counted_rows[:, None, :, None]
    assert relative_error((result.output * rows).flatten(2), (expected * rows).flatten(2)) < 3e-6
    received = torch.einsum("bhij,big->bhgj", A, spec.weights.double())
    entropy = (-torch.xlogy(A, A).sum(-1) * spec.entropy_weights.double()[:, None]).sum(-1)
    for reduction in (reduced, without_lse):
        assert relative_error(reduction.received.flatten(2), received.flatten(2)) < 3e-6
        assert float((reduction.entropy - entropy).abs().max()) < 1e-5
        counted = counted_rows[..., None]
        assert (
            relative_error(
                (reduction.attended_carry * counted).flatten(1),
                ((A @ carry.double()[:, None]).mean(1) * counted).flatten(1),
            )
            < 1e-5
        )
        assert (
            relative_error(reduction.mass, (spec.weights[..., 0].sum(1, keepdim=True)).expand_as(reduction.mass)) < 1e-5
        )
    exact = dense.attention_matrix(call)
    assert float(((exact - A) * rows).abs().max()) < 1e-9
    sample, row = counted_rows.nonzero(as_tuple=True)
    with small_blocks(64 if small else 2**16):
        single_rows = blocked.compute_rows(call, sample, row)
    torch.testing.assert_close(single_rows.double(), A[sample, :, row], atol=3e-6, rtol=0)


@every_pair(kind=["full", "causal"], name=EDIT_NAMES, dtype=[torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_its_dtype(dtype, name, kind):
    m = make_mask(kind, 2, 48, 48, "left")
    call = make_call(m, 4, 2, 16, dtype)
    call = replace(call, edits=draw_edits(name, m, 4, torch.Generator().manual_seed(1)))
    result, spec = attend_with_edits(call), make_spec(m, 4)
    rows = m.valid_rows[:, None, :, None]
    assert result.output.dtype == dtype
    assert relative_error((result.output * rows).flatten(2), (dense.attention_output(call) * rows).flatten(2)) < (
        1e-2 if dtype == torch.bfloat16 else 2e-3
    )
    reduced, expected = reduce_attention(call, result.lse, spec, None), dense.reduce_attention(call, None, spec)
    assert relative_error(reduced.received.flatten(2), expected.received.flatten(2)) < 1e-3


def test_a_hidden_key_receives_attention_only_from_its_own_row():
    m = make_mask("full", 2, 30, 30, "left")
    hidden = torch.zeros(2, 3, 30, dtype=torch.bool)
    hidden[:, 0, 25], hidden[:, 1, 20:], hidden[:, 2, -1] = True, True, True
    call = replace(
        make_call(m), edits=EditTensors((BiasTensors(torch.where(hidden, -torch.inf, 0.0), hides_keys=True),))
    )
    for at in blocked.iter_blocks(call, attend_with_edits(call).lse):
        for h in range(at.heads.start, at.heads.stop):
            for j in range(at.keys.start, at.keys.stop):
                column = at.p[0, h - at.heads.start, :, j - at.keys.start]
                own = torch.arange(at.rows.start, at.rows.stop) == j
                assert (column[own] > 0).all()
                assert bool((column[~own] == 0).all()) == bool(hidden[at.batch.start, h, j])


def test_a_row_whose_keys_are_all_hidden_sees_its_own():
    m = make_mask("causal", 1, 6, 6)
    call = make_call(m)
    edits = EditTensors((BiasTensors(torch.full((1, 1, 6), -torch.inf), hides_keys=True),))
    result = attend_with_edits(replace(call, edits=edits))
    torch.testing.assert_close(result.output, call.value)


def test_moved_mass_arrives_at_the_target():
    m = make_mask("full", 1, 12, 12)
    call = make_call(m)
    before = dense.attention_matrix(call)
    source, target = torch.tensor([3, 7]).expand(1, 3, 2), torch.tensor([0, 0]).expand(1, 3, 2)
    call = replace(call, edits=EditTensors(moves=(MoveTensors(source, target),)))
    lse = attend_with_edits(call).lse
    (block,) = (at for at in blocked.iter_blocks(call, lse))
    assert (block.p[..., [3, 7]] == 0).all()
    torch.testing.assert_close(block.p[0, :, :, 0].double(), before[0, :, :, [0, 3, 7]].sum(-1), atol=1e-6, rtol=0)


def test_a_virtual_sink_is_an_extra_key_with_a_value_of_zero():
    m = make_mask("full", 2, 9, 9)
    call = make_call(m, dim=8)
    score = torch.tensor([0.5, -1.0, 6.0])
    result = attend_with_edits(replace(call, edits=EditTensors(sink=score)))
    # q has an extra dimension of 1; the extra key has only that dimension
    q = torch.nn.functional.pad(call.query, (0, 1), value=1.0)
    k = torch.nn.functional.pad(call.key, (0, 1))
    extra = torch.zeros(2, 3, 1, 9)
    extra[..., 0, 8] = score / call.scaling
    wide = torch.cat([k, extra], 2), torch.cat([call.value, torch.zeros(2, 3, 1, 8)], 2)
    expected = torch.nn.functional.scaled_dot_product_attention(q, *wide, scale=call.scaling)
    torch.testing.assert_close(result.output, expected)


def test_other_edits_than_one_bias_use_the_blocked_backend():
    m = make_mask("full", 1, 16, 16)
    call = make_call(m, dim=16)
    generator = torch.Generator().manual_seed(0)
    for name in ("move", "spread", "sink", "bias"):
        assert select_backend(replace(call, edits=draw_edits(name, m, 3, generator))) == "blocked"


def test_empty_edits_change_nothing():
    m = make_mask("causal", 2, 20, 20, "left")
    call = make_call(m, 4, 2)
    assert torch.equal(attend_with_edits(call).output, attend_with_edits(replace(call, edits=EditTensors())).output)
