"""A mean with its 95 % CI, as text and as a series of a chart.

Interval(0.14, 0.10, 0.19).format()                  # "0.14 [0.10, 0.19]"
Interval.from_row(estimate(table, "acc").iloc[0])    # from a row of floatscope.analysis
describe_intervals([24, 24], over="questions")       # how they are computed, for the text of a page
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from floatscope.analysis.statistics import note_small_n
from floatscope.reports.charts import Series

TRAINED, UNTRAINED = "trained", "untrained"


@dataclass(frozen=True)
class Interval:
    """A mean with the ends of its 95 % CI; the ends are NaN if there is only one sample."""

    mean: float
    low: float
    high: float

    @staticmethod
    def from_row(row: Any) -> Interval:
        """From a row of `estimate` or `difference`."""
        return Interval(float(row["mean"]), float(row["low"]), float(row["high"]))

    def to_percent(self) -> Interval:
        """The same for a share in percent."""
        return Interval(100 * self.mean, 100 * self.low, 100 * self.high)

    def format(self, digits: int = 2, sign: bool = False) -> str:
        """`0.14 [0.10, 0.19]`; the mean alone without an interval, `–` without a mean. `sign` adds a plus."""
        if math.isnan(self.mean):
            return "–"
        form = f"{'+' if sign else ''}.{digits}f"
        interval = "" if math.isnan(self.low) else f" [{self.low:{form}}, {self.high:{form}}]"
        return f"{self.mean:{form}}{interval}".replace("-", "−")

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of zero."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Estimate:
    """The same quantity of a model and of its control."""

    model: Interval
    control: Interval | None

    def format(self, digits: int = 2) -> str:
        """`0.14 [0.10, 0.19] · untrained 0.25 [0.20, 0.30]`."""
        if self.control is None:
            return self.model.format(digits)
        return f"{self.model.format(digits)} · {UNTRAINED} {self.control.format(digits)}"


def describe_intervals(counts: Iterable[int], over: str = "samples") -> str:
    """How the intervals of a page are computed, with a note if any of them is over fewer than 30 samples."""
    note = note_small_n(counts)
    method = (
        "Intervals are 95 % CIs: Wilson's for values of 0 and 1, Newcombe's for paired differences of such values,"
        f" otherwise from a BCa bootstrap over {over}."
    )
    return f"{method} {note}" if note else method


def interval_series(name: str, label: str, intervals: Sequence[Interval | None], control: bool = False) -> Series:
    """Intervals as a series of a chart; None where nothing was measured."""
    y, low, high = (
        [None if interval is None else nan_to_none(getattr(interval, end)) for interval in intervals]
        for end in ("mean", "low", "high")
    )
    return Series(name, label, y, low, high, control=control)


def nan_to_none(value: float) -> float | None:
    """The value, or None for NaN."""
    return None if math.isnan(value) else value
