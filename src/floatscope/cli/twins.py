"""`floatscope twins`: list the shipped models and their question files, or train the models again."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from floatscope.cli import options as o
from floatscope.cli.console import explain_interrupt, make_console, print_line, print_text
from floatscope.cli.help_text import help_for

twins = typer.Typer()

MODELS = {
    "twin:arm": ("ARM", "autoregressive"),
    "twin:mdm": ("MDM", "masked diffusion, trained from scratch"),
    "twin:mdm-adapted": ("MDM", "masked diffusion, adapted from twin:arm"),
}
QUESTION_FILES = {
    "twin:reading-1": "a fact about a new person, in one passage",
    "twin:reading-5": "a fact about a new person, in one of five passages",
    "twin:two-hop": "a fact about somebody's teacher, in two of five passages",
    "twin:contradicted": "a fact the twins learnt, which a passage contradicts; the passage counts",
    "twin:unanswerable": 'a fact that is in none of five passages; the right answer is "unknown"',
    "twin:closed-book": "a fact the twins learnt, without passages",
    "twin:closed-book-fresh": "a fact about a new person, without passages: nobody can know",
    "twin:few-shot": "which of three words is meant, from four examples",
    "twin:biography": "every fact that the passages tell of a person, in sentences",
    "twin:dated": "a fact of which the passages have several versions; the newest is right",
}
"""A shipped question file → what it asks."""


def list_twins(context: typer.Context, as_json: o.AsJson = False) -> None:
    """List the shipped models and their question files, or train the models again.

    The twins are three small models that were trained alike; --data takes the names of the question files.
    """
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.table import Table

    from floatscope.tasks.sample_files import read_samples

    counts = {name: len(read_samples(name)) for name in QUESTION_FILES}
    if as_json:
        models = [{"name": name, "paradigm": kind.lower(), "about": about} for name, (kind, about) in MODELS.items()]
        files = [{"name": name, "about": about, "questions": counts[name]} for name, about in QUESTION_FILES.items()]
        typer.echo(json.dumps({"models": models, "data": files}, indent=1))
        return
    console = Console(highlight=False)
    table = Table("model", "paradigm", "about", box=None, header_style="bold", pad_edge=False)
    for name, (kind, about) in MODELS.items():
        table.add_row(name, kind, about)
    console.print(table, "")
    table = Table("data", "questions", "asks for", box=None, header_style="bold", pad_edge=False)
    table.columns[1].justify = "right"
    for name, about in QUESTION_FILES.items():
        table.add_row(name, str(counts[name]), about)
    console.print(table)


def train(
    text: Annotated[
        list[Path], o.Opt(metavar="FILE", help="Training text, also .gz, .xz and .bz2; may be repeated.")
    ] = [],  # noqa: B006
    out: Annotated[Path, o.Opt(metavar="DIR", help="Folder for the corpus, checkpoints and trained models.")] = Path(
        "twins"
    ),
    minutes: Annotated[float, o.Opt(metavar="X", min=0, help="Stop after this time; the same command resumes.")] = 8.0,
    tiny: Annotated[bool, o.Opt("--tiny", help="Two small layers and few steps, to try it on a CPU.")] = False,
    workers: Annotated[int, o.Opt(metavar="N", min=0, help="Processes that prepare batches.")] = 4,
    device: Annotated[str | None, o.Opt(help=o.DEVICE_HELP)] = None,
    licence: Annotated[str, o.Opt(help=o.LICENCE_HELP)] = "",
) -> None:
    """Train the three twins on text and invented facts, in segments that can be interrupted and resumed.

    One is autoregressive, one a masked diffusion model trained from scratch, one a masked diffusion model adapted from
    the first.

    When all are trained, they answer the held-out questions, and each gets its scores and its model card.
    """
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    console = make_console()
    print_line(console, "training", str(out))

    from floatscope.lab.twins.scores import EvaluationEvent
    from floatscope.lab.twins.segments import describe_saved, remaining_work, train_segment
    from floatscope.lab.twins.train import RECIPES, TINY_RECIPES

    recipes = TINY_RECIPES if tiny else RECIPES
    card = {"licence": licence, "command": shlex.join(["floatscope", *sys.argv[1:]])}
    columns = TextColumn("[bold]{task.description:<15}[/]"), BarColumn(), TextColumn("{task.fields[text]}")
    with explain_interrupt(lambda: describe_saved(out, recipes)), ExitStack() as stack:
        bars = Progress(*columns, TimeRemainingColumn(), console=console)
        tasks: dict[str, TaskID] = {}
        for event in train_segment(
            out, text, recipes, minutes, device=device, workers=workers, compiled=not tiny, **card
        ):
            if isinstance(event, EvaluationEvent):
                verb = "measure" if event.file == "attention" else "score"
                name, done, total, label = f"{verb} {event.kind}", event.answered, event.questions, event.file
            else:
                rate = f"{event.tokens_per_second / 1e6:.2f} Mtok/s"
                name, done, total = event.kind, event.step, event.steps
                label = f"text {event.text_loss:.3f}  answers {event.answer_loss:.3f}  {rate}"
            if not tasks:
                stack.enter_context(bars)  # the bars begin with the first event
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total, text=label)
            bars.update(tasks[name], completed=done, text=label)
    if remaining := remaining_work(out):
        still = ", ".join(remaining)
        print_text(console, f"this segment is over; still to do: {still}; run the same command to resume")
    else:
        print_text(console, f"finished: the twins, their scores and their cards are in {out / 'models'}")


twins.callback(invoke_without_command=True, **help_for("twins", list_twins))(list_twins)
twins.command(**help_for("twins train", train))(train)
