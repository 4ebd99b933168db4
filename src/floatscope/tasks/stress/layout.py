"""The layout sweep: how the gold passages of a multi-hop question are arranged.

sweep_layout(pool, layouts=("adjacent", "separated", "reversed"))
sweep_layout(pool, documents=32)                              # among more passages, of other samples

The hops are in reasoning order if the gold passage that states the answer comes last; the others keep the order of the
file. MuSiQue gives the order itself, which is then used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.stress.options import OptionValue, parse_counts, parse_names, require_one
from floatscope.tasks.stress.passage_edits import (
    HAS_ANSWERING,
    get_answering,
    insert_randomly,
    interleave,
    make_counterfactual,
    replace_passages,
    split_passage,
    states_answer,
)
from floatscope.tasks.stress.point import Point
from floatscope.tasks.stress.requirements import Requirement, get_gold, get_others, select_samples
from floatscope.tasks.stress.sample_pool import SamplePool, has_wrong_answer, make_rng

HAS_HOPS = Requirement(
    "two gold passages or more",
    'mark each hop with "gold": true in "passages"',
    lambda sample: len(get_gold(sample)) > 1,
)
_HAS_ANSWERING = replace(HAS_ANSWERING, remedy=f"{HAS_ANSWERING.remedy}, or leave contradicted out of `layouts`")
HAS_DISTRACTOR = Requirement(
    "a passage that is not gold",
    "give distractors too, or leave separated out of `layouts`",
    lambda sample: bool(get_others(sample)),
)
HAS_SENTENCES = Requirement(
    "a gold passage of two sentences or more",
    "leave split out of `layouts`",
    lambda sample: any(len(split_passage(passage)) > 1 for passage in get_gold(sample)),
)


@dataclass(frozen=True)
class Layout:
    """An arrangement of passages, and what a sample needs for it."""

    description: str
    arrange: Callable[[SamplePool, Sample, list[Passage]], list[Passage]]  # (pool, sample, hops in reasoning order)
    requirements: tuple[Requirement, ...] = ()


def sweep_layout(pool: SamplePool, *, layouts: OptionValue = None, documents: OptionValue = None) -> list[Point]:
    """Return the samples as given, and in each layout.

    With `documents`, each sample has that many passages before it is arranged: the gold ones, its own others, then
    passages of other samples at random positions.
    """
    names = parse_names("layout", layouts, LAYOUTS)
    with_hops = select_samples("layout", pool.samples, [HAS_HOPS])
    hops = {sample.id: order_hops(sample) for sample in with_hops}
    size = ""
    if documents is not None:
        k = require_one("documents", parse_counts("documents", documents, (), minimum=1))
        with_hops, size = _set_size(pool, with_hops, k), f", among {k} documents"
    requirements = dict.fromkeys(r for name in names for r in LAYOUTS[name].requirements)
    wrong = [has_wrong_answer(pool, "layout contradicted")] if "contradicted" in names else []
    samples = select_samples("layout", with_hops, [*requirements, *wrong])
    return [
        Point(
            name,
            None,
            tuple(replace_passages(s, LAYOUTS[name].arrange(pool, s, hops[s.id])) for s in samples),
            series=name,
            note=LAYOUTS[name].description + size,
        )
        for name in names
    ]


def _set_size(pool: SamplePool, samples: Sequence[Sample], k: int) -> list[Sample]:
    """Give each sample k passages: drop the last of its own that are not gold, or insert some of other samples."""
    resized = {sample.id: _resize(pool, sample, k) for sample in samples}
    has_size = Requirement(
        f"room for its gold passages and enough others for documents={k}",
        "give another number, or more samples",
        lambda sample: len(resized[sample.id].passages) == k,
    )
    return [resized[sample.id] for sample in select_samples("layout", samples, [has_size])]


def _resize(pool: SamplePool, sample: Sample, k: int) -> Sample:
    surplus = max(0, len(sample.passages) - k)
    dropped = [at for at, passage in enumerate(sample.passages) if not passage.gold][::-1][:surplus]
    own = [passage for at, passage in enumerate(sample.passages) if at not in dropped]
    more = pool.draw_passages("layout documents", sample, k - len(own))
    return replace_passages(sample, insert_randomly(own, more, make_rng(pool.seed, "layout documents", sample.id)))


def order_hops(sample: Sample) -> list[Passage]:
    """Return the gold passages in reasoning order."""
    steps = sample.meta.get("question_decomposition") or ()
    places = [step.get("paragraph_support_idx") if isinstance(step, dict) else None for step in steps]
    if sorted(places, key=str) == sorted((at for at, passage in enumerate(sample.passages) if passage.gold), key=str):
        return [sample.passages[at] for at in places if at is not None]
    return sorted(get_gold(sample), key=lambda passage: states_answer(passage, sample.answers))


def _given(pool: SamplePool, sample: Sample, hops: list[Passage]) -> list[Passage]:
    return list(sample.passages)


def _place_block(pool: SamplePool, sample: Sample, hops: list[Passage]) -> list[Passage]:
    others = get_others(sample)
    gap = make_rng(pool.seed, "layout block", sample.id).randrange(len(others) + 1)
    return interleave(hops, others, [gap] * len(hops))


def _adjacent(pool: SamplePool, sample: Sample, hops: list[Passage]) -> list[Passage]:
    return _place_block(pool, sample, hops)


def _reversed(pool: SamplePool, sample: Sample, hops: list[Passage]) -> list[Passage]:
    return _place_block(pool, sample, hops[::-1])


def _separated(pool: SamplePool, sample: Sample, hops: list[Passage]) -> list[Passage]:
    others = get_others(sample)
    return interleave(hops, others, [round(number * len(others) / (len(hops) - 1)) for number in range(len(hops))])


def _split(pool: SamplePool, sample: Sample, hops: list[Passage]) -> list[Passage]:
    return [part for passage in sample.passages for part in (split_passage(passage) if passage.gold else [passage])]


def _duplicated(pool: SamplePool, sample: Sample, hops: list[Passage]) -> list[Passage]:
    rng = make_rng(pool.seed, "layout duplicated", sample.id)
    return insert_randomly(sample.passages, get_gold(sample), rng)


def _contradicted(pool: SamplePool, sample: Sample, hops: list[Passage]) -> list[Passage]:
    (value,) = pool.draw_wrong_answers("layout contradicted", sample, 1)
    copy = make_counterfactual(get_answering(sample)[0], sample.answers, value)
    return insert_randomly(sample.passages, [copy], make_rng(pool.seed, "layout contradicted", sample.id))


LAYOUTS = {
    "given": Layout("as given", _given),
    "adjacent": Layout("the hops one after the other, in reasoning order", _adjacent),
    "separated": Layout("the hops as far apart as possible, in reasoning order", _separated, (HAS_DISTRACTOR,)),
    "reversed": Layout("like adjacent, with the hops in reverse order", _reversed),
    "split": Layout("each gold passage as two consecutive gold documents", _split, (HAS_SENTENCES,)),
    "duplicated": Layout("each gold passage twice, the copy at a random position and gold too", _duplicated),
    "contradicted": Layout(
        "a copy of the answering hop at a random position that states another value; nothing distinguishes the two",
        _contradicted,
        (_HAS_ANSWERING,),
    ),
}
