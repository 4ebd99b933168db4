"""`floatscope models`: the table, and the description of one checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import floatscope as fs
from floatscope.cli.main import app
from floatscope.models.architectures import ARCHITECTURES
from floatscope.models.example_checkpoints import EXAMPLES


def invoke(*words: str):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["models", *map(str, words)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    shape = {"layers": 2, "width": 32, "kv_heads": 2, "ffn": 48}
    return {layout: fs.write_random(home / layout, layout, **shape) for layout in ("llada", "dream", "llama", "bert")}


def test_the_table_lists_what_can_be_opened_and_what_is_refused():
    result = invoke()
    assert result.exit_code == 0
    for name in ("LLaDA-8B", "Dream-7B", "ModernBERT", "GPT-2", "iLLaDA", "Qwen3-0.6B-diffusion-mdlm"):
        assert name in result.output
    for name in ("LLaDA2.0", "SDAR", "Fast-dLLM v2", "LLaDA-MoE", "mdlm-owt", "BD3-LM", "DiffusionGemma"):
        assert name in result.output.split("refused")[0]
    for name in ("LLaDA2.2", "MMaDA", "Nemotron-Labs-Diffusion", "SEDD"):
        assert name in result.output.split("refused")[1]
    record = json.loads(invoke("--json").stdout)
    opened = {row["architecture"]: row for row in record["opened"]}
    assert opened.keys() >= {"llada", "dream", "bert", "causal", "llada2", "sdar", "sdar-moe", "fast-dllm-v2"}
    assert opened["llada2"]["attends"].startswith("in blocks of 32")
    assert (opened["mdlm"]["attends"], opened["bd3lm"]["attends"]) == (
        "to all",
        "in blocks of config.json's block_size",
    )
    assert opened["a2d"]["attends"].startswith("to all, or in blocks")
    assert opened["diffusion-gemma"]["attends"].startswith("to its canvas")
    assert opened["diffusion-gemma"]["mask"].startswith("none")
    assert (opened["fast-dllm-v2"]["shift"], opened["dream"]["attends"]) == (True, "to all")
    assert all(row["watched"] for row in record["opened"])
    assert all(row["reason"] for row in record["refused"])


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_terminal_and_breaks_no_name(width):
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(app, ["models"])
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in result.output.replace(", …", "").replace("…)", "")
    for examples in EXAMPLES.values():
        for example in examples:
            assert any(example.name in line for line in lines)
    for row in ARCHITECTURES:
        assert any(line.split()[:2] == [row.name, row.paradigm] for line in lines)


def test_an_architecture_can_be_described_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = " ".join(invoke("llada2").output.split())
    for part in (
        "inclusionAI/LLaDA2.0-mini (16 B, 1.4 B active)",
        "class Glm4MoeForCausalLM",
        "attends in blocks of 32",
        "mask id config.json, the tokenizer's <|mask|>, else 156895",
        "row p predicts position p",
        "can be watched yes",
    ):
        assert part in text
    assert "note the files do not say whether it was trained in blocks" in " ".join(invoke("a2d").output.split())
    record = json.loads(invoke("llada2", "--json").stdout)
    assert (record["mask_id"], record["block_size"], record["experts"]) == (156895, 32, True)
    listed = json.loads(invoke("--json").stdout)["opened"]
    assert next(row for row in listed if row["architecture"] == "llada2") == record
    fs.write_random("llada", layers=1)  # a folder of that name comes first
    assert "1 layers" in invoke("llada").output


def test_every_example_is_one_of_an_architecture():
    assert EXAMPLES.keys() <= {row.name for row in ARCHITECTURES}


def test_the_description_agrees_with_the_loaded_model(folders):
    for folder in folders.values():
        record = json.loads(invoke(folder, "--json").stdout)
        model = fs.load(folder, device="cpu")
        assert record["parameters"] == sum(p.numel() for p in model.module.parameters())
        for fact in ("name", "paradigm", "mask_id", "shift", "architecture", "bos_id", "eos_id", "eot_id", "context"):
            assert record["spec"][fact] == getattr(model.spec, fact)
        assert record["has_chat_template"] == model.tokenizer.has_chat_template
        assert (record["samplers"] == ["ar"]) is (model.spec.paradigm == "arm")
        assert record["capture_obstacle"] is None


def test_the_description_of_a_block_model_names_its_block(tmp_path):
    folder = fs.write_random(tmp_path / "m", "sdar", layers=1)
    text = " ".join(invoke(folder, "--block-size", "8").output.split())
    assert "attends to positions up to the end of its block of 8" in text
    assert "threshold, dynamic" in text
    assert "can be watched yes" in text


def test_the_description_is_readable(folders):
    text = " ".join(invoke(folders["llada"]).output.split())
    for part in (
        "architecture llada, opened as LlamaForCausalLM",
        "paradigm masked diffusion",
        "2 layers, 4 heads of 8, 2 for keys and values",
        "mask 261 <|mdm_mask|>",
        "row p predicts position p",
        "end of turn 260 <|eot_id|>",
        "chat template yes",
        "can be watched yes",
    ):
        assert part in text
    assert "[MASK]" in invoke(folders["bert"]).output


def test_options_override_the_files(folders):
    record = json.loads(invoke(folders["llama"], "--mask-id", 300, "--no-shift", "--json").stdout)
    assert (record["spec"]["paradigm"], record["spec"]["mask_id"], record["spec"]["shift"]) == ("mdm", 300, False)
    assert "a causal model opened as a masked diffusion model" in record["warnings"][0]


def test_a_model_that_cannot_be_watched_has_a_reason(tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = Gemma2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    record = json.loads(invoke(tmp_path / "gemma", "--json").stdout)
    assert record["capture_obstacle"] == "a soft cap on the attention scores"
    assert record["warnings"] == [
        "no tokenizer: prompts are token ids; for texts, copy the files of its tokenizer (tokenizer.json, …) into a"
        " folder with the checkpoint"
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["nowhere"],
            "nowhere is not a folder; give a checkpoint folder, a hub id (org/name), a .gguf file, twin:NAME or"
            " smollm2:NAME",
        ),
        (["twin:mdn"], "unknown twin 'mdn' (did you mean 'mdm'?); allowed: arm, mdm, mdm-adapted"),
        (["{llada}", "--mask-id", "512"], "{llada}: mask id 512 is not a valid token id; expected 0 … 511"),
        (["{llada}", "--revision", "main"], "--revision main needs a hub id (org/name), and {llada} is not one"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(folders, words, message):
    result = invoke(*(word.format(**folders) for word in words))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"floatscope: {message.format(**folders)}\n"


def test_names_from_a_checkpoint_cannot_write_to_the_terminal(tmp_path):
    folder = fs.write_random(tmp_path / "m", layers=1, width=32)
    content = (folder / "tokenizer.json").read_text().replace("<|mdm_mask|>", "\\u001b[2J[/bold]")
    (folder / "tokenizer.json").write_text(content)
    about = json.loads((folder / "tokenizer_config.json").read_text())
    about.pop("added_tokens_decoder", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    result = invoke(folder)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert r"\x1b[2J[/bold]" in result.output


def test_an_ascii_terminal_is_enough():
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run([sys.executable, "-m", "floatscope", "models"], capture_output=True, env=env, timeout=120)
    assert result.returncode == 0, result.stderr
    assert b"LLaDA-8B" in result.stdout
