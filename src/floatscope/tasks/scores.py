"""Scores of extractive question answering: is the prediction right?

acc("It was Velmora.", ["Velmora"])      # 1.0: the prediction contains a gold answer
em("the Velmora", ["Velmora"])           # 1.0: exact match, ignoring articles, case and punctuation
f1("Velmora city", ["Velmora"])          # 0.67: overlap of words
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
    """Lower the case, remove punctuation and articles, and collapse spaces (the rule of SQuAD)."""
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def acc(prediction: str, golds: Sequence[str]) -> float:
    """Return 1.0 if the normalised prediction contains a normalised gold answer, else 0.0."""
    return _best_score(lambda text, gold: float(gold in text), prediction, golds)


def em(prediction: str, golds: Sequence[str]) -> float:
    """Return 1.0 if the normalised prediction equals a normalised gold answer, else 0.0."""
    return _best_score(lambda text, gold: float(gold == text), prediction, golds)


def f1(prediction: str, golds: Sequence[str]) -> float:
    """Return the harmonic mean of word precision and recall, for the best gold answer."""
    return _best_score(_word_f1, prediction, golds)


def abstains(prediction: str) -> bool:
    """Whether the prediction is empty or begins with words that decline to answer."""
    text = normalise(prediction)
    return not text or any(text == words or text.startswith(f"{words} ") for words in ABSTENTIONS)


def is_unanswerable(sample: Sample) -> bool:
    """Whether abstaining is right: the sample has no answer, or all its answers abstain."""
    return all(abstains(answer) for answer in sample.answers)


def _best_score(score: Callable[[str, str], float], prediction: str, golds: Sequence[str]) -> float:
    """Return the best score over the gold answers; an answer that is empty once normalised does not count."""
    text = normalise(prediction)
    return max((score(text, gold) for gold in map(normalise, golds) if gold), default=0.0)


def _word_f1(text: str, gold: str) -> float:
    a, b = text.split(), gold.split()
    common = sum((Counter(a) & Counter(b)).values())
    return 2 * common / (len(a) + len(b)) if common else 0.0
