"""`floatscope report RUN…`: one page about runs, and on request the figures and tables behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from floatscope.cli import options as o
from floatscope.cli.console import print_text
from floatscope.errors import UserError


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Folders written by floatscope trace.", show_default=False)
    ],
    out: Annotated[Path, o.Opt(metavar="FILE", help="The page.")] = Path("report.html"),
    detector: Annotated[str, o.Opt(help="What counts as an anchor, such as 'rulli(eps=3)'.")] = "zscore",
    commits: Annotated[
        str,
        o.Opt(help="The commits that count for reading, order and floating: answer, or all with its ends of text."),
    ] = "answer",
    explore: Annotated[int, o.Opt(metavar="N", min=0, help="Samples of each run to step through on the page.")] = 2,
    figures: Annotated[Path | None, o.Opt(metavar="DIR", help="Also draw every chart into this folder.")] = None,
    figure_format: Annotated[
        str | None, o.Opt(help="Figure formats: png, pdf, svg, or several with commas. Default: png,pdf.")
    ] = None,
    tables: Annotated[Path | None, o.Opt(metavar="DIR", help="Also write the numbers into this folder.")] = None,
    paper: Annotated[
        bool,
        o.Opt("--paper", help="Draw the figures of the attention floating paper instead of the standard sections."),
    ] = False,
    as_json: Annotated[bool, o.Opt("--json", help="Print the paths of what was written as JSON.")] = False,
) -> None:
    """Compare runs on one page, each beside its untrained control."""
    import json

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if figure_format is not None and figures is None:
        raise UserError("--figure-format needs --figures DIR")
    formats = [format.strip() for format in (figure_format or "png,pdf").split(",")]

    from floatscope.reports.build import write_report

    progress_console = Console(stderr=True, highlight=False)
    columns = TextColumn("reading traces"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    is_silent = not progress_console.is_terminal
    with Progress(*columns, console=progress_console, transient=True, disable=is_silent) as bars:
        task = bars.add_task("", total=None)
        files = write_report(
            runs,
            out,
            detector=detector,
            commits=commits,
            explore=explore,
            tables=tables,
            figures=figures,
            figure_formats=formats,
            paper=paper,
            on_progress=lambda done, total: bars.update(task, completed=done, total=total),
        )
    written = {"tables": list(map(str, files.tables)), "figures": list(map(str, files.figures))}
    if as_json:
        typer.echo(json.dumps({"page": str(out), "summary": files.summary, **written}))
        return
    console = Console(highlight=False, soft_wrap=True)
    for sentence in files.summary:
        print_text(console, "• " + sentence.replace("**", ""))
    for kind, paths in written.items():
        if paths:
            print_text(console, f"{len(paths)} {kind}: {Path(paths[0]).parent}")
    print_text(console, f"page: {out}")
