"""Is the answer right? The published rules of extractive question answering.

acc("It was Velmora.", ["Velmora"])      # 1.0: the normalised gold answer is part of the normalised prediction
em("the Velmora", ["Velmora"])           # 1.0: they are the same, articles, case and punctuation aside
f1("Velmora city", ["Velmora"])          # 0.67: words in common
abstains("I don't know.")                # True
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from floatscope.tasks.sample import Sample

ABSTENTIONS = (
    "unknown",
    "unanswerable",
    "no answer",
    "not known",
    "i dont know",
    "i do not know",
    "cannot be answered",
    "can not be answered",
    "not mentioned",
    "not given",
    "no relevant context",
)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces."""
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def acc(prediction: str, golds: Sequence[str]) -> float:
    return _best(lambda said, gold: float(gold in said), prediction, golds)


def em(prediction: str, golds: Sequence[str]) -> float:
    return _best(lambda said, gold: float(gold == said), prediction, golds)


def f1(prediction: str, golds: Sequence[str]) -> float:
    return _best(_overlap, prediction, golds)


def abstains(prediction: str) -> bool:
    """Whether it says nothing, or begins with words that decline to answer."""
    said = normalise(prediction)
    return not said or any(said == words or said.startswith(f"{words} ") for words in ABSTENTIONS)


def is_unanswerable(sample: Sample) -> bool:
    """Whether to abstain is right: it has no answer, or only such a one."""
    return all(abstains(answer) for answer in sample.answers)


def _best(score: Callable[[str, str], float], prediction: str, golds: Sequence[str]) -> float:
    """The best over the gold answers; one that is empty once normalised is no answer."""
    said = normalise(prediction)
    return max((score(said, gold) for gold in map(normalise, golds) if gold), default=0.0)


def _overlap(said: str, gold: str) -> float:
    a, b = said.split(), gold.split()
    common = sum((Counter(a) & Counter(b)).values())
    return 2 * common / (len(a) + len(b)) if common else 0.0
