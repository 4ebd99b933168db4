"""`floatscope stress`: the same questions under changing conditions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from floatscope.cli import options as o
from floatscope.cli.console import print_table
from floatscope.cli.output import Output
from floatscope.errors import unknown_choice

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from floatscope.tasks.sample import Passage

RETRIEVED = 100  # passages per question, before gold ones and those with an answer are removed
COLUMNS = ("model", "point", "n", "acc", "gold", "others")


@o.expand_groups
def stress(
    models: o.ModelNames,
    *,
    kind: Annotated[
        str,
        o.Opt(help="What changes: noise, position, layout, query, shots, masks, needle or dirty.", show_default=False),
    ],
    out: o.OutFolder,
    settings: o.Settings = [],  # noqa: B006
    as_json: o.AsJson = False,
    data: o.Data,
    reading: o.DataOptions,
    retrieval: o.RetrievalOptions,
    questions: o.QuestionOptions,
    sampling: o.SamplingOptions,
    loading: o.ModelOptions,
) -> None:
    """Ask the same questions under changing conditions, and show scores beside attention.

    Several models share the charts. --set gives options of the kind, such as documents=10.

    An interrupted stress test is resumed by the same command.
    """
    from floatscope.tasks.stress import KINDS

    if kind not in KINDS:
        raise unknown_choice("kind of stress test", kind, KINDS)
    options = o.parse_settings(settings)
    for name in options:
        if name not in KINDS[kind].options:
            raise unknown_choice(f"option of {kind}", name, KINDS[kind].options)
    if kind == "noise" and "retrieve" in options:
        options["retrieve"] = _open_retriever(Path(str(options["retrieve"])))
    o.check_models(models)
    file = reading.read(data)
    samples, recall, index = retrieval.apply(file.samples)
    output = Output(as_json)
    skipped = output.skipped(file)
    output.recall(recall, retrieval.k)
    output.line("checking", ", ".join(models))

    from floatscope.models.description import describe
    from floatscope.pipelines.folders import model_folders
    from floatscope.pipelines.stress import check_kind, plan_stress, write_stress_results

    paths, notes = model_folders(models, out), dict[str, list[str]]()
    if not loading.trust_remote_code:  # a mistake in a later model shows before the first one answers
        for name in models:
            spec = describe(name, **loading.describing).spec
            check_kind(kind, spec)
    for name, path in zip(models, paths, strict=True):
        output.line("opening", name)
        model = loading.load(name)
        output.line("model", repr(model))
        source = reading.describe(data) | index
        job = plan_stress(
            model, samples, path, kind, options=options, source=source, **questions.settings, **sampling.settings
        )
        notes[model.spec.name] = output.run(name, job)
    table, page = write_stress_results(paths, out), out / "report.html"
    if as_json:
        rows = json.loads(table.to_json(orient="records"))
        record: dict[str, object] = {"page": str(page), "notes": notes, "skipped": skipped, "points": rows}
        if recall is not None:
            record["recall"] = recall
        output.finish(record)
        return
    _print_points(output.console, table)
    output.line("page", str(page))


def _print_points(console: Console, table: pd.DataFrame) -> None:
    from floatscope.reports.charts import Table
    from floatscope.reports.stress_report import build_stress_charts

    summary = next(chart for chart in build_stress_charts(table) if isinstance(chart, Table))
    places = [summary.columns.index(name) for name in COLUMNS]
    print_table(console, COLUMNS, [[row[place] for place in places] for row in summary.rows])


def _open_retriever(folder: Path) -> Callable[[str], list[Passage]]:
    """A function from a question to passages of an index."""
    from floatscope.tasks.index import Index
    from floatscope.tasks.sample import Passage

    index = Index.open(folder)
    return lambda question: [Passage(hit.title, hit.text) for hit in index.search(question, RETRIEVED)]
