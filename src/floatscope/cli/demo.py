"""`floatscope demo`: watch a small model denoise a few canvases, and look at what was kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint, the run folders and the maps.")] = Path("demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Watch a small model denoise a few canvases: checkpoint, run folders, temporal maps.

    The weights are random: this shows how the instrument works, not what a trained model does.

    Run again, it continues where it stopped; a finished sample is not decoded twice.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from floatscope import demo as work
    from floatscope.trace.sizes import format_size

    console = Console(stderr=as_json, highlight=False, soft_wrap=True)

    def say(what: str, text: object) -> None:
        console.print(f"[bold]{what:<11}[/]{text}")

    ready = work.prepare(out)
    say("model", f"{ready.about}; control: the same, drawn anew")
    say("forecast", f"{format_size(ready.size.total)} for {ready.samples} samples of {work.STEPS} steps")
    kept = 0
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("left")
    with Progress(TextColumn(f"[bold]{'watching':<10}[/]"), *columns, console=console) as progress:
        bar = progress.add_task("", total=ready.samples)
        for finished in work.watch(ready):
            kept += not finished.decoded
            rest = ready.samples - kept
            progress.update(bar, advance=int(finished.decoded), total=rest, visible=rest > 0)
    seen = work.look(ready)
    if as_json:
        typer.echo(json.dumps({"forecast": ready.size.total, "kept": kept, **seen.as_json}, indent=1))
        return
    if kept:
        say("kept", f"{kept} samples that were finished before")
    say("checkpoint", seen.checkpoint)
    for run in seen.runs.values():
        say("run", run)
    for picture in seen.maps.values():
        say("map", picture)
    say("seen", seen.line)
    say("", "Both are random: this is how the instrument works, not the phenomenon. Trained twins are planned.")
