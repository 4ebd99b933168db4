"""The held-out question files: made before training, from names that training never sees, and not changed since.

    for name, samples in make_held_out(fixed_world()).items(): write_samples(folder / f"{name}.jsonl", samples)
    read_shipped("reading-5")                # the shipped file, from floatscope.tasks.sample_files

| file | question about |
|---|---|
| reading-1, reading-5 | a fact of a fresh person, stated in one passage, or in one of five at any position |
| closed-book | a fact of the fixed world, without passages |
| closed-book-fresh | a fact of a fresh person, without passages: it cannot be known |
| two-hop | a fact of somebody's teacher, stated in two of five passages |
| contradicted | a fact of the fixed world that the passage contradicts; the passage is right |
| unanswerable | somebody in none of the five passages; "unknown" is right |
| few-shot | which of three words is meant, from four examples |
| biography | all facts of a fresh person, stated in one or two of five passages; the answer has several sentences |
| dated | a fact of a fresh person that three of five passages state differently; the latest year is right |
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from floatscope.lab.twins.world import (
    World,
    make_biography,
    make_closed_book,
    make_contradicted,
    make_dated,
    make_few_shot,
    make_reading,
    make_two_hop,
    make_unanswerable,
)
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
    "biography": 200,
    "dated": 200,
}


def make_held_out(fixed: World) -> dict[str, list[Sample]]:
    """Make the samples of all files; their seeds are the names of the files."""
    makers: dict[str, Callable[[World, Random, str, int], Sample]] = {
        "reading-1": lambda world, rng, id, i: make_reading(world, rng, id, 1),
        "reading-5": lambda world, rng, id, i: make_reading(world, rng, id, 5, gold_at=i % 5),
        "closed-book": lambda world, rng, id, i: make_closed_book(fixed, rng, id),
        "closed-book-fresh": lambda world, rng, id, i: make_closed_book(world, rng, id),
        "two-hop": lambda world, rng, id, i: make_two_hop(world, rng, id, 5),
        "contradicted": lambda world, rng, id, i: make_contradicted(fixed, rng, id, 5),
        "unanswerable": lambda world, rng, id, i: make_unanswerable(world, rng, id, 5),
        "few-shot": lambda world, rng, id, i: make_few_shot(rng, id, 4),
        "biography": lambda world, rng, id, i: make_biography(world, rng, id, 5),
        "dated": lambda world, rng, id, i: make_dated(world, rng, id, 5, versions=3),
    }
    return {
        name: [
            make(World.generate(f"held out {name} {i}", PEOPLE, held_out=True), Random(f"{name} {i}"), f"{name}-{i}", i)
            for i in range(SIZES[name])
        ]
        for name, make in makers.items()
    }
