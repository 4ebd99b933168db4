"""The pictures of the page, ARM and MDM on the same axes, by the report's own drawing.

for path, caption in drawn(Path("runs/pair"), Path("docs/pair")): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from runs import swept
from tables import CONTROL, read_table

from floatscope.analysis.estimate import estimate
from floatscope.analysis.retrieval import head_map
from floatscope.analysis.stress_tests import curve
from floatscope.reports.charts import Lines, Map, Series
from floatscope.reports.figures import draw

LABELS = {"arm": "ARM", "mdm": "MDM"}


def drawn(out: Path, to: Path) -> Iterator[tuple[Path, str]]:
    """Each picture's file, and what it shows."""
    to.mkdir(parents=True, exist_ok=True)
    if (out / "traces").exists():
        for name, table, only, value, title, unit, caption in BY_LAYER:
            chart = _by_layer(out, table, only, value, title, unit)
            draw(chart, to / f"{name}.png", models=list(LABELS.values()))
            yield to / f"{name}.png", caption
        yield from _heads(out, to)
    for kind, title, x, caption in SWEEPS:
        if all(swept(out / "stress" / kind / who) for who in LABELS):
            draw(_sweep(out / "stress" / kind, title, x), to / f"{kind}.png", models=list(LABELS.values()))
            yield to / f"{kind}.png", caption


BY_LAYER: list[tuple[str, str, dict[str, str], str, str, str, str]] = [
    (
        "first-token",
        "absorption",
        {"set": "first"},
        "percent",
        "What the first token absorbs",
        "attention (%)",
        "Percent of each layer's attention on the first token.",
    ),
    (
        "floating",
        "floating",
        {},
        "within",
        "Do anchors float over steps?",
        "steps off the usual top key",
        "Share of steps whose top key is not the usual one of that text and layer.",
    ),
    (
        "content",
        "structure",
        {"set": "content"},
        "ratio",
        "Where content is looked at",
        "attention on content / uniform",
        "Attention on content over what uniform attention would give it; structure is the rest.",
    ),
    (
        "gold",
        "answer_rows",
        {"region": "gold"},
        "ratio",
        "Where the gold passage is read",
        "attention on gold / uniform",
        "Attention of the rows that decide the answer on the gold passage, over its share.",
    ),
]
SWEEPS = [
    ("position", "Where the gold passage stands", "passages before the gold one", "Five passages, NQ."),
]


def _by_layer(out: Path, table: str, only: dict[str, str], value: str, title: str, unit: str) -> Lines:
    series = []
    for who, label in LABELS.items():
        for folder, name in ((out / "traces" / who, "trained"), (out / "traces" / who / CONTROL, "untrained")):
            rows = read_table(folder, table)
            for column, wanted in only.items():
                rows = rows[rows[column] == wanted]
            told = estimate(rows, value, by=["layer"]).sort_values("layer")
            y, low, high = (told[end].tolist() for end in ("mean", "low", "high"))
            layers = told["layer"].tolist()
            series.append(Series(name, label, y, low, high, control=folder.name == CONTROL, x=layers))
    return Lines(title, "layer", unit, x=list(range(max(len(s.y) for s in series))), series=series)


def _heads(out: Path, to: Path) -> Iterator[tuple[Path, str]]:
    """Layers down, heads across: a map for each model, on one scale."""
    maps = {who: head_map(read_table(out / "traces" / who, "retrieval")) for who in LABELS}
    most = max(0.1, *(float(each.max(axis=None)) for each in maps.values()))
    for who, scores in maps.items():
        path = to / f"heads-{who}.png"
        draw(_map(scores, f"Heads of the {LABELS[who]} that copy evidence", LABELS[who], most), path)
        yield path, f"Copy score of each head of the {LABELS[who]}: share of the evidence's tokens that it copied."


def _map(scores: pd.DataFrame, title: str, label: str, most: float) -> Map:
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
        bounds=(0.0, most),
    )


def _sweep(folder: Path, title: str, x: str) -> Lines:
    series = []
    for who, label in LABELS.items():
        some = curve([folder / who])
        some = some[some["value"].notna()].sort_values("value")
        y, low, high = ((100 * some[end]).tolist() for end in ("acc", "low", "high"))
        series.append(Series("trained", label, y, low, high, x=some["value"].tolist()))
    return Lines(title, x, "right answers (%)", x=series[0].x or [], series=series)
