"""The runs of a report: each with its tables, the tables of its untrained controls, and its label.

    runs = [ReportRun.open(Path("runs/arm"), "arm"), ReportRun.open(Path("runs/mdm"), "mdm")]
    runs[0].build_series("absorption", "lift", along="layer", where={"set": "first"})     # estimates, ready to draw
    runs[1].estimate("floating", "within").model.format()                                # "0.14 [0.10, 0.19]"

`where` selects rows of a table: column → value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from floatscope.analysis.run_tables import RunTables, analyse
from floatscope.analysis.statistics import difference, estimate
from floatscope.errors import UserError
from floatscope.reports.charts import Series
from floatscope.reports.intervals import TRAINED, UNTRAINED, Estimate, Interval, interval_series, nan_to_none
from floatscope.schema import Paradigm
from floatscope.traces import Run, find_controls, open_run

Where = Mapping[str, Any] | None


@dataclass(frozen=True)
class ReportRun:
    """A run with its tables and those of its controls."""

    label: str
    run: Run
    tables: RunTables
    controls: list[RunTables] = field(default_factory=list)
    incomplete_controls: list[str] = field(default_factory=list)  # folders of controls that lack samples of the run
    commits: str = "answer"  # which commits count: those of the answer, or all

    @staticmethod
    def open(
        path: Path,
        label: str,
        detector: str = "zscore",
        on_progress: Callable[[str], None] = lambda _: None,
        commits: str = "answer",
    ) -> ReportRun:
        """Read a run folder and its controls, and build their tables.

        A control is measured on the samples of the run; one that lacks some of them is left out. `on_progress` gets the
        name of each sample that was read.
        """
        run = open_run(path)
        if not run.finished:
            raise UserError(f"{path} has no finished sample of {len(run.samples)}; trace them first")
        controls, incomplete = list[RunTables](), list[str]()
        for folder in find_controls(path):
            control = open_run(folder)
            if set(run.finished) <= set(control.finished):
                traces = (control.trace(sample) for sample in run.finished)
                controls.append(analyse(traces, detector, on_progress, commits=commits))
            else:
                incomplete.append(folder.name)
        tables = analyse(run, detector, on_progress, commits=commits)
        return ReportRun(label, run, tables, controls, incomplete, commits)

    @property
    def paradigm(self) -> Paradigm:
        """How the model of the run decodes; a run that does not say is taken for an MDM."""
        return Paradigm(self.run.settings.get("paradigm", Paradigm.MDM))

    def has_table(self, name: str) -> bool:
        """Whether the traces of the run provide this table."""
        return name in self.tables.tables

    def table(self, name: str, where: Where = None) -> pd.DataFrame:
        """The rows of a table of the run."""
        return _select(self.tables.tables[name], where)

    def control_tables(self, name: str, where: Where = None) -> list[pd.DataFrame]:
        """The same rows of each control that has the table."""
        return [_select(control.tables[name], where) for control in self.controls if name in control.tables]

    def build_series(
        self, table: str, value: str, along: str, where: Where = None, own_x: bool = False
    ) -> list[Series]:
        """Estimates along a column, of the model and of its control. `own_x` gives each series its own x values."""
        result = []
        for name, tables in ((TRAINED, [self.table(table, where)]), (UNTRAINED, self.control_tables(table, where))):
            if tables:
                rows = estimate(tables, value, [along])
                x = [float(v) for v in rows[along]] if own_x else None
                y, low, high = ([nan_to_none(float(v)) for v in rows[end]] for end in ("mean", "low", "high"))
                result.append(Series(name, self.label, y, low, high, control=name == UNTRAINED, x=x))
        return result

    def estimate(self, table: str, value: str, where: Where = None) -> Estimate:
        """The mean over samples with its 95 % CI, of the model and of its control."""
        rows, controls = self.table(table, where), self.control_tables(table, where)
        control = Interval.from_row(estimate(controls, value).iloc[0]) if controls and not rows.empty else None
        return Estimate(Interval.from_row(estimate(rows, value).iloc[0]), control)

    def difference_from_control(self, table: str, value: str, where: Where = None) -> Interval | None:
        """The paired difference between the model and its control; None without a control."""
        rows, controls = self.table(table, where), self.control_tables(table, where)
        return Interval.from_row(difference(rows, controls, value).iloc[0]) if controls and not rows.empty else None

    def difference_from(self, other: ReportRun, table: str, value: str, where: Where = None) -> Interval:
        """The paired difference between this model and another, over the samples they share."""
        return Interval.from_row(difference(self.table(table, where), other.table(table, where), value).iloc[0])


Category = tuple[str, str, str, Mapping[str, Any]]
"""A row of a dot chart: its name, the table, the column, and which rows of the table."""


def build_dot_series(runs: Sequence[ReportRun], categories: Sequence[Category]) -> Iterator[Series]:
    """For each run, and for its control, a value per category."""
    for run in runs:
        estimates = [run.estimate(table, value, where) for _, table, value, where in categories]
        yield interval_series(TRAINED, run.label, [each.model for each in estimates])
        if run.controls:
            yield interval_series(UNTRAINED, run.label, [each.control for each in estimates], control=True)


def _select(table: pd.DataFrame, where: Where) -> pd.DataFrame:
    for column, value in (where or {}).items():
        table = table[table[column] == value]
    return table
