"""Runs as Markdown tables: stress sweeps, studies.

sweep_table([Path("runs/position/arm"), Path("runs/position/mdm")])      # a row per point of the sweep
effect_table(effects([Path("runs/sinks/arm")]))                          # a row per edited condition
markdown_table([["model", "acc"], ["arm", "31.0"]])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from floatscope.analysis.stress_tests import position_gap, stress_curve

VALUES = {"acc": ("acc", 100.0, 1), "nll": ("NLL", 1.0, 2), "moved": ("moved, %", 100.0, 2)}
"""Column of the effects → title, scale, digits."""
DOSES = {"dose": "dose, %", "dose_control": "dose of the control, %"}


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose first row is the header."""
    header, *others = rows
    return "".join("| " + " | ".join(row) + " |\n" for row in (header, ["---"] * len(header), *others))


def sweep_table(folders: Sequence[Path]) -> str:
    """Return the points of a sweep, with a column of scores and of attention on gold for each model."""
    table = stress_curve(folders)
    names, models = list(dict.fromkeys(table["name"])), list(dict.fromkeys(table["model"]))
    lines = [["point", *models, *(f"gold, {model}" for model in models)]]
    for name in names:
        rows = {row.model: row for row in table[table["name"] == name].itertuples()}
        scores = [_format_score(rows.get(model)) for model in models]
        lines.append([name, *scores, *(_format_lift(rows.get(model)) for model in models)])
    ranges = [r for r in position_gap(table).itertuples() if r.best > r.worst]
    parts = [f"{r.model}{f' ({r.series})' if r.series else ''} {100 * r.gap:.1f}" for r in ranges]
    return markdown_table(lines) + (f"\nBest minus worst point: {', '.join(parts)}.\n" if parts else "")


def _format_score(row: Any) -> str:
    return "–" if row is None else f"{100 * row.acc:.1f} [{100 * row.low:.1f}, {100 * row.high:.1f}]"


def _format_lift(row: Any) -> str:
    value = float("nan") if row is None else getattr(row, "gold_lift", float("nan"))
    return "–" if value != value else f"{value:.2f}"


def effect_table(table: pd.DataFrame) -> str:
    """Return a row for the baseline and for every edited condition; the controls are part of the effects."""
    edited = table[(table["control_of"] == "")]
    names = [name for name in VALUES if name in table]
    has_subsets = table["subset"].nunique() > 1
    doses = [name for name in ("dose", "dose_control") if name in table and table[name].notna().any()]
    header = ["model", *(["subset"] if has_subsets else []), "condition"]
    header += [*(DOSES[name] for name in doses), *(VALUES[name][0] for name in names)]
    lines = [[*header, *(f"effect, {VALUES[name][0]}" for name in names)]]
    for _, row in edited.iterrows():
        cells = [row["model"], *([row["subset"]] if has_subsets else []), row["condition"]]
        cells += [_format_dose(row[name]) for name in doses]
        cells += [_format_mean(row, name) for name in names]
        lines.append([*cells, *(_format_interval(row, f"{name}_effect", name) for name in names)])
    return markdown_table(lines)


def head_table(table: pd.DataFrame) -> str:
    """Return, for each model, the five heads whose zeroing costs most."""
    lines = [["model", "head", "NLL without the head − with it"]]
    for model, rows in table[table["value"].notna()].groupby("model", sort=False):
        for _, row in rows.sort_values("nll_change", ascending=False).head(5).iterrows():
            lines.append([str(model), row["condition"], _format_interval(row, "nll_change", "nll")])
    return markdown_table(lines)


def _format_dose(value: float) -> str:
    return "–" if value != value else f"{100 * value:.1f}"


def _format_mean(row: pd.Series, name: str) -> str:
    _, scale, digits = VALUES[name]
    return "–" if row[name] != row[name] else f"{scale * row[name]:.{digits}f}"


def _format_interval(row: pd.Series, column: str, name: str) -> str:
    _, scale, digits = VALUES[name]
    if column not in row or row[column] != row[column]:
        return "–"
    mean, low, high = (scale * row[c] for c in (column, f"{column}_low", f"{column}_high"))
    return f"{mean:+.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
