"""How much stands around the gold passages that does not answer, and of what sort.

noise(source, distractors="counterfactual", counts=(0, 2, 4))
# counterfactual-0, -2, -4: the gold passages and so many copies that tell another value
# counterfactual-fixed-0, -2, -4: the same among harmless passages, so many that the total stays

A harmless passage is one of another sample that neither tells the answer nor has the title of a gold passage. At fixed
length a noise passage takes the place of a harmless one, and everything else stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from floatscope.errors import UserError
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.score import normalise
from floatscope.tasks.stress.draw import Source
from floatscope.tasks.stress.passages import ANSWERING, answering, counterfactual, plain, with_passages, woven
from floatscope.tasks.stress.point import (
    GOLD,
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

DISTRACTORS = {
    "random": "passages of other samples",
    "own": "the sample's own other passages, then random ones",
    "retrieved": "what `retrieve` finds for the question, then random ones",
    "counterfactual": "copies of the gold passage that tell another value",
}
COUNTS = (0, 1, 2, 4, 8, 16)
LENGTHS = ("growing", "fixed")
PLACES = ("random", "kept")

_TOLD = replace(ANSWERING, help=f'{ANSWERING.help}, or leave counterfactual out: distractors=("random", "own")')

Retrieve = Callable[[str], Sequence[Passage]]
Noise = dict[str, list[Passage]]  # sample id → passages in the order they are taken


def noise(
    source: Source,
    *,
    distractors: Choice = None,
    counts: Choice = None,
    lengths: Choice = None,
    total: Choice = None,
    gold: Choice = "random",
    retrieve: Retrieve | None = None,
) -> list[Point]:
    """So many distractors of each sort, added to the gold passages or in the place of harmless ones."""
    usual = [sort for sort in DISTRACTORS if sort != "retrieved" or retrieve is not None]
    sorts = chosen("distractor", distractors, DISTRACTORS) if distractors is not None else usual
    spans = chosen("length", lengths, LENGTHS)
    place = one("gold", chosen("gold place", gold, PLACES))
    if "retrieved" in sorts and retrieve is None:
        raise UserError(
            "retrieved distractors need `retrieve`, a function from a question to passages (--set retrieve=INDEX)"
        )
    wanted = whole("counts", counts, COUNTS)
    length = None if total is None else one("total", whole("total", total, (), least=1))
    needs = [GOLD, *([_TOLD] if "counterfactual" in sorts else [])]
    samples = able("noise", source.samples, needs)
    found = {sort: {s.id: _noise(source, s, sort, max(1, wanted[-1]), retrieve) for s in samples} for sort in sorts}
    samples = able("noise", samples, [_something(sort, found[sort]) for sort in sorts])
    made = []
    for sort in sorts:
        there = min(len(found[sort][sample.id]) for sample in samples)
        sizes = within("counts", wanted, counts is not None, there, f"{sort} passages for every sample")
        if "growing" in spans:
            made += [_growing(source, samples, sort, found[sort], size, place) for size in sizes]
        if "fixed" in spans and sort != "random":
            strict = counts is not None or length is not None
            made += _fixed(source, samples, sort, found[sort], sizes, length, place, strict)
    if not made:
        raise UserError("at fixed length random distractors are the harmless passages themselves; choose another sort")
    return made


def _something(sort: str, found: Noise) -> Need:
    return Need(
        f"{sort} distractors ({DISTRACTORS[sort]})",
        "give more samples, or choose other distractors",
        lambda sample: bool(found[sample.id]),
    )


def _noise(source: Source, sample: Sample, sort: str, most: int, retrieve: Retrieve | None) -> list[Passage]:
    """Passages of a sort in the order they are taken: a larger number has those of a smaller one."""
    if sort == "counterfactual":
        (passage, *_), values = answering(sample), source.wrong("noise counterfactual", sample, most)
        return [counterfactual(passage, sample.answers, value) for value in values]
    first = []
    if sort == "own":
        first = [plain(passage) for passage in rest_of(sample)][:most]
    if sort == "retrieved" and retrieve is not None:
        first = _useless(retrieve(sample.question), sample)[:most]
    return first + source.passages("noise random", sample, most - len(first), without=first)


def _useless(found: Iterable[Passage], sample: Sample) -> list[Passage]:
    """What was retrieved, less gold passages and those that tell an answer."""
    gold = {passage.text for passage in gold_of(sample)}
    answers = [f" {normalise(answer)} " for answer in sample.answers if normalise(answer)]
    return [
        plain(passage)
        for passage in {passage.text: passage for passage in found}.values()
        if passage.text not in gold and not any(answer in f" {normalise(passage.text)} " for answer in answers)
    ]


def _placed(source: Source, sample: Sample, rest: Sequence[Passage], gold: str) -> Sample:
    """The gold passages among the rest, in their order: where they were, or at places that follow from the id."""
    told = gold_of(sample)
    if gold == "kept":
        before = [sum(not p.gold for p in sample.passages[:at]) for at, p in enumerate(sample.passages) if p.gold]
        gaps = [min(gap, len(rest)) for gap in before]
    else:
        rolls = dice(source.seed, "noise", sample.id)
        gaps = sorted(int(rolls.random() * (len(rest) + 1)) for _ in told)
    return with_passages(sample, woven(told, rest, gaps))


def _growing(source: Source, samples: Sequence[Sample], sort: str, found: Noise, size: int, gold: str) -> Point:
    told = tuple(_placed(source, sample, found[sample.id][:size], gold) for sample in samples)
    return Point(
        f"{sort}-{size}", size, told, series=sort, note=f"the gold passages and {size}: {_filled(samples, sort, size)}"
    )


def _filled(samples: Sequence[Sample], sort: str, size: int) -> str:
    """What the distractors are, and how often a sample's own did not do."""
    short = sum(len(rest_of(sample)) < size for sample in samples)
    if sort == "own" and short:
        return f"the sample's own other passages, with random ones for {short} of {len(samples)} samples"
    return DISTRACTORS[sort]


