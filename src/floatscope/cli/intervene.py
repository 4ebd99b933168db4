"""`floatscope intervene`: the same questions with the attention edited, beside the baseline and the control."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floatscope.cli import options as o
from floatscope.errors import unknown_choice

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from floatscope.models.model import Model

Opt = typer.Option
CONTROLS = ("random", "middle", "none")


def _list(wanted: bool) -> None:
    if not wanted:
        return
    from rich.console import Console
    from rich.table import Table

    from floatscope.interventions.recipes import RECIPES

    shown = Table(box=None, header_style="bold", pad_edge=False)
    shown.add_column("edit", no_wrap=True)
    shown.add_column("what it does")
    for name, recipe in RECIPES.items():
        shown.add_row(f"{name}({', '.join(f'{k}={v!r}' for k, v in recipe.defaults.items())})", recipe.about)
    console = Console(highlight=False)
    console.print(shown)
    console.print("[dim]every edit also takes steps, layers and heads, as in mask_anchors(k=5, layers=\\[2, 3])[/]")
    raise typer.Exit


def intervene(
    models: o.Names,
    edit: Annotated[list[str], Opt(help="What is changed; several are at work together.", show_default=False)],
    data: o.Questions,
    out: Annotated[Path, Opt(help="The folder: a new one, or one to go on with.", show_default=False)],
    control: Annotated[str, Opt(help="The same edit on other keys or heads: random, middle, none.")] = "random",
    draws: Annotated[int, Opt(help="How often random keys are drawn.")] = 3,
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
    as_json: Annotated[bool, Opt("--json", help="Print one JSON object: the effects and where they are.")] = False,
    listed: Annotated[bool, Opt("--list", callback=_list, is_eager=True, help="Print the edits there are.")] = False,
) -> None:
    """Ask the same questions with the attention as it is, edited, and edited elsewhere, and show what the edit does.

    Broken off, the same command goes on where it stopped.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from floatscope.analysis.experiments import effects
    from floatscope.interventions.recipes import parse_edits
    from floatscope.pipelines.intervene import plan_intervention
    from floatscope.reports.intervened import intervened
    from floatscope.reports.page import write_page
    from floatscope.tasks.read import about, read_file

    if control not in CONTROLS:
        raise unknown_choice("control", control, CONTROLS)
    parse_edits(edit)  # before a model is opened: what is wrong with them
    read = read_file(data, limit, format=format, skip_bad=skip_bad)
    paths, notes = o.folders(models, out), dict[str, list[str]]()
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    o.say_bad(console, read)
    for name, path in zip(models, paths, strict=True):
        opened = o.opened(name, console.is_terminal, device=device, dtype=dtype, mask_id=mask_id, shift=shift,
                          revision=revision, trust_remote_code=trust_remote_code)  # fmt: skip
        made = plan_intervention(
            opened, read.samples, path, _arms(opened, edit, control, draws), title=" and ".join(edit), prompt=prompt,
            chat=chat, batch=batch, preset=preset, source=about(data, limit), sampler=sampler, new_tokens=new_tokens,
            steps=steps, block=block, temperature=temperature, seed=seed,
        )  # fmt: skip
        o.say(console, "model", repr(opened))
        notes[opened.spec.name] = made.notes
        for sentence in made.notes:
            o.say(console, "note", sentence)
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"), TimeRemainingColumn()
        try:
            with (
                warnings.catch_warnings(record=True) as said,
                Progress(TextColumn(f"[bold]{name}[/]"), *columns, console=console) as bars,
            ):
                bar = bars.add_task("", total=made.total, completed=made.finished, told="")
                for arm, answered in made:
                    bars.update(bar, completed=made.finished, told=f"{arm.name}: acc {100 * answered.acc:.1f} %")
        except KeyboardInterrupt as error:
            kept = f"{made.finished} of {made.total} answers are kept"
            typer.echo(f"floatscope: interrupted; {kept}, and the same command goes on with the others", err=True)
            raise typer.Exit(130) from error
        heard = [str(each.message) for each in said]
        for sentence in {each.partition(" picked ")[0]: each for each in heard}.values():  # one of each edit
            o.say(console, "note", sentence)
    table, page = effects(paths), out / "report.html"
    table.to_csv(out / "effects.csv", index=False)
    write_page(intervened(paths), page)
    if as_json:
        rows = json.loads(table.to_json(orient="records"))
        typer.echo(json.dumps({"page": str(page), "notes": notes, "bad": len(read.bad), "effects": rows}, indent=1))
        return
    _show(console, table)
    o.say(console, "page", str(page))


def _arms(model: Model, edits: list[str], control: str, draws: int) -> list[Any]:
    from floatscope.interventions.arm import BASELINE, Condition, build_conditions

    config: Any = getattr(model.module, "config", None)
    heads = getattr(getattr(config, "get_text_config", lambda: config)(), "num_attention_heads", None)
    return [Condition(BASELINE), *build_conditions(edits, None if control == "none" else control, draws, heads)]


def _show(console: Console, table: pd.DataFrame) -> None:
    from rich.table import Table

    from floatscope.reports.intervened import arms_table, effects_table

    for told in (arms_table(table, intervals=False), effects_table(table)):
        shown = Table(box=None, header_style="bold", pad_edge=False)
        for at, name in enumerate(told.columns):
            words = all(str(row[at])[:1].isalpha() for row in told.rows)
            shown.add_column(name, justify="left" if words else "right", no_wrap=True)
        for row in told.rows:
            shown.add_row(*map(str, row))
        console.print(shown)
        console.print()
