"""On a GPU: the output equals the model's own kernel bit for bit, and the Triton kernel has the stated accuracy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calls import make_call, make_mask, probabilities, relative_error
from test_edit_tensors import EDIT_NAMES, draw_edits
from torch.nn import functional

from floatscope.capture import attention_kernel, dense
from floatscope.capture.attention import AttentionCall
from floatscope.capture.backends import reduce_attention, select_backend
from floatscope.capture.edit_tensors import EditTensors
from floatscope.capture.edited_attention import attend_with_edits
from floatscope.capture.reduction_spec import ReductionSpec, entropy_row_weights
from floatscope.capture.visibility import Visibility
from pairs import every_pair

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LIMIT = {torch.float32: 5e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3}


def call_to_gpu(call: AttentionCall) -> AttentionCall:
    visibility = call.visibility
    return AttentionCall(
        call.query.cuda(),
        call.key.cuda(),
        call.value.cuda(),
        replace(visibility, valid=None if visibility.valid is None else visibility.valid.cuda()),
        call.scaling,
        None if call.edits is None else edits_to_gpu(call.edits),
    )


def edits_to_gpu(edits: EditTensors) -> EditTensors:
    def to_gpu(part):
        return replace(part, **{k: v.cuda() for k, v in vars(part).items() if isinstance(v, torch.Tensor)})

    return EditTensors(
        tuple(map(to_gpu, edits.biases)),
        None if edits.sink is None else edits.sink.cuda(),
        tuple(map(to_gpu, edits.moves)),
        None if edits.silent_heads is None else edits.silent_heads.cuda(),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize("kind", ["full", "causal"])
def test_unpadded_attention_equals_sdpa_bit_for_bit(kind, repeats, dtype):
    call = call_to_gpu(make_call(make_mask(kind, 2, 256, 256), heads=8, repeats=repeats, dim=64, dtype=dtype))
    expected = functional.scaled_dot_product_attention(
        call.query, call.key, call.value, is_causal=kind == "causal", scale=call.scaling, enable_gqa=repeats > 1
    )
    assert torch.equal(attend_with_edits(call).output, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("kind", ["full", "causal"])
@pytest.mark.parametrize("backend", ["auto", "blocked"])
def test_received_attention_has_the_stated_accuracy(backend, kind, side, dtype):
    """Group `all`, random weights and single rows, with entropy and carry."""
    m = make_mask(kind, 2, 300, 300, side)
    call = make_call(m, heads=4, repeats=2, dim=64, dtype=dtype)
    counts = m.valid_rows[..., None]
    weights = torch.rand(2, 300, 20)
    weights[..., 0] = 1.0
    for g in range(1, 10):
        weights[..., g] = torch.arange(300) == 33 * g
    weights = weights * counts
    entropy = entropy_row_weights(m.valid_rows, m.table.sum(-1)[:, 0].float())
    carry = torch.rand(2, 300, 3)
    gpu = call_to_gpu(call)
    lse = attend_with_edits(gpu).lse
    if backend == "auto" and lse is not None:
        assert select_backend(gpu) == "triton"
    result = reduce_attention(gpu, lse, ReductionSpec(weights.cuda(), entropy.cuda()), carry.cuda(), backend)
    A = probabilities(call, m)
    rows = -torch.where(A > 0, A * A.clamp_min(1e-300).log(), 0.0).sum(-1)
    attended_carry = (A @ carry.double()[:, None]).mean(1)
    assert relative_error(result.received.cpu(), torch.einsum("bhij,big->bhgj", A, weights.double())) <= LIMIT[dtype]
    assert float((result.entropy.cpu() - (rows * entropy[:, None]).sum(-1)).abs().max()) <= 1e-3
    assert (
        relative_error((result.attended_carry.cpu() * counts).flatten(1), (attended_carry * counts).flatten(1))
        <= LIMIT[dtype]
    )


@every_pair(
    structure=[("block", 4), ("block", 32), ("block", 48), ("window", 6), ("window", 64), ("causal", 0), ("full", 0)],
    queries=[1000, 1024, 32],
    side=["none", "left", "right"],
    dim=[64, 128, 256, 512],
    dtype=[torch.float32, torch.bfloat16],
    repeats=[1, 2],
)
def test_structured_masks_and_wide_heads_equal_float64(structure, queries, side, dim, dtype, repeats):
    """Output, received attention, entropy and carry, for square calls and for the last rows over cached keys."""
    kind, size = structure
    keys = 1000 if queries == 32 else queries
    m = make_mask(kind, 2, queries, keys, side, size)
    call = call_to_gpu(make_call(m, heads=4, repeats=repeats, dim=dim, dtype=dtype))
    valid = m.valid_rows.cuda()
    weights = torch.rand(2, queries, 20, device="cuda")
    weights[..., 0] = 1.0
    weights[..., 1] = torch.arange(queries, device="cuda") == queries - 20
    visible_keys = call.visibility.count_visible_keys("cuda")[:, 0].expand(2, -1)
    spec = ReductionSpec(weights * valid[..., None], entropy_row_weights(valid, visible_keys))
    carry = torch.rand(2, keys, 3, device="cuda")
    attended = attend_with_edits(call)
    assert attended.lse is not None
    assert select_backend(call) == "triton"
    result = reduce_attention(call, attended.lse, spec, carry)
    expected = dense.reduce_attention(call, None, spec, carry)
    rows = valid[:, None, :, None]
    output, expected_output = (x * rows for x in (attended.output, dense.attention_output(call)))
    limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert relative_error(output.flatten(2), expected_output.flatten(2)) <= limit
    assert relative_error(result.received.flatten(2), expected.received.flatten(2)) <= LIMIT[dtype]
    assert relative_error(result.received[:, :, 0], expected.received[:, :, 0]) <= LIMIT[dtype]
    assert float((result.entropy - expected.entropy).abs().max()) <= 1e-3
    carried, expected_carry = (x * valid[..., None] for x in (result.attended_carry, expected.attended_carry))
    assert relative_error(carried.flatten(1), expected_carry.flatten(1)) <= LIMIT[dtype]


@pytest.mark.parametrize("visibility", [Visibility.block(8192, 8192, 32), Visibility.window(8192, 8192, 1024)])
def test_structured_attention_needs_no_memory_for_a_mask(visibility):
    q, k, v = (torch.randn(1, n, 8192, 128, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2))
    call = AttentionCall(q, k, v, visibility, 0.1)
    attend_with_edits(call)  # compile
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attended = attend_with_edits(call)
    reduce_attention(call, attended.lse, ReductionSpec(torch.ones(1, 8192, 16, device="cuda")))
    assert torch.cuda.max_memory_allocated() - before <= 8192**2 // 2  # bytes; a boolean mask has 8192²


@pytest.mark.parametrize("kind", ["full", "causal", "block", "window"])
def test_the_log_sum_exp_of_our_kernel_is_that_of_torch(kind):
    """In bf16 too, where the interpreter cannot show it."""
    m = make_mask(kind, 2, 300, 300, "left", 40)
    call = make_call(m, heads=4, repeats=2, dim=128, dtype=torch.bfloat16)
    scores = call.query.double() @ call.key.double().repeat_interleave(2, 1).mT * call.scaling
    expected = torch.logsumexp(scores.masked_fill(~m.table, -torch.inf), -1)
    actual = attention_kernel.compute_lse(call_to_gpu(call)).cpu()
    rows = m.valid_rows[:, None].expand_as(actual)
    assert float((actual - expected)[rows].abs().max()) <= 1e-4


def test_tf32_of_the_model_is_not_used_for_the_capture():
    m = make_mask("window", 1, 200, 200, size=50)
    call = make_call(m, heads=4, dim=64)
    expected = torch.einsum("bhij->bhj", probabilities(call, m))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        result = reduce_attention(
            call_to_gpu(call), None, ReductionSpec(torch.ones(1, 200, 1, device="cuda")), None, "blocked"
        ).received[:, :, 0]
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert relative_error(result.cpu(), expected) <= 5e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("kind", ["full", "causal"])
@pytest.mark.parametrize("name", EDIT_NAMES)
def test_edits_are_executed_and_captured(name, kind, side, dtype):
    m = make_mask(kind, 2, 300, 300, side)
    call = make_call(m, heads=4, repeats=2, dim=64, dtype=dtype)
    call = replace(call, edits=draw_edits(name, m, 4, torch.Generator().manual_seed(0)))
    rows = m.valid_rows[:, None, :, None]
    spec = ReductionSpec((torch.rand(2, 300, 3) + 0.1) * m.valid_rows[..., None])
    gpu = call_to_gpu(call)
    attended = attend_with_edits(gpu)
    result = reduce_attention(gpu, attended.lse, ReductionSpec(spec.weights.cuda()))
    limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert (
        relative_error((attended.output.cpu() * rows).flatten(2), (dense.attention_output(call) * rows).flatten(2))
        <= limit
    )
    assert (
        relative_error(result.received.cpu().flatten(2), dense.reduce_attention(call, None, spec).received.flatten(2))
        <= LIMIT[dtype]
    )
