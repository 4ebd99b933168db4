"""What a list of samples contains, and what is suspicious in it.

count_samples(samples)["with_gold"]     # samples with a gold passage
find_problems(samples)                  # {"no gold passage": ["q-3", …]}
"""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from floatscope.tasks.formats.fields import YES_NO
from floatscope.tasks.sample import Sample


def count_samples(samples: list[Sample]) -> dict[str, Any]:
    """Count the samples, and those with passages, gold, evidence, a yes-or-no answer, or no answer."""
    sizes = [len(s.passages) for s in samples]
    return {
        "samples": len(samples),
        "with_passages": sum(map(bool, sizes)),
        "with_gold": sum(any(p.gold for p in s.passages) for s in samples),
        "with_evidence": sum(any(p.evidence for p in s.passages) for s in samples),
        "yes_or_no": sum(bool(s.answers) and not _extractive_answers(s) for s in samples),
        "unanswerable": sum(not s.answers for s in samples),
        "passages_each": min_median_max(sizes),
    }


def min_median_max(numbers: list[int]) -> dict[str, int | float]:
    """Return the minimum, median and maximum of some numbers."""
    return {"min": min(numbers), "median": statistics.median(numbers), "max": max(numbers)}


def find_problems(samples: list[Sample]) -> dict[str, list[str]]:
    """Map each problem of samples that can be read to the ids of the samples that have it."""
    repeats = Counter(_normalise(sample.question) for sample in samples)
    problems = {
        "no gold passage": [s.id for s in samples if s.answers and s.passages and not any(p.gold for p in s.passages)],
        "no evidence in the gold passages": [s.id for s in samples if _lacks_evidence(s)],
        "a question asked more than once": [s.id for s in samples if repeats[_normalise(s.question)] > 1],
    }
    return {problem: ids for problem, ids in problems.items() if ids}


def _lacks_evidence(sample: Sample) -> bool:
    """Whether an answer should be in a gold passage, and is in none."""
    gold = [passage for passage in sample.passages if passage.gold]
    return bool(gold and _extractive_answers(sample)) and not any(passage.evidence for passage in gold)


def _extractive_answers(sample: Sample) -> list[str]:
    """Return the answers that a text can contain; a yes or no is in no text."""
    return [answer for answer in sample.answers if answer.strip().lower() not in YES_NO]


def _normalise(question: str) -> str:
    return " ".join(question.lower().split())
