"""The adapter that comes with floatscope: what it says of itself is so, and it fits the base it names."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import floatscope as fs
from floatscope.errors import UserError
from floatscope.files.records import digest, read_json
from floatscope.lab.adapt.card import card
from floatscope.models.adapter import TENSORS, merge, read_adapter
from floatscope.models.fetched import BASES, cache

HOME = Path(fs.__file__).parent / "assets" / "adapters" / "smollm2"


def test_the_card_is_made_from_the_files_beside_it():
    assert (HOME / "README.md").read_text() == card(HOME)


def test_the_weights_are_those_that_were_trained_and_scored():
    training, scores = read_json(HOME / "training.json"), read_json(HOME / "scores.json")
    assert digest(HOME / TENSORS) == training["weights"] == scores["adapter"]
    assert (HOME / TENSORS).stat().st_size <= 30_000_000


def test_it_belongs_to_the_base_that_is_fetched_and_held_apart_what_it_is_asked():
    adapter, made = read_adapter(HOME), read_json(HOME / "training.json")["material"]
    assert adapter.base_sha256 == BASES["smollm2"].sha256
    held = Path(__file__).parents[3] / "studies" / "pair" / "held.json"
    assert {**made["files"]["held_text"], **made["files"]["held_data"]} == read_json(held)


def test_it_fits_the_shape_of_its_base():
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    config = LlamaConfig(**shape, num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True)
    with torch.device("meta"):
        module = LlamaForCausalLM(config)
    merge(module, read_adapter(HOME))


def test_it_opens_with_its_base_and_reads():
    if not (cache() / BASES["smollm2"].file).is_file() or find_spec("gguf") is None:
        pytest.skip("SmolLM2 is not here; floatscope fetch smollm2 brings it")
    model = fs.load("smollm2:mdm")
    assert (model.spec.name, model.spec.paradigm, model.spec.mask_id) == ("smollm2:mdm", "mdm", 16)
    told = "Document 1: The tower was built by Gustave Eiffel in 1889.\nQuestion: Who built the tower?\nAnswer:"
    assert "Eiffel" in fs.decode(model, told, new_tokens=8).text


def test_without_its_base_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="get it with floatscope fetch smollm2"):
        fs.load("smollm2:mdm")
