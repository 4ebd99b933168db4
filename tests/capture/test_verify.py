"""`verify=True` recomputes every call dense in float64; each test breaks one thing on purpose and sees it caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calls import call_of, mask
from transformers import LlamaConfig, LlamaForCausalLM

import floatscope as fs
from floatscope.capture import verify, watcher
from floatscope.capture.ask import ReductionSpec
from floatscope.capture.attention import attend
from floatscope.capture.received import receive
from floatscope.capture.verify import Mismatch, call_errors
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
    with torch.no_grad(), fs.watch(model, **settings) as seen:
        model(ids, attention_mask=padding)
    return seen


def lie(monkeypatch, name, wrong):
    """Let the watcher use `wrong(honest, …)` instead of its own `name`."""
    honest = getattr(watcher, name)
    monkeypatch.setattr(watcher, name, lambda *args, **kwargs: wrong(honest, *args, **kwargs))


def caught(model, what: str) -> None:
    pattern = rf"captured differs from executed at layer 'model\.layers\.0\.self_attn', step 0: {what} is off by \d"
    with pytest.raises(Mismatch, match=pattern) as error:
        run(model, verify=True)
    assert "run `floatscope doctor`" in str(error.value)
    assert isinstance(error.value, fs.UserError)


def test_an_honest_capture_passes(model):
    assert len(run(model, verify=True).traces) == 2


def test_scores_under_another_scaling_are_caught(model, monkeypatch):
    lie(monkeypatch, "receive", lambda honest, call, *rest: honest(replace(call, scaling=call.scaling * 1.01), *rest))
    caught(model, "received")


def test_dropped_padding_in_the_executed_kernel_is_caught(model, monkeypatch):
    def unpadded(honest, call):
        see = call.visible
        return honest(replace(call, visible=Visibility.causal(see.queries, see.keys)))

    lie(monkeypatch, "attend", unpadded)
    caught(model, "output")


def test_dropped_padding_in_what_is_captured_is_caught(model, monkeypatch):
    def unpadded(honest, call, lse, *rest):
        see = call.visible
        return honest(replace(call, visible=Visibility.causal(see.queries, see.keys)), None, *rest)

    lie(monkeypatch, "receive", unpadded)
    caught(model, "received")


def test_a_forgotten_causal_mask_is_caught(model, monkeypatch):
    def full(honest, call):
        see = call.visible
        return honest(replace(call, visible=Visibility.full(see.queries, see.keys, see.valid)))

    lie(monkeypatch, "attend", full)
    caught(model, "output")


def test_heads_that_read_the_wrong_keys_are_caught(model, monkeypatch):
    def interleaved(honest, call):  # head h reading h % 2 instead of h // 2
        return honest(replace(call, key=call.key.repeat(1, 2, 1, 1), value=call.value.repeat(1, 2, 1, 1)))

    lie(monkeypatch, "attend", interleaved)
    caught(model, "output")


def test_an_output_changed_behind_the_kernel_is_caught(model, monkeypatch):
    lie(monkeypatch, "attend", lambda honest, call: replace(honest(call), output=honest(call).output * 1.001))
    caught(model, "output")


@pytest.mark.parametrize("what", ["entropy", "received"])
def test_nan_is_a_mismatch(model, monkeypatch, what):
    def wrong(honest, *args):
        got = honest(*args)
        return replace(got, **{what: getattr(got, what) * torch.nan})

    lie(monkeypatch, "receive", wrong)
    with pytest.raises(Mismatch, match=f"{what} is off by nan"):
        run(model, verify=True)


@pytest.mark.parametrize("verify", [True, False])
def test_a_log_sum_exp_of_another_head_shows_with_and_without_verify(model, monkeypatch, verify):
    """Rows of softmax sum to 1; that costs nothing to check at every step."""
    lie(monkeypatch, "attend", lambda honest, call: replace(honest(call), lse=honest(call).lse.roll(1, 1)))
    said = r"differs from executed at layer 0 \('model\.layers\.0\.self_attn'\), head \d, step 0, sample 0: rows sum to"
    if verify:
        said = r"differs from executed at layer 'model\.layers\.0\.self_attn', step 0: mass is off by"
    with pytest.raises(fs.UserError, match=said):
        run(model, verify=verify)


def test_a_log_sum_exp_that_is_slightly_off_shows_too(model, monkeypatch):
    lie(monkeypatch, "attend", lambda honest, call: replace(honest(call), lse=honest(call).lse + 0.01))
    with pytest.raises(fs.UserError, match=r"rows sum to (0\.99|1\.01)\d\d instead of 1; run `floatscope doctor`"):
        run(model)


@pytest.mark.parametrize("kind", ["full", "causal", "window", "boolean", "additive per head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_small_for_an_honest_call_and_name_every_quantity(kind, dtype):
    m = mask(kind, 2, 20, 20, "left" if kind in ("full", "causal") else "none")
    call = call_of(m, dtype=dtype)
    ask = ReductionSpec(m.standing[..., None].float(), m.standing.float() / 20)
    carry = torch.rand(2, 20, 3)
    done = attend(call)
    errors = call_errors(call, done.output, ask, carry, receive(call, done.lse, ask, carry))
    assert set(errors) == {"output", "received", "mass", "entropy", "carried"}
    for what, error in errors.items():
        assert error <= (verify.OUTPUT if what == "output" else verify.REDUCED)[dtype]


def test_carried_values_are_checked_too():
    m = mask("causal", 2, 12, 12)
    call, ask, carry = call_of(m), ReductionSpec(torch.ones(2, 12, 1)), torch.rand(2, 12, 2)
    done = attend(call)
    got = receive(call, done.lse, ask, carry)
    assert call_errors(call, done.output, ask, carry, replace(got, carried=got.carried * 1.01))["carried"] > 5e-3
