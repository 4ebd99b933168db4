"""Fit a sample's prompt into a number of tokens by dropping whole shots and passages.

def count_tokens(sample, shots):
    return len(tokenizer.encode(load_template().prompt(sample, shots).text))

fitted = fit_sample(sample, shots, room=4096 - 32, count_tokens=count_tokens)
fitted.sample, fitted.shots, fitted.dropped          # what remains, and how many shots and passages were dropped
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from floatscope.errors import UserError
from floatscope.tasks.sample import Sample

CountTokens = Callable[[Sample, Sequence[Sample]], int]
"""(sample, shots) → the length of the prompt in tokens."""


@dataclass(frozen=True)
class FittedSample:
    """A sample and its shots after dropping; `dropped` counts shots and passages."""

    sample: Sample
    shots: list[Sample]
    dropped: int = 0


def fit_sample(sample: Sample, shots: Sequence[Sample], room: int, count_tokens: CountTokens) -> FittedSample:
    """Drop as few shots and passages as necessary for the prompt to have at most `room` tokens.

    Shots go first, from the last; then passages that are not gold, from the last; then gold passages, from the last.
    The question is never cut: a UserError says that it does not fit alone. The search is a bisection, which assumes
    that no drop except the last one makes the prompt longer.
    """
    most = len(shots) + len(sample.passages)

    def fits(drops: int) -> bool:
        fitted = _drop(sample, shots, drops)
        return count_tokens(fitted.sample, fitted.shots) <= room

    drops = 0 if fits(0) else min(most, bisect_left(range(most), True, lo=1, key=fits))
    fitted = _drop(sample, shots, drops)
    if drops == most and (tokens := count_tokens(fitted.sample, fitted.shots)) > room:
        without = " without shots and passages" if most else ""
        raise UserError(
            f"the prompt of sample '{sample.id}' has {tokens} tokens{without}, and there is room for {room}:"
            " shorten the question or the template, or request fewer new tokens"
        )
    return fitted


def _drop(sample: Sample, shots: Sequence[Sample], drops: int) -> FittedSample:
    order = sorted(enumerate(sample.passages), key=lambda entry: (entry[1].gold, -entry[0]))
    dropped = {at for at, _ in order[: max(0, drops - len(shots))]}
    passages = tuple(passage for at, passage in enumerate(sample.passages) if at not in dropped)
    shorter = replace(sample, passages=passages) if dropped else sample
    return FittedSample(shorter, list(shots[: max(0, len(shots) - drops)]), drops)
