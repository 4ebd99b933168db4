"""Sweeps of the gold passage's position: among its distractors, and as a needle among many passages.

sweep_position(pool, documents=10)                            # gold-0 … gold-9, closed-book, oracle, shuffled
sweep_needle(pool, counts=(5, 25), keys=("first", "last"))    # first-5, last-5, first-25, last-25
"""

from __future__ import annotations

from collections import Counter

from floatscope.errors import UserError
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.stress.options import OptionValue, limit_counts, parse_counts, parse_names, require_one
from floatscope.tasks.stress.passage_edits import interleave, replace_passages
from floatscope.tasks.stress.point import Point
from floatscope.tasks.stress.requirements import HAS_ONE_GOLD, Requirement, get_gold, get_others, select_samples
from floatscope.tasks.stress.sample_pool import SamplePool, make_rng

NEEDLE_COUNTS = (5, 10, 25, 50, 75)
KEYS = ("first", "middle", "last")
HAYSTACKS = ("own", "others")
LARGE_HAYSTACK = 9  # if all samples have as many passages of their own, these are the haystack


def sweep_position(pool: SamplePool, *, documents: OptionValue = None) -> list[Point]:
    """Move the gold passage through all positions among k − 1 distractors.

    The distractors are the sample's own passages in their order, then passages of other samples. The default k is the
    most frequent number of passages.
    """
    single = select_samples("position", pool.samples, [HAS_ONE_GOLD])
    sizes = Counter(len(sample.passages) for sample in single)
    usual = max(sizes, key=lambda size: (sizes[size], size))
    k = require_one("documents", parse_counts("documents", documents, [usual], minimum=1))
    if k < 2:
        raise UserError(
            "position moves the gold passage among others, and there would be 1 document; give more: documents=5"
        )
    distractors = {sample.id: _choose_distractors(pool, sample, k - 1) for sample in single}
    has_enough = Requirement(
        f"{k - 1} passages besides the gold one",
        "give fewer documents or more samples",
        lambda sample: len(distractors[sample.id]) == k - 1,
    )
    samples = select_samples("position", single, [has_enough])

    def place_gold(place: int) -> tuple[Sample, ...]:
        return tuple(replace_passages(s, interleave(get_gold(s), distractors[s.id], [place])) for s in samples)

    def shuffle(sample: Sample) -> Sample:
        passages = [*get_gold(sample), *distractors[sample.id]]
        make_rng(pool.seed, "position", sample.id).shuffle(passages)
        return replace_passages(sample, passages)

    oracle = tuple(replace_passages(sample, get_gold(sample)) for sample in samples)
    return [
        *(
            Point(f"gold-{i}", i, place_gold(i), series="gold", note=f"the gold passage is document {i + 1} of {k}")
            for i in range(k)
        ),
        Point("closed-book", None, tuple(replace_passages(sample, ()) for sample in samples), note="no passages"),
        Point("oracle", None, oracle, note="only the gold passage"),
        Point("shuffled", None, tuple(map(shuffle, samples)), note=f"the {k} documents in random order"),
    ]


def _choose_distractors(pool: SamplePool, sample: Sample, count: int) -> list[Passage]:
    own = get_others(sample)[:count]
    return own + pool.draw_passages("position", sample, count - len(own))


def sweep_needle(
    pool: SamplePool,
    *,
    counts: OptionValue = None,
    keys: OptionValue = None,
    haystack: OptionValue = None,
) -> list[Point]:
    """Make the gold passage the first, middle and last of a growing number of passages, itself included.

    The others are the sample's own passages if all samples have many, else passages of other samples.
    """
    places = parse_names("key", keys, KEYS)
    single = select_samples("needle", pool.samples, [HAS_ONE_GOLD])
    if haystack is None:
        haystack = "own" if all(len(get_others(sample)) >= LARGE_HAYSTACK for sample in single) else "others"
    origin = require_one("haystack", parse_names("haystack", haystack, HAYSTACKS))
    requested = parse_counts("counts", counts, NEEDLE_COUNTS, minimum=1)
    hay = {sample.id: _choose_hay(pool, sample, requested[-1] - 1, origin) for sample in single}
    available = 1 + min(map(len, hay.values()))
    sizes = limit_counts(
        "counts", requested, counts is not None, available, f"passages for every sample (haystack: {origin})"
    )
    if not sizes:
        raise UserError(
            f"needle hides a passage among {requested[0] - 1} others or more, and some sample has {available - 1}; give"
            f" counts up to {available}, or more samples"
        )

    def hide_gold(sample: Sample, size: int, key: str) -> Sample:
        others = [passage for _, passage in sorted(hay[sample.id][: size - 1], key=lambda pair: pair[0])]
        gap = {"first": 0, "middle": len(others) // 2, "last": len(others)}[key]
        return replace_passages(sample, interleave(get_gold(sample), others, [gap]))

    owner = "the sample's own" if origin == "own" else "from other samples"
    return [
        Point(
            f"{key}-{size}",
            size,
            tuple(hide_gold(sample, size, key) for sample in single),
            series=key,
            note=f"{key} of {size} passages, {owner}",
        )
        for size in sizes
        for key in places
    ]


def _choose_hay(pool: SamplePool, sample: Sample, count: int, origin: str) -> list[tuple[int, Passage]]:
    """Return (position, passage) in the order of choice: a smaller haystack is a part of a larger one."""
    if origin == "others":
        return list(enumerate(pool.draw_passages("needle", sample, count)))
    own = list(enumerate(get_others(sample)))
    make_rng(pool.seed, "needle", sample.id).shuffle(own)
    return own[:count]
