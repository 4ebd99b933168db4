"""`floatscope eval` and `floatscope compare`: is the answer right, and what do passages add?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floatscope.cli import options as o
from floatscope.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from floatscope.pipelines.evaluate import EvaluationJob

Opt = typer.Option


def evaluate(
    model: o.Name,
    data: o.Questions,
    out: Annotated[Path, Opt(help="The folder: a new one, or one to go on with.", show_default=False)],
    passages: Annotated[str, Opt(help="How many passages to show: a number (0: closed book), gold, or all.")] = "all",
    shots: Annotated[int, Opt(help="Other samples shown with their answers.")] = 0,
    prompt: o.Template = "default",
    limit: o.Limit = None,
    format: o.Format = None,
    skip_bad: o.SkipBad = False,
    retrieve: o.Retrieve = None,
    k: o.K = 5,
    trace: Annotated[int, Opt(help="Also watch the first so many samples, into OUT/traces.")] = 0,
    new_tokens: o.NewTokens = None,
    steps: o.Steps = None,
    block: o.Block = None,
    sampler: o.Sampler = None,
    preset: o.Preset = None,
    temperature: o.Temperature = None,
    seed: o.Seed = 0,
    chat: o.Chat = None,
    batch: o.Batch = None,
    mask_id: o.MaskId = None,
    shift: o.Shift = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    revision: o.Revision = None,
    trust_remote_code: o.TrustRemoteCode = False,
    as_json: Annotated[bool, Opt("--json", help="Print one JSON object: the scores and where they are.")] = False,
) -> None:
    """Ask a model every question of a file and score what it says.

    Broken off, the same command goes on where it stopped.
    """
    from rich.console import Console

    from floatscope.pipelines.evaluate import plan_evaluation as evaluation_of
    from floatscope.tasks.read import about, read_file

    read = read_file(data, limit, format=format, skip_bad=skip_bad)
    samples, recall, index = (read.samples, None, {}) if retrieve is None else o.retrieved(retrieve, read.samples, k)
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    opened = o.opened(model, console.is_terminal, device=device, dtype=dtype, mask_id=mask_id, shift=shift,
                      revision=revision, trust_remote_code=trust_remote_code)  # fmt: skip
    source = about(data, limit) | index
    evaluation = evaluation_of(
        opened, samples, out, passages=_passages(passages), shots=shots, prompt=prompt, chat=chat, batch=batch,
        trace=trace, preset=preset, source=source, sampler=sampler, new_tokens=new_tokens, steps=steps, block=block,
        temperature=temperature, seed=seed,
    )  # fmt: skip
    o.say(console, "model", repr(opened))
    o.say_bad(console, read)
    for sentence in evaluation.notes:
        o.say(console, "note", sentence)
    o.say_recall(console, recall, k)
    run(console, evaluation)
    told = {"out": str(out), **summary(out), "bad": len(read.bad), **({} if recall is None else {"recall": recall})}
    if as_json:
        typer.echo(json.dumps(told, indent=1))
        return
    o.say(console, "scores", ", ".join(f"{name} {told[name]['mean']:.1f}" for name in ("acc", "em", "f1")) + " %")
    o.say(console, "out", str(out))


def run(console: Console, evaluation: EvaluationJob) -> None:
    """Ask, then watch; a bar each, with the time left. Ctrl-C keeps what is finished."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}")
    try:
        with Progress(TextColumn("[bold]{task.description:<10}[/]"), *columns, console=console) as bars:
            total = len(evaluation.items)
            bar = bars.add_task("asking", total=total, completed=evaluation.finished, told="")
            for answered in evaluation:
                left = f"{o.clock(answered.left)} left" if answered.done < total else f"in {o.clock(answered.seconds)}"
                bars.update(bar, completed=answered.done, told=f"acc {100 * answered.acc:.1f} %, {left}")
            if (tracing := evaluation.traces()) is not None:
                bar = bars.add_task("watching", total=tracing.total, completed=tracing.finished, told="")
                for traced in tracing:
                    bars.update(bar, completed=traced.done, told=f"{o.clock(traced.left)} left")
    except KeyboardInterrupt as error:
        done = f"{evaluation.finished} of {len(evaluation.items)} answers are kept"
        typer.echo(f"floatscope: interrupted; {done}, and the same command goes on with the others", err=True)
        raise typer.Exit(130) from error


def summary(out: Path) -> dict[str, Any]:
    """The scores of a folder, in percent with their intervals."""
    from floatscope.analysis.evaluations import open_evaluation
    from floatscope.reports.scores import abstention, scored

    results = open_evaluation(out)
    told: dict[str, Any] = {name: vars(interval) for name, interval in scored(results.table).items()}
    if (pair := abstention(results.table)) is not None:
        told["abstention"] = {"precision": pair[0], "recall": pair[1]}
    return {"n": len(results.table), "missing": results.missing, **told}


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders that floatscope eval made.")],
    out: Annotated[Path | None, Opt(help="Write the table there: .md, .tex or .csv.")] = None,
    as_json: Annotated[bool, Opt("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Put evaluations side by side: scores with intervals, and what passages add to the closed book."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from floatscope.files.atomic import write_atomic
    from floatscope.reports.scores import WRITERS, cautions, compared, shown, written

    if out is not None and out.suffix.lstrip(".") not in WRITERS:
        raise UserError(f"--out must end in .{', .'.join(WRITERS)}, got '{out.name}'")
    rows = compared(runs)
    for sentence in cautions(runs):
        typer.echo(f"note: {sentence}", err=True)
    if out is not None:
        text = written(rows, out.suffix.lstrip("."))
        try:
            write_atomic(out, [text.encode()])
        except OSError as error:
            raise UserError(f"cannot write {out}: {error.strerror}") from error
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=1))
        return
    console = Console(highlight=False)
    heads, cells = shown(rows)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i < 3 else "right")
    for row in cells:
        table.add_row(*row)
    console.print(table)
    console.print("[dim]percent, 95 % intervals over questions; gains over the closed book, question by question[/]")
    if out is not None:
        console.print(f"table: {out}", soft_wrap=True)


def _passages(given: str) -> int | str:
    if given in ("gold", "all"):
        return given
    if given.isdecimal():
        return int(given)
    raise UserError(f"--passages takes a number, gold or all, got '{given}'")
