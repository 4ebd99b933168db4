"""`floatscope twins …`: train the matched small models that ship with the package."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

twins = typer.Typer(no_args_is_help=True, help="Matched small models: one autoregressive, two masked diffusion.")


@twins.command(epilog="Example: floatscope twins train --text corpus.txt.xz --out twins --minutes 8")
def train(
    text: Annotated[list[Path], typer.Option(help="Plain text or JSON lines, as it is or .gz, .xz, .bz2.")] = [],  # noqa: B006
    out: Annotated[Path, typer.Option(help="Folder for data, checkpoints and the trained models.")] = Path("twins"),
    minutes: Annotated[float, typer.Option(help="End this leg after so long; the same command does the next.")] = 8.0,
    tiny: Annotated[bool, typer.Option("--tiny", help="Two small layers and few steps, to try it on a CPU.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="Processes that make rows ahead.")] = 4,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; without it a GPU if there is one.")] = None,
    licence: Annotated[str, typer.Option(help="Licence and source of the text, as the models' cards shall say.")] = "",
) -> None:
    """Train the three twins from text and invented worlds, in legs that can be broken off and moved.

    One is autoregressive, one masked diffusion from scratch, one masked diffusion from the first.

    Once all are trained they are asked the held-out questions, and each gets its scores and its card.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from floatscope.lab.twins.evaluate import Asked
    from floatscope.lab.twins.legs import leg, unfinished
    from floatscope.lab.twins.train import RECIPES, TINY

    console = Console(highlight=False, soft_wrap=True)
    recipes = TINY if tiny else RECIPES
    told_in_cards = {"licence": licence, "command": shlex.join(["floatscope", *sys.argv[1:]])}
    columns = TextColumn("[bold]{task.description:<15}[/]"), BarColumn(), TextColumn("{task.fields[said]}")
    with ExitStack() as shown:  # the bars begin with the first thing there is to tell
        bars = Progress(*columns, TimeRemainingColumn(), console=console)
        tasks: dict[str, TaskID] = {}
        for told in leg(
            out, text, recipes, minutes, device=device, workers=workers, compiled=not tiny, **told_in_cards
        ):
            if isinstance(told, Asked):
                verb = "watch" if told.file == "attention" else "ask"
                name, done, of, said = f"{verb} {told.kind}", told.answered, told.questions, told.file
            else:
                rate = f"{told.tokens_per_second / 1e6:.2f} Mtok/s"
                name, done, of = told.kind, told.step, told.steps
                said = f"text {told.text_loss:.3f}  answers {told.answer_loss:.3f}  {rate}"
            if not tasks:
                shown.enter_context(bars)
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=of, said=said)
            bars.update(tasks[name], completed=done, said=said)
    if left := unfinished(out):
        console.print(f"this leg is over; still to do: {', '.join(left)}. Run the same command to go on")
    else:
        console.print(f"done: the twins, their scores and their cards are in {out / 'models'}")
