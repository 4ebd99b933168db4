"""Twin cards: every number comes from the JSON files beside the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import floatscope as fs
from floatscope.files.digests import sha256_file
from floatscope.files.json_files import write_json
from floatscope.files.records import convert
from floatscope.lab.training.card import plot_losses
from floatscope.lab.training.record import read_training
from floatscope.lab.twins.attention import AttentionRecord
from floatscope.lab.twins.card import attention_section, card, write_card
from floatscope.lab.twins.record import TwinTraining
from floatscope.lab.twins.scores import (
    chance_accuracy,
    count_new_tokens,
    score_answers,
    share_of_facts,
    wilson_score,
)
from floatscope.lab.twins.world import VALUES
from floatscope.models.checkpoint import WEIGHTS_FILE
from floatscope.tasks.sample_files import read_samples, read_shipped

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
    text = card(folder)
    assert f"| parameters | {training['parameters']:,} |" in text
    assert f"| training tokens | {training['tokens']:,} |" in text
    assert f"```\n{training['command']}\n```" in text
    assert training["weights"] in text
    assert all(digest in text for digest in training["text"]["files"].values())
    for name, file in scores["files"].items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
        assert f"| {file['acc']:.3f} | {file['low']:.3f} … {file['high']:.3f} | {file['n']} |" in row
    step, text_loss, answer_loss = training["losses"][-1]
    assert f"| {step:,} | {text_loss:.3f} | {answer_loss:.3f} |" in text
    change(folder, "training.json", parameters=1234567, seed=77)
    assert "| parameters | 1,234,567 |" in card(folder)
    assert "| seed | 77 |" in card(folder)


def test_licence_is_quoted_as_given(folder):
    text = json.loads((folder / "training.json").read_text())["text"]
    change(folder, "training.json", text=text | {"licence": "CC0"})
    assert "Licence: CC0." in card(folder)
    change(folder, "training.json", text=text | {"licence": ""})
    assert "The licence of the text was not given." in card(folder)


def test_score_at_chance_is_listed_as_a_limit(folder):
    files = json.loads((folder / "scores.json").read_text())["files"]
    for acc, low, learnt in ((0.36, 0.31, False), (0.5, 0.45, True)):
        few_shot = {"few-shot": {"acc": acc, "low": low, "high": acc + 0.05, "n": 300}}
        change(folder, "scores.json", files=files | few_shot)
        assert ("It has not learnt `few-shot`" in card(folder)) is not learnt


def test_biography_is_described_once_it_has_a_score(folder):
    files = json.loads((folder / "scores.json").read_text())["files"]
    files.pop("biography", None)
    change(folder, "scores.json", files=files)
    assert "biography" not in card(folder)
    entry = {"acc": 0.6, "low": 0.5, "high": 0.7, "n": 200, "f1": 0.912, "facts": 0.876}
    change(folder, "scores.json", files=files | {"biography": entry})
    assert "| biography | all facts of a fresh person" in card(folder)
    assert "48 new tokens" in card(folder)
    assert "states 0.876 of the facts, and its f1 is 0.912." in card(folder)


def test_biography_is_scored_by_its_facts():
    sample = read_samples("twin:biography", 1)[0]
    (answer,) = sample.answers
    assert answer == "Nas Zuson keeps a parrot. Nas was born in Sebury. Nas plays the lute."
    assert share_of_facts(answer, sample) == 1
    assert share_of_facts("Nas Zuson plays the lute. Nas keeps a parrot.", sample) == pytest.approx(2 / 3)
    assert share_of_facts("Nas was born in Seburyville. She keeps a parrots.", sample) == 0
    assert share_of_facts("", sample) == 0
    wrong = "Nas Zuson keeps a parrot. Nas was born in Sebury. Nas plays the harp."
    entry = score_answers("biography", [sample, sample], [answer, wrong])
    assert (entry.acc, entry.facts, entry.n) == (0.5, pytest.approx(5 / 6, abs=1e-4), 2)
    assert entry.f1 == pytest.approx((1 + 11 / 12) / 2, abs=1e-4)
    assert [count_new_tokens(s) for s in (sample, read_samples("twin:reading-5", 1)[0])] == [48, 8]


def test_chance_is_computed_from_the_questions():
    assert chance_accuracy("few-shot") == 1 / 3
    relations = [sample.meta["relation"] for sample in read_shipped("closed-book-fresh")]
    known = sum(relations.count(relation) / len(VALUES[relation]) for relation in VALUES)
    assert chance_accuracy("closed-book-fresh") == pytest.approx(known / len(relations), abs=1e-4)
    assert chance_accuracy("reading-5") is None


def test_attention_section_appears_if_it_was_measured_on_these_weights(folder):
    assert "## Attention" not in card(folder)
    (folder / WEIGHTS_FILE).write_bytes(b"weights")
    table = {"caption": "Received attention.", "columns": ["layer", "lift"], "rows": [["0", "1.23"], ["1", "a|b"]]}
    measured = {
        "weights": sha256_file(folder / WEIGHTS_FILE),
        "samples": 24,
        "steps": 16,
        "tables": {"first key": table},
    }
    section = attention_section(convert(measured, AttentionRecord))
    assert section.startswith("## Attention\n\nMeasured on 24 held-out questions, 16 steps each, ")
    assert section.endswith(
        "### First key\n\nReceived attention.\n\n| layer | lift |\n| --- | --- |\n| 0 | 1.23 |\n| 1 | a\\|b |"
    )
    write_json(folder / "attention.json", measured)
    assert section in card(folder)
    write_json(folder / "attention.json", measured | {"weights": "of others"})
    assert section not in card(folder)


def test_loss_plot_is_small_and_on_white(folder):
    from matplotlib.image import imread

    write_card(folder)
    assert (folder / "losses.png").stat().st_size <= 40_000
    assert (imread(folder / "losses.png")[0, 0, :3] == 1).all()
    assert (folder / "README.md").read_text() == card(folder)
    assert plot_losses(read_training(folder, TwinTraining)).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("correct", "acc", "low", "high"), [([1.0] * 10, 1.0, 0.7225, 1.0), ([0.0, 1.0] * 200, 0.5, 0.4512, 0.5488)]
)
def test_score_is_a_mean_with_its_interval(correct, acc, low, high):
    score = wilson_score(correct)
    assert (score.acc, score.n) == (acc, len(correct))
    assert (score.low, score.high) == (low, high)
