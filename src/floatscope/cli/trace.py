"""`floatscope trace`: a model over many samples, into a run folder that can be broken off and gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floatscope.cli import options as o
from floatscope.errors import UserError, unknown_choice

if TYPE_CHECKING:
    from rich.console import Console

    from floatscope.pipelines.trace import TraceJob

Opt = typer.Option
CONTROLS = 3  # seeds, unless said otherwise


def trace(
    model: o.Name,
    out: Annotated[Path, Opt(help="The run folder: a new one, or one to go on with.", show_default=False)],
    data: Annotated[Path | None, Opt(help="Questions, a JSON object on each line; also .gz and .xz.")] = None,
    prompt: Annotated[list[str], Opt(help="A text to answer or continue; may be repeated.")] = [],  # noqa: B006
    limit: o.Limit = None,
    format: o.Format = None,
    skip_bad: o.SkipBad = False,
    new_tokens: o.NewTokens = None,
    steps: o.Steps = None,
    block: o.Block = None,
    sampler: o.Sampler = None,
    preset: o.Preset = None,
    temperature: o.Temperature = None,
    seed: o.Seed = 0,
    chat: o.Chat = None,
    keep: Annotated[str, Opt(help="How much of each step: summary, heads, rows or full.")] = "summary",
    influence: Annotated[bool, Opt("--influence", help="Also the gradient of each committed token's logit.")] = False,
    batch: o.Batch = None,
    control: Annotated[str | None, Opt(help="untrained: trace fresh weights of the same architecture too.")] = None,
    control_seeds: Annotated[int | None, Opt(help="How many untrained controls; 3 unless given.")] = None,
    mask_id: o.MaskId = None,
    shift: o.Shift = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    revision: o.Revision = None,
    trust_remote_code: o.TrustRemoteCode = False,
    as_json: Annotated[bool, Opt("--json", help="Print one JSON object: the runs, their sizes and scores.")] = False,
) -> None:
    """Trace a model over many samples: one file for each, in a run folder.

    Broken off, the same command goes on where it stopped; a finished sample is not decoded twice.

    All new tokens are decoded, whether or not the text has ended, so that runs of several models have the same steps.
    """
    from rich.console import Console

    from floatscope.capture.watcher import Watch
    from floatscope.files.sizes import format_size
    from floatscope.pipelines.trace import plan_trace
    from floatscope.tasks.read import about, read_file

    if (data is None) == (not prompt):
        raise UserError("give --data FILE or --prompt TEXT, one of the two")
    if data is None and limit is not None:
        raise UserError("--limit takes the first samples of --data; leave it out with --prompt")
    if data is None and (format is not None or skip_bad):
        raise UserError("--format and --skip-bad say how --data is read; leave them out with --prompt")
    if control not in (None, "untrained"):
        raise unknown_choice("control", control, ("untrained",))
    if control_seeds is not None and control is None:
        raise UserError("--control-seeds says how many controls; give --control untrained with it")
    if control_seeds is not None and control_seeds < 1:
        raise UserError(f"--control-seeds must be at least 1, got {control_seeds}")
    read = None if data is None else read_file(data, limit, format=format, skip_bad=skip_bad)
    watch = Watch(keep, influence=influence)

    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    opened = o.opened(
        model,
        console.is_terminal,
        device=device,
        dtype=dtype,
        mask_id=mask_id,
        shift=shift,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    tracing = plan_trace(
        opened,
        prompt if read is None else read.samples,
        out,
        watch=watch,
        batch=batch,
        controls=range(control_seeds or CONTROLS) if control else (),
        chat=chat,
        preset=preset,
        source={} if data is None else about(data, limit),
        sampler=sampler,
        new_tokens=new_tokens,
        steps=steps,
        block=block,
        temperature=temperature,
        seed=seed,
    )
    kept = tracing.finished
    o.say(console, "model", repr(opened))
    if read is not None:
        o.say_bad(console, read)
    if tracing.note:
        o.say(console, "note", tracing.note)
    if kept:
        o.say(console, "kept", f"{kept} of {tracing.total} samples, finished before; going on with the others")
    if tracing.size is not None:
        runs = f" in {len(tracing.paths)} runs" if len(tracing.paths) > 1 else ""
        o.say(console, "forecast", f"{format_size(tracing.size.total)} for {tracing.total} samples{runs}")
    try:
        _watch(console, tracing)
    except KeyboardInterrupt as error:
        done = f"{tracing.finished} of {tracing.total} samples are finished and kept"
        typer.echo(f"floatscope: interrupted; {done}, and the same command goes on with the others", err=True)
        raise typer.Exit(130) from error
    told = [run.as_json for run in tracing.summaries()]
    if as_json:
        bad = 0 if read is None else len(read.bad)
        typer.echo(json.dumps({**told[0], "kept": kept, "bad": bad, "controls": told[1:]}, indent=1))
        return
    for place, run in enumerate(told):
        o.say(console, "control" if place else "run", _line(run))


def _watch(console: Console, tracing: TraceJob) -> None:
    """A bar with the time left; what was finished before counts as done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}")
    with Progress(TextColumn(f"[bold]{'tracing':<10}[/]"), *columns, console=console) as progress:
        bar = progress.add_task("", total=tracing.total, completed=tracing.finished, left="")
        for traced in tracing:
            left = f"{o.clock(traced.left)} left" if traced.done < traced.total else f"in {o.clock(traced.seconds)}"
            progress.update(bar, completed=traced.done, left=left)


def _line(run: dict[str, Any]) -> str:
    from floatscope.files.sizes import format_size

    scored = "" if run["acc"] is None else f", acc {run['acc']:.3f}"
    return f"{run['run']}: {run['samples']} samples, {format_size(run['bytes'])}{scored}"
