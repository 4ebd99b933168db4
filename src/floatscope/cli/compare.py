"""`floatscope compare`: evaluations side by side, and what passages add."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from floatscope.cli import options as o


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Folders written by floatscope eval.", show_default=False)
    ],
    out: Annotated[Path | None, o.Opt(metavar="FILE", help="Also write the table: .md, .tex or .csv.")] = None,
    as_json: Annotated[bool, o.Opt("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Compare evaluations: scores with 95 % CIs, and the gain of passages over closed book."""
    from dataclasses import asdict

    from rich.console import Console

    from floatscope.cli.console import print_table, print_text
    from floatscope.errors import escape_controls
    from floatscope.reports.score_table import list_cautions, score_rows, select_columns, write_scores

    rows = score_rows(runs)
    for sentence in list_cautions(runs):
        typer.echo(f"note: {escape_controls(sentence)}", err=True)
    if out is not None:
        write_scores(rows, out)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=1))
        return
    console = Console(highlight=False)
    print_table(console, *select_columns(rows), wrap=True)
    console.print("[dim]percent, with 95 % CIs over questions; gains are paired differences from closed book[/]")
    if out is not None:
        print_text(console, f"table: {out}")
