"""Experiments: the effects of interventions, compared with the baseline and with control conditions.

    effects([Path("runs/sinks/arm"), Path("runs/sinks/mdm")])    # a row per model, subset and condition

A folder holds `experiment.json`, which lists the conditions, and an evaluation per subset of samples and condition.
`floatscope intervene` and `floatscope study` write it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from msgspec import Meta

from floatscope.analysis.evaluations import open_predictions
from floatscope.analysis.statistics import difference, estimate
from floatscope.errors import UserError
from floatscope.files.records import Record, read_record
from floatscope.traces.upgrade import upgrade_experiment

EXPERIMENT_FILE = "experiment.json"
MEASURES = ("acc", "f1", "nll", "order", "moved")
DOSE = "dose"
MASS, COUNT = "mass", "random"
"""What a control matches: the attention that is moved, or the number of keys or heads."""


class ExperimentCondition(Record):
    """The type of a condition in experiment.json."""

    name: str
    edits: list[str]
    control_of: str
    value: float | None
    series: str
    subset: str = ""
    control: str = COUNT


class ExperimentRecord(Record):
    """The type of experiment.json."""

    model: str
    title: str
    conditions: Annotated[list[ExperimentCondition], Meta(min_length=1)]
    notes: Sequence[str] = ()


def read_experiment(path: Path) -> dict[str, Any]:
    """Return the contents of `experiment.json`: model, title, notes and conditions."""
    try:
        return read_record(path / EXPERIMENT_FILE, ExperimentRecord, "run the experiment again", upgrade_experiment)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{path} is not an experiment; `floatscope intervene` writes one") from error


def effects(paths: Sequence[Path]) -> pd.DataFrame:
    """Return the measures of every condition: a row per model, subset and condition. The first one is the baseline.

    Each of acc, f1, nll, order and moved has the columns

    …                the mean, and `…_low`, `…_high`, its 95 % interval over samples
    …_change         the condition minus the baseline, sample by sample
    …_control        the mean over the controls of the condition: those that move as much attention, or if there are
                     none, all controls
    …_effect         the condition minus that mean, sample by sample: what the edit does and a random edit does not
    …_control_count  the mean over the controls that act on as many keys or heads
    …_effect_count   the condition minus that mean

    `dose` is the share of the attention that the condition moves, `dose_control` and `dose_control_count` that of these
    controls. The dose is 0 at baseline, and NaN if it is not defined or an earlier version ran the experiment.
    `control` says what a control matches (`mass`, `random`: the number of keys or heads, `middle`), and for another
    condition what the controls of `…_effect` match.
    """
    rows = []
    for path in paths:
        record = read_experiment(path)
        for subset in dict.fromkeys(condition["subset"] for condition in record["conditions"]):
            conditions = [condition for condition in record["conditions"] if condition["subset"] == subset]
            tables = {name: _read_predictions(path / subset / name) for name in (c["name"] for c in conditions)}
            baseline = tables[conditions[0]["name"]]
            for condition in conditions:
                controls = [other for other in conditions if other["control_of"] == condition["name"]]
                kinds = [_control_kind(control) for control in controls or [condition]]
                by_kind = _group_controls(controls, tables)
                rows.append(
                    {
                        "model": record["model"],
                        "subset": subset,
                        "condition": condition["name"],
                        "edits": "; ".join(condition["edits"]),
                        **{name: condition[name] for name in ("control_of", "value", "series")},
                        "control": MASS if MASS in kinds else kinds[0],
                        **_measure_columns(tables[condition["name"]], baseline, by_kind),
                    }
                )
    return pd.DataFrame(rows)


def matched_controls(record: Mapping[str, Any], condition: str, subset: str = "") -> list[str]:
    """Return the names of the controls of a condition that move as much attention, from `read_experiment`.

    Where there are none, as for heads, these are its other controls.
    """
    controls = [c for c in record["conditions"] if c["control_of"] == condition and c["subset"] == subset]
    by_mass = [control["name"] for control in controls if _control_kind(control) == MASS]
    return by_mass or [control["name"] for control in controls]


def _read_predictions(path: Path) -> pd.DataFrame:
    table = open_predictions(path).table
    return table if "dose" in table else table.assign(dose=math.nan)


def _group_controls(
    controls: Sequence[Mapping[str, Any]], tables: Mapping[str, pd.DataFrame]
) -> dict[str, list[pd.DataFrame]]:
    """The controls of a condition by the suffix of their columns: the main ones, and those of equal count."""
    by_kind = {kind: [tables[c["name"]] for c in controls if _control_kind(c) == kind] for kind in (MASS, COUNT)}
    return {"": by_kind[MASS] or [tables[control["name"]] for control in controls], "_count": by_kind[COUNT]}


def _control_kind(condition: Mapping[str, Any]) -> str:
    """What a control matches; controls of earlier versions do not say it, and match the number. "" if it is none."""
    return str(condition.get("control", COUNT)) if condition["control_of"] else ""


def _measure_columns(
    own: pd.DataFrame, baseline: pd.DataFrame, controls: Mapping[str, list[pd.DataFrame]]
) -> dict[str, float | int]:
    columns: dict[str, float | int] = {"n": len(own), DOSE: float(own[DOSE].mean())}
    for suffix, tables in controls.items():
        if tables:
            columns[f"{DOSE}_control{suffix}"] = float(pd.concat(tables)[DOSE].mean())
    for name in (name for name in MEASURES if name in own):
        columns |= _interval_columns(name, estimate(own, name))
        if own is not baseline:
            columns |= _interval_columns(f"{name}_change", difference(own, baseline, name))
        for suffix, tables in controls.items():
            if tables:
                columns |= _interval_columns(f"{name}_control{suffix}", estimate(tables, name))
                columns |= _interval_columns(f"{name}_effect{suffix}", difference(own, tables, name))
    return columns


def _interval_columns(name: str, table: pd.DataFrame) -> dict[str, float]:
    row = table.iloc[0]
    return {name: row["mean"], f"{name}_low": row["low"], f"{name}_high": row["high"]}
