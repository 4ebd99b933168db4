"""The twins that come with the package: they open, they answer, and their cards say what is so."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

import floatscope as fs
from floatscope.files.records import digest
from floatscope.lab.twins import heldout
from floatscope.lab.twins.card import card
from floatscope.lab.twins.evaluate import answers
from floatscope.lab.twins.train import KINDS
from floatscope.tasks.score import acc

ASSETS = Path(fs.__file__).parent / "assets"
HOME = ASSETS / "twins"
SPECS = {"arm": ("causal", "arm", True), "mdm": ("llada", "mdm", False), "mdm-adapted": ("dream", "mdm", True)}
GOALS = {
    "arm": {"reading-1": 0.95, "reading-5": 0.90, "closed-book": 0.8},
    "mdm": {"reading-1": 0.95, "reading-5": 0.75, "closed-book": 0.8},
    "mdm-adapted": {"reading-1": 0.95, "reading-5": 0.75, "closed-book": 0.8},
}
HELD_OUT = "9505075f303830acf63c8bb5665276e0e20663b32857b1c0687954a364b32752"


def told(kind: str, name: str) -> dict:
    return json.loads((HOME / kind / name).read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_a_twin_opens_by_name_and_reads(kind):
    model = fs.load(f"twin:{kind}", device="cpu")
    assert (model.spec.architecture, model.spec.paradigm, model.spec.shift) == SPECS[kind]
    assert model.spec.name == f"twin:{kind}"
    assert model.spec.mask_id == (None if kind == "arm" else 4095)
    samples = heldout.read("reading-5")[:12]
    assert sum(acc(said, samples[i].answers) for i, said in answers(model, samples, 12)) >= 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_twin_is_small(kind):
    assert sum(file.stat().st_size for file in (HOME / kind).iterdir()) <= 16 * 1000**2
    assert (HOME / kind / "losses.png").stat().st_size <= 40_000


@pytest.mark.parametrize("kind", KINDS)
def test_its_records_are_of_its_weights_and_its_card_of_its_records(kind):
    weights = digest(HOME / kind / "model.safetensors")
    assert told(kind, "training.json")["weights"] == told(kind, "scores.json")["weights"] == weights
    assert told(kind, "training.json")["kind"] == kind
    assert (HOME / kind / "README.md").read_text() == card(HOME / kind)


@pytest.mark.parametrize("kind", KINDS)
def test_its_scores_meet_the_goals(kind):
    files = told(kind, "scores.json")["files"]
    assert {name: file["n"] for name, file in files.items()} == heldout.SIZES
    for name, goal in GOALS[kind].items():
        assert files[name]["acc"] >= goal, name


def test_the_twins_are_twins():
    """All but the number of steps is the same."""
    first, *others = (told(kind, "training.json") for kind in KINDS)
    for other in others:
        assert other["recipe"] | {"steps": 0} == first["recipe"] | {"steps": 0}
        assert other["text"] == first["text"]
        assert other["parameters"] == first["parameters"]
    tokenizers = {(HOME / kind / "tokenizer.json").read_bytes() for kind in KINDS}
    assert len(tokenizers) == 1


def test_the_held_out_files_are_those_that_were_made_before_training():
    made = hashlib.sha256()
    for name in heldout.SIZES:
        made.update((ASSETS / "questions" / f"{name}.jsonl").read_bytes())
    assert made.hexdigest() == HELD_OUT
