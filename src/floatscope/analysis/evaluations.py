"""TODO."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from floatscope.errors import UserError
from floatscope.traces import Run, open_run

PREDICTIONS = "predictions.jsonl"


EVALUATION = "evaluation"


LIKELIHOODS = "likelihoods"


@dataclass(frozen=True)
class Evaluation:
    """A folder of predictions, read."""

    path: Path
    run: Run
    table: pd.DataFrame  # a row per sample that is answered

    @property
    def settings(self) -> dict[str, Any]:
        return self.run.settings

    @property
    def missing(self) -> int:
        return len(self.run.samples) - len(self.table)


def open_evaluation(path: str | Path) -> Evaluation:
    results = open_predictions(path)
    if results.settings["what"] == LIKELIHOODS:
        raise UserError(f"{path} holds the likelihoods of answers alone, no scores; floatscope eval makes those")
    return results


def open_predictions(path: str | Path) -> Evaluation:
    """Of an evaluation, or of likelihoods alone."""
    run = open_run(path)
    if run.settings.get("what") not in (EVALUATION, LIKELIHOODS):
        raise UserError(f"{path} is a run of traces, not of scores; floatscope eval makes those")
    lines = read_predictions(Path(path))
    if not lines:
        raise UserError(f"{path} has no answer yet; the same command goes on with it")
    table = pd.DataFrame([_flat(line) for line in lines]).rename(columns={"id": "sample"})
    table = table.astype({name: float for name in MEASURES if name in table})  # null is NaN
    return Evaluation(Path(path), run, table)


def read_predictions(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole; what a killed writer left half done is not read."""
    file = path / PREDICTIONS
    if not file.exists():
        return []
    try:
        whole, _, _ = file.read_bytes().rpartition(b"\n")
        return [json.loads(line) for line in whole.splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}); delete it and evaluate again") from error


def _flat(line: Mapping[str, Any]) -> dict[str, Any]:
    parts = ("attention", "measures")
    own = {name: value for name, value in line.items() if name not in parts}
    return own | {name: value for part in parts for name, value in line.get(part, {}).items()}


MEASURES = ("nll", "order", "floating")
