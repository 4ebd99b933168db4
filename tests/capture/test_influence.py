"""Influence equals finite differences, is the same in batches and parallel commits, and changes no decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import floatscope as fs
from floatscope.capture import influence
from floatscope.capture.influence import compute_influence
from floatscope.traces.recorder import Recorder
from floatscope.traces.trace_file import read_trace, write_trace

WIDTH = 16
SHAPE = {
    "vocab_size": 50,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
MASK, EOS = 49, 48
PROMPTS = [[1, 2, 3, 4, 5, 6], [8, 9, 10]]
KINDS = ("unshifted", "shifted", "encoder", "arm")
FOUR = {"new_tokens": 4, "stop": False}


def make_model(kind: str, dtype: torch.dtype = torch.float64) -> fs.Model:
    """A model like LLaDA, Dream, BERT or a causal one; all but BERT have two query heads per KV head."""
    torch.manual_seed(1)
    if kind == "encoder":
        module: nn.Module = BertForMaskedLM(BertConfig(**SHAPE))
    else:
        config = LlamaConfig(**SHAPE, num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=0)
        module = LlamaForCausalLM(config)
    for part in module.modules() if dtype == torch.float64 else ():
        if isinstance(part, LlamaRMSNorm):  # its own forward always computes in float32
            part.forward = partial(rms_norm, part)
    arm = kind == "arm"
    spec = fs.ModelSpec(
        kind, fs.Paradigm.ARM if arm else fs.Paradigm.MDM, None if arm else MASK, shift=kind in ("shifted", "arm")
    )
    return fs.Model(module.eval().to(dtype), replace(spec, eos_id=EOS))


def rms_norm(part: LlamaRMSNorm, x: torch.Tensor) -> torch.Tensor:
    return part.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + part.variance_epsilon)


def decode_steps(model: fs.Model, prompts: list[list[int]] = PROMPTS) -> list[fs.Step]:
    return fs.decode(model, prompts, **FOUR, **({} if model.spec.name == "arm" else {"steps": 2})).steps


def influence_of(model: fs.Model, step: fs.Step) -> torch.Tensor:
    return compute_influence(model.forward, model.module, step.before, step.commits)


def differences(model: fs.Model, tokens: torch.Tensor, row: int, token: int) -> torch.Tensor:
    """[key]: the norm of the logit's central differences along a random basis of each position's embedding.

    It runs the sample without padding, through `inputs_embeds`.
    """
    embedded, eps = model.module.get_input_embeddings()(tokens), 1e-5
    basis, _ = torch.linalg.qr(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
    extra = {"is_causal": False} if model.spec.name in ("unshifted", "shifted") else {}
    norms = []
    for j in range(len(tokens)):
        shifted = embedded.repeat(2 * WIDTH, 1, 1)
        shifted[:, j] += torch.cat([eps * basis, -eps * basis])
        up, down = model.module(inputs_embeds=shifted, **extra).logits[:, row, token].split(WIDTH)
        norms.append(((up - down) / (2 * eps)).norm())
    return torch.stack(norms)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_influence_is_the_norm_of_finite_differences(kind):
    model = make_model(kind)
    checked = 0
    for step in decode_steps(model):
        actual = influence_of(model, step)
        assert (actual.dtype, actual.shape) == (torch.float32, (len(step.commits), step.before.tokens.shape[1]))
        for c, b in enumerate(step.commits.sample.tolist()):
            valid, start = step.before.valid[b], int((~step.before.valid[b]).sum())
            row, token = int(step.commits.row[c]) - start, int(step.commits.token[c])
            expected = differences(model, step.before.tokens[b, valid], row, token)
            torch.testing.assert_close(actual[c, valid].double(), expected, rtol=1e-5, atol=1e-6)
            assert (actual[c, ~valid] == 0).all()
            if kind == "arm":
                assert (expected > 1e-3).all()  # the last row predicts, and sees every position
            checked += 1
    assert checked == 8


@pytest.mark.parametrize("kind", ["unshifted", "shifted", "encoder"])
def test_parallel_commits_equal_single_ones(kind):
    model = make_model(kind)
    step = decode_steps(model)[0]
    together = influence_of(model, step)
    assert torch.bincount(step.commits.sample).tolist() == [2, 2]
    names = ("sample", "position", "row", "token", "confidence")
    for c in range(len(step.commits)):
        alone = fs.Commits(*(getattr(step.commits, name)[[c]] for name in names))
        torch.testing.assert_close(
            influence_of(model, replace(step, commits=alone))[0], together[c], rtol=1e-6, atol=1e-7
        )
    assert influence_of(model, replace(step, commits=fs.Commits.empty())).shape == (0, step.before.tokens.shape[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_equals_its_samples_alone(kind, monkeypatch):
    model, watch = make_model(kind), fs.Watch(influence=True)
    together = fs.decode(model, PROMPTS, samples=["a", "b"], watch=watch, **FOUR).traces
    monkeypatch.setattr(influence, "EMBEDDING_ELEMENTS", 1)  # a sample at a time
    in_parts = fs.decode(model, PROMPTS, samples=["a", "b"], watch=watch, **FOUR).traces
    for prompt, trace, part in zip(PROMPTS, together, in_parts, strict=True):
        alone = fs.decode(model, [prompt], samples=[trace.sample], watch=watch, **FOUR).trace
        for other in (alone, part):
            np.testing.assert_allclose(trace.arrays["influence"], other.arrays["influence"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_influence_changes_nothing_else_in_the_decoding(kind, dtype):
    model = make_model(kind, dtype)
    plain, with_it = (
        fs.decode(model, PROMPTS, temperature=1.0, seed=3, watch=fs.Watch("rows", influence=with_influence), **FOUR)
        for with_influence in (False, True)
    )
    assert torch.equal(plain.tokens, with_it.tokens)
    for one, other in zip(plain.traces, with_it.traces, strict=True):
        assert list(other.arrays) == [*one.arrays, "influence"]
        assert other.axes["influence"] == ("commit", "key")
        for name, array in one.arrays.items():
            assert array.tobytes() == other.arrays[name].tobytes(), name
        assert {**one.meta, "fields": [*one.meta["fields"], "influence"]} == other.meta


def test_a_trace_stores_influence_on_the_canvas_of_each_step(tmp_path):
    """An autoregressive canvas grows: positions that a step did not have are NaN, the others are numbers."""
    for trace in fs.decode(make_model("arm"), PROMPTS, watch=fs.Watch(influence=True), **FOUR).traces:
        shifted, keys = trace.arrays["influence"], trace.arrays["keys"][trace.arrays["commit_step"]]
        assert shifted.dtype == np.float32
        assert shifted.shape == (4, keys[-1])
        assert (np.isnan(shifted) == (np.arange(keys[-1]) >= keys[:, None])).all()
        write_trace(tmp_path / "trace.safetensors", trace)
        back = read_trace(tmp_path / "trace.safetensors")
        assert back.arrays["influence"].tobytes() == shifted.tobytes()
        assert (back.axes, back.meta) == (trace.axes, trace.meta)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_close_to_single(kind):
    model = make_model(kind, torch.bfloat16)
    step = decode_steps(model)[0]
    actual = influence_of(model, step)
    model.module.float()  # the same weights
    expected = influence_of(model, step)
    assert actual.dtype == torch.float32
    assert float((actual - expected).norm() / expected.norm()) < 0.08


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_influence_works_where_gradients_are_off(mode):
    model = make_model("shifted")
    out = fs.decode(model, PROMPTS, watch=fs.Watch(influence=True), **FOUR)
    with mode():
        inside = fs.decode(model, PROMPTS, watch=fs.Watch(influence=True), **FOUR).traces
    for one, other in zip(out.traces, inside, strict=True):
        np.testing.assert_array_equal(one.arrays["influence"], other.arrays["influence"])


def model_state(module: nn.Module) -> tuple[object, ...]:
    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()]
    grads = [(p.requires_grad, p.grad) for p in module.parameters()]
    return module.config._attn_implementation, hooks, grads, torch.is_grad_enabled()


@pytest.mark.parametrize("kind", ["unshifted", "arm"])
def test_the_model_uses_its_own_attention_and_is_restored(kind):
    model = make_model(kind)
    module, implementations = model.module, []
    module.lm_head.weight.requires_grad_(False)
    before = model_state(module)
    handle = module.model.register_forward_hook(lambda *_: implementations.append(module.config._attn_implementation))
    _ = fs.decode(model, PROMPTS, watch=fs.Watch(influence=True), **FOUR).traces
    assert implementations == ["floatscope", before[0]] * 4
    handle.remove()
    assert model_state(module) == before

    def fail(*_):
        if torch.is_grad_enabled():
            raise KeyError("in the second forward")

    handle = module.model.layers[1].register_forward_hook(fail)
    with pytest.raises(KeyError, match="in the second forward"):
        _ = fs.decode(model, PROMPTS, watch=fs.Watch(influence=True), **FOUR).traces
    handle.remove()
    assert model_state(module) == before


def test_padding_has_no_influence_in_any_model():
    """A model that adds up all embeddings, padding included: the gradient by each of them is a column of weights."""
    model, weight = make_model("unshifted"), torch.randn(WIDTH, 50, dtype=torch.float64)
    step = decode_steps(model)[0]

    def forward(canvas, rows):
        total = model.module.get_input_embeddings()(canvas.tokens).sum(1, keepdim=True) @ weight
        return total.expand(-1, rows.stop - rows.start, -1)

    expected = weight[:, step.commits.token].norm(dim=0)[:, None] * step.before.valid[step.commits.sample]
    torch.testing.assert_close(compute_influence(forward, model.module, step.before, step.commits), expected.float())


def test_both_hooks_give_the_same_influence():
    traces = []
    for follows in (True, False):
        model = make_model("unshifted")
        model.module._supports_attention_backend = follows
        traces.append(fs.decode(model, PROMPTS, watch=fs.Watch(influence=True), **FOUR).traces)
    for one, other in zip(*traces, strict=True):
        np.testing.assert_array_equal(one.arrays["influence"], other.arrays["influence"])


class Hidden(nn.Module):
    """A model without get_input_embeddings."""

    def forward(self, input_ids):
        raise AssertionError


def test_models_that_cannot_be_differentiated_are_refused(monkeypatch):
    hidden = fs.Model(Hidden(), fs.ModelSpec("hidden", fs.Paradigm.MDM, MASK))
    with pytest.raises(fs.UserError, match=r"Hidden does not provide them \(get_input_embeddings\)"):
        fs.decode(hidden, PROMPTS, watch=fs.Watch(influence=True), **FOUR)
    model = make_model("unshifted")
    step = decode_steps(model)[0]

    def refused(forward, message):
        before = model_state(model.module)
        with pytest.raises(fs.UserError, match=message):
            compute_influence(forward, model.module, step.before, step.commits)
        assert model_state(model.module) == before

    refused(torch.no_grad()(model.forward), r"this model cannot be differentiated \(element 0 of tensors does")
    embed = model.module.get_input_embeddings()
    refused(lambda canvas, rows: model.forward(canvas, rows) + embed(canvas.tokens).sum(), "once per forward, but Emb")
    refused(lambda canvas, rows: model.forward(canvas, rows) * torch.inf, "NaN or infinite at step 0; try float32")

    def full(*_):
        raise torch.OutOfMemoryError

    refused(full, "a forward over 10 positions, which do not fit in the memory of cpu; use shorter")


def test_influence_without_commits_is_refused():
    model = make_model("unshifted")
    with pytest.raises(fs.UserError, match="influence needs the commits of a step, which `watch` does not know"):
        with fs.watch(model, influence=True):
            pass
    out = fs.decode(model, PROMPTS, watch=fs.Watch(influence=True), **FOUR)
    with pytest.raises(
        fs.UserError, match="influence needs the commits of a step, and final_state has no steps; leave influence out"
    ):
        fs.final_state(out, fs.Watch(influence=True))
    assert "influence" not in fs.final_state(out)[0].arrays
    assert "influence" not in fs.final_state(out)[0].meta["fields"]
    with pytest.raises(fs.UserError, match="a field cannot be called 'influence'"):
        Recorder(["a"], extra_axes={"influence": ("head",)})
