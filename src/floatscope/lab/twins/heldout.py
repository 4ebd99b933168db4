"""The held-out files: made before training, of names that training never sees, and not changed after.

    for name, samples in held_out().items(): write(folder / f"{name}.jsonl", samples)
    read("reading-5")                # the shipped file

| file | asks |
|---|---|
| reading-1, reading-5 | a fact of a fresh person, told in one passage, or in one of five at any place |
| closed-book | a fact of the fixed world, without passages |
| closed-book-fresh | the same of fresh people: nobody can know |
| two-hop | a fact of somebody's teacher, told in two of five passages |
| contradicted | a fact of the fixed world that the passage tells differently; the passage counts |
| unanswerable | somebody who is in none of the five passages; "unknown" is right |
| few-shot | which of three words is meant, from four examples |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from random import Random

from floatscope.lab.twins.world import (
    World,
    closed_book,
    contradicted,
    few_shot,
    reading,
    two_hop,
    unanswerable,
)
from floatscope.tasks.read import read_samples
from floatscope.tasks.sample import Sample

PEOPLE = 12  # in a fresh world
SIZES = {
    "reading-1": 300,
    "reading-5": 500,
    "closed-book": 300,
    "closed-book-fresh": 200,
    "two-hop": 300,
    "contradicted": 200,
    "unanswerable": 200,
    "few-shot": 300,
}


def held_out(fixed: World) -> dict[str, list[Sample]]:
    """All files, from their names alone."""
    makers: dict[str, Callable[[World, Random, str, int], Sample]] = {
        "reading-1": lambda world, rng, id, i: reading(world, rng, id, 1),
        "reading-5": lambda world, rng, id, i: reading(world, rng, id, 5, gold_at=i % 5),
        "closed-book": lambda world, rng, id, i: closed_book(fixed, rng, id),
        "closed-book-fresh": lambda world, rng, id, i: closed_book(world, rng, id),
        "two-hop": lambda world, rng, id, i: two_hop(world, rng, id, 5),
        "contradicted": lambda world, rng, id, i: contradicted(fixed, rng, id, 5),
        "unanswerable": lambda world, rng, id, i: unanswerable(world, rng, id, 5),
        "few-shot": lambda world, rng, id, i: few_shot(rng, id, 4),
    }
    return {
        name: [
            make(World.fresh(f"held out {name} {i}", PEOPLE, held_out=True), Random(f"{name} {i}"), f"{name}-{i}", i)
            for i in range(SIZES[name])
        ]
        for name, make in makers.items()
    }


def write(path: Path, samples: Sequence[Sample]) -> None:
    path.write_text("".join(json.dumps(sample.as_json()) + "\n" for sample in samples), encoding="utf-8")


def read(name: str) -> list[Sample]:
    """A shipped file."""
    return read_samples(Path(str(files("floatscope") / "assets" / "questions" / f"{name}.jsonl")))
