"""Written folders: what is written is what is opened, and random ones depend on their seed alone."""

from __future__ import annotations

import json

import pytest
import torch
from folders import LAYOUTS, TINY, tiny, weights
from transformers import GPT2Config, GPT2LMHeadModel

import floatscope as fs
from floatscope.models.families import llama_key


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shards", [1, 5])
def test_what_is_written_is_what_is_opened(tmp_path, layout, shards):
    folder = tiny(tmp_path / "m", layout, shards=shards)
    opened = fs.load(folder, device="cpu").module.state_dict()
    stored = {llama_key(k): t for k, t in weights(folder).items()}
    assert stored.keys() <= opened.keys()
    assert all(torch.equal(opened[k], t) for k, t in stored.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_module_written_again_is_the_same(tmp_path, layout):
    """As for trained weights: module → folder → module → folder."""
    model = fs.load(tiny(tmp_path / "a", layout, shards=2), device="cpu")
    ids = {"mask_token_id": model.spec.mask_id} if model.spec.mask_id else {}
    writes = layout if layout in ("llada", "dream") else "native"
    again = fs.write_checkpoint(tmp_path / "b", model.module, writes, tokenizer=model.tokenizer.tokenizer, ids=ids)
    second = fs.load(again, device="cpu")
    assert second.spec.mask_id == model.spec.mask_id
    assert second.tokenizer.encode("hi, ö") == model.tokenizer.encode("hi, ö")
    for key, tensor in model.module.state_dict().items():
        assert torch.equal(second.module.state_dict()[key], tensor)
    tokens = torch.randint(0, 256, (1, 9))
    with torch.no_grad():
        assert torch.equal(second.module(tokens).logits, model.module(tokens).logits)


def test_lladas_files_look_like_lladas(tmp_path):
    folder = tiny(tmp_path / "m", shards=2)
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["LLaDAModelLM"], "llada")
    assert (config["d_model"], config["n_kv_heads"], config["mlp_hidden_size"]) == (32, 2, 48)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["model.transformer.wte.weight"] == "model-00001-of-00002.safetensors"
    assert len(index["weight_map"]) == 3 + 9 * TINY["layers"]
    assert "mask_token" not in json.loads((folder / "tokenizer_config.json").read_text())


def test_the_seed_makes_the_weights_and_leaves_the_global_state_alone(tmp_path):
    before = torch.random.get_rng_state()
    first, again, other = (weights(tiny(tmp_path / str(i), seed=s)) for i, s in enumerate((0, 0, 1)))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not any(torch.equal(first[k], other[k]) for k in first if "proj" in k)


def test_a_folder_can_be_written_again_under_an_opened_model(tmp_path):
    model = fs.load(tiny(tmp_path / "m"), device="cpu")
    before = {k: t.clone() for k, t in model.module.state_dict().items()}
    tiny(tmp_path / "m", seed=1, layers=1)
    assert all(torch.equal(t, before[k]) for k, t in model.module.state_dict().items())
    assert fs.load(tmp_path / "m", device="cpu").module.config.num_hidden_layers == 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda p: fs.write_random(p, "lama"), "unknown layout 'lama' (did you mean 'llama'?); allowed: llada, dream,"),
        (
            lambda p: fs.write_random(p, blocks=3),
            "unknown size of a random checkpoint 'blocks'; allowed: width, layers,",
        ),
        (lambda p: fs.write_random(p, layers=0), "layers must be a whole number of at least 1, got 0"),
        (lambda p: fs.write_random(p, layers=1, shards=13), "13 shards for 12 tensors; give 1 to 12"),
        (lambda p: fs.write_random(p, shards=0), "0 shards for 57 tensors; give 1 to 57"),
    ],
)
def test_slips_get_a_sentence(tmp_path, call, said):
    with pytest.raises(fs.UserError) as error:
        call(tmp_path / "m")
    assert str(error.value).startswith(said)
    assert not (tmp_path / "m").exists()


def test_a_layout_takes_its_own_class(tmp_path):
    module = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=4))
    with pytest.raises(
        fs.UserError, match="the layout 'llada' is written from a LlamaForCausalLM, got GPT2LMHeadModel"
    ):
        fs.write_checkpoint(tmp_path, module, "llada")
    with pytest.raises(fs.UserError, match="unknown layout 'lada'"):
        fs.write_checkpoint(tmp_path, module, "lada")


def test_dream_has_its_rotation_as_dream_has_it(tmp_path):
    config = json.loads((tiny(tmp_path / "m", "dream") / "config.json").read_text())
    assert config["rope_theta"] == 1000000.0
    assert "rope_parameters" not in config


def test_a_folder_of_somebody_else_is_not_written_over(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "config.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(
            fs.UserError, match="holds other files, which would be overwritten; give a new or empty folder"
        ):
            fs.write_random(folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "notes.txt"]
    assert (tmp_path / "config.json").read_text() == "{}"


def test_a_folder_written_again_keeps_nothing_of_another_layout(tmp_path):
    tiny(tmp_path / "m", "dream", shards=3)
    again = tiny(tmp_path / "m", "bert")
    assert {p.name for p in again.iterdir()} == {p.name for p in tiny(tmp_path / "new", "bert").iterdir()}
    assert fs.load(again, device="cpu").spec.architecture == "bert"


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"heads": 3}, "width 64, heads 3, kv_heads 3: each must be a multiple of the next"),
        ({"kv_heads": 3}, "width 64, heads 4, kv_heads 3: each must be a multiple of the next"),
        ({"width": 12}, "width 12 of 4 heads: each head takes 3, which must be even"),
        ({"vocabulary": 1}, "vocabulary must be a whole number of at least 2, got 1"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"layers": True}, "layers must be a whole number of at least 1, got True"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_get_a_sentence(tmp_path, shape, said):
    with pytest.raises(fs.UserError) as error:
        fs.write_random(tmp_path / "m", **shape)
    assert str(error.value) == said
    assert not (tmp_path / "m").exists()


def test_keys_and_values_have_as_many_heads_as_queries_unless_said(tmp_path):
    folder = fs.write_random(tmp_path / "m", layers=1, heads=2)
    assert json.loads((folder / "config.json").read_text())["n_kv_heads"] == 2
