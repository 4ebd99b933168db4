"""Capabilities of a loaded model: whether it can be cached and padded, and in which direction it attends."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging import version
from tiny_checkpoints import write_tiny

import floatscope as fs
from floatscope.models.description import describe

IDS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL = {**IDS, "hidden_size": 32, "num_hidden_layers": 2}
USUAL = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
ENCODER = {**SMALL, "num_attention_heads": 4, "intermediate_size": 64}
UNUSUAL = {  # class → config class, its sizes, supports_cache, supports_padding
    "MambaForCausalLM": ("MambaConfig", SMALL, False, True),  # takes no position_ids: padding is refused anyway
    "RwkvForCausalLM": ("RwkvConfig", SMALL, False, True),
    "Lfm2ForCausalLM": ("Lfm2Config", {**USUAL, "full_attn_idxs": [1]}, False, True),
    "RecurrentGemmaForCausalLM": ("RecurrentGemmaConfig", {**USUAL, "num_hidden_layers": 3}, True, False),
    "BertLMHeadModel": ("BertConfig", {**ENCODER, "is_decoder": True}, True, True),
    "RobertaForCausalLM": ("RobertaConfig", {**ENCODER, "is_decoder": True}, True, True),
    "BloomForCausalLM": ("BloomConfig", {**IDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}, True, True),
}

CACHE_SINCE = {"RecurrentGemmaForCausalLM": version.parse("5.22")}
"""The oldest release of transformers that is known to give a class a cache that works; decoding checks it."""


def save_class(folder, name, **settings):
    config, sizes, *_ = UNUSUAL[name]
    torch.manual_seed(0)
    module = getattr(transformers, name)(getattr(transformers, config)(**{**sizes, **settings}))
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.3)
    return fs.write_checkpoint(folder, module)


@pytest.mark.parametrize("name", UNUSUAL)
def test_decoding_agrees_with_the_network_itself(tmp_path, name):
    model = fs.load(save_class(tmp_path / "m", name), device="cpu")
    if name not in CACHE_SINCE or version.parse(transformers.__version__) >= CACHE_SINCE[name]:
        assert model.spec.supports_cache == UNUSUAL[name][2]
    assert model.spec.supports_padding == UNUSUAL[name][3]
    decoding = fs.decode(model, [[5, 6, 3, 7]], new_tokens=5, stop=False)
    tokens = decoding.tokens[0]
    with torch.no_grad():
        for i, step in enumerate(decoding.steps):
            expected = model.module(input_ids=tokens[None, : 4 + i], use_cache=False).logits[0, -1].softmax(-1)
            torch.testing.assert_close(step.commits.confidence[0], expected[tokens[4 + i]], rtol=1e-3, atol=1e-5)


def test_a_model_without_padding_support_needs_prompts_of_one_length(tmp_path):
    model = fs.load(save_class(tmp_path / "m", "RecurrentGemmaForCausalLM"), device="cpu")
    with pytest.raises(
        fs.UserError, match="m predicts something else when it is padded; decode prompts of one length together"
    ):
        list(fs.decode(model, [[5, 6, 3, 7], [5]], new_tokens=3))
    assert len(fs.decode(model, [[5, 6], [7, 8]], new_tokens=3).tokens) == 2


def test_a_causal_model_that_attends_in_both_directions_is_refused(tmp_path):
    folder = save_class(tmp_path / "m", "BertLMHeadModel", is_decoder=False)
    message = (
        r"m \(BertLMHeadModel\) attends in both directions, so it is not autoregressive; with mask_id= it opens as a"
    )
    with pytest.raises(fs.UserError, match=message):
        fs.load(folder, device="cpu")
    assert fs.load(folder, device="cpu", mask_id=4).spec.paradigm == "mdm"


def test_a_causal_roberta_counts_positions_from_its_padding_id(tmp_path):
    spec = fs.load(save_class(tmp_path / "m", "RobertaForCausalLM", max_position_embeddings=40), device="cpu").spec
    assert (spec.first_position, spec.context) == (1, 39)


def test_a_model_that_cannot_run_gives_one_sentence(tmp_path, monkeypatch):
    def broken(self, *args, **kwargs):
        raise IndexError("list index out of range\nsecond line")

    folder = write_tiny(tmp_path / "m", "llama")
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", broken)
    with pytest.raises(
        fs.UserError, match=r"m \(LlamaForCausalLM\) cannot be run on 4 tokens \(list index out of range\)"
    ):
        fs.load(folder, device="cpu")


def test_too_little_memory_for_the_check_is_an_error(tmp_path, monkeypatch):
    def full(self, *args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    folder = write_tiny(tmp_path / "m", "llama")
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", full)
    with pytest.raises(fs.UserError, match=r"m needs 0\.0 GiB on cpu"):
        fs.load(folder, device="cpu")


def test_a_short_context_is_not_exceeded(tmp_path):
    assert fs.load(write_tiny(tmp_path / "m", "bert", context=2), device="cpu").spec.context == 2


@pytest.mark.parametrize(
    ("name", "is_capturable"), [("MambaForCausalLM", False), ("BloomForCausalLM", False), ("BertLMHeadModel", True)]
)
def test_attention_in_its_own_code_cannot_be_captured(tmp_path, name, is_capturable):
    obstacle = describe(save_class(tmp_path / "m", name)).capture_obstacle
    assert obstacle == (None if is_capturable else "it computes its attention, if it has any, in its own code")
