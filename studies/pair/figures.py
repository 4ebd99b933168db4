"""The figures of the page: ARM and MDM on the same axes, drawn with the report's charts.

for path, caption in draw_figures(Path("runs/pair"), Path("docs/pair")): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from runs import is_sweep_finished
from trace_tables import CONTROL, read_table

from floatscope.analysis.retrieval_heads import head_map
from floatscope.analysis.statistics import estimate
from floatscope.analysis.stress_tests import stress_curve
from floatscope.reports.charts import Lines, Map, Series
from floatscope.reports.figures import draw

LABELS = {"arm": "ARM", "mdm": "MDM"}


def draw_figures(out: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    """Draw the figures into `folder`; yield each file and its caption."""
    folder.mkdir(parents=True, exist_ok=True)
    if (out / "traces").exists():
        for name, table, only, value, title, unit, caption in BY_LAYER:
            chart = _layer_chart(out, table, only, value, title, unit)
            draw(chart, folder / f"{name}.png", models=list(LABELS.values()))
            yield folder / f"{name}.png", caption
        yield from _draw_head_maps(out, folder)
    for kind, title, x, caption in SWEEPS:
        if all(is_sweep_finished(out / "stress" / kind / paradigm) for paradigm in LABELS):
            draw(_sweep_chart(out / "stress" / kind, title, x), folder / f"{kind}.png", models=list(LABELS.values()))
            yield folder / f"{kind}.png", caption


BY_LAYER: list[tuple[str, str, dict[str, str], str, str, str, str]] = [
    (
        "first-token",
        "absorption",
        {"set": "first"},
        "percent",
        "Attention on the first token",
        "attention (%)",
        "Attention on the first token, in percent of each layer's attention.",
    ),
    (
        "floating",
        "floating",
        {},
        "within",
        "Floating over steps",
        "steps off the most frequent top key",
        "Share of steps whose top key is not the most frequent one of that text and layer.",
    ),
    (
        "content",
        "structure",
        {"set": "content"},
        "ratio",
        "Attention on content",
        "attention on content / uniform",
        "Attention on content relative to uniform attention; structure is the rest.",
    ),
    (
        "gold",
        "predicting_rows",
        {"region": "gold"},
        "ratio",
        "Attention on the gold passage",
        "attention on gold / uniform",
        "Attention of the predicting rows on the gold passage, relative to its share.",
    ),
]
"""Name, table, rows, column, title, unit, caption."""

SWEEPS = [
    ("position", "Position of the gold passage", "passages before the gold one", "Five passages, NQ."),
]


def _layer_chart(out: Path, table: str, only: dict[str, str], value: str, title: str, unit: str) -> Lines:
    series = []
    for paradigm, label in LABELS.items():
        folder = out / "traces" / paradigm
        for source, name in ((folder, "trained"), (folder / CONTROL, "untrained")):
            rows = read_table(source, table)
            for column, selected in only.items():
                rows = rows[rows[column] == selected]
            by_layer = estimate(rows, value, by=["layer"]).sort_values("layer")
            y, low, high = (by_layer[bound].tolist() for bound in ("mean", "low", "high"))
            layers = by_layer["layer"].tolist()
            series.append(Series(name, label, y, low, high, control=source.name == CONTROL, x=layers))
    return Lines(title, "layer", unit, x=list(range(max(len(s.y) for s in series))), series=series)


def _draw_head_maps(out: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    """Draw a map of layers and heads for each model, on one colour scale."""
    maps = {paradigm: head_map(read_table(out / "traces" / paradigm, "retrieval")) for paradigm in LABELS}
    maximum = max(0.1, *(float(scores.max(axis=None)) for scores in maps.values()))
    for paradigm, scores in maps.items():
        path, label = folder / f"heads-{paradigm}.png", LABELS[paradigm]
        draw(_head_chart(scores, f"Heads of the {label} that copy evidence", label, maximum), path)
        yield path, f"Copy score of each head of the {label}: the share of evidence tokens that it copied."


def _head_chart(scores: pd.DataFrame, title: str, label: str, maximum: float) -> Map:
    values = [[float(value) for value in row] for row in scores.to_numpy()]
    return Map(
        title,
        "head",
        "layer",
        values,
        [int(head) for head in scores.columns],
        [int(layer) for layer in scores.index],
        unit="copy score",
        model=label,
        bounds=(0.0, maximum),
    )


def _sweep_chart(folder: Path, title: str, x: str) -> Lines:
    series = []
    for paradigm, label in LABELS.items():
        curve = stress_curve([folder / paradigm])
        curve = curve[curve["value"].notna()].sort_values("value")
        y, low, high = ((100 * curve[column]).tolist() for column in ("acc", "low", "high"))
        series.append(Series("trained", label, y, low, high, x=curve["value"].tolist()))
    return Lines(title, x, "accuracy (%)", x=series[0].x or [], series=series)
