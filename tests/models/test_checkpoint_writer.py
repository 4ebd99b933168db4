"""Written checkpoints: `load` reads back what was written, and random weights depend on the seed alone."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import TINY, TINY_ARCHITECTURES, read_weights, write_tiny
from transformers import GPT2Config, GPT2LMHeadModel

import floatscope as fs
from floatscope.models.conversions import llada_to_llama_key


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
@pytest.mark.parametrize("shards", [1, 5])
def test_load_reads_what_was_written(tmp_path, architecture, shards):
    folder = write_tiny(tmp_path / "m", architecture, shards=shards)
    loaded = fs.load(folder, device="cpu").module.state_dict()
    stored = {llada_to_llama_key(k): t for k, t in read_weights(folder).items()}
    assert stored.keys() <= loaded.keys()
    assert all(torch.equal(loaded[k], t) for k, t in stored.items())


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_a_module_survives_the_round_trip(tmp_path, architecture):
    """Module → folder → module → folder."""
    model = fs.load(write_tiny(tmp_path / "a", architecture, shards=2), device="cpu")
    extra = {"mask_token_id": model.spec.mask_id} if model.spec.mask_id else {}
    file_format = architecture if architecture in ("llada", "dream") else "native"
    again = fs.write_checkpoint(
        tmp_path / "b", model.module, file_format, tokenizer=model.tokenizer.hf, extra_config=extra
    )
    second = fs.load(again, device="cpu")
    assert second.spec.mask_id == model.spec.mask_id
    assert second.tokenizer.encode("hi, ö") == model.tokenizer.encode("hi, ö")
    for key, tensor in model.module.state_dict().items():
        assert torch.equal(second.module.state_dict()[key], tensor)
    tokens = torch.randint(0, 256, (1, 9))
    with torch.no_grad():
        assert torch.equal(second.module(tokens).logits, model.module(tokens).logits)


def test_llada_files_have_the_format_of_llada(tmp_path):
    folder = write_tiny(tmp_path / "m", shards=2)
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["LLaDAModelLM"], "llada")
    assert (config["d_model"], config["n_kv_heads"], config["mlp_hidden_size"]) == (32, 2, 48)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["model.transformer.wte.weight"] == "model-00001-of-00002.safetensors"
    assert len(index["weight_map"]) == 3 + 9 * TINY["layers"]
    assert "mask_token" not in json.loads((folder / "tokenizer_config.json").read_text())


def test_shards_are_as_many_and_as_equal_as_the_sizes_allow(tmp_path):
    torch.manual_seed(0)
    module = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=6, n_head=4, n_positions=64))
    size = sum(t.nbytes for k, t in module.state_dict().items() if k != "lm_head.weight")
    for shards in (2, 3, 4):
        folder = fs.write_checkpoint(tmp_path / str(shards), module, shards=shards)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = [folder / f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        assert {folder / name for name in index["weight_map"].values()} == set(files) == set(folder.glob("*.safet*s"))
        assert index["metadata"] == {"total_size": size}
        assert max(file.stat().st_size for file in files) < 1.3 * size / shards
        assert all(index["weight_map"][name] == file.name for file in files for name in load_file(file))


def test_weights_depend_on_the_seed_and_the_global_state_is_unchanged(tmp_path):
    before = torch.random.get_rng_state()
    first, again, other = (read_weights(write_tiny(tmp_path / str(i), seed=s)) for i, s in enumerate((0, 0, 1)))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not any(torch.equal(first[k], other[k]) for k in first if "proj" in k)


def test_a_folder_can_be_overwritten_while_its_model_is_loaded(tmp_path):
    model = fs.load(write_tiny(tmp_path / "m"), device="cpu")
    before = {k: t.clone() for k, t in model.module.state_dict().items()}
    write_tiny(tmp_path / "m", seed=1, layers=1)
    assert all(torch.equal(t, before[k]) for k, t in model.module.state_dict().items())
    assert fs.load(tmp_path / "m", device="cpu").module.config.num_hidden_layers == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda p: fs.write_random(p, "lama"),
            "unknown architecture 'lama' (did you mean 'llama'?); allowed: llada,",
        ),
        (
            lambda p: fs.write_random(p, blocks=3),
            "unknown size of a random checkpoint 'blocks'; allowed: width, layers,",
        ),
        (lambda p: fs.write_random(p, layers=0), "layers must be a whole number of at least 1, got 0"),
        (lambda p: fs.write_random(p, layers=1, shards=13), "13 shards for 12 tensors; give 1 to 12"),
        (lambda p: fs.write_random(p, shards=0), "0 shards for 57 tensors; give 1 to 57"),
    ],
)
def test_invalid_arguments_give_one_sentence(tmp_path, call, message):
    with pytest.raises(fs.UserError) as error:
        call(tmp_path / "m")
    assert str(error.value).startswith(message)
    assert not (tmp_path / "m").exists()


def test_a_file_format_needs_its_class(tmp_path):
    module = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=4))
    with pytest.raises(fs.UserError, match="the file format 'llada' needs a LlamaForCausalLM, got GPT2LMHeadModel"):
        fs.write_checkpoint(tmp_path, module, "llada")
    with pytest.raises(fs.UserError, match="unknown file format 'lada'"):
        fs.write_checkpoint(tmp_path, module, "lada")


def test_the_config_of_dream_has_rope_theta(tmp_path):
    config = json.loads((write_tiny(tmp_path / "m", "dream") / "config.json").read_text())
    assert config["rope_theta"] == 1000000.0
    assert "rope_parameters" not in config


def test_a_folder_with_other_files_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "config.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(
            fs.UserError, match="contains other files, which would be overwritten; give a new or empty folder"
        ):
            fs.write_random(folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "notes.txt"]
    assert (tmp_path / "config.json").read_text() == "{}"


def test_an_overwritten_folder_has_no_files_of_the_old_architecture(tmp_path):
    write_tiny(tmp_path / "m", "dream", shards=3)
    again = write_tiny(tmp_path / "m", "bert")
    assert {p.name for p in again.iterdir()} == {p.name for p in write_tiny(tmp_path / "new", "bert").iterdir()}
    assert fs.load(again, device="cpu").spec.architecture == "bert"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads": 3}, "width 64, heads 3, kv_heads 3: each must be a multiple of the next"),
        ({"kv_heads": 3}, "width 64, heads 4, kv_heads 3: each must be a multiple of the next"),
        ({"width": 12}, "width 12 with 4 heads gives heads of 3, which must be even"),
        ({"vocab_size": 1}, "vocab_size must be a whole number of at least 2, got 1"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"layers": True}, "layers must be a whole number of at least 1, got True"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_give_one_sentence(tmp_path, sizes, message):
    with pytest.raises(fs.UserError) as error:
        fs.write_random(tmp_path / "m", **sizes)
    assert str(error.value) == message
    assert not (tmp_path / "m").exists()


def test_kv_heads_default_to_heads(tmp_path):
    folder = fs.write_random(tmp_path / "m", layers=1, heads=2)
    assert json.loads((folder / "config.json").read_text())["n_kv_heads"] == 2
