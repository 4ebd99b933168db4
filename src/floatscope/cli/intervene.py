"""`floatscope intervene`: the same questions at baseline, with the attention edited, and under a matched control."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from floatscope.cli import options as o
from floatscope.cli.console import print_table
from floatscope.cli.output import Output
from floatscope.errors import unknown_choice

CONTROLS = ("both", "mass", "random", "middle", "none")


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
    control: Annotated[
        str,
        o.Opt(
            help="The same edit on other keys: mass (as much attention), random (as many), middle rank, both (mass and"
            " random) or none."
        ),
    ] = "both",
    draws: Annotated[int, o.Opt(metavar="N", min=1, help="Number of controls of each kind.")] = 3,
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
    output = Output(as_json)
    skipped = output.skipped(file)
    output.line("opening", models[0])

    from floatscope.pipelines.folders import model_folders
    from floatscope.pipelines.intervene import plan_conditions, plan_intervention, write_effects
    from floatscope.reports.intervention_report import build_comparison_table, build_conditions_table

    paths, notes = model_folders(models, out), dict[str, list[str]]()
    for name, path in zip(models, paths, strict=True):
        if name != models[0]:
            output.line("opening", name)
        model = loading.load(name)
        output.line("model", repr(model))
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
        notes[model.spec.name] = output.run(name, job)
    table, page = write_effects(paths, out), out / "report.html"
    if as_json:
        rows = json.loads(table.to_json(orient="records"))
        output.finish({"page": str(page), "notes": notes, "skipped": skipped, "effects": rows})
        return
    for summary in (build_conditions_table(table, intervals=False), build_comparison_table(table)):
        print_table(output.console, summary.columns, summary.rows)
        output.console.print()
    output.line("page", str(page))
