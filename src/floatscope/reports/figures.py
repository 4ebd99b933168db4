"""The charts of a report as matplotlib figures, for papers and slides, with the numbers and colours of the page.

    draw(chart, "absorption.pdf")                            # or .svg, .png
    draw(chart, "absorption.pdf", models=report.labels)      # the colours of the page, whichever models the chart shows

Controls are dashed, intervals are bands or bars, the reference is a dotted line that the legend names. This module
imports matplotlib; import it only where a figure is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import singledispatch
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from floatscope.errors import UserError, unknown_choice
from floatscope.files.atomic import write_atomic
from floatscope.reports import palette
from floatscope.reports.charts import Chart, Dots, Lines, Map, Number, Series

STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#6a6e75",
    "axes.labelcolor": "#1c1e22",
    "xtick.color": "#6a6e75",
    "ytick.color": "#6a6e75",
    "grid.color": "#e2dfd7",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "floatscope",
}
MARKERS = "os^D"
MUTED = "#6a6e75"
METADATA: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
"""Without dates, so that the same chart gives the same bytes."""
MARK_NAMES = {"top": "top key", "anchor": "anchor", "commit": "committed"}
MAX_MARKERS = 40  # a line with more points has no markers


def draw(chart: Chart, path: str | Path | None = None, models: Sequence[str] = ()) -> Figure:
    """Draw a chart; with `path`, save it in the format of the path's suffix.

    `models` are the labels of the report, which determine the colours. Without them, colours follow the order in the
    chart. A table has no figure.
    """
    labels = list(models) or _chart_models(chart)
    with rc_context(STYLE):
        figure = _draw(chart, labels)
        if path is not None:
            _save(figure, Path(path))
    return figure


def _chart_models(chart: Chart) -> list[str]:
    models = [series.model for series in getattr(chart, "series", ())] or [getattr(chart, "model", "")]
    return list(dict.fromkeys(models))


@singledispatch
def _draw(chart: Any, labels: list[str]) -> Figure:
    raise UserError(f"cannot draw a {type(chart).__name__.lower()} as a figure; draw lines, maps or dots")


@_draw.register
def _lines(chart: Lines, labels: list[str]) -> Figure:
    figure = Figure((5.2, 3.2), layout="constrained", dpi=200)
    axes = figure.subplots()
    positions = np.array([i if isinstance(x, str) else x for i, x in enumerate(chart.x)], float)
    if any(isinstance(x, str) for x in chart.x):
        axes.set_xticks(positions, [str(x) for x in chart.x])
    elif (positions == positions.round()).all():
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for series in chart.series:
        x, y = series.x if series.x is not None else positions, _array(series.y)
        colour, line_style = _model_colour(series.model, labels), "--" if series.control else "-"
        if series.low is not None and series.high is not None:
            low, high = _array(series.low), _array(series.high)
            axes.fill_between(x, low, high, color=colour, alpha=0.06 if series.control else 0.14, lw=0)
        face = "white" if series.control else colour
        marker = _marker(chart, series) if len(x) <= MAX_MARKERS else ""
        width = 1.2 if series.control else 1.7
        axes.plot(x, y, line_style + marker, color=colour, ms=3.5, mfc=face, lw=width, alpha=_alpha(series))
    if chart.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif _starts_at_zero(chart):
        axes.set_ylim(bottom=0)
    if chart.reference is not None:
        level = chart.reference if isinstance(chart.reference, list) else [chart.reference] * len(positions)
        axes.plot(positions, _array(level), ":", color=MUTED, lw=1)
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    axes.grid(axis="y", lw=0.6)
    _legend(figure, chart, labels)
    return figure


@_draw.register
def _dots(chart: Dots, labels: list[str]) -> Figure:
    rows, count = len(chart.categories), max(1, len(chart.series))
    figure = Figure((5.2, 1.3 + rows * max(0.3, 0.16 * count)), layout="constrained", dpi=200)
    axes = figure.subplots()
    for s, series in enumerate(chart.series):
        heights = np.arange(rows) + (s - (count - 1) / 2) * 0.7 / count
        colour, x = _model_colour(series.model, labels), _array(series.y)
        if series.low is not None and series.high is not None:
            ends = _array(series.low), _array(series.high)
            axes.hlines(heights, *ends, colour, "--" if series.control else "-", lw=1.4, alpha=_alpha(series))
        face = "white" if series.control else colour
        axes.plot(x, heights, _marker(chart, series), ms=4.5, color=colour, mfc=face, alpha=_alpha(series))
    for line in range(1, rows):
        axes.axhline(line - 0.5, color="#e2dfd7", lw=0.6)
    if chart.log:
        axes.set_xscale("log")
    elif _starts_at_zero(chart):
        axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    if chart.reference is not None:
        axes.axvline(chart.reference, ls=":", color=MUTED, lw=1)
    axes.set(title=chart.title, xlabel=chart.x_label, ylim=(rows - 0.5, -0.5))
    axes.set_yticks(range(rows), chart.categories, color="#1c1e22")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", lw=0.6)
    axes.set_axisbelow(True)
    _legend(figure, chart, labels)
    return figure


@_draw.register
def _map(chart: Map, labels: list[str]) -> Figure:
    rows, columns = len(chart.y), len(chart.x)
    width = 7.0 if columns > 48 else 4.2
    figure = Figure((width, float(np.clip(1.2 + rows * 0.16, 2, 6))), layout="constrained", dpi=200)
    axes = figure.subplots()
    values = np.array([_array(row) for row in chart.values])
    low, high = chart.bounds or _colour_bounds(values, chart.log)
    colours = ListedColormap(palette.build_ramp("light")).with_extremes(bad="#e6e3dc")
    norm = LogNorm(low, high, clip=True) if chart.log else Normalize(low, high, clip=True)
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap=colours, norm=norm)
    bar = figure.colorbar(image, ax=axes, label=chart.unit, pad=0.02, aspect=25)
    bar.outline.set_visible(False)
    if chart.log:
        bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        bar.ax.yaxis.set_minor_formatter(NullFormatter())
    for axis, names in ((axes.xaxis, chart.x), (axes.yaxis, chart.y)):
        has_words = any(isinstance(name, str) for name in names)
        ticks = MaxNLocator(12, integer=True).tick_values(0, len(names) - 1)
        indices = range(len(names)) if has_words else [int(i) for i in ticks if 0 <= i < len(names)]
        axis.set_ticks(indices, [name if isinstance(name := names[i], str) else f"{name:g}" for i in indices])
        if has_words and axis is axes.xaxis:
            axes.tick_params(axis="x", labelrotation=90)
    for spine in axes.spines.values():
        spine.set_visible(False)
    _draw_marks(axes, chart)
    title = f"{chart.title} ({chart.model})" if chart.model and chart.model not in chart.title else chart.title
    axes.set(title=fill(title, round(11 * width)), xlabel=chart.x_label, ylabel=chart.y_label)
    if chart.marks:
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def _draw_marks(axes: Axes, chart: Map) -> None:
    styles: dict[str, dict[str, Any]] = {
        "top": {"ls": "-", "marker": "v", "ms": 4, "lw": 1, "color": palette.TOP.light},
        "anchor": {"ls": "", "marker": "s", "ms": 5, "mfc": "none", "mec": palette.TOP.light},
        "commit": {"ls": "", "marker": "o", "ms": 2.5, "color": palette.COMMIT.light},
    }
    for kind, style in styles.items():
        marks = sorted((row, column) for row, column, mark in chart.marks if mark == kind)
        if marks:
            axes.plot([column for _, column in marks], [row for row, _ in marks], label=MARK_NAMES[kind], **style)


def _legend(figure: Figure, chart: Lines | Dots, labels: list[str]) -> None:
    """Explain the colours of models, the dashes of controls, the markers of several series, and the reference."""
    entries = [
        Line2D([], [], color=_model_colour(model, labels), lw=2, label=model)
        for model in dict.fromkeys(series.model for series in chart.series)
    ]
    has_several = any(_marker(chart, series) != MARKERS[0] for series in chart.series)
    for series in {(s.name, s.control): s for s in chart.series if s.control or has_several}.values():
        face, line = ("white", "--") if series.control else (MUTED, "")
        marker = _marker(chart, series)
        entries.append(Line2D([], [], color=MUTED, ls=line, marker=marker, ms=3.5, mfc=face, lw=1.2, label=series.name))
    if chart.reference is not None:
        entries.append(Line2D([], [], color=MUTED, ls=":", lw=1.2, label=chart.reference_label or "reference"))
    figure.legend(handles=entries, loc="outside lower center", ncols=min(4, len(entries)))


def _model_colour(model: str, labels: list[str]) -> str:
    return palette.MODELS[labels.index(model) % len(palette.MODELS)].light if model in labels else MUTED


def _marker(chart: Lines | Dots, series: Series) -> str:
    """The marker depends on the index among the series of the same model that are not controls."""
    if series.control:
        return MARKERS[0]
    same = [other for other in chart.series if other.model == series.model and not other.control]
    return MARKERS[same.index(series) % len(MARKERS)]


def _alpha(series: Series) -> float:
    return 0.75 if series.control else 1.0


def _starts_at_zero(chart: Lines | Dots) -> bool:
    """Whether the axis starts at zero: all values are positive and not all are far from zero, as on the page."""
    parts = (part for series in chart.series for part in (series.y, series.low or [], series.high or []))
    values = [value for part in parts for value in part if value is not None]
    return bool(values) and 0 <= min(values) <= 0.75 * max(values)


def _colour_bounds(values: np.ndarray, log: bool) -> tuple[float, float]:
    measured = values[np.isfinite(values) & ((values > 0) | (not log))]
    if not len(measured):
        return 0.5, 1.0
    low, high = float(measured.min()), float(measured.max())
    low = min(low, 0.0) if low < 0 or not log else low
    return (low - 0.5, high + 0.5) if low == high and not log else (low, max(high, low * 1.001))


def _array(values: Sequence[Number]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], float)


def _save(figure: Figure, path: Path) -> None:
    format, formats = path.suffix.lstrip(".").lower(), figure.canvas.get_supported_filetypes()
    if format not in formats:
        raise unknown_choice("figure format", format, formats)
    image = io.BytesIO()
    figure.savefig(image, format=format, metadata=METADATA.get(format))
    try:
        write_atomic(path, [image.getvalue()])
    except OSError as error:
        raise UserError(f"cannot write the figure to {path}: {error.strerror}; give another path") from error