def _fixed(
    source: Source,
    samples: Sequence[Sample],
    sort: str,
    found: Noise,
    sizes: list[int],
    total: int | None,
    gold: str,
    strict: bool,
) -> list[Point]:
    """So many passages at every size; fewer than would do for all sizes if there are no more, unless `strict`."""
    golds = max(len(gold_of(sample)) for sample in samples)
    wanted = golds + sizes[-1] if total is None else total
    if wanted < golds + sizes[-1]:
        raise UserError(f"total={wanted} passages do not hold {golds} gold ones and {sizes[-1]} others; give more")
    harmless = {
        sample.id: source.passages("noise harmless", sample, wanted - len(gold_of(sample)), without=found[sample.id])
        for sample in samples
    }
    length = min(len(gold_of(sample)) + len(harmless[sample.id]) for sample in samples)
    if length < wanted and strict:
        raise UserError(
            f"{wanted} passages of fixed length are asked for, and there are harmless ones for {length}; give more"
            ' samples, smaller numbers, or lengths="growing"'
        )
    return [
        Point(
            f"{sort}-fixed-{size}",
            size,
            tuple(
                _placed(
                    source, s, _swapped(source, s, harmless[s.id][: length - len(gold_of(s))], found[s.id][:size]), gold
                )
                for s in samples
            ),
            series=f"{sort}-fixed",
            note=f"{length} passages, {size} of them noise, the rest harmless: {_filled(samples, sort, size)}",
        )
        for size in sizes
        if golds + size <= length
    ]


def _swapped(source: Source, sample: Sample, harmless: Sequence[Passage], bad: Sequence[Passage]) -> list[Passage]:
    """Harmless passages of which some give their place to noise, one place after the other."""
    told, order = list(harmless), list(range(len(harmless)))
    dice(source.seed, "noise fixed", sample.id).shuffle(order)
    for place, passage in zip(order, bad, strict=False):
        told[place] = passage
    return told
