"""The card says what the JSON files say, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import floatscope as fs
from floatscope.files.records import digest, write_json
from floatscope.lab.training.card import picture
from floatscope.lab.twins import evaluate, heldout
from floatscope.lab.twins.card import attention_section, card, write_card
from floatscope.lab.twins.record import read_training
from floatscope.lab.twins.world import VALUES
from floatscope.models.files import WHOLE

SHIPPED = Path(fs.__file__).parent / "assets" / "twins"
FILES = ("training.json", "scores.json")


@pytest.fixture
def folder(tmp_path):
    for name in FILES:
        shutil.copy(SHIPPED / "mdm" / name, tmp_path)
    return tmp_path


def change(folder: Path, name: str, **entries: object) -> None:
    write_json(folder / name, json.loads((folder / name).read_text()) | entries)


def test_every_number_comes_from_the_files(folder):
    training, scores = (json.loads((folder / name).read_text()) for name in FILES)
    said = card(folder)
    assert f"| parameters | {training['parameters']:,} |" in said
    assert f"| tokens seen | {training['tokens']:,} |" in said
    assert f"```\n{training['command']}\n```" in said
    assert training["weights"] in said
    assert all(digest in said for digest in training["text"]["files"].values())
    for name, file in scores["files"].items():
        row = next(line for line in said.splitlines() if line.startswith(f"| {name} |"))
        assert f"| {file['acc']:.3f} | {file['low']:.3f} … {file['high']:.3f} | {file['n']} |" in row
    step, text, answers = training["losses"][-1]
    assert f"| {step:,} | {text:.3f} | {answers:.3f} |" in said
    change(folder, "training.json", parameters=1234567, seed=77)
    assert "| parameters | 1,234,567 |" in card(folder)
    assert "| seed | 77 |" in card(folder)


def test_a_licence_is_the_users_word(folder):
    text = json.loads((folder / "training.json").read_text())["text"]
    change(folder, "training.json", text=text | {"licence": "CC0"})
    assert "Licence: CC0." in card(folder)
    change(folder, "training.json", text=text | {"licence": ""})
    assert "Its licence was not given." in card(folder)


def test_what_is_at_chance_is_a_limit(folder):
    files = json.loads((folder / "scores.json").read_text())["files"]
    for acc, low, learnt in ((0.36, 0.31, False), (0.5, 0.45, True)):
        few_shot = {"few-shot": {"acc": acc, "low": low, "high": acc + 0.05, "n": 300}}
        change(folder, "scores.json", files=files | few_shot)
        assert ("It has not learnt `few-shot`" in card(folder)) is not learnt


def test_chance_is_counted_from_the_questions():
    assert evaluate.chance("few-shot") == 1 / 3
    asked = [sample.meta["relation"] for sample in heldout.read("closed-book-fresh")]
    known = sum(asked.count(relation) / len(VALUES[relation]) for relation in VALUES)
    assert evaluate.chance("closed-book-fresh") == pytest.approx(known / len(asked), abs=1e-4)
    assert evaluate.chance("reading-5") is None


def test_what_its_attention_does_is_shown_if_it_was_measured(folder):
    assert "What its attention does" not in card(folder)
    (folder / WHOLE).write_bytes(b"weights")
    shown = {"says": "What it receives.", "columns": ["layer", "lift"], "rows": [["0", 1.23456], [1, "a|b"]]}
    measured = {"weights": digest(folder / WHOLE), "samples": 24, "steps": 16, "tables": {"first key": shown}}
    said = attention_section(measured)
    assert said.startswith("## What its attention does\n\nWatched over 24 held-out questions, 16 steps each, ")
    assert said.endswith(
        "### First key\n\nWhat it receives.\n\n| layer | lift |\n| --- | --- |\n| 0 | 1.23 |\n| 1 | a\\|b |"
    )
    write_json(folder / "attention.json", measured)
    assert said in card(folder)
    write_json(folder / "attention.json", measured | {"weights": "of others"})
    assert said not in card(folder)


def test_the_picture_is_small_and_light(folder):
    from matplotlib.image import imread

    write_card(folder)
    assert (folder / "losses.png").stat().st_size <= 40_000
    assert (imread(folder / "losses.png")[0, 0, :3] == 1).all()
    assert (folder / "README.md").read_text() == card(folder)
    assert picture(read_training(folder)).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("right", "acc", "low", "high"), [([1.0] * 10, 1.0, 1.0, 1.0), ([0.0, 1.0] * 200, 0.5, 0.45, 0.55)]
)
def test_a_score_is_a_mean_with_its_interval(right, acc, low, high):
    score = evaluate.score_of(right)
    assert (score.acc, score.n) == (acc, len(right))
    assert (score.low, score.high) == (pytest.approx(low, abs=0.006), pytest.approx(high, abs=0.006))
