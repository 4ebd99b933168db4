"""What a sample must have to take part in a sweep.

select_samples("position", samples, [HAS_ONE_GOLD])            # a UserError if no sample qualifies
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from floatscope.errors import UserError
from floatscope.tasks.sample import Passage, Sample


@dataclass(frozen=True)
class Requirement:
    """A property that samples need: its description, what helps if they lack it, and its test."""

    description: str
    remedy: str
    is_met: Callable[[Sample], bool]


def get_gold(sample: Sample) -> list[Passage]:
    """Return the gold passages of a sample."""
    return [passage for passage in sample.passages if passage.gold]


def get_others(sample: Sample) -> list[Passage]:
    """Return the passages of a sample that are not gold."""
    return [passage for passage in sample.passages if not passage.gold]


HAS_PASSAGE = Requirement("a passage", 'give "passages"', lambda sample: bool(sample.passages))
HAS_GOLD = Requirement(
    "a gold passage", 'mark it with "gold": true in "passages"', lambda sample: bool(get_gold(sample))
)
HAS_ONE_GOLD = Requirement(
    "exactly one gold passage",
    'mark it with "gold": true in "passages"; for several gold passages use `layout` or `noise`',
    lambda sample: len(get_gold(sample)) == 1,
)


def select_samples(kind: str, samples: Sequence[Sample], requirements: Sequence[Requirement]) -> list[Sample]:
    """Return the samples that meet every requirement, in their order; raise UserError if there are none."""
    met = [[requirement.is_met(sample) for requirement in requirements] for sample in samples]
    for number, requirement in enumerate(requirements):
        if not any(row[number] for row in met):
            who = "the sample lacks" if len(samples) == 1 else f"all {len(samples)} samples lack"
            raise UserError(f"{kind} needs {requirement.description}, which {who}; {requirement.remedy}")
    selected = [sample for sample, row in zip(samples, met, strict=True) if all(row)]
    if not selected:
        descriptions = ", and ".join(requirement.description for requirement in requirements)
        raise UserError(
            f"{kind} needs {descriptions}, and no sample has all of it; choose fewer options, or give other samples"
        )
    return selected
