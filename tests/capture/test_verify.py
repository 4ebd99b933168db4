"""`verify=True` recomputes every call dense in float64; each test breaks one thing and expects a mismatch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calls import make_call, make_mask
from transformers import LlamaConfig, LlamaForCausalLM

import floatscope as fs
from floatscope.capture import verify, watcher
from floatscope.capture.attention import attend
from floatscope.capture.backends import reduce_attention
from floatscope.capture.reduction_spec import ReductionSpec
from floatscope.capture.verify import Mismatch, measure_errors
from floatscope.capture.visibility import Visibility

T = 10


@pytest.fixture
def model():
    shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads)).eval()


def run(model, **settings):
    ids = torch.randint(0, 50, (2, T))
    padding = torch.ones(2, T, dtype=torch.long)
    padding[1, :4] = 0
    with torch.no_grad(), fs.watch(model, **settings) as session:
        model(ids, attention_mask=padding)
    return session


def corrupt(monkeypatch, name, corrupted):
    """Let the watcher use `corrupted(original, …)` instead of its own `name`."""
    original = getattr(watcher, name)
    monkeypatch.setattr(watcher, name, lambda *args, **kwargs: corrupted(original, *args, **kwargs))


def assert_caught(model, quantity: str) -> None:
    pattern = rf"captured differs from executed at layer 'model\.layers\.0\.self_attn', step 0: {quantity} is off by \d"
    with pytest.raises(Mismatch, match=pattern) as error:
        run(model, verify=True)
    assert "run `floatscope doctor`" in str(error.value)
    assert isinstance(error.value, fs.UserError)


def test_a_correct_capture_passes(model):
    assert len(run(model, verify=True).traces) == 2


def test_scores_with_another_scaling_are_caught(model, monkeypatch):
    corrupt(
        monkeypatch,
        "reduce_attention",
        lambda original, call, *rest: original(replace(call, scaling=call.scaling * 1.01), *rest),
    )
    assert_caught(model, "received")


def test_dropped_padding_in_the_executed_kernel_is_caught(model, monkeypatch):
    def unpadded(original, call):
        visibility = call.visibility
        return original(replace(call, visibility=Visibility.causal(visibility.queries, visibility.keys)))

    corrupt(monkeypatch, "attend_with_edits", unpadded)
    assert_caught(model, "output")


def test_dropped_padding_in_the_capture_is_caught(model, monkeypatch):
    def unpadded(original, call, lse, *rest):
        visibility = call.visibility
        return original(replace(call, visibility=Visibility.causal(visibility.queries, visibility.keys)), None, *rest)

    corrupt(monkeypatch, "reduce_attention", unpadded)
    assert_caught(model, "received")


def test_a_forgotten_causal_mask_is_caught(model, monkeypatch):
    def full(original, call):
        visibility = call.visibility
        return original(
            replace(call, visibility=Visibility.full(visibility.queries, visibility.keys, visibility.valid))
        )

    corrupt(monkeypatch, "attend_with_edits", full)
    assert_caught(model, "output")


def test_heads_that_read_the_wrong_keys_are_caught(model, monkeypatch):
    def interleaved(original, call):  # head h reading h % 2 instead of h // 2
        return original(replace(call, key=call.key.repeat(1, 2, 1, 1), value=call.value.repeat(1, 2, 1, 1)))

    corrupt(monkeypatch, "attend_with_edits", interleaved)
    assert_caught(model, "output")


def test_an_output_changed_after_the_kernel_is_caught(model, monkeypatch):
    corrupt(
        monkeypatch,
        "attend_with_edits",
        lambda original, call: replace(original(call), output=original(call).output * 1.001),
    )
    assert_caught(model, "output")


@pytest.mark.parametrize("quantity", ["entropy", "received"])
def test_nan_is_a_mismatch(model, monkeypatch, quantity):
    def corrupted(original, *args):
        result = original(*args)
        return replace(result, **{quantity: getattr(result, quantity) * torch.nan})

    corrupt(monkeypatch, "reduce_attention", corrupted)
    with pytest.raises(Mismatch, match=f"{quantity} is off by nan"):
        run(model, verify=True)


@pytest.mark.parametrize("verify", [True, False])
def test_a_log_sum_exp_of_another_head_is_caught_with_and_without_verify(model, monkeypatch, verify):
    """Softmax rows sum to 1, which every step checks at no cost."""
    corrupt(
        monkeypatch,
        "attend_with_edits",
        lambda original, call: replace(original(call), lse=original(call).lse.roll(1, 1)),
    )
    message = (
        r"differs from executed at layer 0 \('model\.layers\.0\.self_attn'\), head \d, step 0, sample 0: rows sum to"
    )
    if verify:
        message = r"differs from executed at layer 'model\.layers\.0\.self_attn', step 0: mass is off by"
    with pytest.raises(fs.UserError, match=message):
        run(model, verify=verify)


def test_a_slightly_wrong_log_sum_exp_is_caught(model, monkeypatch):
    corrupt(
        monkeypatch, "attend_with_edits", lambda original, call: replace(original(call), lse=original(call).lse + 0.01)
    )
    with pytest.raises(fs.UserError, match=r"rows sum to (0\.99|1\.01)\d\d instead of 1; run `floatscope doctor`"):
        run(model)


@pytest.mark.parametrize("kind", ["full", "causal", "window", "boolean", "additive per head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_of_a_correct_call_are_small_and_cover_every_quantity(kind, dtype):
    m = make_mask(kind, 2, 20, 20, "left" if kind in ("full", "causal") else "none")
    call = make_call(m, dtype=dtype)
    spec = ReductionSpec(m.valid_rows[..., None].float(), m.valid_rows.float() / 20)
    carry = torch.rand(2, 20, 3)
    attended = attend(call)
    errors = measure_errors(call, attended.output, spec, carry, reduce_attention(call, attended.lse, spec, carry))
    assert set(errors) == {"output", "received", "mass", "entropy", "carry"}
    for quantity, error in errors.items():
        assert error <= (verify.OUTPUT_TOLERANCE if quantity == "output" else verify.REDUCTION_TOLERANCE)[dtype]


def test_the_carry_is_checked():
    m = make_mask("causal", 2, 12, 12)
    call, spec, carry = make_call(m), ReductionSpec(torch.ones(2, 12, 1)), torch.rand(2, 12, 2)
    attended = attend(call)
    result = reduce_attention(call, attended.lse, spec, carry)
    assert (
        measure_errors(
            call, attended.output, spec, carry, replace(result, attended_carry=result.attended_carry * 1.01)
        )["carry"]
        > 5e-3
    )
