"""On a GPU: the model's own kernel gives its bits and its log-sum-exp, and the Triton kernel the stated accuracy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calls import call_of, mask, off, probabilities
from test_changes import PARTS, some
from torch.nn import functional

from floatscope.capture import dense
from floatscope.capture.ask import ReductionSpec, row_mean
from floatscope.capture.attention import Attention
from floatscope.capture.changed import attend
from floatscope.capture.changes import Changes
from floatscope.capture.received import backend_for, receive

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LIMIT = {torch.float32: 5e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3}


def on_gpu(call: Attention) -> Attention:
    see = call.visible
    return Attention(
        call.query.cuda(),
        call.key.cuda(),
        call.value.cuda(),
        replace(see, valid=None if see.valid is None else see.valid.cuda()),
        call.scaling,
        None if call.changes is None else moved(call.changes),
    )


def moved(changes: Changes) -> Changes:
    def there(part):
        return replace(part, **{k: v.cuda() for k, v in vars(part).items() if isinstance(v, torch.Tensor)})

    return Changes(
        tuple(map(there, changes.biases)),
        None if changes.sink is None else changes.sink.cuda(),
        tuple(map(there, changes.moves)),
        None if changes.silent is None else changes.silent.cuda(),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize("kind", ["full", "causal"])
def test_unpadded_attention_is_what_sdpa_gives_bit_for_bit(kind, repeats, dtype):
    call = on_gpu(call_of(mask(kind, 2, 256, 256), heads=8, repeats=repeats, dim=64, dtype=dtype))
    want = functional.scaled_dot_product_attention(
        call.query, call.key, call.value, is_causal=kind == "causal", scale=call.scaling, enable_gqa=repeats > 1
    )
    assert torch.equal(attend(call).output, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("kind", ["full", "causal"])
@pytest.mark.parametrize("backend", ["auto", "blocked"])
def test_received_attention_is_as_accurate_as_stated(backend, kind, side, dtype):
    """Group `all`, random weights and single rows, with entropy and carried values."""
    m = mask(kind, 2, 300, 300, side)
    call = call_of(m, heads=4, repeats=2, dim=64, dtype=dtype)
    counts = m.standing[..., None]
    weights = torch.rand(2, 300, 20)
    weights[..., 0] = 1.0
    for g in range(1, 10):
        weights[..., g] = torch.arange(300) == 33 * g
    weights = weights * counts
    entropy = row_mean(m.standing, m.table.sum(-1)[:, 0].float())
    carry = torch.rand(2, 300, 3)
    gpu = on_gpu(call)
    lse = attend(gpu).lse
    if backend == "auto" and lse is not None:
        assert backend_for(gpu) == "triton"
    got = receive(gpu, lse, ReductionSpec(weights.cuda(), entropy.cuda()), carry.cuda(), backend)
    A = probabilities(call, m)
    rows = -torch.where(A > 0, A * A.clamp_min(1e-300).log(), 0.0).sum(-1)
    onward = (A @ carry.double()[:, None]).mean(1)
    assert off(got.received.cpu(), torch.einsum("bhij,big->bhgj", A, weights.double())) <= LIMIT[dtype]
    assert float((got.entropy.cpu() - (rows * entropy[:, None]).sum(-1)).abs().max()) <= 1e-3
    assert off((got.carried.cpu() * counts).flatten(1), (onward * counts).flatten(1)) <= LIMIT[dtype]


def test_tf32_allowed_for_the_model_is_not_used_for_the_capture():
    m = mask("window", 1, 200, 200, size=50)
    call = call_of(m, heads=4, dim=64)
    want = torch.einsum("bhij->bhj", probabilities(call, m))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        got = receive(
            on_gpu(call), None, ReductionSpec(torch.ones(1, 200, 1, device="cuda")), None, "blocked"
        ).received[:, :, 0]
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert off(got.cpu(), want) <= 5e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("kind", ["full", "causal"])
@pytest.mark.parametrize("part", PARTS)
def test_what_is_changed_is_executed_and_captured(part, kind, side, dtype):
    m = mask(kind, 2, 300, 300, side)
    call = call_of(m, heads=4, repeats=2, dim=64, dtype=dtype)
    call = replace(call, changes=some(part, m, 4, torch.Generator().manual_seed(0)))
    rows = m.standing[:, None, :, None]
    ask = ReductionSpec((torch.rand(2, 300, 3) + 0.1) * m.standing[..., None])
    gpu = on_gpu(call)
    done = attend(gpu)
    got = receive(gpu, done.lse, ReductionSpec(ask.weights.cuda()))
    limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert off((done.output.cpu() * rows).flatten(2), (dense.output(call) * rows).flatten(2)) <= limit
    assert off(got.received.cpu().flatten(2), dense.receive(call, None, ask).received.flatten(2)) <= LIMIT[dtype]
