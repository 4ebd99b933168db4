"""`floatscope doctor`: what is here, which backend serves which case, and whether captured == executed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from floatscope.pipelines.doctor import Report


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Check this machine: is what is captured what was executed?

    Every kind of attention call and a few tiny models are watched and compared with the dense float64 result.

    Ends with status 1 if a check fails, and names it.
    """
    from rich.console import Console

    from floatscope.pipelines.doctor import examine

    console = Console(highlight=False)
    with Console(stderr=True).status("checking attention calls and models"):
        report = examine()
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=1))
    else:
        _print(console, report)
    if not report.ok:
        raise typer.Exit(1)


def _print(console: Console, report: Report) -> None:
    from rich.table import Table

    from floatscope.pipelines.doctor import limit

    def table(title: str, *columns: str) -> Table:
        made = Table(*columns, title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        made.columns[0].no_wrap = True
        return made

    def against(error: float, limit: float) -> str:
        return f"{error:.0e} < {limit:.0e}" if error <= limit else f"[red]{error:.0e} > {limit:.0e}[/]"

    facts = table("This machine", "", "")
    facts.show_header = False
    for fact, value in report.facts.items():
        facts.add_row(fact, value)

    served = table(
        "Which backend serves which attention call", "device", "mask", "where", "cases", "backend", "not triton:"
    )
    for row in report.served():
        served.add_row(row.device, row.mask, row.where, str(row.cases), row.backend, row.reason)

    worst = report.worst()
    kinds = dict.fromkeys((device, dtype) for device, dtype, _ in worst)
    columns = (f"{dtype} on {device}" for device, dtype in kinds)
    errors = table("Largest error against dense float64, and its limit", "quantity", *columns)
    for what in dict.fromkeys(quantity for *_, quantity in worst):
        errors.add_row(what, *(against(worst[*kind, what], limit(what, kind[1])) for kind in kinds))

    models = table("Whole models, verified while watched; watched against unwatched output", "model", "as", "error")
    for v in report.verdicts:
        models.add_row(
            v.model, f"{v.dtype} on {v.device}", "[red]see below[/]" if v.problem else against(v.error, v.limit)
        )

    for part in (facts, served, errors, models):
        console.print(part, "")
    if report.ok:
        done = f"{len(report.outcomes)} attention calls and {len(report.verdicts)} models checked"
        console.print(f"[bold green]captured == executed here[/]: {done}")
    else:
        console.print(f"[bold red]captured != executed here[/]: {len(report.failures)} checks failed")
        for failure in report.failures:
            console.print(f"  {failure}", soft_wrap=True)
