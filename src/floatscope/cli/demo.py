"""`floatscope demo`: the shipped twins answer a few questions, watched, and a report shows where they look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from floatscope.cli import options as o
from floatscope.cli.console import (
    explain_interrupt,
    make_console,
    print_line,
    print_table,
    show_progress,
)


def demo(
    out: Annotated[Path, o.Opt(metavar="DIR", help="Folder for the runs and the report.")] = Path("demo"),
    as_json: o.AsJson = False,
) -> None:
    """Trace the three twins and their untrained controls on twelve questions, and write a report.

    One twin is autoregressive, one a masked diffusion model trained from scratch, one a masked diffusion model adapted
    from the first. They ship with the package: nothing is downloaded.

    An interrupted demo is resumed by the same command.
    """
    console = make_console(stderr=as_json)
    print_line(console, "opening", "twin:arm, twin:mdm, twin:mdm-adapted")

    from floatscope.files.sizes import format_size
    from floatscope.pipelines.demo import STEPS, plan_demo, write_demo_report

    job = plan_demo(out)
    size = f"{job.total} samples of {STEPS} steps, at most {format_size(job.max_bytes)}"
    print_line(console, "forecast", size)
    if job.finished:
        print_line(console, "resuming", f"{job.finished} of {job.total} samples are already finished")
    with (
        explain_interrupt(lambda: f"{job.finished} of {job.total} samples are finished"),
        show_progress(console, "tracing", job.total, job.finished) as update,
    ):
        finished = job.finished
        for event in job:
            finished += 1
            update(finished, f"{event.run.name} {event.sample}")
    result = write_demo_report(job)
    if as_json:
        typer.echo(json.dumps(result.as_json, indent=1))
        return
    rows = [(r.twin, f"{r.acc:.0%}", r.first_key, r.top_key, r.within, r.across) for r in result.rows]
    print_table(console, ("", "acc", "first key", "top key", "within", "across"), rows)
    console.print(
        "First and top key: mean lift over layers; 1 is what uniform attention gives. Within, across: how often the top"
        " key of a layer is away from its usual position, in one text and over all texts. (Untrained control.)"
    )
    print_line(console, "page", str(result.page))
