"""The temporal map: the received attention of one sample, M[step, key], as a picture.

Steps run down and keys run right, as the canvas is read. A triangle marks the top key of each step that has an anchor
(`Trace.anchor_path`), and a line joins the triangles: a vertical line is a sink, a wandering line floats. Keys that are
not eligible are below a grey bar: they have a value but are never the top key. Masked positions are outlined and
commits are dots; where the cells are too narrow for that, the canvas has a panel of its own below the map.

    draw_temporal_map(trace, layer=3, scale="lift", path="floating.png")
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from floatscope.errors import UserError, unknown_choice
from floatscope.schema import MIN_ANCHOR_LIFT, UNDECIDED, RowSource, State

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from floatscope.traces.trace import Array, Trace

LABELS = {
    "mean": "received attention (mean over rows)",
    "sum": "received attention (sum over rows)",
    "percent": "received attention (%)",
    "visible": "received attention (mean over rows that see the key)",
    "lift": "lift (1 = uniform attention)",
}
ROW_LABELS = {RowSource.CACHE: "new rows only", RowSource.BLOCK: "of the current block"}
MAX_OUTLINED_KEYS = 200
"""Above this number of keys a cell is too narrow for an outline."""
TOP, COMMIT, ABSENT = "#ff3b6b", "#ff8c1a", "#d9d9d9"
STATES = {
    State.PAD: ABSENT,
    State.PROMPT: "#f7f7f7",
    State.MASKED: "#4d5870",
    State.COMMITTED: "#c3cfe6",
    State.NOISE: "#8a7a5c",
}


def draw_temporal_map(
    trace: Trace,
    *,
    layer: int | None = None,
    group: str = "all",
    scale: str = "lift",
    path: str | Path | None = None,
    head: int | None = None,
    view: str = "prefix",
) -> Figure:
    """Draw the map of one layer, or of the mean over layers; keys that no row could see are grey.

    The figure is saved to `path`, in the format of its suffix. The other arguments are those of `Trace.received`.
    """
    layers: int | Literal["mean"] = "mean" if layer is None else layer
    received = trace.received(layers, group, scale, head, view)
    has_lift = {"eligible", "uniform"} <= trace.arrays.keys()
    steps, keys = received.shape
    width = int(np.max(trace.arrays["commit_position"] + 1, initial=keys))  # a growing canvas commits after its keys
    size = (float(np.clip(2.5 + 0.2 * keys, 7, 14)), float(np.clip(2 + 0.25 * steps, 3, 9)))
    figure = Figure(size, dpi=150, layout="constrained")
    rows = 2 if keys > MAX_OUTLINED_KEYS else 1
    panels = figure.subplots(rows, sharex=True, squeeze=False, height_ratios=[3, 1][:rows])
    axes: Axes = panels[0, 0]
    for panel in panels[:, 0]:
        panel.set(ylabel="step", xlim=(-0.5, width - 0.5), facecolor=ABSENT)
        panel.yaxis.set_major_locator(MaxNLocator(10, integer=True))
    panel.set_xlabel("key (position in the canvas)")
    panel.xaxis.set_major_locator(MaxNLocator(12, integer=True))

    _draw_heat(figure, axes, received, LABELS[scale])
    (_draw_outline if keys <= MAX_OUTLINED_KEYS else _draw_canvas_panel)(trace, panel)
    tops = trace.anchor_path(layers, group, head, view) if has_lift else _largest_keys(received)
    step, top = np.flatnonzero(tops >= 0), tops[tops >= 0]
    if has_lift:
        lift = trace.received(layers, group, "lift", head, view, eligible=True)
        _draw_ineligible(axes, np.isfinite(received).any(0) & ~np.isfinite(lift).any(0))
    mark = float(np.clip(250 / steps, 4, 8))
    axes.plot(top, step, "-v", color=TOP, ms=mark, lw=mark / 6, mec="white", mew=mark / 12)
    where = "mean over layers" if layer is None else f"layer {layer}"
    where += "" if head is None else f", head {head}"
    name = trace.sample if len(trace.sample) <= 48 else f"{trace.sample[:45]}…"
    name += f" ({trace.meta['model']})" if "model" in trace.meta else ""
    source = RowSource(trace.meta.get("rows", RowSource.ALL))
    is_partial = source == RowSource.BLOCK or (source == RowSource.CACHE and view == "row")
    axes.set_title(f"{name}: {where}, rows: {group}" + (f", {ROW_LABELS[source]}" if is_partial else ""))
    _add_legend(
        figure,
        trace,
        f"top key, lift ≥ {MIN_ANCHOR_LIFT:g}" if has_lift else "largest value",
        keys <= MAX_OUTLINED_KEYS,
    )
    if path is not None:
        _save_figure(figure, Path(path))
    return figure


def _draw_heat(figure: Figure, axes: Axes, received: Array, label: str) -> None:
    """Draw on a logarithmic colour scale: on every scale a few keys receive a hundred times as much as the others."""
    positive = received[np.isfinite(received) & (received > 0)]
    low, high = (np.percentile(positive, 2), positive.max()) if len(positive) else (0.5, 1.0)
    low = min(low, high / 2)  # a flat map still needs a range
    colours = colormaps["viridis"].with_extremes(bad=ABSENT)
    image = axes.imshow(
        np.clip(received, low, None), aspect="auto", interpolation="nearest", cmap=colours, norm=LogNorm(low, high)
    )
    bar = figure.colorbar(image, ax=axes, label=label, pad=0.01, extend="min", extendfrac=0.02, aspect=30)
    bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())


def _draw_ineligible(axes: Axes, is_ineligible: Array) -> None:
    """Draw a grey bar above the keys that have values but are not eligible."""
    edges = np.flatnonzero(np.diff(np.pad(is_ineligible, 1).astype(np.int8))).reshape(-1, 2)
    for start, stop in edges:
        axes.plot([start - 0.4, stop - 0.6], [1.01, 1.01], color="#8a8a8a", lw=3, solid_capstyle="butt",
                  transform=axes.get_xaxis_transform(), clip_on=False)  # fmt: skip


def _draw_outline(trace: Trace, axes: Axes) -> None:
    """Mark the map itself: a line around cells of masks or noise, a dot for each commit, a diamond for each edit."""
    edge = np.pad(np.isin(trace.arrays["states"], UNDECIDED), 1).astype(np.int8)
    y, x = np.nonzero(np.diff(edge, axis=0)[:, 1:-1])
    lines = [((a - 0.5, b - 0.5), (a + 0.5, b - 0.5)) for a, b in zip(x, y, strict=True)]
    y, x = np.nonzero(np.diff(edge, axis=1)[1:-1])
    lines += [((a - 0.5, b - 0.5), (a - 0.5, b + 0.5)) for a, b in zip(x, y, strict=True)]
    axes.add_collection(LineCollection(lines, colors="white", linewidths=1.2))
    mark = float(np.clip(500 / max(edge.shape), 2.5, 6))
    is_edit = trace.is_edit
    for chosen, marker in ((~is_edit, "o"), *([(is_edit, "D")] if is_edit.any() else [])):
        position, step = trace.arrays["commit_position"][chosen], trace.arrays["commit_step"][chosen]
        axes.plot(position, step, marker, color=COMMIT, ms=mark, mec="black", mew=mark / 12)


def _draw_canvas_panel(trace: Trace, axes: Axes) -> None:
    """Draw the state of every position at every step, and the commits of each step."""
    committed_now = max(STATES) + 1
    states = trace.arrays["states"].copy()
    inside = trace.arrays["commit_position"] < states.shape[1]
    states[trace.arrays["commit_step"][inside], trace.arrays["commit_position"][inside]] = committed_now
    colours = ListedColormap([*STATES.values(), COMMIT])
    axes.imshow(states, aspect="auto", interpolation="nearest", cmap=colours, vmin=-0.5, vmax=committed_now + 0.5)


def _largest_keys(received: Array) -> Array:
    """The key of largest value at each step; −1 where nothing was received."""
    return np.where(np.isfinite(received).any(1), np.nan_to_num(received, nan=-1.0).argmax(1), -1)


def _add_legend(figure: Figure, trace: Trace, top: str, outlined: bool) -> None:
    shown = UNDECIDED if outlined else (*UNDECIDED, State.COMMITTED, State.PROMPT)
    marks = [("o" if outlined else "s", COMMIT, "committed by this step")]
    marks += [("D", COMMIT, "edited by this step")] if outlined and trace.is_edit.any() else []
    marks += [
        ("s", "white" if outlined else STATES[state], state.name.lower() + " (outlined)" * outlined)
        for state in shown
        if (trace.arrays["states"] == state).any()
    ]
    entries = [Line2D([], [], color=TOP, marker="v", ms=7, label=top)]
    for marker, colour, label in marks:
        entries.append(Line2D([], [], ls="", marker=marker, color=colour, ms=8, mec="black", mew=0.5, label=label))
    figure.legend(handles=entries, loc="outside lower center", ncols=len(entries), frameon=False)


def _save_figure(figure: Figure, path: Path) -> None:
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in formats:
        raise unknown_choice("figure format", path.suffix.lstrip("."), formats)
    try:
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"cannot write the figure to {path}: {error.strerror}") from error
