"""A point of a sweep: the samples and the prompt settings of one condition.

Point("gold-3", 3, samples, series="gold", note="the gold passage is document 4 of 5")
"""

from __future__ import annotations

from dataclasses import dataclass

from floatscope.tasks.sample import Sample
from floatscope.tasks.stress.options import Number


@dataclass(frozen=True)
class Point:
    """The samples of one point of a sweep, and how their prompts differ from the default."""

    name: str  # usable as a file name
    value: Number | None  # its position on the x axis; None if the sweep has no such axis
    samples: tuple[Sample, ...]
    placement: str | None = None  # of the question
    shots: int = 0
    extra_masks: int = 0
    filler: str = ""  # text in the place of extra masks: their control
    note: str = ""
    series: str = ""  # points of one series form one line
    same_as: str = ""  # an earlier point with exactly the same prompts
    left_out: int = 0  # samples that could not take part in this point or any other
