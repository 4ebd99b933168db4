"""What the tests of the twins share: a text, a recipe and a few questions, all small."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest

from floatscope.lab.twins import attention, evaluate, heldout
from floatscope.lab.twins.train import TINY
from floatscope.tasks.sample import Sample

SMALL = {kind: replace(recipe, vocabulary=1500, length=96) for kind, recipe in TINY.items()}
WORDS = ["tree", "river", "stone", "cloud", "lamp", "garden", "window", "bridge", "music", "winter"]


def write_text(folder: Path) -> Path:
    rng = Random(0)
    text = folder / "text.txt"
    text.write_text(" ".join(rng.choice(WORDS) for _ in range(4000)) + ".\n")
    return text


@cache
def first_of(name: str, count: int) -> list[Sample]:
    return heldout.read(name)[:count]


def few_questions(patch: pytest.MonkeyPatch, count: int = 2) -> None:
    """Ask only the first of every held-out file."""
    patch.setattr(evaluate, "read", lambda name: first_of(name, count))
    patch.setattr(evaluate, "SIZES", dict.fromkeys(heldout.SIZES, count))
    patch.setattr(attention, "SAMPLES", count)
    patch.setattr(attention, "SEEDS", (0,))
