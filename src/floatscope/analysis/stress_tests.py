"""TODO."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from floatscope.analysis.estimate import difference, estimate
from floatscope.analysis.evaluations import open_evaluation
from floatscope.errors import UserError

STRESS = "stress.json"


def read_stress(path: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads((path / STRESS).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} holds no stress test; floatscope stress makes one") from error
    return told


def curve(paths: Sequence[Path]) -> pd.DataFrame:
    """A row per model and point: acc with its interval and its paired difference from the model's first point, and how
    much the rows that decide the answer give to gold and to other passages, over their share of the canvas."""
    rows = []
    for path in paths:
        told = read_stress(path)
        first: pd.DataFrame | None = None
        for point in told["points"]:
            table = open_evaluation(path / point["asked"]).table
            first = table if first is None else first
            rows.append({"model": told["model"], **point, "n": len(table), **_scores(table, first), **_looks(table)})
    return pd.DataFrame(rows)


def gap(table: pd.DataFrame) -> pd.DataFrame:
    """Of each model over its points that have a place on the axis: best, worst, their gap, and the middle dip: the mean
    of the two ends less the least between them."""
    rows = []
    for (model, series), some in table[table["value"].notna()].groupby(["model", "series"], sort=False):
        accs = some.sort_values("value")["acc"].to_numpy()
        dip = (accs[0] + accs[-1]) / 2 - accs[1:-1].min() if len(accs) > 2 else float("nan")
        rows.append((model, series, accs.max(), accs.min(), accs.max() - accs.min(), dip))
    return pd.DataFrame(rows, columns=["model", "series", "best", "worst", "gap", "dip"])


def _scores(table: pd.DataFrame, first: pd.DataFrame) -> dict[str, float]:
    acc, apart = estimate(table, "acc").iloc[0], difference(table, first, "acc").iloc[0]
    return {
        "acc": acc["mean"],
        "low": acc["low"],
        "high": acc["high"],
        "change": apart["mean"],
        "change_low": apart["low"],
        "change_high": apart["high"],
        "f1": float(table["f1"].mean()),
    }


def _looks(table: pd.DataFrame) -> dict[str, float]:
    """Lift of gold and of the others, and of gold where the answer was right and where it was wrong."""
    if "gold_mass" not in table:
        return {}
    table = table.assign(
        gold=(table["gold_mass"] / table["gold_share"]).where(table["gold_share"] > 0),
        other=(table["other_mass"] / table["other_share"]).where(table["other_share"] > 0),
    )
    found: dict[str, float] = {}
    for name in ("gold", "other"):
        told = estimate(table, name).iloc[0]
        found |= {f"{name}_lift": told["mean"], f"{name}_low": told["low"], f"{name}_high": told["high"]}
    right = table["acc"] > 0
    return found | {"gold_right": table.loc[right, "gold"].mean(), "gold_wrong": table.loc[~right, "gold"].mean()}
