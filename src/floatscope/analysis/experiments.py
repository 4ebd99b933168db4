"""TODO."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from floatscope.analysis.estimate import difference, estimate
from floatscope.analysis.evaluations import open_predictions
from floatscope.errors import UserError

EXPERIMENT = "experiment.json"


VALUES = ("acc", "f1", "nll", "order", "floating")


def read_experiment(path: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads((path / EXPERIMENT).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} holds no experiment; floatscope intervene makes one") from error
    return told


def effects(paths: Sequence[Path]) -> pd.DataFrame:
    """A row per model, condition and arm. Each of acc, f1, nll, order and floating comes with

    …          its mean, and `…_low`, `…_high`, its 95 % interval over samples
    …_change   the arm less the baseline, sample by sample
    …_control  the mean over the arm's controls
    …_effect   the arm less that mean, sample by sample: what the edit does that any such edit would not
    """
    rows = []
    for path in paths:
        told = read_experiment(path)
        for condition in dict.fromkeys(arm["condition"] for arm in told["arms"]):
            arms = [arm for arm in told["arms"] if arm["condition"] == condition]
            tables = {arm["name"]: open_predictions(path / condition / arm["name"]).table for arm in arms}
            baseline = tables[arms[0]["name"]]
            for arm in arms:
                own = tables[arm["name"]]
                controls = [tables[other["name"]] for other in arms if other["control_of"] == arm["name"]]
                row = {"model": told["model"], "condition": condition, "arm": arm["name"]}
                row |= {"edits": "; ".join(arm["edits"])} | {
                    name: arm[name] for name in ("control_of", "value", "series")
                }
                row["n"] = len(own)
                for value in (name for name in VALUES if name in own):
                    row |= _interval(value, estimate(own, value))
                    if own is not baseline:
                        row |= _interval(f"{value}_change", difference(own, baseline, value))
                    if controls:
                        row |= _interval(f"{value}_control", estimate(controls, value))
                        row |= _interval(f"{value}_effect", difference(own, controls, value))
                rows.append(row)
    return pd.DataFrame(rows)


def _interval(name: str, told: pd.DataFrame) -> dict[str, float]:
    row = told.iloc[0]
    return {name: row["mean"], f"{name}_low": row["low"], f"{name}_high": row["high"]}
