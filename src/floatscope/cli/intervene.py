"""`floatscope intervene`: the same questions at baseline, with the attention edited, and under a matched control."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from floatscope.cli import options as o
from floatscope.cli.console import (
    collect_warnings,
    explain_interrupt,
    make_console,
    print_line,
    print_notes,
    print_skipped,
    print_table,
    show_progress,
)
from floatscope.errors import unknown_choice

CONTROLS = ("random", "middle", "none")


def _list_edits(is_requested: bool) -> None:
    if not is_requested:
        return
    from rich.console import Console
    from rich.table import Table

    from floatscope.interventions.recipes import RECIPES

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("edit", no_wrap=True)
    table.add_column("what it does")
    for name, recipe in RECIPES.items():
        table.add_row(f"{name}({', '.join(f'{k}={v!r}' for k, v in recipe.defaults.items())})", recipe.description)
    console = Console(highlight=False)
    console.print(table)
    console.print("[dim]every edit also takes steps, layers and heads: mask_anchors(k=5, layers=\\[2, 3])[/]")
    raise typer.Exit


@o.expand_groups
def intervene(
    models: o.ModelNames,
    *,
    edit: Annotated[
        list[str], o.Opt(help="What is changed; several edits apply together (--list).", show_default=False)
    ],
    out: o.OutFolder,
    control: Annotated[str, o.Opt(help="The same edit on other keys or heads: random, middle or none.")] = "random",
    draws: Annotated[int, o.Opt(metavar="N", min=1, help="Number of random controls.")] = 3,
    list_edits: Annotated[
        bool, o.Opt("--list", callback=_list_edits, is_eager=True, help="List the edits and exit.")
    ] = False,
    as_json: o.AsJson = False,
    data: o.Data,
    reading: o.DataOptions,
    questions: o.QuestionOptions,
    sampling: o.SamplingOptions,
    loading: o.ModelOptions,
) -> None:
    """Edit the attention while a model answers, and compare with the baseline and with a control.

    An interrupted experiment is resumed by the same command.
    """
    from floatscope.interventions.recipes import parse_edits

    if control not in CONTROLS:
        raise unknown_choice("control", control, CONTROLS)
    parse_edits(edit)
    o.check_models(models)
    file = reading.read(data)
    console = make_console(stderr=as_json)
    print_skipped(console, file)
    print_line(console, "opening", models[0])

    from floatscope.pipelines.folders import model_folders
    from floatscope.pipelines.intervene import plan_conditions, plan_intervention, write_effects
    from floatscope.reports.intervention_report import build_conditions_table, build_effects_table

    paths, notes = model_folders(models, out), dict[str, list[str]]()
    for name, path in zip(models, paths, strict=True):
        if name != models[0]:
            print_line(console, "opening", name)
        model = loading.load(name)
        print_line(console, "model", repr(model))
        job = plan_intervention(
            model,
            file.samples,
            path,
            plan_conditions(model, edit, None if control == "none" else control, draws),
            title=" and ".join(edit),
            source=reading.describe(data),
            **questions.settings,
            **sampling.settings,
        )
        notes[model.spec.name] = job.notes
        print_notes(console, job.notes)
        with (
            explain_interrupt(lambda job=job: f"{job.finished} of {job.total} answers are finished"),  # type: ignore[misc]
            collect_warnings() as warned,
            show_progress(console, name, job.total, job.finished) as update,
        ):
            for condition, event in job:
                update(job.finished, f"{condition.name}: acc {100 * event.acc:.1f} %")
        print_notes(console, list({text.partition(" picked ")[0]: text for text in warned}.values()))  # one per edit
    table, page = write_effects(paths, out), out / "report.html"
    if as_json:
        rows = json.loads(table.to_json(orient="records"))
        record = {"page": str(page), "notes": notes, "skipped": len(file.errors), "effects": rows}
        typer.echo(json.dumps(record, indent=1))
        return
    for summary in (build_conditions_table(table, intervals=False), build_effects_table(table)):
        print_table(console, summary.columns, summary.rows)
        console.print()
    print_line(console, "page", str(page))
