"""Experiments: the effects of interventions, compared with the baseline and with control conditions.

    effects([Path("runs/sinks/arm"), Path("runs/sinks/mdm")])    # a row per model, subset and condition

A folder holds `experiment.json`, which lists the conditions, and an evaluation per subset of samples and condition.
`floatscope intervene` and `floatscope study` write it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from floatscope.analysis.evaluations import open_predictions
from floatscope.analysis.statistics import difference, estimate
from floatscope.errors import UserError
from floatscope.traces.upgrade import upgrade_experiment

EXPERIMENT_FILE = "experiment.json"
MEASURES = ("acc", "f1", "nll", "order", "floating")


def read_experiment(path: Path) -> dict[str, Any]:
    """Return the contents of `experiment.json`: model, title, notes and conditions."""
    try:
        return upgrade_experiment(json.loads((path / EXPERIMENT_FILE).read_text()))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} is not an experiment; `floatscope intervene` writes one") from error


def effects(paths: Sequence[Path]) -> pd.DataFrame:
    """Return the measures of every condition: a row per model, subset and condition. The first one is the baseline.

    Each of acc, f1, nll, order and floating has the columns

    …          the mean, and `…_low`, `…_high`, its 95 % interval over samples
    …_change   the condition minus the baseline, sample by sample
    …_control  the mean over the controls of the condition
    …_effect   the condition minus that mean, sample by sample: what the edit does and a random edit does not
    """
    rows = []
    for path in paths:
        record = read_experiment(path)
        for subset in dict.fromkeys(condition["subset"] for condition in record["conditions"]):
            conditions = [condition for condition in record["conditions"] if condition["subset"] == subset]
            tables = {name: open_predictions(path / subset / name).table for name in (c["name"] for c in conditions)}
            baseline = tables[conditions[0]["name"]]
            for condition in conditions:
                controls = [tables[other["name"]] for other in conditions if other["control_of"] == condition["name"]]
                rows.append(
                    {
                        "model": record["model"],
                        "subset": subset,
                        "condition": condition["name"],
                        "edits": "; ".join(condition["edits"]),
                        **{name: condition[name] for name in ("control_of", "value", "series")},
                        **_measure_columns(tables[condition["name"]], baseline, controls),
                    }
                )
    return pd.DataFrame(rows)


def _measure_columns(own: pd.DataFrame, baseline: pd.DataFrame, controls: list[pd.DataFrame]) -> dict[str, float | int]:
    columns: dict[str, float | int] = {"n": len(own)}
    for name in (name for name in MEASURES if name in own):
        columns |= _interval_columns(name, estimate(own, name))
        if own is not baseline:
            columns |= _interval_columns(f"{name}_change", difference(own, baseline, name))
        if controls:
            columns |= _interval_columns(f"{name}_control", estimate(controls, name))
            columns |= _interval_columns(f"{name}_effect", difference(own, controls, name))
    return columns


def _interval_columns(name: str, table: pd.DataFrame) -> dict[str, float]:
    row = table.iloc[0]
    return {name: row["mean"], f"{name}_low": row["low"], f"{name}_high": row["high"]}
