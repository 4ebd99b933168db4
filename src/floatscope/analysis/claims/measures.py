"""The measures of claims: numbers per sample from the folders of a comparison, and the value that is compared.

    measure = ScoreChange(after=("scores/main-gold/{}",), before=("scores/main-closed/{}",))
    table = measure.read(Path("runs/claims/twins"), "mdm")     # a row per sample: "after", "before"
    measure.value(table.mean().to_frame().T)                   # after − before

In a folder name, {} stands for the role of the model: arm, mdm or mdm-adapted. Folders of stress points are named by
their purpose (`random-many`); `points.json` in the folder of the comparison gives the point that serves it there,
because harder settings are needed for one pair of models than for another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import pandas as pd

from floatscope.analysis.claims.attention_measures import MEASURES
from floatscope.analysis.evaluations import open_predictions
from floatscope.analysis.experiments import matched_controls, read_experiment
from floatscope.errors import UserError
from floatscope.traces.run_record import FINISHED, RECORD_FILE, read_record

POINTS_FILE = "points.json"
TRACES = "traces"
OTHER_TASK = "traces-other-task"
UNTRAINED = "untrained"
"""The folders of untrained controls are untrained-0, untrained-1, …"""
CEILING, FLOOR = 0.97, 0.05
"""Scores above or below these have no room to change."""
AT_CEILING = "ceiling, no room to differ"


@dataclass(frozen=True)
class AttentionMeasure:
    """A measure of attention, by its name in `MEASURES`."""

    name: str

    def read(self, folder: Path, role: str) -> pd.DataFrame:
        """Read the tables of the traces; `role` may be that of an untrained control, "mdm/untrained-0"."""
        return self.read_tables(TableFolder(folder / TRACES / role, folder / OTHER_TASK / role))

    def read_tables(self, tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
        """Return the measured number of each sample from tables in memory."""
        return pd.DataFrame({"value": MEASURES[self.name](tables)})

    def value(self, means: pd.DataFrame) -> pd.Series:
        """The mean."""
        return means["value"]

    def limit(self, means: Mapping[str, pd.Series]) -> str:
        """Attention has no ceiling."""
        return ""


@dataclass(frozen=True)
class _Scores:
    """Scores after and before a change."""

    after: tuple[str, ...]
    before: tuple[str, ...]

    def read(self, folder: Path, role: str) -> pd.DataFrame:
        """Return the share of right answers after and before, a row per sample."""
        return pd.DataFrame({name: _mean_score(folder, role, getattr(self, name)) for name in ("after", "before")})

    def limit(self, means: Mapping[str, pd.Series]) -> str:
        """Say if all scores are at the ceiling, or those of one model at the floor."""
        return _find_limit(means)


@dataclass(frozen=True)
class ScoreChange(_Scores):
    """The score after a change minus the score before it."""

    def limit(self, means: Mapping[str, pd.Series]) -> str:
        """Say so, too, if every model compared is at the ceiling after the change: no gain can exceed another then."""
        if len(means) > 1 and all(scores["after"] > CEILING for scores in means.values()):
            return AT_CEILING
        return _find_limit(means)

    def value(self, means: pd.DataFrame) -> pd.Series:
        """After − before."""
        return means["after"] - means["before"]


@dataclass(frozen=True)
class ScoreRetained(_Scores):
    """The share of the score that is left after a change: a weaker model has fewer points to lose."""

    def value(self, means: pd.DataFrame) -> pd.Series:
        """After / before."""
        return means["after"] / means["before"]


@dataclass(frozen=True)
class ScoreSpread:
    """(Best − worst) / mean of several points. It is never negative, and too large if there are few samples."""

    points: tuple[str, ...]

    def read(self, folder: Path, role: str) -> pd.DataFrame:
        """Return the share of right answers at each point, a row per sample."""
        return pd.DataFrame({point: _mean_score(folder, role, (point,)) for point in self.points})

    def value(self, means: pd.DataFrame) -> pd.Series:
        """(Best − worst) / mean."""
        return (means.max(axis=1) - means.min(axis=1)) / means.mean(axis=1)

    def limit(self, means: Mapping[str, pd.Series]) -> str:
        """Say if all scores are at the ceiling, or those of one model at the floor."""
        return _find_limit(means)


@dataclass(frozen=True)
class EditCost:
    """What an edit costs beyond its matched controls: points of `acc` lost, or nats of `nll` added."""

    study: str
    condition: str
    measured: str  # acc or nll

    SIGN: ClassVar[Mapping[str, float]] = {"acc": -1.0, "nll": 1.0}

    def read(self, folder: Path, role: str) -> pd.DataFrame:
        """Return the measured number under the edit and the mean of its controls, a row per sample."""
        experiment = folder / "studies" / self.study / role
        controls = matched_controls(read_experiment(experiment), self.condition)
        if not controls:
            raise UserError(f"{experiment} has no condition '{self.condition}' with controls")
        edited, *others = (
            _read_finished(experiment / name).set_index("sample")[self.measured] for name in (self.condition, *controls)
        )
        return pd.DataFrame({"edited": edited, "control": pd.concat(others, axis=1).mean(axis=1)})

    def value(self, means: pd.DataFrame) -> pd.Series:
        """The cost beyond the control."""
        return self.SIGN[self.measured] * (means["edited"] - means["control"])

    def limit(self, means: Mapping[str, pd.Series]) -> str:
        """Say if all scores are at the ceiling, or those of one model at the floor."""
        return _find_limit(means) if self.measured == "acc" else ""


Measure = AttentionMeasure | ScoreChange | ScoreRetained | ScoreSpread | EditCost
"""What a claim measures of one model.

