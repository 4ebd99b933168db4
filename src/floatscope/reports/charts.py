"""What a report holds, as plain values: numbers and words, no pictures. The page and the figures both draw from them.

    absorbed = Lines(
        "Attention on the top key", "layer", "received (%)", x=[0, 1, 2],
        series=[
            Series("trained", "mdm", [4.0, 9.5, 7.1], low=[3.1, 8.8, 6.0], high=[4.9, 10.3, 8.2]),
            Series("untrained", "mdm", [1.2, 1.3, 1.2], control=True),
        ],
        reference=0.8, reference_label="uniform",
    )
    section = Section("absorption", "How much one key absorbs", "What it shows.", "How it was computed.", [absorbed])
    told = to_json(Report("A report", ["It floats."], [Model("mdm", "mdm", 32)], [section]))
    from_json(told)                          # the same report

A colour belongs to a model, by its place in `Report.models`. A number that was not measured is None; NaN and infinity
become None on their way to JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Number = float | int | None
Axis = list[float] | list[int] | list[str]
Mark = tuple[int, int, str]

MARKS = ("top", "anchor", "commit")
"""Kinds of marks on a map: `top` is a triangle, joined from row to row; `anchor` a ring; `commit` a dot."""


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
            raise ValueError(f"series '{self.name}' of {self.model} has one end of its interval; give both or none")
        for what in ("low", "high", "x"):
            values = getattr(self, what)
            if values is not None and len(values) != len(self.y):
                raise ValueError(f"series '{self.name}' has {len(self.y)} values and {len(values)} in `{what}`")


@dataclass(frozen=True)
class Lines:
    """Values along an axis (layers, steps, a threshold); a series may have an `x` of its own."""

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

    `bounds` fixes the ends of the colour scale, so that maps side by side can be compared.
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
                raise ValueError(f"'{self.title}': there is no mark '{kind}' at row {row}, column {column}")


@dataclass(frozen=True)
class Dots:
    """A value with its interval for each category and model, laid out horizontally."""

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


@dataclass(frozen=True)
class Table:
    """A few numbers to be read, not seen."""

    columns: list[str]
    rows: list[list[str | float | int | None]]
    title: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table '{self.title}': a row has {len(row)} cells for {len(self.columns)} columns")


Chart = Lines | Map | Dots | Table
KINDS: dict[str, type[Chart]] = {"lines": Lines, "map": Map, "dots": Dots, "table": Table}


@dataclass(frozen=True)
class Section:
    """One question and what answers it. Sentences may hold **bold** words.

    `shows` says what is to be seen, `computed` how (detector, scale, n, interval); an empty line ends a paragraph.
    `table_name` is the file of the numbers behind it, relative to the page; it is linked if it is there.
    """

    id: str
    title: str
    shows: str
    computed: str
    charts: list[Chart] = field(default_factory=list)
    table_name: str | None = None


@dataclass(frozen=True)
class Model:
    """A run that is compared: its label, `mdm` or `arm`, how many samples, a sentence about it, further facts."""

    label: str
    family: str
    n: int
    about: str = ""
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The whole page. `explorer` holds what `explorer.payload` gave, `provenance` settings and versions, in groups."""

    title: str
    summary: list[str]
    models: list[Model]
    sections: list[Section]
    explorer: list[dict[str, Any]] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> list[str]:
        return [model.label for model in self.models]


def chart_json(chart: Chart) -> dict[str, Any]:
    kind = next(kind for kind, cls in KINDS.items() if isinstance(chart, cls))
    told: dict[str, Any] = _plain({"kind": kind, **asdict(chart)})
    return told


def to_json(report: Report) -> dict[str, Any]:
    """The report as JSON has it: dicts, lists, words, finite numbers."""
    told: dict[str, Any] = _plain(asdict(report))
    for section, given in zip(told["sections"], report.sections, strict=True):
        section["charts"] = [chart_json(chart) for chart in given.charts]
    return told


def from_json(told: Mapping[str, Any]) -> Report:
    """What `to_json` was given."""
    sections = [Section(**{**s, "charts": [_chart(c) for c in s["charts"]]}) for s in told["sections"]]
    return Report(**{**told, "models": [Model(**m) for m in told["models"]], "sections": sections})


def _chart(told: Mapping[str, Any]) -> Chart:
    given = {name: value for name, value in told.items() if name != "kind"}
    if "series" in given:
        given["series"] = [Series(**s) for s in given["series"]]
    if "marks" in given:
        given["marks"] = [tuple(mark) for mark in given["marks"]]
        given["bounds"] = None if given["bounds"] is None else tuple(given["bounds"])
    return KINDS[told["kind"]](**given)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
