"""`floatscope adapt`: turn an autoregressive model into a masked diffusion model."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from floatscope.cli import options as o
from floatscope.cli.console import make_console, print_line, print_text


def adapt(
    model: o.ModelName,
    text: Annotated[
        list[Path], o.Opt(metavar="FILE", help="Training text, also .gz, .xz and .bz2; may be repeated.")
    ] = [],  # noqa: B006
    data: Annotated[
        list[Path], o.Opt(metavar="FILE", help="Training questions with gold passages; may be repeated.")
    ] = [],  # noqa: B006
    held_out_text: Annotated[
        list[Path], o.Opt(metavar="FILE", help="Held-out text for the final scores; may be repeated.")
    ] = [],  # noqa: B006
    held_out_data: Annotated[
        list[Path], o.Opt(metavar="FILE", help="Held-out questions, removed from training; may be repeated.")
    ] = [],  # noqa: B006
    out: Annotated[Path, o.Opt(metavar="DIR", help="Folder for the corpus, checkpoints and the adapter.")] = Path(
        "adapted"
    ),
    minutes: Annotated[float, o.Opt(metavar="X", min=0, help="Stop after this time; the same command resumes.")] = 8.0,
    train_steps: Annotated[int, o.Opt(metavar="N", min=1, help="Optimizer steps in total.")] = 6000,
    rank: Annotated[int, o.Opt(metavar="N", min=0, help="Rank of the adapter; 0 trains all weights.")] = 32,
    batch_tokens: Annotated[int, o.Opt(metavar="N", min=1, help="Tokens of text per step, and of questions.")] = 16384,
    lr: Annotated[float, o.Opt(metavar="X", help="Peak learning rate.")] = 1e-3,
    anneal: Annotated[int, o.Opt(metavar="N", min=0, help="Steps that remove the causal mask; 0: at once.")] = 0,
    autoregressive: Annotated[
        bool,
        o.Opt("--autoregressive", help="Predict the next token of the same rows instead: the control."),
    ] = False,
    mask_token: Annotated[
        str | None, o.Opt(help="The mask token: a token, its id, or new. Default: an unused token.")
    ] = None,
    seed: Annotated[int, o.Opt(metavar="N", help="Seed of everything that is random.")] = 0,
    workers: Annotated[int, o.Opt(metavar="N", min=0, help="Processes that prepare batches.")] = 4,
    device: Annotated[str | None, o.Opt(help=o.DEVICE_HELP)] = None,
    licence: Annotated[str, o.Opt(help=o.LICENCE_HELP)] = "",
) -> None:
    """Turn an autoregressive model into a masked diffusion model, in segments that can be interrupted and resumed.

    The causal mask is removed and the shift of the logits kept. The model learns to fill masks in text, and to answer
    questions from passages. The result is a small adapter: OUT/adapter, opened as MODEL+OUT/adapter.
    """
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from floatscope.lab.adapt.recipe import Recipe

    o.check_model(model)
    recipe = Recipe(
        rank=rank,
        steps=train_steps,
        tokens=batch_tokens,
        lr=lr,
        anneal=anneal,
        control=autoregressive,
        seed=seed,
    )
    console = make_console()
    print_line(console, "opening", model)

    from floatscope.lab.adapt.corpus import TrainingFiles
    from floatscope.lab.adapt.segments import remaining_work, train_segment

    files = TrainingFiles(text, data, held_out_text, held_out_data)
    columns = TextColumn("[bold]{task.description:<9}[/]"), BarColumn(), TextColumn("{task.fields[text]}")
    command = shlex.join(["floatscope", *sys.argv[1:]])
    with ExitStack() as stack:
        status = stack.enter_context(console.status("preparing the corpus"))
        bars = Progress(*columns, TimeRemainingColumn(), console=console)
        task: TaskID | None = None
        for event in train_segment(
            model,
            out,
            files,
            recipe,
            minutes,
            mask=mask_token,
            device=device,
            workers=workers,
            command=command,
            licence=licence,
        ):
            rate = f"{event.tokens_per_second:,.0f} tokens/s"
            losses = f"text {event.text_loss:.3f}  answers {event.answer_loss:.3f}  " if event.text_loss > 0 else ""
            if task is None:
                status.stop()
                stack.enter_context(bars)
                task = bars.add_task("adapt", total=event.steps, text="")
            bars.update(task, completed=event.step, text=losses + rate)
    if remaining := remaining_work(out):
        still = ", ".join(remaining)
        print_text(console, f"this segment is over; still to do: {still}; run the same command to resume")
    else:
        print_text(console, f"finished: {out / 'adapter'} and its model card; open it as {model}+{out / 'adapter'}")