`read(folder, role)` returns a row per sample with the measured numbers, `value(means)` the compared value of column
means, and `limit(means)` why the scores of the models cannot show an effect, empty if they can.
"""


@dataclass(frozen=True)
class TableFolder(Mapping[str, pd.DataFrame]):
    """The tables of a folder by name; those of the other task end in `_other_task`."""

    folder: Path
    other: Path

    SUFFIX: ClassVar[str] = "_other_task"

    def __getitem__(self, name: str) -> pd.DataFrame:
        folder = self.other if name.endswith(self.SUFFIX) else self.folder
        file = folder / f"{name.removesuffix(self.SUFFIX)}.parquet"
        if not file.is_file():
            raise UserError(f"{folder} has no table {file.stem}; trace the samples with the fields that it needs")
        return _read_parquet(file)

    def __iter__(self) -> Iterator[str]:
        """The names of the tables of the main task."""
        return (file.stem for file in sorted(self.folder.glob("*.parquet")))

    def __len__(self) -> int:
        """The number of tables of the main task."""
        return sum(1 for _ in self)


@cache
def _read_parquet(file: Path) -> pd.DataFrame:
    return pd.read_parquet(file)


def _mean_score(folder: Path, role: str, points: tuple[str, ...]) -> pd.Series:
    tables = [_read_finished(folder / _resolve(folder, point).format(role)) for point in points]
    scores: pd.Series = pd.concat(tables).groupby("sample")["acc"].mean()
    return scores


def _resolve(folder: Path, point: str) -> str:
    """Return the folder of a point; `points.json` names the points that serve a purpose."""
    file = folder / POINTS_FILE
    points: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    return points.get(point, point)


def _read_finished(folder: Path) -> pd.DataFrame:
    """Read the predictions of a finished run; refuse an unfinished one, which has the longest samples only."""
    if not (folder / RECORD_FILE).exists() or read_record(folder)["status"] != FINISHED:
        raise UserError(f"{folder} is not finished; run the comparison again to resume it")
    return open_predictions(folder).table


def _find_limit(means: Mapping[str, pd.Series]) -> str:
    if all(scores.min() > CEILING for scores in means.values()):
        return AT_CEILING
    for role, scores in means.items():
        if scores.max() < FLOOR:
            return f"floor, the {role.upper()} is below {FLOOR:.0%}"
    return ""
