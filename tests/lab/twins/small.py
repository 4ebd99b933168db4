"""Small inputs for the tests of the twins: a text, recipes, a few questions."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest

from floatscope.lab.twins import attention, scores
from floatscope.lab.twins.held_out import SIZES
from floatscope.lab.twins.train import TINY_RECIPES
from floatscope.tasks.sample import Sample
from floatscope.tasks.sample_files import read_samples

SMALL = {kind: replace(recipe, vocabulary=1500, length=96) for kind, recipe in TINY_RECIPES.items()}
WORDS = ["tree", "river", "stone", "cloud", "lamp", "garden", "window", "bridge", "music", "winter"]


def write_text(folder: Path) -> Path:
    rng = Random(0)
    text = folder / "text.txt"
    text.write_text(" ".join(rng.choice(WORDS) for _ in range(4000)) + ".\n")
    return text


@cache
def first_samples(name: str, count: int) -> list[Sample]:
    return read_samples(f"twin:{name}", count)


def use_few_questions(patch: pytest.MonkeyPatch, count: int = 2) -> None:
    """Evaluate on the first questions of every held-out file only."""
    patch.setattr(scores, "read_shipped", lambda name: first_samples(name, count))
    patch.setattr(scores, "SIZES", dict.fromkeys(SIZES, count))
    patch.setattr(attention, "SAMPLES", count)
    patch.setattr(attention, "SEEDS", (0,))
