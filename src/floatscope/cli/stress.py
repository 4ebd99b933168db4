"""`floatscope stress`: the same questions with noise, at other places, in other layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from floatscope.cli import options as o

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from floatscope.tasks.sample import Passage

Opt = typer.Option
RETRIEVED = 100  # passages for a question; gold ones and those that tell an answer are left out of them


def stress(
    models: o.Names,
    data: o.Questions,
    kind: Annotated[str, Opt(help="noise, position, layout, query, shots, masks, needle, dirty.", show_default=False)],
    out: Annotated[Path, Opt(help="The folder: a new one, or one to go on with.", show_default=False)],
    option: Annotated[list[str], Opt("--set", help="An option of the kind, such as documents=10.")] = [],  # noqa: B006
    prompt: o.Template = "default",
    limit: o.Limit = None,
    format: o.Format = None,
    skip_bad: o.SkipBad = False,
    retrieve: o.Retrieve = None,
    k: o.K = 5,
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
    as_json: Annotated[bool, Opt("--json", help="Print one JSON object: the points and where they are.")] = False,
) -> None:
    """Ask the same questions under changing conditions, and show score and attention side by side.

    Several models share the curves. Broken off, the same command goes on where it stopped.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from floatscope.analysis.stress_tests import curve
    from floatscope.models.describe import describe
    from floatscope.pipelines.stress import check_kind
    from floatscope.pipelines.stress import plan_stress as stress_test
    from floatscope.reports.page import write_page
    from floatscope.reports.stressed import stressed
    from floatscope.tasks.read import about, read_file

    read = read_file(data, limit, format=format, skip_bad=skip_bad)
    samples, recall, index = (read.samples, None, {}) if retrieve is None else o.retrieved(retrieve, read.samples, k)
    options, paths, notes = o.options(option), o.folders(models, out), dict[str, list[str]]()
    if kind == "noise" and "retrieve" in options:
        options["retrieve"] = _retriever(Path(str(options["retrieve"])))
    if not trust_remote_code:  # before the first is asked anything: what is wrong with another
        for name in models:
            check_kind(kind, describe(name, mask_id=mask_id, shift=shift, revision=revision).spec)
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    o.say_bad(console, read)
    o.say_recall(console, recall, k)
    for name, path in zip(models, paths, strict=True):
        opened = o.opened(name, console.is_terminal, device=device, dtype=dtype, mask_id=mask_id, shift=shift,
                          revision=revision, trust_remote_code=trust_remote_code)  # fmt: skip
        made = stress_test(
            opened, samples, path, kind, seed=seed, options=options, prompt=prompt, chat=chat, batch=batch,
            preset=preset, source=about(data, limit) | index, sampler=sampler, new_tokens=new_tokens, steps=steps,
            block=block, temperature=temperature,
        )  # fmt: skip
        o.say(console, "model", repr(opened))
        notes[opened.spec.name] = made.notes
        for sentence in made.notes:
            o.say(console, "note", sentence)
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"), TimeRemainingColumn()
        try:
            with Progress(TextColumn(f"[bold]{name}[/]"), *columns, console=console) as bars:
                bar = bars.add_task("", total=made.total, completed=made.finished, told="")
                for point, answered in made:
                    told = f"{point.name}: acc {100 * answered.acc:.1f} %"
                    bars.update(bar, completed=made.finished, told=told)
        except KeyboardInterrupt as error:
            kept = f"{made.finished} of {made.total} answers are kept"
            typer.echo(f"floatscope: interrupted; {kept}, and the same command goes on with the others", err=True)
            raise typer.Exit(130) from error
    table, page = curve(paths), out / "report.html"
    table.to_csv(out / "curve.csv", index=False)
    write_page(stressed(paths), page)
    if as_json:
        rows = json.loads(table.to_json(orient="records"))
        found: dict[str, object] = {"page": str(page), "notes": notes, "bad": len(read.bad), "points": rows}
        if recall is not None:
            found["recall"] = recall
        typer.echo(json.dumps(found, indent=1))
        return
    _show(console, table)
    o.say(console, "page", str(page))


def _show(console: Console, table: pd.DataFrame) -> None:
    from rich.table import Table

    from floatscope.reports import charts
    from floatscope.reports.stressed import charts as drawn

    told = next(chart for chart in drawn(table) if isinstance(chart, charts.Table))
    shown = Table(box=None, header_style="bold", pad_edge=False)
    few = ("model", "point", "n", "acc", "gold", "others")
    for name in few:
        shown.add_column(name, justify="left" if name in few[:2] else "right", no_wrap=True)
    for row in told.rows:
        cells = dict(zip(told.columns, row, strict=True))
        shown.add_row(*(str(cells[name]) for name in few))
    console.print(shown)


def _retriever(folder: Path) -> Callable[[str], list[Passage]]:
    """From a question to passages of an index."""
    from floatscope.tasks.index import Index
    from floatscope.tasks.sample import Passage

    index = Index.open(folder)
    return lambda question: [Passage(hit.title, hit.text) for hit in index.search(question, RETRIEVED)]
