"""Watching code that does not use floatscope."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import floatscope as fs
from floatscope.schema import EXPERT_FIELDS, FIELDS, GROUPS, MaskKind, MaskStructure, State, fields_at_level

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
MASK = 49
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]


@pytest.fixture(scope="module")
def arm():
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def bert():
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**SHAPE)).eval()


def same(one: fs.Trace, other: fs.Trace, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in one.arrays.items():
        rounding = 1e-3 if rtol and array.dtype == np.float16 else rtol
        np.testing.assert_allclose(array, other.arrays[name], rounding, atol, err_msg=name)


# ---- around an autoregressive generate()


def test_watching_generate_keeps_its_tokens_and_records_a_step_per_token(arm):
    ids = torch.tensor(PROMPTS[:1])
    settings = {"max_new_tokens": 6, "do_sample": False}
    plain = arm.generate(ids, **settings)
    with fs.watch(arm, verify=True) as watched:
        tokens = arm.generate(ids, **settings)
    assert torch.equal(plain, tokens)
    (trace,) = watched.traces
    assert trace.arrays["keys"].tolist() == [7, 8, 9, 10, 11, 12]
    assert trace.arrays["queries"].tolist() == [7, 1, 1, 1, 1, 1]
    assert trace.arrays["received"].shape == (6, 3, len(GROUPS), 12)
    assert trace.arrays["tokens"][-1].tolist() == plain[0, :12].tolist()
    assert (trace.arrays["states"][-1] == State.COMMITTED).sum() == 5


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_prefix_equals_one_forward_over_the_sequence(arm, use_cache):
    """Causal rows never change: the sum over single rows equals all rows at once."""
    ids = torch.tensor(PROMPTS[:1])
    with fs.watch(arm) as watched:
        tokens = arm.generate(ids, max_new_tokens=6, do_sample=False, use_cache=use_cache)
    with fs.watch(arm) as single_forward:
        arm(tokens[:, :-1])
    (trace,), (final,) = watched.traces, single_forward.traces
    for layer in range(3):
        for scale in ("mean", "lift"):
            got = trace.received(layer=layer, scale=scale)[-1]
            np.testing.assert_allclose(got, final.received(layer=layer, scale=scale)[0], 1e-3, 1e-5)


def test_a_padded_batch_equals_its_samples(arm):
    ids = torch.tensor([PROMPTS[0], [0] * 4 + PROMPTS[1]])
    padding = (ids != 0).long()
    settings = {"max_new_tokens": 5, "do_sample": False}
    with fs.watch(arm, verify=True) as watched:
        tokens = arm.generate(ids, attention_mask=padding, **settings)
    assert torch.equal(tokens, arm.generate(ids, attention_mask=padding, **settings))
    with fs.watch(arm) as alone:
        arm.generate(torch.tensor(PROMPTS[1:]), **settings)
    batched, single = watched.traces[1], alone.traces[0]
    assert batched.arrays["keys"].tolist() == single.arrays["keys"].tolist() == [3, 4, 5, 6, 7]
    np.testing.assert_allclose(batched.received(), single.received(), 1e-3, 1e-5)


def test_a_cache_passed_by_hand_is_detected(arm):
    """The second forward brings the cache of the first."""
    ids = torch.tensor(PROMPTS[:1])
    with torch.no_grad(), fs.watch(arm) as watched:
        out = arm(ids)
        out = arm(torch.tensor([[5]]), past_key_values=out.past_key_values)
    (trace,) = watched.traces
    assert trace.arrays["queries"].tolist() == [7, 1]
    assert trace.arrays["tokens"][-1].tolist() == [*PROMPTS[0], 5]
    with torch.no_grad(), fs.watch(arm) as single_forward:
        arm(torch.tensor([[*PROMPTS[0], 5]]))
    np.testing.assert_allclose(trace.received()[-1], single_forward.traces[0].received()[0], 1e-3, 1e-5)


def test_watching_must_begin_before_the_cache_is_filled(arm):
    """Rows that were not captured cannot be summed."""
    with torch.no_grad():
        past = arm(torch.tensor(PROMPTS[:1])).past_key_values
        with (
            fs.watch(arm),
            pytest.raises(fs.UserError, match="the cache holds 7 positions whose rows were not seen; begin"),
        ):
            arm(torch.tensor([[5]]), past_key_values=past)


def test_each_prompt_is_a_separate_sequence(arm):
    first, second = torch.tensor(PROMPTS[:1]), torch.tensor([[9, 9, 9, 9, 9, 9, 9]])  # of the same length
    with fs.watch(arm) as watched:
        arm.generate(first, max_new_tokens=3, do_sample=False)
        arm.generate(second, max_new_tokens=3, do_sample=False)
        with torch.no_grad():
            arm(first)
            arm(second)
    assert [trace.sample for trace in watched.traces] == ["0.0", "1.0", "2.0", "3.0"]
    assert [len(trace.arrays["keys"]) for trace in watched.traces] == [3, 3, 1, 1]


def test_a_pruned_cache_is_refused():
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=6, pad_token_id=0)).eval()
    message = (
        r"layer 'model\.layers\.0\.self_attn' attends over \d keys but the canvas has \d+ positions: .*pruned caches"
    )
    with fs.watch(model), pytest.raises(fs.UserError, match=message):
        model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=4, do_sample=False)


def test_a_trace_stores_the_mask_of_each_layer(arm):
    """transformers gives a sliding window as a rule over indices, whose structure is not known."""
    torch.manual_seed(0)
    windowed = MistralForCausalLM(
        MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=6, pad_token_id=0)
    ).eval()
    for model, mask in ((arm, MaskStructure(MaskKind.CAUSAL)), (windowed, MaskStructure(MaskKind.RULE))):
        with torch.no_grad(), fs.watch(model) as watched:
            model(torch.arange(3, 12)[None], use_cache=False)
        assert watched.traces[0].masks == (mask,)


def test_a_static_cache_is_refused(arm):
    message = r"a StaticCache attends over positions that are not written yet.*cache_implementation='dynamic'"
    with fs.watch(arm), pytest.raises(fs.UserError, match=message):
        arm.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=4, do_sample=False, cache_implementation="static")


def test_beam_search_is_refused_by_name(arm):
    """It moves sequences between the rows of the batch."""
    with fs.watch(arm), pytest.raises(fs.UserError, match="beam search moves sequences between the rows of the batch"):
        arm.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=4, num_beams=3, do_sample=False)


def test_a_mask_passed_by_position_equals_one_passed_by_name(arm):
    ids, mask = torch.randint(3, 40, (2, 24)), torch.ones(2, 24, dtype=torch.long)
    mask[0, :7] = 0
    traces = []
    for args, kwargs in (((ids, mask), {}), ((), {"input_ids": ids, "attention_mask": mask})):
        with torch.no_grad(), fs.watch(arm, verify=True) as watched:
            arm(*args, **kwargs)
        traces.append(watched.traces)
    for by_position, by_name in zip(*traces, strict=True):
        assert set(by_position.arrays) == set(by_name.arrays)
        for name, array in by_name.arrays.items():
            np.testing.assert_array_equal(by_position.arrays[name], array)
    assert [int(t.arrays["keys"][0]) for t in traces[0]] == [17, 24]


# ---- around a custom denoising loop


def denoise_by_hand(model: nn.Module, ids: torch.Tensor, **kwargs) -> torch.Tensor:
    """One token a step, the most confident first."""
    ids = ids.clone()
    while (ids == MASK).any():
        with torch.no_grad():
            logits = model(ids, **kwargs).logits
        logits[..., MASK] = -torch.inf
        confidence, token = logits.softmax(-1).max(-1)
        for b in range(len(ids)):
            masked = ids[b] == MASK
            if masked.any():
                at = torch.where(masked, confidence[b], -1.0).argmax()
                ids[b, at] = token[b, at]
    return ids


def test_a_denoising_loop_is_tracked_by_its_masks(bert):
    ids = torch.tensor([[1, 2, 3, MASK, MASK, 4, MASK], [5, 6, 7, 8, MASK, MASK, MASK]])
    plain = denoise_by_hand(bert, ids)
    with fs.watch(bert, mask_id=MASK, verify=True) as watched:
        assert torch.equal(denoise_by_hand(bert, ids), plain)
    for b, trace in enumerate(watched.traces):
        assert trace.arrays["received"].shape == (3, 3, len(GROUPS), 7)
        assert (trace.arrays["states"] == State.MASKED).sum(-1).tolist() == [3, 2, 1]
        assert (trace.arrays["states"] == State.COMMITTED).sum(-1).tolist() == [0, 1, 2]
        assert (trace.arrays["states"] == State.PROMPT).sum(-1).tolist() == [4, 4, 4]
        assert trace.arrays["tokens"][0].tolist() == ids[b].tolist()
        assert np.isnan(trace.received(group="committed")[0]).all()
        assert np.isnan(trace.received(group="predicting")).all()  # the commits are not known here
        np.testing.assert_allclose(trace.received(group="masked").sum(-1), 1.0, rtol=1e-4)


def test_a_new_prompt_of_the_same_length_is_a_new_sequence(bert):
    with fs.watch(bert, mask_id=MASK) as watched:
        for first in (1, 2):
            denoise_by_hand(bert, torch.tensor([[first, 2, MASK, MASK]]))
    assert [len(trace.arrays["keys"]) for trace in watched.traces] == [2, 2]
    assert [int(trace.arrays["tokens"][0, 0]) for trace in watched.traces] == [1, 2]


def test_padding_is_read_from_the_attention_mask(bert):
    ids = torch.tensor([[1, 2, MASK, MASK], [0, 5, 6, MASK]])
    with fs.watch(bert, mask_id=MASK, verify=True) as watched:
        denoise_by_hand(bert, ids, attention_mask=(ids != 0).long())
    assert [trace.arrays["keys"].tolist() for trace in watched.traces] == [[4, 4], [3, 3]]


def test_a_floatscope_model_provides_its_mask_id(llada):
    canvas = torch.tensor([[1, 2, 63, 63]])
    with torch.no_grad(), fs.watch(llada) as watched:
        llada.module(canvas, is_causal=False)
    assert (watched.traces[0].arrays["states"] == State.MASKED).sum() == 2


def test_embeddings_are_accepted_instead_of_tokens(bert):
    with torch.no_grad(), fs.watch(bert) as watched:
        bert(inputs_embeds=torch.randn(2, 6, 32))
    assert watched.traces[1].arrays["tokens"].tolist() == [[-1] * 6]


def test_an_input_without_tokens_or_embeddings_is_refused():
    class Odd(nn.Module):
        def forward(self, x):
            return functional.scaled_dot_product_attention(x, x, x)

    model = Odd()
    with (
        fs.watch(model),
        pytest.raises(fs.UserError, match=r"takes neither token ids \[batch, position\] nor embeddings"),
    ):
        model(torch.randn(8))


def test_a_block_without_forwards_is_an_error(bert):
    with fs.watch(bert) as watched:
        pass
    with pytest.raises(
        fs.UserError, match="nothing was seen: no forward of the watched model ran inside the `watch` block"
    ):
        _ = watched.traces


# ---- settings


def test_an_unknown_level_gets_a_suggestion(bert):
    with pytest.raises(
        fs.UserError, match=r"unknown level 'sumary' \(did you mean 'summary'\?\); allowed: summary, heads"
    ):
        fs.Watch(level="sumary")
    with pytest.raises(fs.UserError, match="unknown level 'everything'"), fs.watch(bert, level="everything"):
        pass


def test_an_unknown_field_gets_a_suggestion():
    with pytest.raises(
        fs.UserError, match=r"unknown field 'recieved' \(did you mean 'received'\?\); allowed: received, uniform"
    ):
        fs.Watch(fields=("recieved",))
    with pytest.raises(fs.UserError, match="no fields to capture: name at least one of received"):
        fs.Watch(fields=())


def test_fields_of_commits_are_refused(bert):
    message = "row_key, rows: needs the commits, which `watch` does not know; use fs.decode"
    with pytest.raises(fs.UserError, match=message), fs.watch(bert, fields=("received", "row_key", "rows")):
        pass


def test_an_unknown_backend_gets_a_suggestion():
    with pytest.raises(
        fs.UserError, match=r"unknown backend 'trition' \(did you mean 'triton'\?\); allowed: auto, triton"
    ):
        fs.Watch(backend="trition")


def test_levels_nest():
    levels = [set(fields_at_level(level)) for level in ("summary", "heads", "rows", "full")]
    assert all(a < b for a, b in pairwise(levels))
    assert levels[-1] == set(FIELDS) - set(EXPERT_FIELDS)  # experts are asked for by name
