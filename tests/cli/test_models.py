"""`floatscope models`: the table, and what it says of one checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import floatscope as fs
from floatscope.cli.main import app


def ask(*words: str):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["models", *map(str, words)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    shape = {"layers": 2, "width": 32, "kv_heads": 2, "ffn": 48}
    return {layout: fs.write_random(home / layout, layout, **shape) for layout in ("llada", "dream", "llama", "bert")}


def test_the_table_lists_what_opens_and_what_is_refused():
    done = ask()
    assert done.exit_code == 0
    for name in ("LLaDA-8B", "Dream-7B", "ModernBERT", "GPT-2", "iLLaDA", "Qwen3-0.6B-diffusion-mdlm"):
        assert name in done.output
    for name in ("LLaDA2", "LLaDA-MoE", "SDAR", "DiffusionGemma"):
        assert name in done.output.split("refused")[1]
    told = json.loads(ask("--json").stdout)
    assert {row["layout"] for row in told["opened"]} >= {"llada", "dream", "bert", "causal"}
    assert all(row["why"] for row in told["refused"])


def test_help_shows_an_example():
    assert "Example: floatscope models GSAI-ML/LLaDA-8B-Instruct" in ask("--help").output


def test_one_checkpoint_is_described_as_it_loads(folders):
    for folder in folders.values():
        told = json.loads(ask(folder, "--json").stdout)
        model = fs.load(folder, device="cpu")
        assert told["parameters"] == sum(p.numel() for p in model.module.parameters())
        for fact in ("name", "family", "mask_id", "shift", "layout", "bos_id", "eos_id", "eot_id", "context"):
            assert told["spec"][fact] == getattr(model.spec, fact)
        assert told["template"] == model.tokenizer.has_template
        assert (told["samplers"] == ["ar"]) is (model.spec.paradigm == "arm")
        assert told["not_watched"] is None


def test_a_person_reads_it_too(folders):
    text = " ".join(ask(folders["llada"]).output.split())
    for part in (
        "layout llada, opened as LlamaForCausalLM",
        "family masked diffusion",
        "2 layers of 4 heads of 8, 2 for keys and values",
        "mask 261 <|mdm_mask|>",
        "a row decides its own position",
        "end of turn 260 <|eot_id|>",
        "chat template yes",
        "watched yes",
    ):
        assert part in text
    assert "[MASK]" in ask(folders["bert"]).output


def test_what_the_user_says_overrules(folders):
    told = json.loads(ask(folders["llama"], "--mask-id", 300, "--no-shift", "--json").stdout)
    assert (told["spec"]["family"], told["spec"]["mask_id"], told["spec"]["shift"]) == ("mdm", 300, False)
    assert "a causal model opened as a masked diffusion model" in told["warnings"][0]


def test_a_model_that_cannot_be_watched_says_why(tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = Gemma2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    told = json.loads(ask(tmp_path / "gemma", "--json").stdout)
    assert told["not_watched"] == "a soft cap on the attention scores"
    assert told["warnings"] == ["no tokenizer: prompts are token ids"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["nowhere"],
            "nowhere is no folder; give a checkpoint folder, a hub id (org/name), a .gguf file, twin:NAME or"
            " smollm2:NAME",
        ),
        (["twin:mdn"], "unknown twin 'mdn' (did you mean 'mdm'?); allowed: arm, mdm, mdm-adapted"),
        (["{llada}", "--mask-id", "512"], "{llada}: mask id 512 is none of its token ids, 0 … 511"),
        (["{llada}", "--revision", "main"], "revision='main' belongs to a hub id, and {llada} is none"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(folders, words, said):
    done = ask(*(word.format(**folders) for word in words))
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr == f"floatscope: {said.format(**folders)}\n"


def test_names_from_a_checkpoint_cannot_write_to_the_terminal(tmp_path):
    folder = fs.write_random(tmp_path / "m", layers=1, width=32)
    content = (folder / "tokenizer.json").read_text().replace("<|mdm_mask|>", "\\u001b[2J[/bold]")
    (folder / "tokenizer.json").write_text(content)
    about = json.loads((folder / "tokenizer_config.json").read_text())
    about.pop("added_tokens_decoder", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    done = ask(folder)
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    assert r"\x1b[2J[/bold]" in done.output


def test_a_terminal_of_few_characters_is_written_to_all_the_same():
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", "floatscope", "models"], capture_output=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert b"LLaDA-8B" in done.stdout
