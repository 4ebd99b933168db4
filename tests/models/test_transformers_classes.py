"""Every transformers class that the table opens: saved by transformers, loaded by us, padded, causal or not."""

from __future__ import annotations

import json
import math

import pytest
import torch
import transformers
from tiny_checkpoints import change_weights, edit_json, write_tiny

import floatscope as fs
from floatscope.canvas import CanvasState
from floatscope.schema import State

SIZES = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
GPT2 = {"vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
CLASSES = {  # class → config class, its sizes, first position
    "BertForMaskedLM": ("BertConfig", SIZES, 0),
    "RobertaForMaskedLM": ("RobertaConfig", SIZES, 2),
    "XLMRobertaForMaskedLM": ("XLMRobertaConfig", SIZES, 2),
    "ModernBertForMaskedLM": (
        "ModernBertConfig",
        {**SIZES, "cls_token_id": 2, "sep_token_id": 3, "local_attention": 6},
        0,
    ),
    "LlamaForCausalLM": ("LlamaConfig", {**SIZES, "num_key_value_heads": 2}, 0),
    "GPT2LMHeadModel": ("GPT2Config", GPT2 | {"bos_token_id": 2, "eos_token_id": 3}, 0),
    "Qwen2ForCausalLM": ("Qwen2Config", {**SIZES, "num_key_value_heads": 2}, 0),
    "Qwen3ForCausalLM": ("Qwen3Config", {**SIZES, **GROUPED}, 0),
    "Gemma2ForCausalLM": ("Gemma2Config", {**SIZES, **GROUPED}, 0),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {**SIZES, **GROUPED, "sliding_window": 8}, 0),
    "MistralForCausalLM": ("MistralConfig", {**SIZES, "num_key_value_heads": 2, "sliding_window": 6}, 0),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", SIZES, 0),
}
ENCODERS = [name for name in CLASSES if name.endswith("MaskedLM")]
CAUSAL = [name for name in CLASSES if name not in ENCODERS]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("classes")


def save_class(home, name):
    """Save a module as transformers does, with a small tokenizer beside it."""
    folder = home / name
    config, sizes, _ = CLASSES[name]
    if not folder.exists():
        write_tiny(folder, "bert" if name in ENCODERS else "llama")
        torch.manual_seed(1)
        getattr(transformers, name)(getattr(transformers, config)(**sizes)).save_pretrained(folder)
    return folder


def build_canvas(*rows: list[int]) -> CanvasState:
    longest = max(map(len, rows))
    tokens = torch.tensor([[1] * (longest - len(row)) + row for row in rows])
    states = torch.tensor([[State.PAD] * (longest - len(row)) + [State.PROMPT] * len(row) for row in rows])
    return CanvasState(tokens, states)


def load_class(home, name, **options):
    return fs.load(save_class(home, name), device="cpu", **options)


@pytest.mark.parametrize("name", CLASSES)
def test_logits_equal_those_of_transformers(home, name):
    model = load_class(home, name)
    theirs = getattr(transformers, name).from_pretrained(save_class(home, name), dtype=torch.float32).eval()
    ids = torch.randint(4, 256, (2, 11))
    with torch.no_grad():
        assert torch.equal(model.module(ids).logits, theirs(ids).logits)
    assert model.module.config._attn_implementation == theirs.config._attn_implementation


@pytest.mark.parametrize(
    ("name", "bidirectional"), [*((name, True) for name in CLASSES), *((name, False) for name in CAUSAL)]
)
def test_padding_changes_no_logits_and_rows_attend_in_the_right_direction(home, name, bidirectional):
    model = load_class(home, name, mask_id=4) if bidirectional else load_class(home, name)
    assert model.spec.paradigm == ("mdm" if bidirectional else "arm")
    assert model.spec.first_position == CLASSES[name][2]
    short, long = [5, 6, 7, 8, 9], [20, 21, 22, 23, 24, 25, 26, 27, 28]
    with torch.no_grad():
        alone, together = model.forward(build_canvas(short)), model.forward(build_canvas(long, short))
        torch.testing.assert_close(together[1, 4:], alone[0], rtol=1e-4, atol=1e-5)
        other = model.forward(build_canvas([*short[:-1], 10]))
    changed = (other[0, :-1] - alone[0, :-1]).abs().amax(-1) > 0
    assert bool(changed.all()) is bidirectional
    assert bool(changed.any()) is bidirectional


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_is_a_masked_diffusion_model(home, name):
    model = load_class(home, name)
    assert (model.spec.paradigm, model.spec.shift) == ("mdm", False)
    assert model.tokenizer.id_to_token(model.spec.mask_id) == "[MASK]"
    assert model.tokenizer.suffix == (model.tokenizer.token_to_id("[SEP]"),)
    assert model.spec.context == 64 - CLASSES[name][2]


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_is_autoregressive(home, name):
    spec = load_class(home, name).spec
    assert (spec.paradigm, spec.shift, spec.mask_id, spec.architecture) == ("arm", True, None, "causal")
    assert (spec.bos_id, spec.eos_id, spec.context) == (2, 3, 64)
    assert spec.supports_cache and spec.supports_padding  # noqa: PT018


