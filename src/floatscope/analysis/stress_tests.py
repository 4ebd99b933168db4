"""Stress tests: accuracy and attention on gold as the prompts change, one point at a time.

    table = stress_curve([Path("runs/position/arm"), Path("runs/position/mdm")])   # a row per model and point
    position_gap(table)                                                            # best, worst, gap and dip per model

A folder holds `stress.json`, which lists the points, and an evaluation per point. `floatscope stress` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from msgspec import Meta

from floatscope.analysis.evaluations import open_evaluation
from floatscope.analysis.statistics import difference, estimate
from floatscope.errors import UserError
from floatscope.files.records import Record, read_record
from floatscope.traces.upgrade import upgrade_stress

STRESS_FILE = "stress.json"


class StressPoint(Record):
    """The type of a point in stress.json."""

    name: str
    value: float | None
    series: str
    folder: str
    note: str = ""


class StressRecord(Record):
    """The type of stress.json."""

    kind: str
    model: str
    points: Annotated[list[StressPoint], Meta(min_length=1)]
    notes: Sequence[str] = ()


def read_stress(path: Path) -> dict[str, Any]:
    """Return the contents of `stress.json`: model, kind, notes and points, each point with its `folder`."""
    try:
        return read_record(path / STRESS_FILE, StressRecord, "run the stress test again", upgrade_stress)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{path} is not a stress test; `floatscope stress` writes one") from error


def stress_curve(paths: Sequence[Path]) -> pd.DataFrame:
    """Return the scores and the attention at every point: a row per model and point.

    `acc` with its 95 % interval (`low`, `high`), `change` the paired difference from the model's first point (exactly 0
    there), `f1`; the lift of gold and of other passages in the predicting rows (`gold_lift`, `other_lift`), and that of
    gold for right and for wrong answers (`gold_right`, `gold_wrong`).
    """
    rows = []
    for path in paths:
        record = read_stress(path)
        first: pd.DataFrame | None = None
        for point in record["points"]:
            table = open_evaluation(path / point["folder"]).table
            first = table if first is None else first
            scores, lifts = _score_columns(table, first), _lift_columns(table)
            rows.append({"model": record["model"], **point, "n": len(table), **scores, **lifts})
    return pd.DataFrame(rows)


def position_gap(table: pd.DataFrame) -> pd.DataFrame:
    """Return the spread of acc over the points with a value: a row per model and series of a `stress_curve`.

    `best`, `worst`, their `gap`, and the middle `dip`: the mean of the two ends minus the smallest acc between them.
    """
    rows = []
    for (model, series), points in table[table["value"].notna()].groupby(["model", "series"], sort=False):
        accs = points.sort_values("value")["acc"].to_numpy()
        dip = (accs[0] + accs[-1]) / 2 - accs[1:-1].min() if len(accs) > 2 else float("nan")
        rows.append((model, series, accs.max(), accs.min(), accs.max() - accs.min(), dip))
    return pd.DataFrame(rows, columns=["model", "series", "best", "worst", "gap", "dip"])


def _score_columns(table: pd.DataFrame, first: pd.DataFrame) -> dict[str, float]:
    acc = estimate(table, "acc").iloc[0]
    change = dict.fromkeys(("mean", "low", "high"), 0.0) if table is first else difference(table, first, "acc").iloc[0]
    return {
        "acc": acc["mean"],
        "low": acc["low"],
        "high": acc["high"],
        "change": change["mean"],
        "change_low": change["low"],
        "change_high": change["high"],
        "f1": float(table["f1"].mean()),
    }


def _lift_columns(table: pd.DataFrame) -> dict[str, float]:
    """The lift of gold and of other passages, and of gold for right and for wrong answers."""
    if "gold_mass" not in table:
        return {}
    table = table.assign(
        gold=(table["gold_mass"] / table["gold_share"]).where(table["gold_share"] > 0),
        other=(table["other_mass"] / table["other_share"]).where(table["other_share"] > 0),
    )
    columns: dict[str, float] = {}
    for name in ("gold", "other"):
        lift = estimate(table, name).iloc[0]
        columns |= {f"{name}_lift": lift["mean"], f"{name}_low": lift["low"], f"{name}_high": lift["high"]}
    is_right = table["acc"] > 0
    return columns | {
        "gold_right": table.loc[is_right, "gold"].mean(),
        "gold_wrong": table.loc[~is_right, "gold"].mean(),
    }
