"""Runs as Markdown: sweeps, studies, tables.

points([Path("runs/position/arm"), Path("runs/position/mdm")])      # a line per point of the sweep
rows(effects([Path("runs/sinks/arm")]))                             # a line per edited arm
markdown([["model", "acc"], ["arm", "31.0"]])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from floatscope.analysis.stress_tests import curve, gap

COLUMNS = {"acc": ("acc", 100.0, 1), "nll": ("NLL", 1.0, 2), "floating": ("floating", 1.0, 2)}


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table, its first row the head."""
    head, *others = rows
    return "".join("| " + " | ".join(row) + " |\n" for row in (head, ["---"] * len(head), *others))


def points(folders: Sequence[Path]) -> str:
    """The points of a sweep, a column of scores and of attention on gold for each model."""
    table = curve(folders)
    names, models = list(dict.fromkeys(table["name"])), list(dict.fromkeys(table["model"]))
    heads = ["point", *models, *(f"gold, {model}" for model in models)]
    lines = [heads]
    for name in names:
        rows = {row.model: row for row in table[table["name"] == name].itertuples()}
        scores = [_score(rows.get(model)) for model in models]
        lines.append([name, *scores, *(_lift(rows.get(model)) for model in models)])
    text = markdown(lines)
    swept = [r for r in gap(table).itertuples() if r.best > r.worst]
    worst = [f"{r.model}{f' ({r.series})' if r.series else ''} {100 * r.gap:.1f}" for r in swept]
    return text + (f"\nBest less worst: {', '.join(worst)}.\n" if worst else "")


def _score(row: Any) -> str:
    return "–" if row is None else f"{100 * row.acc:.1f} [{100 * row.low:.1f}, {100 * row.high:.1f}]"


def _lift(row: Any) -> str:
    value = float("nan") if row is None else getattr(row, "gold_lift", float("nan"))
    return "–" if value != value else f"{value:.2f}"


def rows(table: pd.DataFrame) -> str:
    """A line for the baseline and for every edited arm; the controls are in the effects."""
    shown = table[(table["control_of"] == "")]
    some = [name for name in COLUMNS if name in table]
    several = table["condition"].nunique() > 1
    heads = ["model", *(["condition"] if several else []), "arm", *(COLUMNS[name][0] for name in some)]
    heads += [f"effect, {COLUMNS[name][0]}" for name in some]
    lines = [heads]
    for _, row in shown.iterrows():
        cells = [row["model"], *([row["condition"]] if several else []), row["arm"]]
        cells += [_plain(row, name) for name in some] + [_interval(row, f"{name}_effect", name) for name in some]
        lines.append(cells)
    return markdown(lines)


def heads(table: pd.DataFrame) -> str:
    """The five heads of each model whose silence costs most."""
    lines = [["model", "head", "NLL without it, less with it"]]
    for model, some in table[table["value"].notna()].groupby("model", sort=False):
        for _, row in some.sort_values("nll_change", ascending=False).head(5).iterrows():
            lines.append([str(model), row["arm"], _interval(row, "nll_change", "nll")])
    return markdown(lines)


def _plain(row: pd.Series, name: str) -> str:
    _, scale, digits = COLUMNS[name]
    return "–" if row[name] != row[name] else f"{scale * row[name]:.{digits}f}"


def _interval(row: pd.Series, column: str, name: str) -> str:
    _, scale, digits = COLUMNS[name]
    if column not in row or row[column] != row[column]:
        return "–"
    mean, low, high = (scale * row[c] for c in (column, f"{column}_low", f"{column}_high"))
    return f"{mean:+.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
