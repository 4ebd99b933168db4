"""`floatscope demo`: the embedded twins answer a few questions, watched, and the report of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the run folders and the page.")] = Path("demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Watch three trained twins and their untrained controls answer twelve questions, and report what was seen.

    One twin is autoregressive, one masked diffusion from scratch, one masked diffusion adapted from the first. All of
    it is in the package: nothing is downloaded.

    Run again, it continues where it stopped; a finished sample is not decoded twice.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table

    from floatscope.files.sizes import format_size
    from floatscope.pipelines import demo as work

    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    ready = work.prepare(out)
    console.print(
        f"{len(work.TWINS)} twins and their controls, {ready.total} samples of {work.STEPS} steps,"
        f" at most {format_size(ready.size)}"
    )
    if ready.finished:
        console.print(f"{ready.finished} samples were finished before")
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("left")
    with Progress(TextColumn("watching"), *columns, console=console) as progress:
        bar = progress.add_task("", total=ready.total, completed=ready.finished)
        for traced in work.watch(ready):
            progress.update(bar, advance=1, description=traced.sample)
    seen = work.look(ready)
    if as_json:
        typer.echo(json.dumps(seen.as_json, indent=1))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("", "right", "first key", "top key", "within", "across"):
        table.add_column(name, justify="left" if not name else "right")
    for row in seen.rows:
        table.add_row(row.twin, f"{row.right:.0%}", row.first, row.top, row.within, row.across)
    console.print(table)
    console.print(
        "First and top key: lift, 1 = as much as uniform attention would give, mean over layers. Within, across: how"
        " often a layer's top key is away from its usual place, in one text and over all. (Untrained control.)"
    )
    console.print(f"page: {seen.page}")
