"""Edit passages: reorder, rewrite, cut them, or change the answer they state. The evidence moves with its text.

interleave([gold], others, [3])                        # gold after three of the others
edit_passage(passage, [(0, 4, "Mirra")])               # characters 0 … 4 become "Mirra", and the evidence shifts by one
make_counterfactual(passage, ("Velmora",), "Tristan")  # "Mira lives in Tristan.", neither gold nor evidence
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.scores import normalise
from floatscope.tasks.stress.requirements import Requirement, get_gold

Span = tuple[int, int]
Edit = tuple[int, int, str]
"""(start, stop, text): characters [start, stop) become this text."""

POSITION_FIELDS = ("gold_at", "has_answer", "adversarial")
"""Fields of `Sample.meta` that refer to positions of passages."""

SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*(\s+)(?=[^a-z\s])")


def replace_passages(sample: Sample, passages: Iterable[Passage]) -> Sample:
    """Return the sample with other passages; `gold_at` is updated, other fields about positions are dropped."""
    passages = tuple(passages)
    meta = {name: value for name, value in sample.meta.items() if name not in POSITION_FIELDS}
    gold_at = [place for place, passage in enumerate(passages) if passage.gold]
    if "gold_at" in sample.meta and gold_at:
        meta["gold_at"] = gold_at[0]
    return replace(sample, passages=passages, meta=meta)


def interleave(gold: Sequence[Passage], others: Sequence[Passage], gaps: Sequence[int]) -> list[Passage]:
    """Merge both lists in their own order; each gold passage follows as many others as its gap (not falling) says."""
    before = [[passage for passage, gap in zip(gold, gaps, strict=True) if gap == at] for at in range(len(others) + 1)]
    return [*(passage for at, other in enumerate(others) for passage in (*before[at], other)), *before[len(others)]]


def insert_randomly(passages: Iterable[Passage], extra: Iterable[Passage], rng: Random) -> list[Passage]:
    """Insert each extra passage at a random position; the order of the others stays."""
    result = list(passages)
    for passage in extra:
        result.insert(rng.randrange(len(result) + 1), passage)
    return result


def make_distractor(passage: Passage) -> Passage:
    """Return the passage without gold and evidence."""
    return replace(passage, gold=False, evidence=())


def find_answers(text: str, answers: Iterable[str]) -> list[Span]:
    """Find the answers in a text as separate words, in any case; the longest where several match."""
    names = sorted({answer.strip() for answer in answers} - {""}, key=lambda name: (-len(name), name))
    if not names:
        return []
    pattern = "|".join(map(re.escape, names))
    return [match.span() for match in re.finditer(rf"(?<!\w)(?:{pattern})(?!\w)", text, re.IGNORECASE)]


def find_stated_answers(passage: Passage, answers: Sequence[str]) -> list[Span]:
    """Find where a passage states the answer, in the words of the answers or of its evidence."""
    known = {normalise(answer) for answer in answers} - {""}
    spellings = [passage.text[start:stop] for start, stop in passage.evidence]
    return find_answers(passage.text, [*answers, *(text for text in spellings if normalise(text) in known)])


def states_answer(passage: Passage, answers: Sequence[str]) -> bool:
    """Whether the passage states the answer, and does so in its evidence if that is known."""
    spans = find_stated_answers(passage, answers)
    in_evidence = any(start < b and a < stop for start, stop in spans for a, b in passage.evidence)
    return in_evidence if passage.evidence else bool(spans)


def get_answering(sample: Sample) -> list[Passage]:
    """Return the gold passages that state the answer itself."""
    return [passage for passage in get_gold(sample) if states_answer(passage, sample.answers)]


HAS_ANSWERING = Requirement(
    "a gold passage whose text contains one of the answers",
    'give "answers" in the words of the passages',
    lambda sample: bool(get_answering(sample)),
)


def find_protected(passage: Passage, answers: Sequence[str]) -> set[int]:
    """Return the characters that must not change: the evidence, and the answers in a gold passage."""
    spans = [*passage.evidence, *(find_stated_answers(passage, answers) if passage.gold else ())]
    return {at for start, stop in spans for at in range(start, stop)}


def edit_text(text: str, edits: Iterable[Edit]) -> str:
    """Apply edits that do not overlap."""
    parts, at = [], 0
    for start, stop, new in sorted(edits):
        parts += [text[at:start], new]
        at = stop
    return "".join([*parts, text[at:]])


def edit_passage(passage: Passage, edits: Sequence[Edit]) -> Passage:
    """Apply edits outside the evidence, and move the evidence with its text."""
    shifts = [
        sum(len(new) - (stop - start) for start, stop, new in edits if stop <= first) for first, _ in passage.evidence
    ]
    evidence = tuple((a + shift, b + shift) for (a, b), shift in zip(passage.evidence, shifts, strict=True))
    return replace(passage, text=edit_text(passage.text, edits), evidence=evidence)


def cut_passage(passage: Passage, start: int, stop: int) -> Passage:
    """Return characters [start, stop) of the passage, with the evidence inside them."""
    evidence = tuple((a - start, b - start) for a, b in passage.evidence if start <= a and b <= stop)
    return replace(passage, text=passage.text[start:stop], evidence=evidence)


def split_passage(passage: Passage) -> list[Passage]:
    """Split a passage in two at the sentence end nearest to its middle, never inside evidence.

    A passage of one sentence is returned alone.
    """
    text = passage.text
    ends = [
        match.span(1)
        for match in SENTENCE_END.finditer(text)
        if not any(a < match.end(1) and match.start(1) < b for a, b in passage.evidence)
    ]
    if not ends:
        return [passage]
    stop, start = min(ends, key=lambda end: abs(end[0] - len(text) / 2))
    return [cut_passage(passage, 0, stop), cut_passage(passage, start, len(text))]


def make_counterfactual(passage: Passage, answers: Sequence[str], value: str) -> Passage:
    """Return a distractor that states `value` wherever the passage states the answer, in its title too."""
    text = edit_text(passage.text, [(a, b, value) for a, b in find_stated_answers(passage, answers)])
    title = edit_text(passage.title, [(a, b, value) for a, b in find_answers(passage.title, answers)])
    return replace(make_distractor(passage), title=title, text=text)
