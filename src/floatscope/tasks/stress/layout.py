"""How the passages of a question with several hops stand to each other.

layout(source, layouts=("adjacent", "separated", "reversed"))

The hops are in the order of reasoning when the gold passage that tells the answer comes last; the others are then in
the order of the file. MuSiQue tells the order itself, and is believed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.stress.draw import Source, has_wrong
from floatscope.tasks.stress.passages import (
    ANSWERING,
    answering,
    counterfactual,
    halves,
    is_answering,
    scattered,
    with_passages,
    woven,
)
from floatscope.tasks.stress.point import Choice, Need, Point, able, chosen, dice, gold_of, rest_of

HOPS = Need(
    "two gold passages or more",
    'mark each hop with "gold": true in "passages"',
    lambda sample: len(gold_of(sample)) > 1,
)
_TOLD = replace(ANSWERING, help=f"{ANSWERING.help}, or leave contradicted out of `layouts`")
BESIDE = Need(
    "a passage that is not gold",
    "give distractors too, or leave separated out of `layouts`",
    lambda sample: bool(rest_of(sample)),
)
SENTENCES = Need(
    "a gold passage of two sentences or more",
    "leave split out of `layouts`",
    lambda sample: any(len(halves(passage)) > 1 for passage in gold_of(sample)),
)


@dataclass(frozen=True)
class Layout:
    about: str
    make: Callable[[Source, Sample], list[Passage]]
    needs: tuple[Need, ...] = ()


def layout(source: Source, *, layouts: Choice = None) -> list[Point]:
    """The samples as they were given, and in each layout."""
    names = chosen("layout", layouts, LAYOUTS)
    needs = dict.fromkeys([HOPS, *(need for name in names for need in LAYOUTS[name].needs)])
    wrong = [has_wrong(source, "layout contradicted")] if "contradicted" in names else []
    samples = able("layout", source.samples, [*needs, *wrong])
    return [
        Point(
            name,
            None,
            tuple(with_passages(sample, LAYOUTS[name].make(source, sample)) for sample in samples),
            series=name,
            note=LAYOUTS[name].about,
        )
        for name in names
    ]


def hops(sample: Sample) -> list[Passage]:
    """The gold passages in the order of reasoning."""
    steps = sample.meta.get("question_decomposition") or ()
    told = [step.get("paragraph_support_idx") if isinstance(step, dict) else None for step in steps]
    if sorted(told, key=str) == sorted((at for at, passage in enumerate(sample.passages) if passage.gold), key=str):
        return [sample.passages[at] for at in told if at is not None]
    return sorted(gold_of(sample), key=lambda passage: is_answering(passage, sample.answers))


def _given(source: Source, sample: Sample) -> list[Passage]:
    return list(sample.passages)


def _block(source: Source, sample: Sample, told: list[Passage]) -> list[Passage]:
    rest = rest_of(sample)
    gap = dice(source.seed, "layout block", sample.id).randrange(len(rest) + 1)
    return woven(told, rest, [gap] * len(told))


def _adjacent(source: Source, sample: Sample) -> list[Passage]:
    return _block(source, sample, hops(sample))


def _reversed(source: Source, sample: Sample) -> list[Passage]:
    return _block(source, sample, hops(sample)[::-1])


def _separated(source: Source, sample: Sample) -> list[Passage]:
    told, rest = hops(sample), rest_of(sample)
    return woven(told, rest, [round(number * len(rest) / (len(told) - 1)) for number in range(len(told))])


def _split(source: Source, sample: Sample) -> list[Passage]:
    return [part for passage in sample.passages for part in (halves(passage) if passage.gold else [passage])]


def _duplicated(source: Source, sample: Sample) -> list[Passage]:
    return scattered(sample.passages, gold_of(sample), dice(source.seed, "layout duplicated", sample.id))


def _contradicted(source: Source, sample: Sample) -> list[Passage]:
    (value,) = source.wrong("layout contradicted", sample, 1)
    copy = counterfactual(answering(sample)[0], sample.answers, value)
    return scattered(sample.passages, [copy], dice(source.seed, "layout contradicted", sample.id))


LAYOUTS = {
    "given": Layout("as it was given", _given),
    "adjacent": Layout("the hops one after the other, in the order of reasoning", _adjacent),
    "separated": Layout("the hops as far apart as can be, in the order of reasoning", _separated, (BESIDE,)),
    "reversed": Layout("like adjacent, the hops the other way round", _reversed),
    "split": Layout("each gold passage in two documents, both gold, one after the other", _split, (SENTENCES,)),
    "duplicated": Layout("each gold passage a second time, gold too, anywhere", _duplicated),
    "contradicted": Layout("a copy of the answering hop that tells another value, anywhere", _contradicted, (_TOLD,)),
}
