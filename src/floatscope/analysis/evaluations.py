"""Evaluations: folders of predictions and scores, read as tables.

    evaluation = open_evaluation("runs/mdm-5")
    evaluation.table["acc"].mean()              # a row per sample
    evaluation.settings["template"], evaluation.missing

A folder holds `run.json` and `predictions.jsonl`, a line per answered sample. `floatscope eval` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from msgspec import field

from floatscope.errors import UserError
from floatscope.files.records import Record, parse_record
from floatscope.interventions.notes import Problem
from floatscope.traces import Run, open_run
from floatscope.traces.run_record import FINISHED

PREDICTIONS_FILE = "predictions.jsonl"
EVALUATION, LIKELIHOODS = "evaluation", "likelihoods"
"""The setting `kind` of a run of scores."""
FLOAT_COLUMNS = ("nll", "order", "moved", "dose")
"""Columns that may be null, which becomes NaN."""


@dataclass(frozen=True)
class Evaluation:
    """A folder of predictions.

    Example:
        samples = fs.read_samples("twin:reading-1", limit=2)
        evaluation = fs.evaluate(fs.load("twin:mdm"), samples, "runs/eval", new_tokens=4)
        evaluation.table[["sample", "acc", "prediction"]]
    """

    path: Path
    run: Run
    table: pd.DataFrame  # a row per answered sample

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the evaluation."""
        return self.run.settings

    @property
    def missing(self) -> int:
        """The number of samples that are not answered."""
        return len(self.run.samples) - len(self.table)


def open_evaluation(path: str | Path) -> Evaluation:
    """Read the folder of an evaluation.

    Args:
        path: the folder.

    Returns:
        The evaluation: `table` has a row per sample.

    Example:
        samples = fs.read_samples("twin:reading-1", limit=2)
        evaluation = fs.evaluate(fs.load("twin:mdm"), samples, "runs/eval", new_tokens=4)
        fs.open_evaluation("runs/eval").table["acc"].mean()
    """
    evaluation = open_predictions(path)
    if evaluation.settings["kind"] == LIKELIHOODS:
        raise UserError(f"{path} has only the likelihoods of answers, no scores; `floatscope eval` computes scores")
    return evaluation


def open_predictions(path: str | Path) -> Evaluation:
    """Read the folder of an evaluation, or of likelihoods only."""
    run = open_run(path)
    if run.settings.get("kind") not in (EVALUATION, LIKELIHOODS):
        raise UserError(f"{path} is a run of traces, not of scores; `floatscope eval` computes scores")
    lines = read_predictions(Path(path))
    if not lines:
        raise UserError(f"{path} has no answer yet; run the same command again to resume it")
    if run.record["status"] == FINISHED and len(lines) < len(run.samples):
        raise UserError(
            f"{Path(path) / PREDICTIONS_FILE} has {len(lines)} of {len(run.samples)} answers, although all were"
            " written; run the same command again to answer the others"
        )
    if unknown := {line["id"] for line in lines}.difference(run.samples):
        raise _damaged(Path(path), f"'{min(unknown)}' is not a sample of the run")
    table = pd.DataFrame([_flatten(line) for line in lines]).rename(columns={"id": "sample"})
    table = table.astype({name: float for name in FLOAT_COLUMNS if name in table})
    return Evaluation(Path(path), run, table)


class PredictionNote(Record):
    """The type of a note about the edits of a batch."""

    edit: str
    problem: Problem
    count: int
    total: int


class Prediction(Record):
    """The type of a line of the predictions."""

    id: str
    prediction: str = ""
    answers: Sequence[str] = ()
    acc: float = 0.0
    em: float = 0.0
    f1: float = 0.0
    abstained: bool = False
    unanswerable: bool = False
    passages: int = 0
    tokens: int = 0
    attention: dict[str, float] = field(default_factory=dict)
    measures: dict[str, float | None] = field(default_factory=dict)
    notes: Sequence[PredictionNote] = ()


def read_predictions(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of the predictions; a line that a killed writer left unfinished is ignored."""
    file = path / PREDICTIONS_FILE
    try:
        complete, _, _ = file.read_bytes().rpartition(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    lines: dict[str, dict[str, Any]] = {}
    for number, text in enumerate(complete.split(b"\n") if complete else (), 1):
        try:
            line = parse_record(text, Prediction)
        except ValueError as error:
            raise _damaged(path, f"line {number}: {error}") from error
        if line["id"] in lines:
            raise _damaged(path, f"line {number} is a second one of '{line['id']}'")
        lines[line["id"]] = line
    return list(lines.values())


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(
        f"{path / PREDICTIONS_FILE} is damaged ({reason}); restore it from a copy, or delete it and run the same"
        " command again"
    )


def _flatten(line: Mapping[str, Any]) -> dict[str, Any]:
    """The prediction with the entries of `attention` and `measures` as columns of their own, without notes."""
    nested = ("attention", "measures")
    flat = {name: value for name, value in line.items() if name not in (*nested, "notes")}
    return flat | {name: value for part in nested for name, value in line.get(part, {}).items()}
