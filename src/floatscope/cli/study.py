"""`floatscope study`: a named experiment with its controls, and one sentence of findings per model."""

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


@o.expand_groups
def study(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="sinks, pin, heads, dormant or blank.", show_default=False)
    ],
    models: o.ModelNames,
    *,
    out: o.OutFolder,
    settings: o.Settings = [],  # noqa: B006
    as_json: o.AsJson = False,
    data: o.Data,
    reading: o.DataOptions,
    questions: o.QuestionOptions,
    sampling: o.SamplingOptions,
    loading: o.ModelOptions,
) -> None:
    """Run a named experiment with its controls on one model or several.

    --set gives options of the study, such as counts=1,5.

    An interrupted study is resumed by the same command.
    """
    from floatscope.analysis.studies import STUDIES

    if name not in STUDIES:
        raise unknown_choice("study", name, STUDIES)
    options = o.parse_settings(settings)
    o.check_models(models)
    file = reading.read(data)
    console = make_console(stderr=as_json)
    print_skipped(console, file)
    print_line(console, "opening", models[0])

    from floatscope.pipelines.folders import model_folders
    from floatscope.pipelines.studies import StudyInput, check_study, plan_study_job, write_study_results
    from floatscope.reports.study_report import build_study_table

    check_study(name, options)
    paths, notes = model_folders(models, out), dict[str, list[str]]()
    arguments = {**sampling.settings, **questions.settings, "source": reading.describe(data)}
    seed = arguments.pop("seed")
    for model_name, path in zip(models, paths, strict=True):
        if model_name != models[0]:
            print_line(console, "opening", model_name)
        model = loading.load(model_name)
        print_line(console, "model", repr(model))
        job = plan_study_job(name, StudyInput(model, tuple(file.samples), path, seed, arguments), **options)
        print_notes(console, job.notes)
        with (
            explain_interrupt(lambda job=job: f"{job.finished} of {job.total} answers are finished"),  # type: ignore[misc]
            collect_warnings() as warned,
            show_progress(console, model_name, job.total, job.finished) as update,
        ):
            for condition, _ in job:
                update(job.finished, f"{condition.subset} {condition.name}".strip())
        print_notes(console, warned)
        notes[model.spec.name] = [*job.notes, *warned]
    table, page = write_study_results(name, paths, out, notes), out / "report.html"
    findings = STUDIES[name].summarise(table)
    if as_json:
        rows = json.loads(table.to_json(orient="records"))
        record = {"page": str(page), "findings": findings, "notes": notes, "skipped": len(file.errors), "effects": rows}
        typer.echo(json.dumps(record, indent=1))
        return
    summary = build_study_table(name, table)
    print_table(console, summary.columns, summary.rows)
    for finding in findings:
        print_line(console, "finding", finding)
    print_line(console, "page", str(page))
