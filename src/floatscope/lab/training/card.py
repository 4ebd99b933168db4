"""Parts that the model cards share: Markdown tables, the loss curves, and writing the files.

markdown_table(("step", "loss"), [(100, "3.2")], numeric_columns=2)
write_card_files(folder, training, markdown)          # README.md and losses.png
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path

from floatscope.files.atomic import explain_write_errors, write_atomic
from floatscope.lab.training.progress import Recipe
from floatscope.lab.training.record import TrainingRecord

CARD, PLOT = "README.md", "losses.png"
LOSS_TABLE_STEPS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)  # fractions of the training whose losses are in the table


def write_card_files(folder: Path, training: TrainingRecord, markdown: str) -> None:
    """Write the loss plot and the card."""
    with explain_write_errors("the card", folder):
        write_atomic(folder / PLOT, [plot_losses(training)])
        write_atomic(folder / CARD, [markdown.encode()])


def plot_losses(training: TrainingRecord) -> bytes:
    """Return the loss curves of a training.json as a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure((6.4, 3.2), dpi=110, layout="constrained", facecolor="white")
    axes = figure.subplots()
    steps, *curves = zip(*training.losses, strict=True)
    for curve, label, colour in zip(curves, ("text", "answers"), ("#31688e", "#d1495b"), strict=True):
        axes.plot(steps, curve, color=colour, lw=1.5)
        axes.annotate(
            label, (steps[-1], curve[-1]), (5, 0), textcoords="offset points", color=colour, va="center", fontsize=10
        )
    axes.set(xlabel="step", ylabel="loss (nats)", yscale="log", title=f"{training.kind}: losses while training")
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


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]], numeric_columns: int = 0) -> str:
    """Return a Markdown table; the last `numeric_columns` columns are right-aligned."""
    rules = ["---"] * (len(columns) - numeric_columns) + ["---:"] * numeric_columns
    lines = [columns, rules, *rows]
    return "\n".join("| " + " | ".join(_format_cell(value) for value in line) + " |" for line in lines)


def loss_table(losses: Sequence[Sequence[float]]) -> str:
    """Return the losses at a few fractions of the training as a Markdown table."""
    entries = dict.fromkeys(tuple(losses[round(part * (len(losses) - 1))]) for part in LOSS_TABLE_STEPS)
    rows = [(f"{step:,}", f"{text:.3f}", f"{answers:.3f}") for step, text, answers in entries]
    return markdown_table(("step", "text", "answers"), rows, numeric_columns=3)


def describe_schedule(recipe: Recipe) -> str:
    """Return the learning-rate schedule of a recipe in words."""
    return f"{recipe.lr:g}, after {recipe.warmup:,} warm-up steps, then a cosine decay to 5 %"


def describe_run(training: TrainingRecord) -> dict[str, str]:
    """Return time, device and versions of a training.json as rows of a table."""
    return {
        "time": f"{training.seconds:,.0f} s, {training.tokens_per_second:,} tokens/s",
        "device": training.device,
        "versions": ", ".join(f"{name} {version}" for name, version in training.versions.items()),
    }


def _format_cell(value: object) -> str:
    return (f"{value:.3g}" if isinstance(value, float) else str(value)).replace("|", "\\|")