def test_heads_of_other_tasks_are_ignored(home, tmp_path):
    folder = write_tiny(tmp_path / "m", "bert")
    extra = {"cls.seq_relationship.weight": torch.zeros(2, 32), "bert.pooler.dense.weight": torch.zeros(32, 32)}
    change_weights(folder, lambda tensors: tensors.update(extra))
    assert fs.load(folder, device="cpu").spec.architecture == "bert"


def test_old_names_of_layer_norms_are_read(tmp_path):
    folder = write_tiny(tmp_path / "m", "bert")
    before = fs.load(folder, device="cpu").module.state_dict()

    def use_old_names(tensors):
        for key in [k for k in tensors if "LayerNorm" in k]:
            old = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[old] = tensors.pop(key)

    change_weights(folder, use_old_names)
    after = fs.load(folder, device="cpu").module.state_dict()
    assert all(torch.equal(after[k], t) for k, t in before.items())


def test_gpt2_without_its_prefix_is_read(home, tmp_path):
    folder = tmp_path / "gpt2"
    original = load_class(home, "GPT2LMHeadModel").module
    original.save_pretrained(folder)
    change_weights(folder, lambda t: [t.update({k.removeprefix("transformer."): t.pop(k)}) for k in list(t)])
    model = fs.load(folder, device="cpu")
    ids = torch.randint(0, 500, (1, 8))
    with torch.no_grad():
        assert torch.equal(model.module(ids).logits, original(ids).logits)
    change_weights(folder, lambda tensors: tensors.pop("h.1.mlp.c_fc.bias"))
    with pytest.raises(
        fs.UserError, match=r"missing tensors: transformer\.h\.1\.mlp\.c_fc\.bias; unexpected tensors: none"
    ):
        fs.load(folder, device="cpu")


def test_a_mixture_of_experts_is_merged_as_transformers_does(tmp_path):
    """Its files have one tensor per expert and its module one for all: transformers converts them."""
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64,
    )  # fmt: skip
    module = transformers.MixtralForCausalLM(config).eval()
    module.save_pretrained(tmp_path)
    model = fs.load(tmp_path, device="cpu")
    ids = torch.randint(0, 64, (1, 8))
    with torch.no_grad():
        assert torch.equal(model.module(ids).logits, module(ids).logits)
    change_weights(tmp_path, lambda tensors: tensors.pop(next(k for k in tensors if "experts.3" in k)))
    with pytest.raises(fs.UserError):
        fs.load(tmp_path, device="cpu")


def test_the_first_of_several_eos_ids_is_used(tmp_path):
    folder = write_tiny(tmp_path / "m", "llama")
    edit_json(folder / "config.json", eos_token_id=[256, 257])
    spec = fs.load(folder, device="cpu").spec
    assert (spec.eos_id, spec.eot_id, spec.stop_ids) == (256, 257, (256, 257))


STATE_SPACES = {
    "Mamba2ForCausalLM": (
        "Mamba2Config",
        {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 4},
    ),
    "BambaForCausalLM": (
        "BambaConfig",
        {
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attn_layer_indices": [1],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_chunk_size": 4,
        },
    ),
    "NemotronHForCausalLM": (
        "NemotronHConfig",
        {
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 4,
            "layers_block_type": ["mamba", "attention"],
        },
    ),
}


@pytest.mark.parametrize("name", STATE_SPACES)
def test_an_infinite_setting_as_transformers_writes_it_is_read(tmp_path, name):
    config, sizes = STATE_SPACES[name]
    config = getattr(transformers, config)(vocab_size=64, hidden_size=32, num_hidden_layers=2, **sizes)
    getattr(transformers, name)(config).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    model = fs.load(tmp_path, device="cpu")
    theirs = getattr(transformers, name).from_pretrained(tmp_path).eval()
    assert list(model.module.config.time_step_limit) == [0.0, math.inf]
    ids = torch.randint(0, 64, (1, 9))
    with torch.no_grad():
        assert torch.equal(model.module(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("value", [{"__float__": "NaN"}, {"__float__": "1e400"}, {"__float__": ["Infinity"]}])
def test_other_encoded_numbers_are_refused(tmp_path, value):
    config = transformers.Mamba2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, **STATE_SPACES["Mamba2ForCausalLM"][1]
    )
    transformers.Mamba2ForCausalLM(config).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", time_step_limit=[0.0, value])
    with pytest.raises(fs.UserError, match="does not describe a Mamba2ForCausalLM"):
        fs.load(tmp_path, device="cpu")
