"""Cut what a sample shows, by whole shots and passages, until its prompt has room.

def length(sample, shots): return len(text.encode(template("default").prompt(sample, shots).text))

fitted = fit(sample, shots, room=4096 - 32, length=length)
fitted.sample, fitted.shots, fitted.dropped          # what is left, and how many shots and passages are gone
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from floatscope.errors import UserError
from floatscope.tasks.sample import Sample

Length = Callable[[Sample, Sequence[Sample]], int]
"""A sample, its shots → how many tokens its prompt has."""


@dataclass(frozen=True)
class Fitted:
    sample: Sample
    shots: list[Sample]
    dropped: int = 0  # shots and passages


def fit(sample: Sample, shots: Sequence[Sample], room: int, length: Length) -> Fitted:
    """The sample with as few drops as let it fit: shots from the last, then passages that are not gold from the last,
    then gold ones from the last. The question is never cut; refused if it does not fit alone.

    Prompts are measured a few times only, which takes for granted that no drop but the last makes a prompt longer.
    """
    most = len(shots) + len(sample.passages)

    def fits(drops: int) -> bool:
        left = _without(sample, shots, drops)
        return length(left.sample, left.shots) <= room

    drops = 0 if fits(0) else min(most, bisect_left(range(most), True, lo=1, key=fits))
    left = _without(sample, shots, drops)
    if drops == most and (tokens := length(left.sample, left.shots)) > room:
        without = " without shots and passages" if most else ""
        raise UserError(
            f"the prompt of sample '{sample.id}' has {tokens} tokens{without}, and there is room for {room}:"
            " shorten the question or the template, or ask for fewer new tokens"
        )
    return left


def _without(sample: Sample, shots: Sequence[Sample], drops: int) -> Fitted:
    kept = list(shots[: max(0, len(shots) - drops)])
    order = sorted(enumerate(sample.passages), key=lambda at: (at[1].gold, -at[0]))
    gone = {at for at, _ in order[: max(0, drops - len(shots))]}
    passages = tuple(passage for at, passage in enumerate(sample.passages) if at not in gone)
    return Fitted(replace(sample, passages=passages) if gone else sample, kept, drops)
