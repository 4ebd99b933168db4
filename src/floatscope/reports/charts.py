"""The contents of a report as plain values: numbers and text, no drawing. The page and the figures both draw them.

    absorption = Lines(
        "Attention on the top key", "layer", "received (%)", x=[0, 1, 2],
        series=[
            Series("trained", "mdm", [4.0, 9.5, 7.1], low=[3.1, 8.8, 6.0], high=[4.9, 10.3, 8.2]),
            Series("untrained", "mdm", [1.2, 1.3, 1.2], control=True),
        ],
        reference=0.8, reference_label="uniform",
    )
    section = Section("absorption", "How much one key absorbs", "What it shows.", "How it was computed.", [absorption])
    data = to_json(Report("A report", ["It floats."], [Model("mdm", "mdm", 32)], [section]))
    from_json(data)                          # the same report

The place of a model in `Report.models` determines its colour. A value that was not measured is None; `to_json` turns
NaN and infinity into None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from floatscope.schema import Paradigm

Number = float | int | None
Axis = list[float] | list[int] | list[str]
Mark = tuple[int, int, str]

MARKS = ("top", "anchor", "commit")
"""Kinds of marks on a map: `top` is a triangle, joined from row to row; `anchor` a frame; `commit` a dot."""


@dataclass(frozen=True)
class Series:
    """Values of one run with their 95 % intervals. `model` is the run's label; a control has its model's colour."""

    name: str
    model: str
    y: list[Number]
    low: list[Number] | None = None
    high: list[Number] | None = None
    control: bool = False
    x: list[float] | list[int] | None = None

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ValueError(
                f"series '{self.name}' of {self.model} has one end of its interval; give both ends or neither"
            )
        for name in ("low", "high", "x"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.y):
                raise ValueError(f"series '{self.name}' has {len(self.y)} values and {len(values)} in `{name}`")


@dataclass(frozen=True)
class Lines:
    """Values along an axis (layers, steps, a threshold). A series may have its own `x`."""

    title: str
    x_label: str
    y_label: str
    x: Axis
    series: list[Series]
    reference: float | int | list[Number] | None = None
    reference_label: str = ""
    log: bool = False

    def __post_init__(self) -> None:
        for series in self.series:
            if series.x is None and len(series.y) != len(self.x):
                raise ValueError(f"'{self.title}': series '{series.name}' has {len(series.y)} of {len(self.x)} values")
        if isinstance(self.reference, list) and len(self.reference) != len(self.x):
            raise ValueError(f"'{self.title}': the reference has {len(self.reference)} of {len(self.x)} values")


@dataclass(frozen=True)
class Map:
    """A value for every row and column: steps × keys, layers × heads. Row 0 is at the top.

    `bounds` fixes the ends of the colour scale, so that readers can compare maps side by side.
    """

    title: str
    x_label: str
    y_label: str
    values: list[list[Number]]
    x: Axis
    y: Axis
    marks: list[Mark] = field(default_factory=list)
    unit: str = ""
    model: str = ""
    log: bool = False
    bounds: tuple[float | int, float | int] | None = None

    def __post_init__(self) -> None:
        if len(self.values) != len(self.y) or any(len(row) != len(self.x) for row in self.values):
            raise ValueError(f"'{self.title}': the values are not {len(self.y)} rows of {len(self.x)}")
        for row, column, kind in self.marks:
            if kind not in MARKS or not (0 <= row < len(self.y) and 0 <= column < len(self.x)):
                raise ValueError(f"'{self.title}': cannot place a mark '{kind}' at row {row}, column {column}")


@dataclass(frozen=True)
class Dots:
    """A value with its interval for each category and model, drawn horizontally."""

    title: str
    categories: list[str]
    x_label: str
    series: list[Series]
    reference: float | int | None = None
    reference_label: str = ""
    log: bool = False

    def __post_init__(self) -> None:
        for series in self.series:
            if len(series.y) != len(self.categories):
                raise ValueError(
                    f"'{self.title}': series '{series.name}' has {len(series.y)} values for"
                    f" {len(self.categories)} categories"
                )


Cell = str | float | int | None


@dataclass(frozen=True)
class Table:
    """A small table of numbers and words."""

    columns: list[str]
    rows: list[list[Cell]]
    title: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table '{self.title}': a row has {len(row)} cells for {len(self.columns)} columns")


Chart = Lines | Map | Dots | Table
KINDS: dict[str, type[Chart]] = {"lines": Lines, "map": Map, "dots": Dots, "table": Table}


@dataclass(frozen=True)
class Section:
    """One question and the charts that answer it. `**words**` in the texts are bold.

    `text` says what the charts show, `method` how they were computed (detector, scale, n, interval). An empty line ends
    a paragraph. `table_file` is the file with the numbers, relative to the page; the page links it if the file exists.
    """

    id: str
    title: str
    text: str
    method: str
    charts: list[Chart] = field(default_factory=list)
    table_file: str | None = None


@dataclass(frozen=True)
class Model:
    """A run in the report: its label, its paradigm (`mdm` or `arm`), the number of samples, a sentence, more facts."""

    label: str
    paradigm: Paradigm
    n: int
    about: str = ""
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The contents of one page.

    `explorer` holds the payloads of `explorer.build_payload`, `provenance` the settings and versions, in groups.
    """

    title: str
    summary: list[str]
    models: list[Model]
    sections: list[Section]
    explorer: list[dict[str, Any]] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> list[str]:
        """The labels of the models, in the order of their colours."""
        return [model.label for model in self.models]


def chart_to_json(chart: Chart) -> dict[str, Any]:
    """A chart as JSON data, with its kind under `kind`."""
    kind = next(kind for kind, cls in KINDS.items() if isinstance(chart, cls))
    data: dict[str, Any] = _to_plain({"kind": kind, **asdict(chart)})
    return data


def to_json(report: Report) -> dict[str, Any]:
    """A report as JSON data: dicts, lists, strings and finite numbers."""
    data: dict[str, Any] = _to_plain(asdict(report))
    for section_data, section in zip(data["sections"], report.sections, strict=True):
        section_data["charts"] = [chart_to_json(chart) for chart in section.charts]
    return data


def from_json(data: Mapping[str, Any]) -> Report:
    """The inverse of `to_json`."""
    sections = [Section(**{**s, "charts": [_chart_from_json(c) for c in s["charts"]]}) for s in data["sections"]]
    models = [Model(**{**model, "paradigm": Paradigm(model["paradigm"])}) for model in data["models"]]
    return Report(**{**data, "models": models, "sections": sections})


def _chart_from_json(data: Mapping[str, Any]) -> Chart:
    fields = {name: value for name, value in data.items() if name != "kind"}
    if "series" in fields:
        fields["series"] = [Series(**s) for s in fields["series"]]
    if "marks" in fields:
        fields["marks"] = [tuple(mark) for mark in fields["marks"]]
        fields["bounds"] = None if fields["bounds"] is None else tuple(fields["bounds"])
    return KINDS[data["kind"]](**fields)


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _to_plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_to_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
