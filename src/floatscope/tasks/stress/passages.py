"""What is done to passages: put in another order, rewritten, cut, told otherwise. The evidence moves with its text.

woven([gold], others, [3])                        # gold after three of the others
rewritten(passage, [(0, 4, "Mirra")])             # characters 0 … 4 are now "Mirra", the evidence is one further
counterfactual(passage, ("Velmora",), "Tristan")  # "Mira lives in Tristan.", neither gold nor evidence
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.score import normalise
from floatscope.tasks.stress.point import Need, gold_of

Span = tuple[int, int]
Edit = tuple[int, int, str]  # characters [start, stop) become this

PLACE_NOTES = ("gold_at", "has_answer", "adversarial")
SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*(\s+)(?=[^a-z\s])")


def with_passages(sample: Sample, passages: Iterable[Passage]) -> Sample:
    """The sample with these; a note of the place of its gold passage follows, notes of other places are dropped."""
    told = tuple(passages)
    meta = {name: value for name, value in sample.meta.items() if name not in PLACE_NOTES}
    places = [place for place, passage in enumerate(told) if passage.gold]
    if "gold_at" in sample.meta and places:
        meta["gold_at"] = places[0]
    return replace(sample, passages=told, meta=meta)


def woven(gold: Sequence[Passage], rest: Sequence[Passage], gaps: Sequence[int]) -> list[Passage]:
    """Both in their own order, each of the gold ones after as many of the rest as its gap says; gaps do not fall."""
    before = [[passage for passage, gap in zip(gold, gaps, strict=True) if gap == at] for at in range(len(rest) + 1)]
    return [*(each for at, other in enumerate(rest) for each in (*before[at], other)), *before[len(rest)]]


def scattered(passages: Iterable[Passage], extra: Iterable[Passage], dice: Random) -> list[Passage]:
    """Each of the extra ones put in anywhere; the order of the others stays."""
    told = list(passages)
    for passage in extra:
        told.insert(dice.randrange(len(told) + 1), passage)
    return told


def plain(passage: Passage) -> Passage:
    """The passage as one that does not answer the question."""
    return replace(passage, gold=False, evidence=())


def occurrences(text: str, answers: Iterable[str]) -> list[Span]:
    """Where an answer stands as words of its own, in any case; the longest where several do."""
    names = sorted({answer.strip() for answer in answers} - {""}, key=lambda name: (-len(name), name))
    if not names:
        return []
    pattern = "|".join(map(re.escape, names))
    return [found.span() for found in re.finditer(rf"(?<!\w)(?:{pattern})(?!\w)", text, re.IGNORECASE)]


def told_answers(passage: Passage, answers: Sequence[str]) -> list[Span]:
    """Where a passage tells the answer, in the words of the answers or those of its evidence."""
    known = {normalise(answer) for answer in answers} - {""}
    spelled = [passage.text[start:stop] for start, stop in passage.evidence]
    return occurrences(passage.text, [*answers, *(text for text in spelled if normalise(text) in known)])


def is_answering(passage: Passage, answers: Sequence[str]) -> bool:
    """Whether the answer is told, and in the evidence where that is known."""
    spans = told_answers(passage, answers)
    meets = any(start < b and a < stop for start, stop in spans for a, b in passage.evidence)
    return meets if passage.evidence else bool(spans)


def answering(sample: Sample) -> list[Passage]:
    """The gold passages that tell the answer itself."""
    return [passage for passage in gold_of(sample) if is_answering(passage, sample.answers)]


ANSWERING = Need(
    "a gold passage that has one of the answers in its text",
    'give "answers" in the words of the passages',
    lambda sample: bool(answering(sample)),
)


def guarded(passage: Passage, answers: Sequence[str]) -> set[int]:
    """The characters that must stay: the evidence, and in a gold passage the answers."""
    spans = [*passage.evidence, *(told_answers(passage, answers) if passage.gold else ())]
    return {at for start, stop in spans for at in range(start, stop)}


def edited(text: str, edits: Iterable[Edit]) -> str:
    """The text with edits made that do not overlap."""
    parts, at = [], 0
    for start, stop, new in sorted(edits):
        parts += [text[at:start], new]
        at = stop
    return "".join([*parts, text[at:]])


def rewritten(passage: Passage, edits: Sequence[Edit]) -> Passage:
    """The passage with edits made outside its evidence."""
    by = [
        sum(len(new) - (stop - start) for start, stop, new in edits if stop <= first) for first, _ in passage.evidence
    ]
    moved = tuple((a + more, b + more) for (a, b), more in zip(passage.evidence, by, strict=True))
    return replace(passage, text=edited(passage.text, edits), evidence=moved)


def piece(passage: Passage, start: int, stop: int) -> Passage:
    """A part of the passage with the evidence that lies in it."""
    inside = tuple((a - start, b - start) for a, b in passage.evidence if start <= a and b <= stop)
    return replace(passage, text=passage.text[start:stop], evidence=inside)


def halves(passage: Passage) -> list[Passage]:
    """Cut in two between the sentences nearest to its middle, never through evidence; whole if it has one sentence."""
    text = passage.text
    ends = [
        found.span(1)
        for found in SENTENCE_END.finditer(text)
        if not any(a < found.end(1) and found.start(1) < b for a, b in passage.evidence)
    ]
    if not ends:
        return [passage]
    stop, start = min(ends, key=lambda end: abs(end[0] - len(text) / 2))
    return [piece(passage, 0, stop), piece(passage, start, len(text))]


def counterfactual(passage: Passage, answers: Sequence[str], value: str) -> Passage:
    """The passage with another value wherever it tells the answer, in its title too."""
    text = edited(passage.text, [(a, b, value) for a, b in told_answers(passage, answers)])
    title = edited(passage.title, [(a, b, value) for a, b in occurrences(passage.title, answers)])
    return replace(plain(passage), title=title, text=text)
