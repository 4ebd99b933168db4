"""What four tokens tell of an opened model: whether it may be cached and padded, and where it looks."""

from __future__ import annotations

import pytest
import torch
import transformers
from folders import tiny

import floatscope as fs
from floatscope.models.describe import describe

IDS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL = {**IDS, "hidden_size": 32, "num_hidden_layers": 2}
USUAL = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
ENCODER = {**SMALL, "num_attention_heads": 4, "intermediate_size": 64}
ODD = {  # class → config class, its sizes, cache, padding
    "MambaForCausalLM": ("MambaConfig", SMALL, False, True),  # takes no position_ids: padding is refused anyhow
    "RwkvForCausalLM": ("RwkvConfig", SMALL, False, True),
    "Lfm2ForCausalLM": ("Lfm2Config", {**USUAL, "full_attn_idxs": [1]}, False, True),
    "RecurrentGemmaForCausalLM": ("RecurrentGemmaConfig", {**USUAL, "num_hidden_layers": 3}, True, False),
    "BertLMHeadModel": ("BertConfig", {**ENCODER, "is_decoder": True}, True, True),
    "RobertaForCausalLM": ("RobertaConfig", {**ENCODER, "is_decoder": True}, True, True),
    "BloomForCausalLM": ("BloomConfig", {**IDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}, True, True),
}


def written(folder, name, **more):
    config, sizes, *_ = ODD[name]
    torch.manual_seed(0)
    module = getattr(transformers, name)(getattr(transformers, config)(**{**sizes, **more}))
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.3)
    return fs.write_checkpoint(folder, module)


@pytest.mark.parametrize("name", ODD)
def test_decoding_says_what_the_network_itself_says(tmp_path, name):
    model = fs.load(written(tmp_path / "m", name), device="cpu")
    assert (model.spec.cache, model.spec.padding) == ODD[name][2:]
    done = fs.decode(model, [[5, 6, 3, 7]], new_tokens=5, stop=False)
    tokens = done.tokens[0]
    with torch.no_grad():
        for i, step in enumerate(done.steps):
            own = model.module(input_ids=tokens[None, : 4 + i], use_cache=False).logits[0, -1].softmax(-1)
            torch.testing.assert_close(step.commits.confidence[0], own[tokens[4 + i]], rtol=1e-3, atol=1e-5)


def test_a_model_that_padding_changes_decodes_one_length_at_a_time(tmp_path):
    model = fs.load(written(tmp_path / "m", "RecurrentGemmaForCausalLM"), device="cpu")
    with pytest.raises(
        fs.UserError, match="m answers otherwise when it is padded; decode prompts of one length together"
    ):
        list(fs.decode(model, [[5, 6, 3, 7], [5]], new_tokens=3))
    assert len(fs.decode(model, [[5, 6], [7, 8]], new_tokens=3).tokens) == 2


def test_a_causal_model_that_looks_both_ways_is_refused(tmp_path):
    folder = written(tmp_path / "m", "BertLMHeadModel", is_decoder=False)
    said = (
        r"m \(BertLMHeadModel\) looks both ways, so it is no autoregressive model; with mask_id= it opens as a masked"
    )
    with pytest.raises(fs.UserError, match=said):
        fs.load(folder, device="cpu")
    assert fs.load(folder, device="cpu", mask_id=4).spec.paradigm == "mdm"


def test_roberta_counts_from_its_padding_as_a_causal_model_too(tmp_path):
    spec = fs.load(written(tmp_path / "m", "RobertaForCausalLM", max_position_embeddings=40), device="cpu").spec
    assert (spec.first_position, spec.context) == (1, 39)


def test_a_model_that_cannot_run_is_one_sentence(tmp_path, monkeypatch):
    def broken(self, *args, **kwargs):
        raise IndexError("list index out of range\nsecond line")

    folder = tiny(tmp_path / "m", "llama")
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", broken)
    with pytest.raises(
        fs.UserError, match=r"m \(LlamaForCausalLM\) cannot be run on 4 tokens \(list index out of range\)"
    ):
        fs.load(folder, device="cpu")


def test_too_little_memory_for_the_probe_is_said(tmp_path, monkeypatch):
    def full(self, *args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    folder = tiny(tmp_path / "m", "llama")
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", full)
    with pytest.raises(fs.UserError, match=r"m needs 0\.0 GiB on cpu"):
        fs.load(folder, device="cpu")


def test_a_short_context_is_not_overrun(tmp_path):
    assert fs.load(tiny(tmp_path / "m", "bert", context=2), device="cpu").spec.context == 2


@pytest.mark.parametrize(
    ("name", "watched"), [("MambaForCausalLM", False), ("BloomForCausalLM", False), ("BertLMHeadModel", True)]
)
def test_attention_in_code_of_its_own_is_said_not_to_be_watched(tmp_path, name, watched):
    about = describe(written(tmp_path / "m", name)).not_watched
    assert about == (None if watched else "it computes its attention, if it has any, in code of its own")
