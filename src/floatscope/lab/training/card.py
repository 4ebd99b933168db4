"""Parts of a model card: a table, and the loss curves.

table(("step", "loss"), [(100, "3.2")], right=2)
picture(training)                                  # PNG, from training.json's "kind" and "losses"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import Any

CARD, PICTURE = "README.md", "losses.png"


def picture(training: dict[str, Any]) -> bytes:
    """The loss curves as a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure((6.4, 3.2), dpi=110, layout="constrained", facecolor="white")
    axes = figure.subplots()
    steps, *curves = zip(*training["losses"], strict=True)
    for curve, label, colour in zip(curves, ("text", "answers"), ("#31688e", "#d1495b"), strict=True):
        axes.plot(steps, curve, color=colour, lw=1.5)
        axes.annotate(
            label, (steps[-1], curve[-1]), (5, 0), textcoords="offset points", color=colour, va="center", fontsize=10
        )
    axes.set(xlabel="step", ylabel="loss (nats)", yscale="log", title=f"{training['kind']}: losses while training")
    plain = FuncFormatter(lambda y, _: f"{y:g}")
    axes.yaxis.set_major_formatter(plain)
    if max(map(max, curves)) < 10 * min(map(min, curves)):  # within a decade the axis labels its minor ticks
        axes.yaxis.set_minor_formatter(plain)
    axes.set_xlim(0, steps[-1] * 1.13)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e5e5e5", lw=0.6)
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], right: int = 0) -> str:
    """A Markdown table; its last `right` columns are numbers."""
    rules = ["---"] * (len(columns) - right) + ["---:"] * right
    lines = [columns, rules, *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: object) -> str:
    return (f"{value:.3g}" if isinstance(value, float) else str(value)).replace("|", "\\|")
