"""`floatscope twins …`: train the matched small models that ship with the package."""

from __future__ import annotations

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
    workers: Annotated[int, typer.Option(help="Processes that make rows ahead.")] = 4,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; without it a GPU if there is one.")] = None,
) -> None:
    """Train the three twins from text and invented worlds, in legs that can be broken off and moved.

    One is autoregressive, one masked diffusion from scratch, one masked diffusion from the first.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from floatscope.twins.legs import leg, unfinished
    from floatscope.twins.train import RECIPES, TINY

    console = Console(highlight=False, soft_wrap=True)
    recipes = TINY if tiny else RECIPES
    columns = TextColumn("[bold]{task.description:<12}[/]"), BarColumn(), TextColumn("{task.fields[said]}")
    with Progress(*columns, TimeRemainingColumn(), console=console) as bars:
        tasks: dict[str, object] = {}
        for told in leg(out, text, recipes, minutes, device=device, workers=workers, compiled=not tiny):
            rate = f"{told.tokens_per_second / 1e6:.2f} Mtok/s"
            said = f"text {told.text_loss:.3f}  answers {told.answer_loss:.3f}  {rate}"
            if told.kind not in tasks:
                tasks[told.kind] = bars.add_task(told.kind, total=told.steps, said=said)
            bars.update(tasks[told.kind], completed=told.step, said=said)  # type: ignore[arg-type]
    if left := unfinished(out):
        console.print(f"this leg is over; still to do: {', '.join(left)}. Run the same command to go on")
    else:
        console.print(f"trained: {out / 'models'}")
