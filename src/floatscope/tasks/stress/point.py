"""A point of a sweep, which samples can take part, and what a person may choose.

Point("gold-3", 3, samples, series="gold", note="the gold passage is document 4 of 5")
able("position", samples, [ONE_GOLD])            # those that can; refused in a sentence where none can
chosen("layout", ("adjacent", "split"), LAYOUTS)  # names, checked
numbers("counts", (0, 8, 64), least=0)            # numbers, checked
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from floatscope.errors import UserError, unknown_choice
from floatscope.tasks.sample import Passage, Sample

Number = int | float
Choice = object
"""What a person chose of an option: one, several, or None for the usual; `chosen`, `numbers` and `one` check it."""
T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """The samples as they are to be asked at one place of a sweep."""

    name: str  # fit for a file
    value: Number | None  # its place on the x axis; None where there is no such thing
    samples: tuple[Sample, ...]
    placement: str | None = None  # of the question
    shots: int = 0
    extra_masks: int = 0
    filler: str = ""  # text in the place of as many extra masks: their control
    note: str = ""
    series: str = ""  # points of one series make one line
    same_as: str = ""  # an earlier point that asks exactly the same
    left_out: int = 0  # samples that could not take part, in this point or any other


@dataclass(frozen=True)
class Need:
    """What a sample must have to take part."""

    what: str
    help: str
    met: Callable[[Sample], bool]


def gold_of(sample: Sample) -> list[Passage]:
    return [passage for passage in sample.passages if passage.gold]


def rest_of(sample: Sample) -> list[Passage]:
    return [passage for passage in sample.passages if not passage.gold]


GOLD = Need("a gold passage", 'mark it with "gold": true in "passages"', lambda sample: bool(gold_of(sample)))
ONE_GOLD = Need(
    "exactly one gold passage",
    'mark it with "gold": true in "passages"; where there are several, `layout` and `noise` move them',
    lambda sample: len(gold_of(sample)) == 1,
)


def able(kind: str, samples: Sequence[Sample], needs: Sequence[Need]) -> list[Sample]:
    """The samples that meet every need, in their order."""
    met = [[need.met(sample) for need in needs] for sample in samples]
    for number, need in enumerate(needs):
        if not any(row[number] for row in met):
            lack = "the sample lacks" if len(samples) == 1 else f"all {len(samples)} samples lack"
            raise UserError(f"{kind} needs {need.what}, which {lack}; {need.help}")
    found = [sample for sample, row in zip(samples, met, strict=True) if all(row)]
    if not found:
        whats = ", and ".join(need.what for need in needs)
        raise UserError(f"{kind} needs {whats}, and no sample has it all; choose less, or give other samples")
    return found


def dice(*of: object) -> Random:
    """Random numbers that follow from what they are for: a seed, a kind, a sample's id."""
    return Random(" ".join(map(repr, of)))


def chosen(what: str, given: Choice, allowed: Iterable[str]) -> list[str]:
    """Names out of those allowed: one, several, or None for all."""
    names = list(allowed)
    if given is None:
        return names
    picked = [str(name) for name in _several(given)]
    for name in picked:
        if name not in names:
            raise unknown_choice(what, name, names)
    return _distinct(what, picked)


def numbers(option: str, given: Choice, least: Number, most: Number | None = None) -> list[Number]:
    """Numbers of a sweep in rising order; whole ones, unless `most` is given."""
    picked: list[Number] = _several(given)
    for number in picked:
        whole = type(number) is int or (most is not None and isinstance(number, float))
        if not whole or not least <= number or (most is not None and number > most):
            span = f"whole numbers from {least} on" if most is None else f"numbers from {least} to {most}"
            raise UserError(f"{option} must be {span}, got {number!r}")
    return sorted(_distinct(option, picked))


def whole(option: str, given: Choice, usual: Iterable[int], least: int = 0) -> list[int]:
    """Whole numbers that were given, or the usual ones."""
    return [int(number) for number in numbers(option, usual if given is None else given, least)]


def within(option: str, counts: Sequence[int], asked: bool, there: int, of: str) -> list[int]:
    """Those up to what is there; what was asked for and is not there is refused."""
    if asked and counts[-1] > there:
        raise UserError(f"{option} goes up to {counts[-1]}, and there are {there} {of}; give fewer, or more samples")
    return [count for count in counts if count <= there]


def one(what: str, picked: Sequence[T]) -> T:
    """The only one, where several make no sense."""
    if len(picked) != 1:
        raise UserError(f"{what} takes one value, got {len(picked)}: {', '.join(map(str, picked))}")
    return picked[0]


def _several(given: Choice) -> list[Any]:
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def _distinct(what: str, picked: list[T]) -> list[T]:
    if not picked:
        raise UserError(f"no {what} is given; give one or more")
    if twice := [each for number, each in enumerate(picked) if each in picked[:number]]:
        raise UserError(f"{what} {twice[0]} is given twice; give it once")
    return picked
