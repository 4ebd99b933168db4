"""Retrieve passages for samples from an index, and measure how many gold passages are among them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from floatscope.tasks.formats.fields import find_evidence
from floatscope.tasks.index.engine import Hit
from floatscope.tasks.index.index import Index
from floatscope.tasks.sample import Passage, Sample


def retrieve_passages(index: Index, samples: Iterable[Sample], k: int = 5) -> tuple[list[Sample], float | None]:
    """Give each sample the best `k` passages for its question, and measure the recall of gold passages.

    The gold passages are those of the sample that are marked gold or have evidence. A hit matches one of them if it
    has the same title and contains its evidence or all of its text; if the evidence is unknown, also if it is a part
    of it. If one of the two has no title, one text must contain the other.

    Returns:
        The samples with their new passages, and the share of gold passages that were found. Samples without gold
        passages do not count; the share is None if no sample has any.
    """
    result, found, total = [], 0, 0
    for sample in samples:
        gold = list({(p.title, p.text): p for p in sample.passages if p.gold or p.evidence}.values())
        hits = index.search(sample.question, k)
        total, found = total + len(gold), found + sum(any(_matches(hit, own) for hit in hits) for own in gold)
        passages = (_build_passage(hit, [own for own in gold if _matches(hit, own)]) for hit in hits)
        result.append(replace(sample, passages=tuple(passages)))
    return result, found / total if total else None


def _matches(hit: Hit, own: Passage) -> bool:
    have_titles = bool(hit.title and own.title)
    if have_titles and _normalise(hit.title) != _normalise(own.title):
        return False
    theirs, ours = _normalise(hit.text), _normalise(own.text)
    if ours in theirs or not own.evidence:
        return ours in theirs or theirs in ours
    return (have_titles or theirs in ours) and bool(find_evidence(hit.text, _list_evidence(own)))


def _build_passage(hit: Hit, gold: list[Passage]) -> Passage:
    """Return the hit as a passage; it is gold if it matches gold passages, and has their evidence."""
    same = [own.evidence for own in gold if own.text == hit.text]
    evidence = same[0] if same else find_evidence(hit.text, [text for own in gold for text in _list_evidence(own)])
    return Passage(hit.title, hit.text, bool(gold), evidence)


def _list_evidence(own: Passage) -> list[str]:
    return [own.text[start:stop] for start, stop in own.evidence]


def _normalise(text: str) -> str:
    """Ignore case and spacing; the outer spaces make a text match only from word to word."""
    return f" {' '.join(text.casefold().split())} "
