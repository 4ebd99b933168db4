"""Interventions in an attention call: output, received attention, entropy and single rows equal a restatement that
goes through every row in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from calls import Mask, call_of, mask, masks, off, small_blocks, values
from hypothesis import given, settings
from hypothesis import strategies as st
from test_primitive import ask_of

from floatscope.capture import blocked, dense
from floatscope.capture.attention import Attention
from floatscope.capture.changed import attend
from floatscope.capture.changes import NOWHERE, Bias, Changes, Move
from floatscope.capture.received import backend_for, receive

few = settings(max_examples=80)
PARTS = ("bias", "hide", "hide some rows", "sink", "move", "spread", "silent")


def some(part: str, m: Mask, heads: int, noise: torch.Generator) -> Changes:
    """One sort of change with random operands."""

    def rows() -> torch.Tensor:
        return torch.rand(m.batch, m.queries, generator=noise) > 0.5

    def keys(n: int) -> torch.Tensor:  # different ones, some ranks empty
        order = torch.rand(m.batch, heads, m.keys, generator=noise).argsort(-1)[..., :n]
        return order.masked_fill(torch.rand(order.shape, generator=noise) < 0.2, NOWHERE)

    def numbers(width: int) -> torch.Tensor:
        return torch.randn(m.batch, width, m.keys, generator=noise) * 3

    n = min(3, m.keys)
    match part:
        case "bias":
            return Changes((Bias(numbers(1)), Bias(numbers(heads), rows())))
        case "hide":
            hidden = torch.rand(m.batch, heads, m.keys, generator=noise) < 0.6
            return Changes((Bias(torch.where(hidden, -torch.inf, 0.0), hides=True),))
        case "hide some rows":
            hidden = torch.rand(m.batch, 1, m.keys, generator=noise) < 0.9
            return Changes((Bias(torch.where(hidden, -torch.inf, numbers(1)), rows(), hides=True),))
        case "sink":
            sink = torch.randn(heads, generator=noise) * 4
            return Changes(sink=torch.where(torch.arange(heads) % 3 == 1, -torch.inf, sink))
        case "move":
            return Changes(moves=(Move(keys(n), keys(n).clamp_min(0), rows()),))
        case "spread":
            return Changes(moves=(Move(keys(n)),))
        case _:
            return Changes(silent=torch.arange(heads) % 2 == 0)


def together(parts: list[Changes]) -> Changes:
    moves = tuple(move for part in parts for move in part.moves)
    return Changes(
        tuple(bias for part in parts for bias in part.biases),
        next((part.sink for part in parts if part.sink is not None), None),
        moves[:1],  # two moves might take the same mass
        next((part.silent for part in parts if part.silent is not None), None),
    )


def executed(call: Attention, m: Mask, changes: Changes) -> torch.Tensor:
    """A, row after row; rows on padding, or that see nothing, are zero."""
    B, H, Q, _ = call.query.shape
    A = torch.zeros(B, H, Q, m.keys, dtype=torch.float64)
    table, added = m.table.expand(B, H, Q, m.keys), m.bias.expand(B, H, Q, m.keys)
    for b in range(B):
        for h in range(H):
            key = call.key[b, h // call.repeats].double()
            for i in range(Q):
                seen = [j for j in range(m.keys) if table[b, h, i, j]]
                score = {j: float(call.query[b, h, i].double() @ key[j]) * call.scaling for j in seen}
                score = {j: s + float(added[b, h, i, j]) for j, s in score.items()}
                for bias in changes.biases:
                    if bias.queries is not None and not bias.queries[b, i]:
                        continue
                    numbers = bias.keys[b, h if bias.keys.shape[1] > 1 else 0].tolist()
                    for j in seen:
                        if numbers[j] > -math.inf or j != m.offset + i:
                            score[j] += numbers[j]
                most = max([s for s in score.values() if s > -math.inf], default=0.0)
                e = {j: math.exp(s - most) for j, s in score.items()}
                extra = 0.0 if changes.sink is None else math.exp(float(changes.sink[h]) - most)
                total = sum(e.values()) + extra
                p = {j: x / total for j, x in e.items()} if total else {}
                after = dict(p)
                for move in changes.moves:
                    if move.queries is not None and not move.queries[b, i]:
                        continue
                    for r, a in enumerate(move.source[b, h].tolist()):
                        to = seen if move.target is None else [int(move.target[b, h, r])]
                        if a in p and to and all(j in p for j in to):
                            after[a] -= p[a]
                            for j in to:
                                after[j] += p[a] / len(to)
                for j, x in after.items():
                    A[b, h, i, j] = x
    return A


@few
@given(
    masks(largest=10),
    st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 3)]),
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=4, unique=True),
    st.booleans(),
    st.integers(0, 99),
)
def test_what_is_executed_and_captured_is_the_change(m, heads, parts, small, seed):
    heads = (3, 1) if m.kind == "additive per head" else heads
    noise = torch.Generator().manual_seed(seed)
    changes = together([some(part, m, heads[0], noise) for part in parts])
    call = replace(call_of(m, *heads, seed=seed), changes=changes)
    A = executed(call, m, changes)
    stands = m.standing & m.table.all(1).any(-1)  # [batch, query]
    ask, carry = ask_of(m, 5, seed), torch.rand(m.batch, m.keys, 3)
    with small_blocks(64 if small else 2**16):
        done = attend(call)
        got = receive(call, done.lse, ask, carry, "blocked")
        unaided = receive(call, None, ask, carry, "blocked")
    want = A @ values(call)
    if changes.silent is not None:
        want[:, changes.silent] = 0
    rows = stands[:, None, :, None]
    assert off((done.output * rows).flatten(2), (want * rows).flatten(2)) < 3e-6
    received = torch.einsum("bhij,big->bhgj", A, ask.weights.double())
    entropy = (-torch.xlogy(A, A).sum(-1) * ask.entropy.double()[:, None]).sum(-1)
    for answer in (got, unaided):
        assert off(answer.received.flatten(2), received.flatten(2)) < 3e-6
        assert float((answer.entropy - entropy).abs().max()) < 1e-5
        counted = stands[..., None]
        assert (
            off((answer.carried * counted).flatten(1), ((A @ carry.double()[:, None]).mean(1) * counted).flatten(1))
            < 1e-5
        )
        assert off(answer.mass, (ask.weights[..., 0].sum(1, keepdim=True)).expand_as(answer.mass)) < 1e-5
    exact = dense.matrix(call)
    assert float(((exact - A) * rows).abs().max()) < 1e-9
    sample, row = stands.nonzero(as_tuple=True)
    with small_blocks(64 if small else 2**16):
        chosen = blocked.rows(call, sample, row)
    torch.testing.assert_close(chosen.double(), A[sample, :, row], atol=3e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", ["full", "causal"])
def test_halves_are_as_exact_as_their_type(dtype, part, kind):
    m = mask(kind, 2, 48, 48, "left")
    call = call_of(m, 4, 2, 16, dtype)
    call = replace(call, changes=some(part, m, 4, torch.Generator().manual_seed(1)))
    done, ask = attend(call), ask_of(m, 4)
    rows = m.standing[:, None, :, None]
    assert done.output.dtype == dtype
    assert off((done.output * rows).flatten(2), (dense.output(call) * rows).flatten(2)) < (
        1e-2 if dtype == torch.bfloat16 else 2e-3
    )
    got, want = receive(call, done.lse, ask, None), dense.receive(call, None, ask)
    assert off(got.received.flatten(2), want.received.flatten(2)) < 1e-3


def test_a_hidden_key_gets_exactly_nothing_but_from_its_own_row():
    m = mask("full", 2, 30, 30, "left")
    hidden = torch.zeros(2, 3, 30, dtype=torch.bool)
    hidden[:, 0, 25], hidden[:, 1, 20:], hidden[:, 2, -1] = True, True, True
    call = replace(call_of(m), changes=Changes((Bias(torch.where(hidden, -torch.inf, 0.0), hides=True),)))
    for at in blocked.blocks(call, attend(call).lse):
        for h in range(at.heads.start, at.heads.stop):
            for j in range(at.keys.start, at.keys.stop):
                column = at.p[0, h - at.heads.start, :, j - at.keys.start]
                own = torch.arange(at.rows.start, at.rows.stop) == j
                assert (column[own] > 0).all()
                assert bool((column[~own] == 0).all()) == bool(hidden[at.batch.start, h, j])


def test_a_row_none_of_whose_keys_is_left_has_its_own():
    m = mask("causal", 1, 6, 6)
    call = call_of(m)
    changes = Changes((Bias(torch.full((1, 1, 6), -torch.inf), hides=True),))
    done = attend(replace(call, changes=changes))
    torch.testing.assert_close(done.output, call.value)


def test_moved_mass_is_where_it_was_moved_to():
    m = mask("full", 1, 12, 12)
    call = call_of(m)
    before = dense.matrix(call)
    source, target = torch.tensor([3, 7]).expand(1, 3, 2), torch.tensor([0, 0]).expand(1, 3, 2)
    call = replace(call, changes=Changes(moves=(Move(source, target),)))
    lse = attend(call).lse
    (block,) = (at for at in blocked.blocks(call, lse))
    assert (block.p[..., [3, 7]] == 0).all()
    torch.testing.assert_close(block.p[0, :, :, 0].double(), before[0, :, :, [0, 3, 7]].sum(-1), atol=1e-6, rtol=0)


def test_a_virtual_sink_is_an_extra_key_with_a_value_of_zero():
    m = mask("full", 2, 9, 9)
    call = call_of(m, dim=8)
    score = torch.tensor([0.5, -1.0, 6.0])
    done = attend(replace(call, changes=Changes(sink=score)))
    # q has a further dimension of 1, the extra key only that dimension
    q = torch.nn.functional.pad(call.query, (0, 1), value=1.0)
    k = torch.nn.functional.pad(call.key, (0, 1))
    extra = torch.zeros(2, 3, 1, 9)
    extra[..., 0, 8] = score / call.scaling
    wide = torch.cat([k, extra], 2), torch.cat([call.value, torch.zeros(2, 3, 1, 8)], 2)
    want = torch.nn.functional.scaled_dot_product_attention(q, *wide, scale=call.scaling)
    torch.testing.assert_close(done.output, want)


def test_the_kernel_on_a_gpu_takes_one_bias_and_leaves_the_rest_to_the_blocks():
    m = mask("full", 1, 16, 16)
    call = call_of(m, dim=16)
    noise = torch.Generator().manual_seed(0)
    for part in ("move", "spread", "sink", "bias"):
        assert backend_for(replace(call, changes=some(part, m, 3, noise))) == "blocked"


def test_without_changes_nothing_is_another():
    m = mask("causal", 2, 20, 20, "left")
    call = call_of(m, 4, 2)
    assert torch.equal(attend(call).output, attend(replace(call, changes=Changes())).output)
