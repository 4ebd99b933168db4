"""A small base, a text and questions, made once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from floatscope.lab.adapt.corpus import TrainingFiles
from floatscope.lab.twins.world import World, make_reading
from floatscope.models.random_checkpoints import write_random


@dataclass(frozen=True)
class SmallData:
    """A folder with files to train on and held-out files."""

    folder: Path
    files: TrainingFiles


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """A causal model with random weights."""
    return write_random(tmp_path_factory.mktemp("base") / "base", "llama", layers=2, heads=4, kv_heads=2)


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> SmallData:
    folder = tmp_path_factory.mktemp("files")
    rng = Random(0)
    names = ["Paris", "Berlin", "Rome", "Oslo", "Vienna", "Madrid"]
    lines = [
        f"The river runs from {rng.choice(names)} to the sea, and in {rng.randint(1000, 1999)} it froze. "
        + "Then people of the town walked over it, and they said that nobody had ever seen such a winter before. " * 2
        for _ in range(72)
    ]
    (folder / "text.txt").write_text("\n".join(lines[:60]))
    (folder / "held.txt").write_text("\n".join(lines[60:]))
    for name in ("train", "eval"):
        samples = [
            make_reading(World.generate(f"{name} {i}", 6), Random(f"{name} {i}"), f"{name}-{i}", 2) for i in range(20)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(s.as_json()) + "\n" for s in samples))
    paths = [[folder / name] for name in ("text.txt", "train.jsonl", "held.txt", "eval.jsonl")]
    return SmallData(folder, TrainingFiles(*paths))
