"""`floatscope adapt`: make a masked diffusion model of a causal one."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from floatscope.cli.options import Name


def adapt(
    model: Name,
    text: Annotated[list[Path], typer.Option(help="Text to learn from, once for each file, .gz, .xz, .bz2 too.")] = [],  # noqa: B006
    data: Annotated[list[Path], typer.Option(help="Questions with their right passages, once for each file.")] = [],  # noqa: B006
    held_text: Annotated[list[Path], typer.Option(help="Text held apart; masks are filled there at the end.")] = [],  # noqa: B006
    held_data: Annotated[list[Path], typer.Option(help="Questions held apart; none of them is learnt.")] = [],  # noqa: B006
    out: Annotated[Path, typer.Option(help="Folder for material, checkpoints and the adapter.")] = Path("adapted"),
    minutes: Annotated[
        float, typer.Option(min=0, help="End this leg after so long; the same command does the next.")
    ] = 8.0,
    steps: Annotated[int, typer.Option(help="Of the whole training.")] = 6000,
    rank: Annotated[int, typer.Option(help="Of the small matrices on every projection; 0: learn all weights.")] = 32,
    tokens: Annotated[int, typer.Option(help="Of text in a step, and as many of questions.")] = 16384,
    peak: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-3,
    anneal: Annotated[int, typer.Option(help="Steps over which the causal mask is opened; 0: at once.")] = 0,
    control: Annotated[
        bool, typer.Option("--control", help="Learn the next token from the same rows: an autoregressive control.")
    ] = False,
    mask: Annotated[str | None, typer.Option(help="The mask: a token, its id, or new. Default: a free one.")] = None,
    seed: Annotated[int, typer.Option(help="Of whatever is drawn.")] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Processes that make rows ahead.")] = 4,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; without it a GPU if there is one.")] = None,
    licence: Annotated[str, typer.Option(help="Licence and source of the files, as the card shall say.")] = "",
) -> None:
    """Make a masked diffusion model of a causal one, in legs that can be broken off and moved.

    The causal mask is dropped, the shift of the logits kept; masks are learnt on text, answers on questions with
    passages. What is learnt is a small adapter beside the base: OUT/adapter, opened as BASE+OUT/adapter.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from floatscope.lab.adapt.legs import leg, unfinished
    from floatscope.lab.adapt.material import Given
    from floatscope.lab.adapt.recipe import Recipe

    console = Console(highlight=False, soft_wrap=True)
    recipe = Recipe(rank=rank, steps=steps, tokens=tokens, peak=peak, anneal=anneal, control=control, seed=seed)
    given = Given(text, data, held_text, held_data)
    columns = TextColumn("[bold]{task.description:<9}[/]"), BarColumn(), TextColumn("{task.fields[said]}")
    command = shlex.join(["floatscope", *sys.argv[1:]])
    with ExitStack() as shown:
        waiting = shown.enter_context(console.status("preparing"))
        bars = Progress(*columns, TimeRemainingColumn(), console=console)
        task: TaskID | None = None
        for told in leg(
            model,
            out,
            given,
            recipe,
            minutes,
            mask=mask,
            device=device,
            workers=workers,
            command=command,
            licence=licence,
        ):
            rate = f"{told.tokens_per_second:,.0f} tokens/s"
            losses = f"text {told.text_loss:.3f}  answers {told.answer_loss:.3f}  " if told.text_loss > 0 else ""
            if task is None:
                waiting.stop()
                shown.enter_context(bars)
                task = bars.add_task("adapt", total=told.steps, said="")
            bars.update(task, completed=told.step, said=losses + rate)
    if left := unfinished(out):
        console.print(f"this leg is over; still to do: {', '.join(left)}. Run the same command to go on")
    else:
        console.print(f"done: {out / 'adapter'}, with its card; open it as {model}+{out / 'adapter'}")
