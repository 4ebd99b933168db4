"""Capabilities of a loaded model: whether it can be cached and padded, and in which direction it attends."""

from __future__ import annotations

import pytest
import torch
import transformers
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
    "RecurrentGemmaForCausalLM": ("RecurrentGemmaConfig", {**USUAL, "num_hidden_layers": 3}, False, False),
    "MistralForCausalLM": ("MistralConfig", {**USUAL, "sliding_window": 6}, True, True),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {**USUAL, "head_dim": 8, "sliding_window": 6}, True, True),
    "BertLMHeadModel": ("BertConfig", {**ENCODER, "is_decoder": True}, True, True),
    "RobertaForCausalLM": ("RobertaConfig", {**ENCODER, "is_decoder": True}, True, True),
    "BloomForCausalLM": ("BloomConfig", {**IDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}, True, True),
}


def save_class(folder, name, seed=0, **settings):
    config, sizes, *_ = UNUSUAL[name]
    torch.manual_seed(seed)
    module = getattr(transformers, name)(getattr(transformers, config)(**{**sizes, **settings}))
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.3)
    return fs.write_checkpoint(folder, module)


@pytest.mark.parametrize("name", UNUSUAL)
def test_decoding_agrees_with_the_network_itself(tmp_path, name):
    model = fs.load(save_class(tmp_path / "m", name), device="cpu")
    assert model.spec.supports_cache == UNUSUAL[name][2]
    assert model.spec.supports_padding == UNUSUAL[name][3]
    decoding = fs.decode(model, [[5, 6, 3, 7]], new_tokens=5, stop=False)
    tokens = decoding.tokens[0]
    with torch.no_grad():
        for i, step in enumerate(decoding.steps):
            expected = model.module(input_ids=tokens[None, : 4 + i], use_cache=False).logits[0, -1].softmax(-1)
            torch.testing.assert_close(step.commits.confidence[0], expected[tokens[4 + i]], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["RecurrentGemmaForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM"])
def test_tokens_past_the_window_equal_those_of_generate(tmp_path, name, seed):
    window = {"attention_window_size" if name.startswith("Recurrent") else "sliding_window": 6}
    model = fs.load(save_class(tmp_path / "m", name, seed=seed, **window), device="cpu")
    assert model.module.config.sliding_window == 6
    prompt = torch.randint(3, 64, (1, 9), generator=torch.Generator().manual_seed(seed))
    expected = model.module.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    decodings = [fs.decode(model, prompt.tolist(), new_tokens=8, stop=False) for _ in range(2)]
    for _ in zip(*decodings, strict=True):  # in turns: neither may see a state of the other
        pass
    for decoding in decodings:
        assert decoding.tokens.tolist() == expected.tolist()


def test_a_cache_that_ignores_the_window_is_not_used(tmp_path, monkeypatch):
    """It gives the right rows until the input is longer than the window."""
    folder = save_class(tmp_path / "m", "MistralForCausalLM", sliding_window=100)
    forward = transformers.MistralModel.forward

    def ignore_window(self, *args, past_key_values=None, **kwargs):
        size, is_cached = self.config.sliding_window, past_key_values is not None and past_key_values.get_seq_length()
        self.config.sliding_window = 1000 if is_cached else size
        try:
            return forward(self, *args, past_key_values=past_key_values, **kwargs)
        finally:
            self.config.sliding_window = size

    assert fs.load(folder, device="cpu").spec.supports_cache
    monkeypatch.setattr(transformers.MistralModel, "forward", ignore_window)
    model = fs.load(folder, device="cpu")
    assert not model.spec.supports_cache
    assert model.module.config.sliding_window == 100


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
