"""Passages from an index for samples, and how many of the gold ones are among them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from floatscope.tasks.index.engine import Hit
from floatscope.tasks.index.index import Index
from floatscope.tasks.sample import Passage, Sample


def retrieved(index: Index, samples: Iterable[Sample], k: int = 5) -> tuple[list[Sample], float | None]:
    """Each sample with the best `k` passages for its question, and the share of the gold passages that are among them.

    A passage is gold if one of the sample's own gold passages has its title or, where one of the two has none, its
    text. Without gold passages there is no share.
    """
    given, found, gold = [], 0, 0
    for sample in samples:
        wanted = [passage for passage in sample.passages if passage.gold]
        hits = index.search(sample.question, k)
        gold, found = gold + len(wanted), found + sum(any(_same(hit, passage) for hit in hits) for passage in wanted)
        passages = []
        for hit in hits:
            mine = [passage for passage in wanted if _same(hit, passage)]
            evidence = next((passage.evidence for passage in mine if passage.text == hit.text), ())
            passages.append(Passage(hit.title, hit.text, bool(mine), evidence))
        given.append(replace(sample, passages=tuple(passages)))
    return given, found / gold if gold else None


def _same(hit: Hit, passage: Passage) -> bool:
    mine, theirs = (hit.title, passage.title) if hit.title and passage.title else (hit.text, passage.text)
    return mine.casefold().split() == theirs.casefold().split()
