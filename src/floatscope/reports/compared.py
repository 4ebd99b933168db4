"""Runs that are compared: each with its tables, those of its untrained controls, and how it is called.

runs = [Compared.of("runs/arm"), Compared.of("runs/mdm")]
runs[0].series("absorption", "lift", along="layer", where={"set": "first"})     # estimates, ready to be drawn
runs[1].number("floating", "within")                                          # one number with its interval
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from floatscope.analysis.estimate import difference, estimate
from floatscope.analysis.measure import RunTables, build_tables
from floatscope.errors import UserError
from floatscope.reports.charts import Series
from floatscope.traces import Run, controls, open_run

TWIN, CONTROL = "trained", "untrained"


@dataclass(frozen=True)
class Compared:
    """A run, measured with its controls."""

    label: str
    run: Run
    measured: RunTables
    controls: list[RunTables] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)  # controls that lack samples the model has

    @staticmethod
    def of(path: Path, label: str, detector: str, told: Callable[[str], None] = lambda _: None) -> Compared:
        run = open_run(path)
        if not run.done:
            raise UserError(f"{path} has no finished sample of {len(run.samples)}; trace them first")
        whole, broken = list[RunTables](), list[str]()
        for folder in controls(path):
            control = open_run(folder)
            if set(run.done) <= set(control.done):  # on the very samples the model has
                whole.append(build_tables((control.trace(sample) for sample in run.done), detector, told))
            else:
                broken.append(folder.name)
        return Compared(label, run, build_tables(run, detector, told), whole, broken)

    @property
    def family(self) -> str:
        return str(self.run.settings.get("family", "mdm"))

    def has(self, table: str) -> bool:
        return table in self.measured.tables

    def table(self, name: str, where: Mapping[str, Any] | None = None) -> pd.DataFrame:
        return _where(self.measured.tables[name], where)

    def control_tables(self, name: str, where: Mapping[str, Any] | None = None) -> list[pd.DataFrame]:
        return [_where(each.tables[name], where) for each in self.controls if name in each.tables]

    def series(
        self, table: str, value: str, along: str, where: Mapping[str, Any] | None = None, own_x: bool = False
    ) -> list[Series]:
        """The trained model's estimates along a column, and the control's. `own_x` brings the relative depth."""
        found = []
        for name, tables in ((TWIN, [self.table(table, where)]), (CONTROL, self.control_tables(table, where))):
            if tables:
                told = estimate(tables, value, [along])
                x = [float(v) for v in told[along]] if own_x else None
                found.append(_series(name, self.label, told, x, name == CONTROL))
        return found

    def number(self, table: str, value: str, where: Mapping[str, Any] | None = None) -> Number:
        own, others = self.table(table, where), self.control_tables(table, where)
        control = Interval.of(estimate(others, value).iloc[0]) if others and not own.empty else None
        return Number(Interval.of(estimate(own, value).iloc[0]), control)

    def beyond(self, table: str, value: str, where: Mapping[str, Any] | None = None) -> Interval | None:
        """This model less its control, sample by sample; None without one."""
        own, others = self.table(table, where), self.control_tables(table, where)
        return Interval.of(difference(own, others, value).iloc[0]) if others and not own.empty else None

    def apart(self, other: Compared, table: str, value: str, where: Mapping[str, Any] | None = None) -> Interval:
        """This model less another, on the samples both have."""
        return Interval.of(difference(self.table(table, where), other.table(table, where), value).iloc[0])


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float

    @staticmethod
    def of(row: Any) -> Interval:
        return Interval(float(row["mean"]), float(row["low"]), float(row["high"]))

    def said(self, digits: int = 2, sign: bool = False) -> str:
        """With its interval, if it has one: a single sample gives none."""
        if math.isnan(self.mean):
            return "–"
        form = f"{'+' if sign else ''}.{digits}f"
        interval = "" if math.isnan(self.low) else f" [{self.low:{form}}, {self.high:{form}}]"
        return f"{self.mean:{form}}{interval}".replace("-", "−")

    @property
    def sure(self) -> bool:
        """Whether it is apart from zero."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Number:
    """One number of a model, and the same of its control."""

    own: Interval
    control: Interval | None


Category = tuple[str, str, str, Mapping[str, Any]]
"""How it is called, and which number it is: the table, the value, the rows."""


def dots(runs: Sequence[Compared], categories: Sequence[Category]) -> Iterator[Series]:
    """For each run a value per category, and for its control."""
    for run in runs:
        numbers = [run.number(table, value, where) for _, table, value, where in categories]
        yield _of_numbers(TWIN, run.label, [number.own for number in numbers], False)
        if run.controls:
            yield _of_numbers(CONTROL, run.label, [number.control for number in numbers], True)


def _of_numbers(name: str, label: str, intervals: Sequence[Interval | None], control: bool) -> Series:
    ends = ("mean", "low", "high")
    y, low, high = ([None if i is None else _known(getattr(i, end)) for i in intervals] for end in ends)
    return Series(name, label, y, low, high, control=control)


def _series(name: str, label: str, told: pd.DataFrame, x: list[float] | None, control: bool) -> Series:
    y, low, high = ([_known(float(v)) for v in told[column]] for column in ("mean", "low", "high"))
    return Series(name, label, y, low, high, control=control, x=x)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _where(table: pd.DataFrame, where: Mapping[str, Any] | None) -> pd.DataFrame:
    for column, value in (where or {}).items():
        table = table[table[column] == value]
    return table
