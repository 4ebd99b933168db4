"""Passages from an index for samples, and how many of the gold ones are among them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from floatscope.tasks.formats.fields import find
from floatscope.tasks.index.engine import Hit
from floatscope.tasks.index.index import Index
from floatscope.tasks.sample import Passage, Sample


def retrieved(index: Index, samples: Iterable[Sample], k: int = 5) -> tuple[list[Sample], float | None]:
    """Each sample with the best `k` passages for its question, and the share of the gold passages that are found.

    What is gold follows from the sample's own passages, those it marks as gold or tells the evidence of. One of them is
    found by a passage with its title that holds its evidence, or all of its text; where its evidence is not known, also
    by one that is a part of it. Titles say nothing where one of the two has none: then one text must be in the other.
    Samples without gold passages do not count, and where none has any the share is None.
    """
    given, found, wanted = [], 0, 0
    for sample in samples:
        gold = list({(p.title, p.text): p for p in sample.passages if p.gold or p.evidence}.values())
        hits = index.search(sample.question, k)
        wanted, found = wanted + len(gold), found + sum(any(_finds(hit, own) for hit in hits) for own in gold)
        passages = (_passage(hit, [own for own in gold if _finds(hit, own)]) for hit in hits)
        given.append(replace(sample, passages=tuple(passages)))
    return given, found / wanted if wanted else None


def _finds(hit: Hit, own: Passage) -> bool:
    titled = bool(hit.title and own.title)
    if titled and _plain(hit.title) != _plain(own.title):
        return False
    theirs, ours = _plain(hit.text), _plain(own.text)
    if ours in theirs or not own.evidence:
        return ours in theirs or theirs in ours
    return (titled or theirs in ours) and bool(find(hit.text, _evidence(own)))


def _passage(hit: Hit, gold: list[Passage]) -> Passage:
    """What was found, with the evidence where it stands in it."""
    same = [own.evidence for own in gold if own.text == hit.text]
    evidence = same[0] if same else find(hit.text, [text for own in gold for text in _evidence(own)])
    return Passage(hit.title, hit.text, bool(gold), evidence)


def _evidence(own: Passage) -> list[str]:
    return [own.text[start:stop] for start, stop in own.evidence]


def _plain(text: str) -> str:
    """Whole words, whatever their case and spacing: one plain text is in another only from word to word."""
    return f" {' '.join(text.casefold().split())} "
