"""The shipped adapter: its card matches its files, and it fits the base it names."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import floatscope as fs
from floatscope.errors import UserError
from floatscope.files.digests import sha256_file
from floatscope.files.json_files import read_json
from floatscope.lab.adapt.card import card
from floatscope.models.adapter import read_adapter, tensors_file
from floatscope.models.adapter_merge import merge_adapter
from floatscope.models.bases import BASES, cache_folder

HOME = Path(fs.__file__).parent / "assets" / "adapters" / "smollm2"


def test_card_matches_the_files_beside_it():
    assert (HOME / "README.md").read_text() == card(HOME)


def test_weights_are_the_trained_and_scored_ones():
    training, scores = read_json(HOME / "training.json"), read_json(HOME / "scores.json")
    assert sha256_file(tensors_file(HOME)) == training["weights"] == scores["adapter"]
    assert tensors_file(HOME).stat().st_size <= 30_000_000


def test_adapter_names_the_fetched_base_and_the_held_out_files():
    adapter, corpus = read_adapter(HOME), read_json(HOME / "training.json")["corpus"]
    assert adapter.base_sha256 == BASES["smollm2"].sha256
    digests = Path(__file__).parents[3] / "studies" / "pair" / "held_out.json"
    assert {**corpus["files"]["held_out_text"], **corpus["files"]["held_out_data"]} == read_json(digests)


def test_adapter_fits_the_shape_of_its_base():
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    config = LlamaConfig(**shape, num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True)
    with torch.device("meta"):
        module = LlamaForCausalLM(config)
    merge_adapter(module, read_adapter(HOME))


@pytest.mark.slow
def test_adapter_opens_with_its_base_and_reads():
    if not (cache_folder() / BASES["smollm2"].file_name).is_file() or find_spec("gguf") is None:
        pytest.skip("SmolLM2 is not here; floatscope fetch smollm2 brings it")
    model = fs.load("smollm2:mdm")
    assert (model.spec.name, model.spec.paradigm, model.spec.mask_id) == ("smollm2:mdm", "mdm", 16)
    prompt = "Document 1: The tower was built by Gustave Eiffel in 1889.\nQuestion: Who built the tower?\nAnswer:"
    assert "Eiffel" in fs.decode(model, prompt, new_tokens=8).text


def test_missing_base_error_names_the_fetch_command(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="run floatscope fetch smollm2"):
        fs.load("smollm2:mdm")
