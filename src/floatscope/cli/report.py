"""`floatscope report RUN…`: one page, and if asked for the figures and tables behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from floatscope.errors import UserError, unknown_choice

FORMATS = ("png", "pdf", "svg")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders, as floatscope trace makes them.")],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    detector: Annotated[str, typer.Option(help="What an anchor is, such as 'rulli(eps=3)'.")] = "zscore",
    explore: Annotated[int, typer.Option(min=0, help="Canvases of each run to look into.")] = 2,
    figures: Annotated[Path | None, typer.Option(help="Also draw every chart into this folder.")] = None,
    format: Annotated[
        str | None, typer.Option(help="Of the figures: png, pdf, svg, or several with commas; png,pdf unless given.")
    ] = None,
    tables: Annotated[Path | None, typer.Option(help="Also write the numbers into this folder.")] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="The figures of the attention floating paper, drawn from these runs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print where things are as JSON.")] = False,
) -> None:
    """Compare runs on one page: where they look, what for and in which order, each beside its untrained control."""
    import json

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from floatscope.reports.build import build, linked, write_figures, write_tables
    from floatscope.reports.page import write_page
    from floatscope.traces import controls, open_run

    if format is not None and figures is None:
        raise UserError("--format is that of the figures; give --figures FOLDER with it")
    endings = [ending.strip() for ending in (format or "png,pdf").split(",")]
    for ending in endings:
        if ending not in FORMATS:
            raise unknown_choice("format", ending, FORMATS)
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out names the page, such as report.html, got {out}")
    console = Console(stderr=True, highlight=False)
    total = sum(len(open_run(each).done) for run in runs for each in (run, *controls(run)))
    columns = TextColumn("reading traces"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=total)
        made, compared = build(runs, detector, explore, lambda _: bars.advance(task), as_paper=paper)
    written = {
        "tables": [str(path) for path in write_tables(compared, tables)] if tables else [],
        "figures": [str(path) for path in write_figures(made, figures, endings)] if figures else [],
    }
    write_page(linked(made, tables, out) if tables else made, out)
    if as_json:
        typer.echo(json.dumps({"page": str(out), "summary": made.summary, **written}))
        return
    shown = Console(highlight=False, soft_wrap=True)
    for sentence in made.summary:
        shown.print("• " + sentence.replace("[", "\\[").replace("**", ""))
    for kind, paths in written.items():
        if paths:
            shown.print(f"{len(paths)} {kind}: {Path(paths[0]).parent}")
    shown.print(f"page: {out}")
