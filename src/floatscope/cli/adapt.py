"""`floatscope adapt`: turn an autoregressive model into a masked diffusion model."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from floatscope.cli import options as o
from floatscope.cli.console import explain_interrupt, print_text, show_status
from floatscope.cli.output import Output, Show, format_clock

if TYPE_CHECKING:
    from floatscope.lab.training.progress import ProgressEvent
    from floatscope.pipelines.job import Job


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
    as_json: o.AsJson = False,
) -> None:
    """Turn an autoregressive model into a masked diffusion model, in segments that can be interrupted and resumed.

    The causal mask is removed and the shift of the logits kept. The model learns to fill masks in text, and to answer
    questions from passages. The result is a small adapter: OUT/adapter, opened as MODEL+OUT/adapter.
    """
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
    output = Output(as_json)
    output.line("opening", model)

    from floatscope.lab.adapt.corpus import TrainingFiles
    from floatscope.lab.adapt.segments import describe_saved, remaining_work, train_segment

    files = TrainingFiles(text, data, held_out_text, held_out_data)
    events = train_segment(
        model,
        out,
        files,
        recipe,
        minutes,
        mask=mask_token,
        device=device,
        workers=workers,
        command=shlex.join(["floatscope", *sys.argv[1:]]),
        licence=licence,
    )
    with explain_interrupt(lambda: describe_saved(out, recipe)):
        _show_progress(output, events, 2 * batch_tokens)
    remaining, adapter = remaining_work(out), out / "adapter"
    if as_json:
        output.finish({"out": str(out), "adapter": None if remaining else str(adapter), "remaining": remaining})
    elif remaining:
        still = ", ".join(remaining)
        print_text(output.console, f"this segment is over; still to do: {still}; run the same command to resume")
    else:
        print_text(output.console, f"finished: {adapter} and its model card; open it as {model}+{adapter}")


def _show_progress(output: Output, events: Iterator[ProgressEvent | Job], tokens_per_step: int) -> None:
    """Show the steps of the training, and run the job of the scores."""
    from floatscope.pipelines.job import Job

    show: Show | None = None
    with ExitStack() as display:
        display.enter_context(show_status("preparing the corpus"))
        for event in events:
            if isinstance(event, Job):
                display.close()
                if event.parts:
                    output.run("scoring", event)
                continue
            if output.as_json:
                display.close()
                output.write_event(_describe_step(event))
                continue
            if show is None:
                display.close()
                show = display.enter_context(output.progress("training", event.steps))
            losses = f"text {event.text_loss:.3f}  answers {event.answer_loss:.3f}  " if event.text_loss > 0 else ""
            left = format_clock((event.steps - event.step) * tokens_per_step / event.tokens_per_second)
            show(event.step, f"{losses}{event.tokens_per_second:,.0f} tokens/s, {left} left")


def _describe_step(event: ProgressEvent) -> dict[str, object]:
    """The step as an event; a loss that is not known yet is null."""
    losses = {"text_loss": event.text_loss, "answer_loss": event.answer_loss}
    return {
        "event": "step",
        "done": event.step,
        "total": event.steps,
        **{name: None if math.isnan(loss) else loss for name, loss in losses.items()},
        "tokens_per_second": event.tokens_per_second,
    }
