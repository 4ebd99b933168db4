"""Decoding, watched or not, with models of every kind."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import floatscope as fs
from floatscope.canvas import Regions
from floatscope.sampling import SAMPLERS
from floatscope.schema import FIELDS, GROUPS, State, fields_at_level
from type_checks import unchecked

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
MASK, EOS = 49, 48
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]
KINDS = ("unshifted", "shifted", "encoder", "arm")


def build_model(kind: str, seed: int = 0) -> fs.Model:
    """A tiny model with random weights: LLaDA-like, Dream-like, BERT, or a causal one."""
    torch.manual_seed(seed)
    if kind == "encoder":
        return fs.Model(
            BertForMaskedLM(BertConfig(**SHAPE)).eval(), fs.ModelSpec(kind, fs.Paradigm.MDM, MASK, eos_id=EOS)
        )
    config = LlamaConfig(**SHAPE, num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    module = LlamaForCausalLM(config).eval()
    paradigm = fs.Paradigm.ARM if kind == "arm" else fs.Paradigm.MDM
    spec = fs.ModelSpec(kind, paradigm, None if kind == "arm" else MASK, shift=kind != "unshifted", eos_id=EOS)
    return fs.Model(module, spec)


@pytest.fixture(scope="module")
def llada_text(tmp_path_factory):
    """With a tokenizer and a chat template."""
    return fs.load(fs.write_random(tmp_path_factory.mktemp("checkpoint") / "llada", layers=2, width=32), device="cpu")


def same(one: fs.Trace, other: fs.Trace, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in one.arrays.items():
        rounding = 1e-3 if rtol and array.dtype == np.float16 else rtol
        np.testing.assert_allclose(array, other.arrays[name], rounding, atol, err_msg=name)


def attention_of(model: fs.Model, canvas: fs.CanvasState) -> list[torch.Tensor]:
    """Eager attention [batch, head, query, key] of every layer over the whole canvas."""
    valid, module = canvas.valid.long(), model.module
    extra = {} if model.spec.name == "encoder" else {"is_causal": model.spec.paradigm == "arm", "use_cache": False}
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return module(
                input_ids=canvas.tokens,
                attention_mask=valid,
                position_ids=(valid.cumsum(-1) - 1).clamp_min(0),
                output_attentions=True,
                **extra,
            ).attentions
    finally:
        module.set_attn_implementation(before)


def test_watching_does_not_change_the_tokens(llada):
    plain = fs.decode(llada, PROMPTS, new_tokens=8, steps=4)
    watched = fs.decode(llada, PROMPTS, new_tokens=8, steps=4, watch=fs.Watch())
    assert torch.equal(plain.tokens, watched.tokens)
    with pytest.raises(fs.UserError, match=r"nothing was watched; decode with watch=fs\.Watch\(\)"):
        _ = plain.traces
    assert [step.commits.position.tolist() for step in plain.steps] == [
        step.commits.position.tolist() for step in watched.steps
    ]
    assert not (watched.tokens[:, -8:] == llada.spec.mask_id).any()


@pytest.mark.parametrize("level", ["summary", "heads", "rows", "full"])
def test_a_trace_stores_the_fields_of_its_level(llada, level):
    trace, _ = fs.decode(llada, PROMPTS, new_tokens=8, steps=4, watch=fs.Watch(level=level)).traces
    without_regions = set(fields_at_level(level)) - {"regions", "rollout", "row_regions"}
    assert set(trace.arrays) & set(FIELDS) == without_regions
    n = len(PROMPTS[0]) + 8
    assert trace.arrays["received"].shape == (4, 3, len(GROUPS), n)
    assert trace.arrays["row_key"].shape == (8, 3, 4, 16)  # [commit, layer, head, rank]
    if level == "full":
        assert trace.arrays["matrix"].shape == (4, 3, 4, n, n)
        np.testing.assert_allclose(trace.arrays["matrix"].sum(-1), 1.0, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_settings_as_one_value_decode_as_keywords_do(kind):
    given = {"sampler": "ar" if kind == "arm" else "threshold(tau=0.1)", "new_tokens": 5, "temperature": 0.7, "seed": 3}
    model = build_model(kind)
    tokens = fs.decode(model, [[1, 2, 3]], **given, stop=False).tokens
    assert torch.equal(fs.decode(model, [[1, 2, 3]], sampling=fs.Sampling(**given)).tokens, tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_the_traces_of_a_batch_equal_those_of_single_samples(kind):
    model, settings = build_model(kind), {"new_tokens": 8, "watch": fs.Watch("rows")}
    batched = fs.decode(model, PROMPTS, samples=["a", "b"], **settings).traces
    for prompt, trace in zip(PROMPTS, batched, strict=True):
        same(trace, fs.decode(model, [prompt], samples=[trace.sample], **settings).trace)


SETTINGS = [
    *((kind, {"sampler": name}) for kind in ("unshifted", "shifted") for name in SAMPLERS if name != "pc"),
    *((kind, {"temperature": 0.8, "top_p": 0.9}) for kind in KINDS),
    *((kind, {"block": 4, "sampler": "threshold(tau=0.3)"}) for kind in KINDS[:3]),
    ("unshifted", {"guidance": 1.0, "block": 2, "steps": 8}),
    ("shifted", {"preset": "dream", "sampler": "entropy", "steps": 8, "order_temperature": 0.5}),
    ("arm", {"top_k": 4, "temperature": 1.5}),
]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_a_batch_of_unequal_prompts_equals_single_prompts(kind, settings):
    """In fp32 the same tokens, and confidences to 1e-5."""
    model = build_model(kind, 3)
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], list(range(11, 31)), [40]]
    names = ["a", "b", "c", "d"]
    batched = fs.decode(model, prompts, samples=names, new_tokens=8, seed=5, **settings)
    for b, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        alone = fs.decode(model, [prompt], samples=[name], new_tokens=8, seed=5, **settings)
        assert batched.generated_ids[b] == alone.generated_ids[0]
        theirs = torch.cat([s.commits.confidence[s.commits.sample == b] for s in batched.steps])
        mine = torch.cat([s.commits.confidence for s in alone.steps])
        torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-5)


def test_an_interrupted_decoding_cannot_be_read():
    model, calls = build_model("unshifted"), []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    handle = model.module.register_forward_hook(interrupt)
    out = fs.decode(model, PROMPTS, new_tokens=8)
    with pytest.raises(KeyboardInterrupt):
        _ = out.tokens
    handle.remove()
    for read in (lambda: out.tokens, lambda: out.generated_ids, lambda: out.steps):
        with pytest.raises(fs.UserError, match=r"was interrupted at step 2 \(KeyboardInterrupt\); decode again"):
            read()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_that_are_nan_are_refused(kind):
    model = build_model(kind)
    with torch.no_grad():
        next(iter(model.module.parameters())).fill_(torch.nan)
    with pytest.raises(fs.UserError, match="logits are NaN or infinite"):
        _ = fs.decode(model, PROMPTS, new_tokens=4).tokens


def test_a_model_with_hidden_attention_is_refused():
    config = BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None)
    model = fs.Model(BloomForCausalLM(config).eval(), fs.ModelSpec("bloom", fs.Paradigm.ARM, None, shift=True))
    assert fs.decode(model, [[1, 2, 3]], new_tokens=2).tokens.shape == (1, 5)
    with pytest.raises(fs.UserError, match="no attention was seen: BloomForCausalLM calls neither"):
        _ = fs.decode(model, [[1, 2, 3]], new_tokens=2, watch=fs.Watch()).traces


def test_the_final_state_excludes_positions_after_an_early_end():
    model = build_model("unshifted", 2)
    first = fs.decode(model, [PROMPTS[0]], new_tokens=8, block=1)
    ends = int(first.tokens[0, len(PROMPTS[0]) + 2])
    model = fs.Model(model.module, fs.ModelSpec("stops", fs.Paradigm.MDM, MASK, eos_id=ends))
    out = fs.decode(model, [PROMPTS[0]], new_tokens=8, block=1, stop=True, watch=fs.Watch())
    assert len(out.steps) < 8
    (final,) = fs.final_state(out)
    assert int(final.arrays["keys"][0]) == len(PROMPTS[0]) + len(out.generated_ids[0]) + 1
    assert not (final.arrays["states"] == State.MASKED).any()


def test_infilling_appends_nothing_by_default():
    model = build_model("unshifted")
    assert fs.decode(model, [[1, MASK, 3]], infill=True).tokens.shape == (1, 3)
    assert fs.decode(model, [[1, MASK, 3]], infill=True, new_tokens=2).tokens.shape == (1, 5)
    with pytest.raises(fs.UserError, match="it only appends, and cannot fill masks inside a prompt"):
        fs.decode(build_model("arm"), [[1, 2]], infill=True, new_tokens=2)


@pytest.mark.parametrize("sampler", ["confidence", "klass"])
@pytest.mark.parametrize("kind", ["unshifted", "shifted", "encoder"])
def test_the_suffix_is_visible_and_never_filled(kind, sampler):
    model, suffix = build_model(kind), [MASK, MASK, 7, MASK]
    settings = {"new_tokens": 6, "block": 3, "sampler": sampler}
    out = fs.decode(model, PROMPTS, suffix=suffix, **settings)
    for step in out:
        assert step.after.tokens[:, -4:].tolist() == [suffix, suffix]
        assert step.commits.position.lt(out.answer_start + 6).all()
    assert out.generated_ids == [row[7:13] for row in out.tokens.tolist()]
    assert not any(MASK in new for new in out.generated_ids)
    canvas = torch.tensor([PROMPTS[0] + [MASK] * 6 + suffix])
    first = fs.decode(model, PROMPTS[0], suffix=suffix, **settings).steps[0].before.tokens
    assert torch.equal(first, canvas)


def test_an_impossible_suffix_is_refused():
    with pytest.raises(fs.UserError, match="arm only appends, so nothing can follow its answer; leave suffix out"):
        fs.decode(build_model("arm"), PROMPTS, suffix=[1], new_tokens=2)
    with pytest.raises(fs.UserError, match="token 99 is not in unshifted's vocabulary"):
        fs.decode(build_model("unshifted"), PROMPTS, suffix=[99], new_tokens=2)
    with pytest.raises(fs.UserError, match="has no new tokens to generate, so nothing can follow its answer"):
        fs.decode(build_model("unshifted"), [[1, MASK]], suffix=[1], infill=True)


def test_padding_uses_the_pad_token():
    module = build_model("unshifted").module
    model = fs.Model(module, fs.ModelSpec("padded", fs.Paradigm.MDM, MASK, pad_id=7))
    assert fs.decode(model, PROMPTS, new_tokens=2).tokens[1, :4].tolist() == [7] * 4


def test_one_message_is_one_conversation(llada_text):
    one = fs.decode(llada_text, {"role": "user", "content": "hi"}, new_tokens=2)
    assert one.samples == ("0",)
    assert torch.equal(one.tokens, fs.decode(llada_text, "hi", new_tokens=2, chat=True).tokens)
    assert one.meta["chat"] is True
    with pytest.raises(fs.UserError, match="messages need a chat template, and chat is False"):
        fs.decode(llada_text, [{"role": "user", "content": "hi"}], chat=False)


def test_top_key_ignores_nan():
    """Early steps of a cached model have fewer keys; a group without rows has no top key."""
    trace = fs.decode(build_model("arm"), [list(range(1, 30))], new_tokens=6, stop=False, watch=fs.Watch()).trace
    lift = trace.received(layer=1, scale="lift", eligible=True)
    assert trace.top_key(layer=1).tolist() == [int(np.nanargmax(row)) for row in lift]
    assert trace.top_key(layer=1, group="masked").tolist() == [-1] * 6


def test_steps_run_lazily_and_are_stored():
    model, calls = build_model("unshifted"), []
    handle = model.module.register_forward_hook(lambda *_: calls.append(1))
    out = fs.decode(model, PROMPTS, new_tokens=8, steps=4, watch=fs.Watch())
    assert not calls
    first = next(iter(out))
    assert len(calls) == 1
    assert torch.is_grad_enabled()  # no_grad does not leak into the caller's code
    assert len(out.steps) == len(calls) == 4
    assert [step.before.step for step in out] == [0, 1, 2, 3]
    assert out.steps[0] is first
    assert len(out.traces[0].arrays["keys"]) == 4
    handle.remove()


def test_the_repr_shows_the_progress_and_runs_nothing():
    out = fs.decode(build_model("unshifted"), PROMPTS, new_tokens=4, watch=fs.Watch())
    start = "Decoding(unshifted, 2 prompts, sampler=confidence, new_tokens=4, steps="
    assert repr(out) == start + "0 (unfinished), watched)"
    next(iter(out))
    assert repr(out) == start + "1 (unfinished), watched)"
    assert len(out.steps) == 4
    assert repr(out) == start + "4 (finished), watched)"


def test_a_dropped_decoding_restores_the_model():
    model = build_model("unshifted")
    before = model.module.config._attn_implementation
    out = fs.decode(model, PROMPTS, new_tokens=8, watch=fs.Watch())
    next(iter(out))
    del out
    assert model.module.config._attn_implementation == before
    assert len(fs.decode(model, PROMPTS, new_tokens=4, watch=fs.Watch()).traces) == 2


def test_arguments_are_checked_before_the_first_step():
    model = build_model("unshifted")
    with pytest.raises(fs.UserError, match="9 steps do not divide among 2 blocks"):
        fs.decode(model, PROMPTS, new_tokens=8, steps=9, block=4)


def test_masks_in_the_prompt_are_filled_only_with_infill():
    model = build_model("unshifted")
    prompt = [1, MASK, 3, MASK, 5]
    with pytest.raises(fs.UserError, match=r"prompt 0 contains the mask token \(49\) 2 times; .*infill=True"):
        fs.decode(model, [prompt], new_tokens=4)
    out = fs.decode(model, [prompt, [1, MASK]], new_tokens=0, infill=True, watch=fs.Watch())
    assert (out.tokens[0, [0, 2, 4]] == torch.tensor([1, 3, 5])).all()
    assert not (out.tokens == MASK)[out.steps[0].before.valid].any()
    assert [len(t.arrays["keys"]) for t in out.traces] == [2, 1]


def test_the_unguided_pass_is_not_watched():
    model = build_model("unshifted")
    plain = fs.decode(model, PROMPTS, new_tokens=4, steps=1, watch=fs.Watch(verify=True))
    guided = fs.decode(model, PROMPTS, new_tokens=4, steps=1, watch=fs.Watch(verify=True), guidance=2.0)
    np.testing.assert_array_equal(plain.traces[0].received(), guided.traces[0].received())


def test_lift_of_the_latest_step_equals_the_traces():
    for kind in KINDS:
        out = fs.decode(build_model(kind), PROMPTS, new_tokens=4, watch=fs.Watch())
        with pytest.raises(fs.UserError, match="run a step first"):
            out.lift(0)
        lifts = [out.lift(2)[0].numpy() for _ in out]
        stored = out.traces[0].received(2, scale="lift", eligible=True, view="row")
        for lift, expected in zip(lifts, stored, strict=True):
            np.testing.assert_allclose(lift, expected[: len(lift)], 1e-5)
        with pytest.raises(fs.UserError, match=r"there is no layer 3: \w+ has layers 0 to 2"):
            out.lift(3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_received_attention_equals_eager_attention(kind, seed):
    """Eager attention of the canvas before each step, by group; an ARM's rows are summed over its cache."""
    model = build_model(kind, seed)
    out = fs.decode(model, PROMPTS, new_tokens=8, watch=fs.Watch("rows", verify=True), stop=False)
    for t, step in enumerate(out.steps):
        canvas = step.before
        for b, trace in enumerate(out.traces):
            start = int((~canvas.valid[b]).sum())
            states, n = canvas.states[b, start:], canvas.tokens.shape[1] - start
            mine = step.commits.sample == b
            predicting = step.commits.row[mine] - start
            for layer, A in enumerate(attention_of(model, canvas)):
                rows = A[b].mean(0)[start:, start:]  # [query, key]
                groups = {"all": rows, "predicting": rows[predicting]}
                groups |= {"masked": rows[states == State.MASKED], "committed": rows[states == State.COMMITTED]}
                for group, these in groups.items():
                    got = trace.received(layer=layer, group=group)[t, :n]
                    np.testing.assert_allclose(got, these.mean(0), 2e-4, 1e-5, err_msg=group)
                at = trace.arrays["commit_step"] == t
                want = A[b][:, start:, start:][:, predicting].transpose(0, 1)
                np.testing.assert_allclose(trace.arrays["rows"][at, layer][..., :n], want, 2e-4, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_predicting_row_has_the_logits_of_the_token(kind):
    """p for unshifted logits, p − 1 for shifted ones: the token is the argmax of that row."""
    model = build_model(kind, 1)
    for step in fs.decode(model, PROMPTS, new_tokens=6, stop=False):
        logits, c = model.forward(step.before).detach(), step.commits
        assert torch.equal(logits[c.sample, c.row].argmax(-1), c.token)
        assert torch.equal(c.position - c.row, torch.full_like(c.row, 0 if kind in ("unshifted", "encoder") else 1))
        p = logits[c.sample, c.row].softmax(-1).max(-1).values
        torch.testing.assert_close(c.confidence, p)


@pytest.mark.parametrize("kind", KINDS)
def test_the_final_state_is_one_forward_over_the_finished_sequence(kind):
    model = build_model(kind)
    out = fs.decode(model, PROMPTS, new_tokens=6, watch=fs.Watch(), stop=False)
    finals = fs.final_state(out, fs.Watch("rows", verify=True))
    canvas = out.steps[-1].after
    for b, trace in enumerate(finals):
        assert trace.meta["state"] == "final"
        assert trace.arrays["received"].shape[0] == 1
        start = int((~canvas.valid[b]).sum())
        for layer, A in enumerate(attention_of(model, canvas)):
            rows = A[b][:, start:, start:]
            np.testing.assert_allclose(trace.received(layer=layer)[0], rows.mean((0, 1)), 2e-4, 1e-5)
            want = rows[:, trace.arrays["commit_row"]].transpose(0, 1)
            np.testing.assert_allclose(trace.arrays["rows"][:, layer], want, 2e-4, 1e-5)
        assert sorted(trace.arrays["commit_position"]) == list(range(len(PROMPTS[b]), len(PROMPTS[b]) + 6))


def test_the_final_state_of_an_ended_sample_excludes_the_filler():
    model = build_model("arm")
    plain = fs.decode(model, PROMPTS, new_tokens=6, stop=False)
    ends = int(plain.tokens[0, len(PROMPTS[0]) + 2])  # the third token of the first sample now ends it
    model = fs.Model(model.module, fs.ModelSpec("arm", fs.Paradigm.ARM, None, shift=True, eos_id=ends))
    out = fs.decode(model, PROMPTS, new_tokens=6, watch=fs.Watch())
    first, second = out.traces
    assert len(first.arrays["keys"]) == 3
    assert len(second.arrays["keys"]) == 6
    assert len(out.generated_ids[0]) == 2  # without the end token
    short, long = fs.final_state(out)
    assert int(short.arrays["keys"][0]) == len(PROMPTS[0]) + 3
    assert int(long.arrays["keys"][0]) == len(PROMPTS[1]) + 6


def test_committed_rows_grow_from_step_to_step(llada):
    (trace,) = fs.decode(llada, PROMPTS[:1], new_tokens=8, steps=4, watch=fs.Watch()).traces
    committed = trace.received(group="committed")
    assert np.isnan(committed[0]).all()
    np.testing.assert_allclose(committed[1:].sum(-1), 1.0, rtol=1e-4)
    assert (trace.arrays["states"] == State.COMMITTED).sum(-1).tolist() == [0, 2, 4, 6]


def test_regions_are_stored_in_the_trace(llada):
    regions = Regions.from_spans([{"prompt": [(0, 7)], "answer": [(7, 15)]}], 15)
    (trace,) = fs.decode(llada, PROMPTS[:1], new_tokens=8, steps=2, watch=fs.Watch(), regions=regions).traces
    assert trace.coords["region"] == ("prompt", "answer")
    np.testing.assert_allclose(trace.arrays["regions"].sum(-1), 1.0, rtol=2e-3)  # the two regions cover the canvas
    np.testing.assert_allclose(trace.arrays["rollout"].sum(-1), 1.0, rtol=1e-4)
    np.testing.assert_allclose(trace.arrays["row_regions"].sum(-1), 1.0, rtol=2e-3)


def test_names_and_meta_are_stored_in_the_traces(llada):
    out = fs.decode(
        llada, PROMPTS, new_tokens=2, steps=1, watch=fs.Watch(), samples=["nq-1", "nq-2"], meta={"note": "x"}
    )
    assert [trace.sample for trace in out.traces] == ["nq-1", "nq-2"]
    assert out.traces[0].meta["note"] == "x"
    assert out.traces[0].meta["steps"] == 1
    assert out.traces[0].coords["layer"] == tuple(f"model.layers.{i}.self_attn" for i in range(3))


def test_every_prompt_needs_a_name(llada):
    with pytest.raises(fs.UserError, match="1 different sample names for 2 prompts; give one for each"):
        fs.decode(llada, PROMPTS, new_tokens=2, steps=1, samples=["only"])


def test_the_meta_of_a_trace_holds_the_settings():
    out = fs.decode(
        build_model("shifted"), PROMPTS, new_tokens=4, watch=fs.Watch(), sampler="threshold(tau=0.5)", seed=3
    )
    meta = out.traces[0].meta
    want = {"model": "shifted", "paradigm": "mdm", "mask_id": MASK, "shift": True, "dtype": "float32", "seed": 3}
    want |= {"sampler": "threshold", "arguments": {"tau": 0.5}, "new_tokens": 4, "temperature": 0.0, "chat": False}
    want |= {"rows": "all", "state": "step", "remote_code": False}
    assert {name: meta[name] for name in want} == want


def test_a_masked_diffusion_model_needs_a_mask_token():
    spec = fs.ModelSpec("maskless", fs.Paradigm.MDM, None)
    with pytest.raises(fs.UserError, match=r"maskless has no mask token; open it with mask_id="):
        fs.decode(fs.Model(build_model("unshifted").module, spec), PROMPTS, new_tokens=2)


def test_a_prompt_beyond_the_context_is_refused_with_the_number():
    spec = fs.ModelSpec("short", fs.Paradigm.MDM, MASK, context=12)
    model = fs.Model(build_model("unshifted").module, spec)
    with pytest.raises(fs.UserError, match=r"prompt 0 has 7 tokens, with 8 after it 15, and short was trained for 12"):
        fs.decode(model, PROMPTS, new_tokens=8)
    with pytest.raises(fs.UserError, match="prompt 0 is empty, and an autoregressive model needs a first token"):
        fs.decode(build_model("arm"), [[]], new_tokens=2)
    assert fs.decode(model, [[]], new_tokens=2).tokens.shape == (1, 2)


def test_fields_are_fp32_under_autocast(llada):
    regions = Regions.from_spans([{"prompt": [(0, 7)], "answer": [(7, 15)]}], 15)
    with torch.autocast("cpu", torch.bfloat16):
        out = fs.decode(llada, PROMPTS[:1], new_tokens=8, steps=2, watch=fs.Watch(level="rows"), regions=regions)
    rows, member = (torch.tensor(out.traces[0].arrays[name]) for name in ("rows", "region_member"))
    got = torch.tensor(out.traces[0].arrays["row_regions"]).float()
    torch.testing.assert_close(got, (rows @ member.float()).half().float(), rtol=0, atol=0)


def test_mistakes_get_a_one_sentence_error(tmp_path):
    llada = fs.load(fs.write_random(tmp_path / "m"), device="cpu")
    settings = {"new_tokens": 4, "steps": 2}
    mistakes = [
        (
            lambda: fs.decode(llada, 5, **settings),
            "a prompt is a text, a list of token ids or a list of messages, got 5",
        ),
        (
            lambda: fs.decode(llada, [[1, "hello"]], **settings),
            "a prompt is a text, a list of token ids or a list of messages; 'hello' is not a token id",
        ),
        (lambda: fs.decode(llada, [[1, 99999]], **settings), "token 99999 is not in m's vocabulary, 0 … 511"),
        (
            lambda: fs.decode(llada, [[1.5]], **settings),
            "a prompt is a text, a list of token ids or a list of messages; 1.5 is not a token id",
        ),
        (
            lambda: fs.decode(llada, [1.5, 2], **settings),
            "a prompt is a text, a list of token ids or a list of messages, got 1.5",
        ),
        (
            lambda: fs.decode(llada, b"hello", **settings),
            "a prompt is a text, a list of token ids or a list of messages, got b'hello'",
        ),
        (
            lambda: fs.decode(llada, "a" + chr(0xDCFF), **settings),
            "the prompt is not valid text: it contains bytes that are not UTF-8",
        ),
        (lambda: fs.decode(llada, [[1]], **settings, chat="no"), "chat must be True or False, got 'no'"),
        (
            lambda: fs.decode(llada, [[1]], **settings, samples="a"),
            "samples must be a list of names, one for each prompt, got 'a'",
        ),
        (
            lambda: fs.decode(llada, [[1]], **settings, preset=5),
            "unknown preset '5'; allowed: llada, dream, llada2, llada2.1, sdar, fast-dllm-v2, diffusion-gemma",
        ),
        (lambda: fs.final_state(llada), "final_state needs the result of fs.decode, got Model"),
        (lambda: fs.decode(llada, [[1]], **settings, watch=True), "watch must be a fs.Watch(…) or None, got True"),
        (
            lambda: fs.decode(llada.module, [[1]], **settings),
            "decode needs a floatscope Model (fs.load), got LlamaForCausalLM; see also fs.watch",
        ),
        (
            lambda: fs.watch(llada, levl="heads").__enter__(),
            "unknown setting of `watch` 'levl' (did you mean 'level'?);"
            " allowed: level, fields, reducers, verify, backend, experts",
        ),
        (lambda: fs.watch("gpt2").__enter__(), "watch needs a torch module or a floatscope Model, got str"),
        (
            lambda: fs.Watch(fields="received"),
            "fields must be a tuple of names, got the string 'received'; write ('received',)",
        ),
        (
            lambda: fs.Watch(reducers=(fs.Reducer,)),
            f"{fs.Reducer!r} is not a valid reducer; give an instance of a subclass of fs.Reducer with a name and axes",
        ),
    ]
    with unchecked():
        for mistake, sentence in mistakes:
            with pytest.raises(fs.UserError, match=f"^{re.escape(sentence)}$"):
                mistake()


def test_decoding_at_temperature_0_is_deterministic(llada):
    """Two runs leave the same trace."""
    one, other = (fs.decode(llada, PROMPTS, new_tokens=4, steps=2, watch=fs.Watch()).traces for _ in range(2))
    for a, b in zip(one, other, strict=True):
        same(a, b, 0, 0)


def test_an_arm_without_a_cache_gives_the_same_numbers():
    """Without a cache the trace has all rows at every step."""
    with_cache = build_model("arm")
    without = fs.Model(with_cache.module, replace(with_cache.spec, supports_cache=False))
    settings = {"new_tokens": 5, "stop": False, "watch": fs.Watch()}
    one, other = (fs.decode(model, PROMPTS, **settings) for model in (with_cache, without))
    assert torch.equal(one.tokens, other.tokens)
    assert (one.meta["rows"], other.meta["rows"]) == ("cache", "all")
    for a, b in zip(one.traces, other.traces, strict=True):
        for group in ("all", "committed", "predicting"):
            for scale in ("mean", "lift"):
                np.testing.assert_allclose(a.received(1, group, scale), b.received(1, group, scale), 1e-3, 1e-5)
