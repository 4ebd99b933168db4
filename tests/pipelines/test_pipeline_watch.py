"""Watching code that knows nothing of floatscope."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import floatscope as fs
from floatscope.schema import FIELDS, GROUPS, State, fields_at_level

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


# --- around an autoregressive generate() ------------------------------------------------------------------------------


def test_generate_gives_the_same_tokens_and_a_step_for_each(arm):
    ids = torch.tensor(PROMPTS[:1])
    go = {"max_new_tokens": 6, "do_sample": False}
    plain = arm.generate(ids, **go)
    with fs.watch(arm, verify=True) as seen:
        watched = arm.generate(ids, **go)
    assert torch.equal(plain, watched)
    (trace,) = seen.traces
    assert trace.arrays["keys"].tolist() == [7, 8, 9, 10, 11, 12]
    assert trace.arrays["queries"].tolist() == [7, 1, 1, 1, 1, 1]
    assert trace.arrays["received"].shape == (6, 3, len(GROUPS), 12)
    assert trace.arrays["tokens"][-1].tolist() == plain[0, :12].tolist()
    assert (trace.arrays["states"][-1] == State.COMMITTED).sum() == 5


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_prefix_is_what_one_forward_over_the_sequence_receives(arm, use_cache):
    """Causal rows never change: added up a row at a time, or seen all at once at every step."""
    ids = torch.tensor(PROMPTS[:1])
    with fs.watch(arm) as seen:
        tokens = arm.generate(ids, max_new_tokens=6, do_sample=False, use_cache=use_cache)
    with fs.watch(arm) as whole:
        arm(tokens[:, :-1])
    (trace,), (final,) = seen.traces, whole.traces
    for layer in range(3):
        for scale in ("mean", "lift"):
            got = trace.received(layer=layer, scale=scale)[-1]
            np.testing.assert_allclose(got, final.received(layer=layer, scale=scale)[0], 1e-3, 1e-5)


def test_a_padded_batch_is_generated_as_its_samples_are(arm):
    ids = torch.tensor([PROMPTS[0], [0] * 4 + PROMPTS[1]])
    padding = (ids != 0).long()
    go = {"max_new_tokens": 5, "do_sample": False}
    with fs.watch(arm, verify=True) as seen:
        tokens = arm.generate(ids, attention_mask=padding, **go)
    assert torch.equal(tokens, arm.generate(ids, attention_mask=padding, **go))
    with fs.watch(arm) as alone:
        arm.generate(torch.tensor(PROMPTS[1:]), **go)
    batched, single = seen.traces[1], alone.traces[0]
    assert batched.arrays["keys"].tolist() == single.arrays["keys"].tolist() == [3, 4, 5, 6, 7]
    np.testing.assert_allclose(batched.received(), single.received(), 1e-3, 1e-5)


def test_a_cache_passed_by_hand_is_noticed(arm):
    """The first forward looks like any other; the second brings its cache."""
    ids = torch.tensor(PROMPTS[:1])
    with torch.no_grad(), fs.watch(arm) as seen:
        out = arm(ids)
        out = arm(torch.tensor([[5]]), past_key_values=out.past_key_values)
    (trace,) = seen.traces
    assert trace.arrays["queries"].tolist() == [7, 1]
    assert trace.arrays["tokens"][-1].tolist() == [*PROMPTS[0], 5]
    with torch.no_grad(), fs.watch(arm) as whole:
        arm(torch.tensor([[*PROMPTS[0], 5]]))
    np.testing.assert_allclose(trace.received()[-1], whole.traces[0].received()[0], 1e-3, 1e-5)


def test_watching_begins_before_the_cache_is_filled(arm):
    """Rows that were not seen cannot be added up."""
    with torch.no_grad():
        past = arm(torch.tensor(PROMPTS[:1])).past_key_values
        with (
            fs.watch(arm),
            pytest.raises(fs.UserError, match="the cache holds 7 positions whose rows were not seen; begin"),
        ):
            arm(torch.tensor([[5]]), past_key_values=past)


def test_each_prompt_is_a_sequence_of_its_own(arm):
    first, second = torch.tensor(PROMPTS[:1]), torch.tensor([[9, 9, 9, 9, 9, 9, 9]])  # of the same length
    with fs.watch(arm) as seen:
        arm.generate(first, max_new_tokens=3, do_sample=False)
        arm.generate(second, max_new_tokens=3, do_sample=False)
        with torch.no_grad():
            arm(first)
            arm(second)
    assert [trace.sample for trace in seen.traces] == ["0.0", "1.0", "2.0", "3.0"]
    assert [len(trace.arrays["keys"]) for trace in seen.traces] == [3, 3, 1, 1]


def test_a_cache_that_forgets_is_refused():
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=6, pad_token_id=0)).eval()
    said = r"layer 'model\.layers\.0\.self_attn' attends over \d keys but the canvas has \d+ positions: .*pruned caches"
    with fs.watch(model), pytest.raises(fs.UserError, match=said):
        model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=4, do_sample=False)


def test_a_static_cache_is_refused(arm):
    said = r"a StaticCache attends over positions that are not written yet.*cache_implementation='dynamic'"
    with fs.watch(arm), pytest.raises(fs.UserError, match=said):
        arm.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=4, do_sample=False, cache_implementation="static")


def test_beam_search_is_refused_by_name(arm):
    """It moves sequences between the rows of the batch: no row would be the trace of one sequence."""
    with fs.watch(arm), pytest.raises(fs.UserError, match="beam search moves sequences from row to row of the batch"):
        arm.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=4, num_beams=3, do_sample=False)


def test_a_mask_given_by_position_is_the_mask_given_by_name(arm):
    ids, mask = torch.randint(3, 40, (2, 24)), torch.ones(2, 24, dtype=torch.long)
    mask[0, :7] = 0
    traces = []
    for args, kwargs in (((ids, mask), {}), ((), {"input_ids": ids, "attention_mask": mask})):
        with torch.no_grad(), fs.watch(arm, verify=True) as seen:
            arm(*args, **kwargs)
        traces.append(seen.traces)
    for by_position, by_name in zip(*traces, strict=True):
        assert set(by_position.arrays) == set(by_name.arrays)
        for name, array in by_name.arrays.items():
            np.testing.assert_array_equal(by_position.arrays[name], array)
    assert [int(t.arrays["keys"][0]) for t in traces[0]] == [17, 24]


# --- around a denoising loop of one's own -----------------------------------------------------------------------------


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


def test_a_denoising_loop_is_followed_by_its_masks(bert):
    ids = torch.tensor([[1, 2, 3, MASK, MASK, 4, MASK], [5, 6, 7, 8, MASK, MASK, MASK]])
    plain = denoise_by_hand(bert, ids)
    with fs.watch(bert, mask_id=MASK, verify=True) as seen:
        assert torch.equal(denoise_by_hand(bert, ids), plain)
    for b, trace in enumerate(seen.traces):
        assert trace.arrays["received"].shape == (3, 3, len(GROUPS), 7)
        assert (trace.arrays["states"] == State.MASKED).sum(-1).tolist() == [3, 2, 1]
        assert (trace.arrays["states"] == State.COMMITTED).sum(-1).tolist() == [0, 1, 2]
        assert (trace.arrays["states"] == State.PROMPT).sum(-1).tolist() == [4, 4, 4]
        assert trace.arrays["tokens"][0].tolist() == ids[b].tolist()
        assert np.isnan(trace.received(group="committed")[0]).all()
        assert np.isnan(trace.received(group="predicting")).all()  # the commits are not known here
        np.testing.assert_allclose(trace.received(group="masked").sum(-1), 1.0, rtol=1e-4)


def test_a_new_prompt_of_the_same_length_is_a_new_sequence(bert):
    with fs.watch(bert, mask_id=MASK) as seen:
        for first in (1, 2):
            denoise_by_hand(bert, torch.tensor([[first, 2, MASK, MASK]]))
    assert [len(trace.arrays["keys"]) for trace in seen.traces] == [2, 2]
    assert [int(trace.arrays["tokens"][0, 0]) for trace in seen.traces] == [1, 2]


def test_padding_is_read_from_the_attention_mask(bert):
    ids = torch.tensor([[1, 2, MASK, MASK], [0, 5, 6, MASK]])
    with fs.watch(bert, mask_id=MASK, verify=True) as seen:
        denoise_by_hand(bert, ids, attention_mask=(ids != 0).long())
    assert [trace.arrays["keys"].tolist() for trace in seen.traces] == [[4, 4], [3, 3]]


def test_a_model_of_ours_brings_its_own_mask_id(llada):
    canvas = torch.tensor([[1, 2, 63, 63]])
    with torch.no_grad(), fs.watch(llada) as seen:
        llada.module(canvas, is_causal=False)
    assert (seen.traces[0].arrays["states"] == State.MASKED).sum() == 2


def test_embeddings_will_do_where_there_are_no_tokens(bert):
    with torch.no_grad(), fs.watch(bert) as seen:
        bert(inputs_embeds=torch.randn(2, 6, 32))
    assert seen.traces[1].arrays["tokens"].tolist() == [[-1] * 6]


def test_an_input_that_is_neither_is_refused():
    class Odd(nn.Module):
        def forward(self, x):
            return functional.scaled_dot_product_attention(x, x, x)

    model = Odd()
    with (
        fs.watch(model),
        pytest.raises(fs.UserError, match=r"takes neither token ids \[batch, position\] nor embeddings"),
    ):
        model(torch.randn(8))


def test_nothing_seen_is_an_error_not_an_empty_list(bert):
    with fs.watch(bert) as seen:
        pass
    with pytest.raises(
        fs.UserError, match="nothing was seen: no forward of the watched model ran inside the `watch` block"
    ):
        _ = seen.traces


# --- settings ---------------------------------------------------------------------------------------------------------


def test_an_unknown_keep_level_suggests_the_nearest(bert):
    with pytest.raises(
        fs.UserError, match=r"unknown keep level 'sumary' \(did you mean 'summary'\?\); allowed: summary, heads"
    ):
        fs.Watch(level="sumary")
    with pytest.raises(fs.UserError, match="unknown keep level 'everything'"), fs.watch(bert, keep="everything"):
        pass


def test_an_unknown_field_suggests_the_nearest():
    with pytest.raises(
        fs.UserError, match=r"unknown field 'recieved' \(did you mean 'received'\?\); allowed: received, uniform"
    ):
        fs.Watch(fields=("recieved",))
    with pytest.raises(fs.UserError, match="nothing to keep: name at least one field of received"):
        fs.Watch(fields=())


def test_rows_of_commits_are_not_for_foreign_code(bert):
    said = "row_key, rows: rows of commits, which `watch` does not know; use fs.decode"
    with pytest.raises(fs.UserError, match=said), fs.watch(bert, fields=("received", "row_key", "rows")):
        pass


def test_an_unknown_backend_suggests_the_nearest():
    with pytest.raises(
        fs.UserError, match=r"unknown backend 'trition' \(did you mean 'triton'\?\); allowed: auto, triton"
    ):
        fs.Watch(backend="trition")


def test_levels_nest():
    levels = [set(fields_at_level(keep)) for keep in ("summary", "heads", "rows", "full")]
    assert all(a < b for a, b in pairwise(levels))
    assert levels[-1] == set(FIELDS)
