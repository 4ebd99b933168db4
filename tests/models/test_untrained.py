"""The untrained control: the same architecture with other weights, which depend on the seed alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import floatscope as fs

SHAPE = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 20)
        self.register_buffer("places", torch.arange(4))


class Bare(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4)),
    "plain": Plain,
}


def shapes(module: nn.Module) -> dict[str, tuple]:
    return {name: (tuple(t.shape), t.dtype) for name, t in module.state_dict().items()}


def matrices(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in module.named_parameters() if p.ndim > 1}


@pytest.mark.parametrize("name", MODELS)
def test_same_architecture_other_weights(name):
    model = MODELS[name]()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    control = fs.untrained(model, seed=1)
    assert type(control) is type(model)
    assert shapes(control) == shapes(model)
    assert not any(torch.equal(control.get_parameter(k), p) for k, p in matrices(model).items())
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())  # the model itself is untouched
    shared = {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in control.parameters()}
    assert not shared


@pytest.mark.parametrize("name", MODELS)
def test_weights_depend_on_the_seed_alone(name):
    model = MODELS[name]()
    first = fs.untrained(model, seed=5)
    torch.rand(7)  # the global state must not matter
    again, other = fs.untrained(model, seed=5), fs.untrained(model, seed=6)
    assert all(torch.equal(again.get_parameter(k), p) for k, p in matrices(first).items())
    assert not any(torch.equal(other.get_parameter(k), p) for k, p in matrices(first).items())


@pytest.mark.parametrize("name", MODELS)
def test_the_global_random_state_is_unchanged(name):
    model = MODELS[name]()
    before = torch.random.get_rng_state()
    fs.untrained(model, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("training", [True, False])
def test_training_mode_and_dtype_are_those_of_the_model(training):
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).train(training)
    for p in model.parameters():
        p.data = p.data.bfloat16()  # as `from_pretrained` does: parameters in bf16, RoPE's frequencies in fp32
    control = fs.untrained(model)
    assert control.training is training
    assert {p.dtype for p in control.parameters()} == {torch.bfloat16}
    frequencies = dict(control.named_buffers())["model.rotary_emb.inv_freq"]
    assert torch.equal(frequencies, dict(model.named_buffers())["model.rotary_emb.inv_freq"])


def test_tied_weights_stay_tied():
    model = MODELS["gpt2"]()
    control = fs.untrained(model.bfloat16())
    assert control.lm_head.weight is control.transformer.wte.weight
    assert control.lm_head.weight.dtype == torch.bfloat16


def test_a_layer_that_cannot_be_initialised_is_named():
    message = r"cannot build an untrained control: 'Bare' \(Bare\) has parameters \(scale\) but no reset_parameters\(\)"
    with pytest.raises(fs.UserError, match=message):
        fs.untrained(Bare())
    with pytest.raises(fs.UserError, match=r"'1' \(Bare\) has parameters \(scale\)"):
        fs.untrained(nn.Sequential(Plain(), Bare()))


def test_a_control_decodes_like_its_model(llada):
    control = fs.untrained(llada, seed=2)
    assert control.spec.name == f"{llada.spec.name} (untrained, seed 2)"
    assert control.spec.mask_id == llada.spec.mask_id
    out = fs.decode(control, [[1, 2, 3]], new_tokens=4, steps=2, watch=fs.Watch())
    trained = fs.decode(llada, [[1, 2, 3]], new_tokens=4, steps=2, watch=fs.Watch())
    assert out.traces[0].arrays["received"].shape == trained.traces[0].arrays["received"].shape
    assert not torch.equal(torch.tensor(out.traces[0].received()), torch.tensor(trained.traces[0].received()))
