"""`floatscope doctor`: this machine, which backend serves which attention call, and whether captured == executed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from floatscope.cli import options as o
from floatscope.cli.console import print_text, show_status

if TYPE_CHECKING:
    from rich.console import Console

    from floatscope.pipelines.doctor import Report


def doctor(as_json: o.AsJson = False) -> None:
    """Check on this machine that captured attention is executed attention.

    Every kind of attention call and a few tiny models are watched and compared with a dense float64 result.

    The exit status is 1 if a check fails.
    """
    from rich.console import Console

    console = Console(highlight=False)
    with show_status("checking attention calls and models"):
        from floatscope.pipelines.doctor import examine

        report = examine()
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=1))
    else:
        _print_report(console, report)
    if not report.ok:
        raise typer.Exit(1)


def _print_report(console: Console, report: Report) -> None:
    from rich.table import Table

    from floatscope.pipelines.doctor import error_limit

    def make_table(title: str, *columns: str) -> Table:
        table = Table(*columns, title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.columns[0].no_wrap = True
        return table

    def compare(error: float, limit: float) -> str:
        return f"{error:.0e} < {limit:.0e}" if error <= limit else f"[red]{error:.0e} > {limit:.0e}[/]"

    facts = make_table("This machine", "", "")
    facts.show_header = False
    for fact, value in report.facts.items():
        facts.add_row(fact, value)

    backends = make_table(
        "Which backend serves which attention call", "device", "mask", "where", "cases", "backend", "why not triton"
    )
    for row in report.backend_uses():
        backends.add_row(row.device, row.mask, row.where, str(row.cases), row.backend, row.reason)

    worst = report.largest_errors()
    placements = dict.fromkeys((device, dtype) for device, dtype, _ in worst)
    columns = (f"{dtype} on {device}" for device, dtype in placements)
    errors = make_table("Largest error against dense float64, and its limit", "quantity", *columns)
    for quantity in dict.fromkeys(quantity for *_, quantity in worst):
        cells = (compare(worst[*placement, quantity], error_limit(quantity, placement[1])) for placement in placements)
        errors.add_row(quantity, *cells)

    models = make_table("Complete models: watched against unwatched output", "model", "as", "error")
    for verdict in report.models:
        result = "[red]see below[/]" if verdict.problem else compare(verdict.error, verdict.limit)
        models.add_row(verdict.model, f"{verdict.dtype} on {verdict.device}", result)

    libraries = make_table("Libraries whose private APIs are used", "library", "installed", "tested", "private APIs")
    for use in report.libraries:
        libraries.add_row(use.library, use.installed, f"{use.oldest} to {use.newest}", ", ".join(use.private_apis))

    for table in (facts, backends, errors, models, libraries):
        console.print(table, "")
    for use in report.libraries:
        if use.problem is not None:
            console.print(f"[yellow]untested[/]: {use.problem}; the checks above ran with it", soft_wrap=True)
    if report.ok:
        checked = f"{len(report.calls)} attention calls and {len(report.models)} models checked"
        console.print(f"[bold green]captured == executed[/]: {checked}")
    else:
        console.print(f"[bold red]captured != executed[/]: {len(report.failures)} checks failed")
        for failure in report.failures:
            print_text(console, f"  {failure}")
