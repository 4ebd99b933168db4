"""`floatscope study`: an experiment with a name, its controls, and what it found in a sentence per model."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floatscope.cli import options as o

if TYPE_CHECKING:
    from rich.console import Console

    from floatscope.pipelines.intervene import InterventionJob
    from floatscope.reports.charts import Table

Opt = typer.Option


def study(
    name: Annotated[str, typer.Argument(metavar="NAME", help="sinks, pin, heads, dormant or blank.")],
    models: o.Names,
    data: o.Questions,
    out: Annotated[Path, Opt(help="The folder: a new one, or one to go on with.", show_default=False)],
    option: Annotated[list[str], Opt("--set", help="An option of the study, such as counts=1,5.")] = [],  # noqa: B006
    prompt: o.Template = "default",
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
    batch: o.Batch = None,
    mask_id: o.MaskId = None,
    shift: o.Shift = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    revision: o.Revision = None,
    trust_remote_code: o.TrustRemoteCode = False,
    as_json: Annotated[bool, Opt("--json", help="Print one JSON object: the findings and where they are.")] = False,
) -> None:
    """Run an experiment that has a name on one model or several, with its controls.

    Broken off, the same command goes on where it stopped.
    """
    from rich.console import Console

    from floatscope.analysis.experiments import effects
    from floatscope.analysis.studies import STUDIES
    from floatscope.pipelines.intervene import plan_intervention
    from floatscope.pipelines.studies import StudyInput, check, plan
    from floatscope.reports.page import write_page
    from floatscope.reports.studied import results, studied
    from floatscope.tasks.read import about, read_file

    options, paths, notes = o.options(option), o.folders(models, out), dict[str, list[str]]()
    check(name, options)
    read = read_file(data, limit, format=format, skip_bad=skip_bad)
    settings: dict[str, Any] = {
        "prompt": prompt, "chat": chat, "batch": batch, "preset": preset, "source": about(data, limit),
        "sampler": sampler, "new_tokens": new_tokens, "steps": steps, "block": block, "temperature": temperature,
    }  # fmt: skip
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    o.say_bad(console, read)
    for model, path in zip(models, paths, strict=True):
        opened = o.opened(model, console.is_terminal, device=device, dtype=dtype, mask_id=mask_id, shift=shift,
                          revision=revision, trust_remote_code=trust_remote_code)  # fmt: skip
        o.say(console, "model", repr(opened))
        planned = plan(name, StudyInput(opened, tuple(read.samples), path, seed, settings), **options)
        made = plan_intervention(opened, planned.subsets, path, planned.conditions, title=STUDIES[name].title,
                          nll_only=STUDIES[name].nll_only, seed=seed, **settings)  # fmt: skip
        said = _run(console, model, made, [*planned.notes, *made.notes])
        notes[opened.spec.name] = [*planned.notes, *made.notes, *said]
    table, page = effects(paths), out / "report.html"
    table.to_csv(out / "effects.csv", index=False)
    write_page(studied(name, paths, notes), page)
    found = STUDIES[name].summarise(table)
    if as_json:
        rows = json.loads(table.to_json(orient="records"))
        told = {"page": str(page), "found": found, "notes": notes, "bad": len(read.bad), "effects": rows}
        typer.echo(json.dumps(told, indent=1))
        return
    _show(console, results(name, table))
    for sentence in found:
        o.say(console, "found", sentence)
    o.say(console, "page", str(page))


def _run(console: Console, model: str, made: InterventionJob, told: list[str]) -> list[str]:
    """To the end; and what is to be said of edits that found nothing to do."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    for sentence in told:
        o.say(console, "note", sentence)
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"), TimeRemainingColumn()
    try:
        with (
            warnings.catch_warnings(record=True) as said,
            Progress(TextColumn(f"[bold]{model}[/]"), *columns, console=console) as bars,
        ):
            bar = bars.add_task("", total=made.total, completed=made.finished, told="")
            for arm, _ in made:
                bars.update(bar, completed=made.finished, told=f"{arm.subset} {arm.name}".strip())
    except KeyboardInterrupt as error:
        kept = f"{made.finished} of {made.total} answers are kept"
        typer.echo(f"floatscope: interrupted; {kept}, and the same command goes on with the others", err=True)
        raise typer.Exit(130) from error
    sentences = list(dict.fromkeys(str(each.message) for each in said))
    for sentence in sentences:
        o.say(console, "note", sentence)
    return sentences


def _show(console: Console, told: Table) -> None:
    from rich.table import Table

    shown = Table(box=None, header_style="bold", pad_edge=False)
    for at, column in enumerate(told.columns):
        shown.add_column(column, justify="left" if at <= told.columns.index("arm") else "right", no_wrap=True)
    for row in told.rows:
        shown.add_row(*map(str, row))
    console.print(shown)
