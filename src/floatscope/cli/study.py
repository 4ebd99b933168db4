"""`floatscope study`: a named experiment with its controls, and one sentence of findings per model."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from floatscope.cli import options as o
from floatscope.cli.console import print_table
from floatscope.cli.output import Output
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
    output = Output(as_json)
    skipped = output.skipped(file)
    output.line("opening", models[0])

    from floatscope.pipelines.folders import model_folders
    from floatscope.pipelines.studies import StudyInput, check_study, study_jobs, write_study_results
    from floatscope.reports.study_report import build_study_tables

    check_study(name, options)
    paths, notes = model_folders(models, out), dict[str, list[str]]()
    arguments = {**sampling.settings, **questions.settings, "source": reading.describe(data)}
    seed = arguments.pop("seed")
    for model_name, path in zip(models, paths, strict=True):
        if model_name != models[0]:
            output.line("opening", model_name)
        model = loading.load(model_name)
        output.line("model", repr(model))
        study_input = StudyInput(model, tuple(file.samples), path, seed, arguments)
        jobs = study_jobs(name, study_input, **options)
        notes[model.spec.name] = [note for job in jobs for note in output.run(model_name, job)]
    table, page = write_study_results(name, paths, out, notes), out / "report.html"
    findings = STUDIES[name].summarise(table)
    if as_json:
        rows = json.loads(table.to_json(orient="records"))
        output.finish({"page": str(page), "findings": findings, "notes": notes, "skipped": skipped, "effects": rows})
        return
    for summary in build_study_tables(name, table):
        print_table(output.console, summary.columns, summary.rows)
        output.console.print()
    for finding in findings:
        output.line("finding", finding)
    output.line("page", str(page))
