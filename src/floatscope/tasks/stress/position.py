"""Where the gold passage stands: among its distractors, and as a needle among many.

position(source, documents=10)                       # gold-0 … gold-9, closed-book, oracle, shuffled
needle(source, counts=(5, 25), keys=("first", "last"))   # first-5, last-5, first-25, last-25
"""

from __future__ import annotations

from collections import Counter

from floatscope.errors import UserError
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.stress.draw import Source
from floatscope.tasks.stress.passages import with_passages, woven
from floatscope.tasks.stress.point import (
    ONE_GOLD,
    Choice,
    Need,
    Point,
    able,
    chosen,
    dice,
    gold_of,
    one,
    rest_of,
    whole,
    within,
)

REFERENCES = ("closed-book", "oracle", "shuffled")
PAIRS = (5, 10, 25, 50, 75)
KEYS = ("first", "middle", "last")
HAYSTACKS = ("own", "others")
MANY = 9  # own passages that make a haystack


def position(source: Source, *, documents: Choice = None) -> list[Point]:
    """The gold passage at each place among k − 1 others: its own in their order, then those of other samples."""
    single = able("position", source.samples, [ONE_GOLD])
    sizes = Counter(len(sample.passages) for sample in single)
    usual = max(sizes, key=lambda size: (sizes[size], size))
    k = one("documents", whole("documents", documents, [usual], least=1))
    if k < 2:
        raise UserError(
            "position moves the gold passage among others, and there would be 1 document; give more: documents=5"
        )
    others = {sample.id: _distractors(source, sample, k - 1) for sample in single}
    enough = Need(
        f"{k - 1} passages beside the gold one",
        "give fewer documents, or more samples",
        lambda s: len(others[s.id]) == k - 1,
    )
    samples = able("position", single, [enough])

    def at(place: int) -> tuple[Sample, ...]:
        return tuple(with_passages(s, woven(gold_of(s), others[s.id], [place])) for s in samples)

    def shuffled(sample: Sample) -> Sample:
        told = [*gold_of(sample), *others[sample.id]]
        dice(source.seed, "position", sample.id).shuffle(told)
        return with_passages(sample, told)

    return [
        *(
            Point(f"gold-{i}", i, at(i), series="gold", note=f"the gold passage is document {i + 1} of {k}")
            for i in range(k)
        ),
        Point("closed-book", None, tuple(with_passages(s, ()) for s in samples), note="no passages"),
        Point("oracle", None, tuple(with_passages(s, gold_of(s)) for s in samples), note="the gold passage alone"),
        Point("shuffled", None, tuple(map(shuffled, samples)), note=f"the {k} documents in any order"),
    ]


def _distractors(source: Source, sample: Sample, count: int) -> list[Passage]:
    own = rest_of(sample)[:count]
    return own + source.passages("position", sample, count - len(own))


def needle(
    source: Source,
    *,
    counts: Choice = None,
    keys: Choice = None,
    haystack: Choice = None,
) -> list[Point]:
    """The gold passage first, in the middle and last among so many passages, itself counted: records of its own where
    all samples have many, else passages of other samples."""
    places = chosen("key", keys, KEYS)
    single = able("needle", source.samples, [ONE_GOLD])
    if haystack is None:
        haystack = "own" if all(len(rest_of(sample)) >= MANY for sample in single) else "others"
    hidden_in = one("haystack", chosen("haystack", haystack, HAYSTACKS))
    wanted = whole("counts", counts, PAIRS, least=1)
    hay = {sample.id: _hay(source, sample, wanted[-1] - 1, hidden_in) for sample in single}
    there = 1 + min(map(len, hay.values()))
    sizes = within("counts", wanted, counts is not None, there, f"passages for every sample (haystack: {hidden_in})")
    if not sizes:
        raise UserError(
            f"needle hides a passage among {wanted[0] - 1} others or more, and some sample has {there - 1}; give counts"
            f" up to {there}, or more samples"
        )

    def hidden(sample: Sample, size: int, key: str) -> Sample:
        rest = [passage for _, passage in sorted(hay[sample.id][: size - 1], key=lambda pair: pair[0])]
        gap = {"first": 0, "middle": len(rest) // 2, "last": len(rest)}[key]
        return with_passages(sample, woven(gold_of(sample), rest, [gap]))

    return [
        Point(
            f"{key}-{size}",
            size,
            tuple(hidden(sample, size, key) for sample in single),
            series=key,
            note=f"{key} of {size} passages, {'its own' if hidden_in == 'own' else 'those of other samples'}",
        )
        for size in sizes
        for key in places
    ]


def _hay(source: Source, sample: Sample, count: int, haystack: str) -> list[tuple[int, Passage]]:
    """Passages in the order they are taken, each with its place among the others."""
    if haystack == "others":
        return list(enumerate(source.passages("needle", sample, count)))
    own = list(enumerate(rest_of(sample)))
    dice(source.seed, "needle", sample.id).shuffle(own)
    return own[:count]
