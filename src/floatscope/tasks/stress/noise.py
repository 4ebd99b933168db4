"""The noise sweep: how many passages that do not answer are around the gold ones, and of which type.

sweep_noise(pool, distractors="counterfactual", counts=(0, 2, 4))
# counterfactual-0, -2, -4: the gold passages and 0, 2, 4 copies that state another value
# counterfactual-fixed-0, -2, -4: the same among harmless passages, with a constant total
sweep_noise(pool, distractors="dated", lengths="growing")
# dated-0, -1, -2, …: the gold passage with a year, and copies that state another value and an earlier year

Nothing distinguishes a counterfactual copy from the gold passage, so chance is the best possible score. Years
distinguish dated copies: the latest is right. The gold passage has its year in all points of this series.

A harmless passage belongs to another sample, and neither states the answer nor has the title of a gold passage. At
fixed length a noise passage replaces a harmless one, and everything else keeps its position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from floatscope.errors import UserError
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.scores import normalise
from floatscope.tasks.stress.dates import add_date, draw_years
from floatscope.tasks.stress.options import OptionValue, limit_counts, parse_counts, parse_names, require_one
from floatscope.tasks.stress.passage_edits import (
    HAS_ANSWERING,
    get_answering,
    interleave,
    make_counterfactual,
    make_distractor,
    replace_passages,
)
from floatscope.tasks.stress.point import Point
from floatscope.tasks.stress.requirements import HAS_GOLD, Requirement, get_gold, get_others, select_samples
from floatscope.tasks.stress.sample_pool import SamplePool, make_rng

DISTRACTORS = {
    "random": "passages of other samples",
    "own": "the sample's own other passages, then random ones",
    "retrieved": "the passages that `retrieve` returns for the question, then random ones",
    "counterfactual": "copies of the gold passage that state another value; nothing distinguishes them from it",
    "dated": "copies of the gold passage that state another value and an earlier year than it",
}
COUNTS = (0, 1, 2, 4, 8, 16)
LENGTHS = ("growing", "fixed")
GOLD_PLACES = ("random", "kept")

COPIES = ("counterfactual", "dated")  # distractors made from the passage that states the answer

_HAS_ANSWERING = replace(
    HAS_ANSWERING,
    remedy=f'{HAS_ANSWERING.remedy}, or leave counterfactual and dated out: distractors=("random", "own")',
)

Retrieve = Callable[[str], Sequence[Passage]]
"""A function from a question to passages."""

Noise = dict[str, list[Passage]]
"""Sample id → its distractors, in the order in which they are used."""


def sweep_noise(
    pool: SamplePool,
    *,
    distractors: OptionValue = None,
    counts: OptionValue = None,
    lengths: OptionValue = None,
    total: OptionValue = None,
    gold: OptionValue = "random",
    retrieve: Retrieve | None = None,
) -> list[Point]:
    """Add a growing number of distractors of each type, or let them replace harmless passages."""
    available = [name for name in DISTRACTORS if name != "retrieved" or retrieve is not None]
    types = parse_names("distractor", distractors, DISTRACTORS) if distractors is not None else available
    length_modes = parse_names("length", lengths, LENGTHS)
    gold_place = require_one("gold", parse_names("gold place", gold, GOLD_PLACES))
    if "retrieved" in types and retrieve is None:
        raise UserError(
            "retrieved distractors need `retrieve`, a function from a question to passages (--set retrieve=INDEX)"
        )
    requested = parse_counts("counts", counts, COUNTS)
    length = None if total is None else require_one("total", parse_counts("total", total, (), minimum=1))
    requirements = [HAS_GOLD, *([_HAS_ANSWERING] if any(type in COPIES for type in types) else [])]
    samples = select_samples("noise", pool.samples, requirements)
    most = max(1, requested[-1])
    noise = {type: {s.id: _choose_noise(pool, s, type, most, retrieve) for s in samples} for type in types}
    samples = select_samples("noise", samples, [_has_distractors(type, noise[type]) for type in types])
    points = []
    for type in types:
        shortest = min(len(noise[type][sample.id]) for sample in samples)
        items = f"{type} passages for every sample"
        sizes = limit_counts("counts", requested, counts is not None, shortest, items)
        sources = [_date_gold(pool, sample) for sample in samples] if type == "dated" else samples
        if "growing" in length_modes:
            points += [_growing_point(pool, sources, type, noise[type], size, gold_place) for size in sizes]
        if "fixed" in length_modes and type != "random":
            is_strict = counts is not None or length is not None
            points += _fixed_points(pool, sources, type, noise[type], sizes, length, gold_place, is_strict)
    if not points:
        raise UserError("at fixed length random distractors are the harmless passages themselves; choose another type")
    return points


def _has_distractors(type: str, noise: Noise) -> Requirement:
    return Requirement(
        f"{type} distractors ({DISTRACTORS[type]})",
        "give more samples, or choose other distractors",
        lambda sample: bool(noise[sample.id]),
    )


def _choose_noise(pool: SamplePool, sample: Sample, type: str, most: int, retrieve: Retrieve | None) -> list[Passage]:
    """Return distractors in the order in which they are used: a smaller number is a part of a larger one."""
    if type in COPIES:
        passage, values = get_answering(sample)[0], pool.draw_wrong_answers(f"noise {type}", sample, most)
        copies = [make_counterfactual(passage, sample.answers, value) for value in values]
        if type == "counterfactual":
            return copies
        return list(map(add_date, copies, _draw_years(pool, sample, len(copies))[1]))
    first = []
    if type == "own":
        first = [make_distractor(passage) for passage in get_others(sample)][:most]
    if type == "retrieved" and retrieve is not None:
        first = _drop_answering(retrieve(sample.question), sample)[:most]
    return first + pool.draw_passages("noise random", sample, most - len(first), without=first)


def _draw_years(pool: SamplePool, sample: Sample, older: int) -> tuple[int, list[int]]:
    """Draw the year of the gold passage and those of its copies."""
    return draw_years(make_rng(pool.seed, "noise dated", sample.id), older, without=sample.answers)


def _date_gold(pool: SamplePool, sample: Sample) -> Sample:
    """Add the latest year to the gold passage that states the answer."""
    answering, (year, _) = get_answering(sample)[0], _draw_years(pool, sample, 0)
    at = sample.passages.index(answering)
    return replace(sample, passages=(*sample.passages[:at], add_date(answering, year), *sample.passages[at + 1 :]))


def _drop_answering(passages: Iterable[Passage], sample: Sample) -> list[Passage]:
    """Return retrieved passages without gold ones and those that state an answer."""
    gold = {passage.text for passage in get_gold(sample)}
    answers = [f" {normalise(answer)} " for answer in sample.answers if normalise(answer)]
    return [
        make_distractor(passage)
        for passage in {passage.text: passage for passage in passages}.values()
        if passage.text not in gold and not any(answer in f" {normalise(passage.text)} " for answer in answers)
    ]


def _place_gold(pool: SamplePool, sample: Sample, others: Sequence[Passage], gold_place: str) -> Sample:
    """Put the gold passages among the others, in their order: where they were, or at positions drawn by the id."""
    gold = get_gold(sample)
    if gold_place == "kept":
        before = [sum(not p.gold for p in sample.passages[:at]) for at, p in enumerate(sample.passages) if p.gold]
        gaps = [min(gap, len(others)) for gap in before]
    else:
        rng = make_rng(pool.seed, "noise", sample.id)
        gaps = sorted(int(rng.random() * (len(others) + 1)) for _ in gold)
    return replace_passages(sample, interleave(gold, others, gaps))


def _growing_point(
    pool: SamplePool, samples: Sequence[Sample], type: str, noise: Noise, size: int, gold_place: str
) -> Point:
    changed = tuple(_place_gold(pool, sample, noise[sample.id][:size], gold_place) for sample in samples)
    note = f"the gold passages and {size} distractors: {_describe_noise(samples, type, size)}"
    return Point(f"{type}-{size}", size, changed, series=type, note=note)


def _describe_noise(samples: Sequence[Sample], type: str, size: int) -> str:
    """Return what the distractors are, and for how many samples their own passages were too few."""
    short = sum(len(get_others(sample)) < size for sample in samples)
    if type == "own" and short:
        return f"the sample's own other passages, with random ones for {short} of {len(samples)} samples"
    return DISTRACTORS[type]


def _fixed_points(
    pool: SamplePool,
    samples: Sequence[Sample],
    type: str,
    noise: Noise,
    sizes: list[int],
    total: int | None,
    gold_place: str,
    is_strict: bool,
) -> list[Point]:
    """Keep the number of passages constant; if harmless passages run out, use a smaller total unless `is_strict`."""
    golds = max(len(get_gold(sample)) for sample in samples)
    requested = golds + sizes[-1] if total is None else total
    if requested < golds + sizes[-1]:
        raise UserError(f"total={requested} passages cannot hold {golds} gold ones and {sizes[-1]} others; give more")
    harmless = {
        s.id: pool.draw_passages("noise harmless", s, requested - len(get_gold(s)), without=noise[s.id])
        for s in samples
    }
    length = min(len(get_gold(sample)) + len(harmless[sample.id]) for sample in samples)
    if length < requested and is_strict:
        raise UserError(
            f"fixed length needs {requested} passages, and there are harmless ones for {length}; give more samples,"
            ' smaller numbers, or lengths="growing"'
        )

    def change(sample: Sample, size: int) -> Sample:
        others = harmless[sample.id][: length - len(get_gold(sample))]
        return _place_gold(pool, sample, _swap_in(pool, sample, others, noise[sample.id][:size]), gold_place)

    return [
        Point(
            f"{type}-fixed-{size}",
            size,
            tuple(change(sample, size) for sample in samples),
            series=f"{type}-fixed",
            note=f"{length} passages, {size} of them noise, the rest harmless: {_describe_noise(samples, type, size)}",
        )
        for size in sizes
        if golds + size <= length
    ]


def _swap_in(pool: SamplePool, sample: Sample, harmless: Sequence[Passage], noise: Sequence[Passage]) -> list[Passage]:
    """Replace harmless passages by noise, one position after the other."""
    passages, order = list(harmless), list(range(len(harmless)))
    make_rng(pool.seed, "noise fixed", sample.id).shuffle(order)
    for place, passage in zip(order, noise, strict=False):
        passages[place] = passage
    return passages
