"""`floatscope eval`: answer the questions of a file and score the answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floatscope.cli import options as o
from floatscope.cli.console import (
    explain_interrupt,
    format_time,
    make_console,
    print_line,
    print_notes,
    print_recall,
    print_skipped,
    show_progress,
)
from floatscope.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from floatscope.pipelines.evaluate import EvaluationJob

SCORES = ("acc", "em", "f1")


@o.expand_groups
def evaluate(
    model: o.ModelName,
    *,
    out: o.OutFolder,
    passages: Annotated[
        str, o.Opt(metavar="N|gold|all", help="Passages per question: a number (0: closed book), gold, or all.")
    ] = "all",
    shots: Annotated[int, o.Opt(metavar="N", min=0, help="Answered examples before the question.")] = 0,
    trace_samples: Annotated[
        int, o.Opt(min=0, metavar="N", help="Also trace the first N samples, into OUT/traces.")
    ] = 0,
    as_json: o.AsJson = False,
    data: o.Data,
    reading: o.DataOptions,
    retrieval: o.RetrievalOptions,
    questions: o.QuestionOptions,
    sampling: o.SamplingOptions,
    loading: o.ModelOptions,
) -> None:
    """Answer every question of a file and score the answers.

    An interrupted evaluation is resumed by the same command.
    """
    passage_choice = _parse_passages(passages)
    o.check_model(model)
    file = reading.read(data)
    samples, recall, index = retrieval.apply(file.samples)
    console = make_console(stderr=as_json)
    print_line(console, "opening", model)

    from floatscope.pipelines.evaluate import plan_evaluation

    loaded = loading.load(model)
    job = plan_evaluation(
        loaded,
        samples,
        out,
        passages=passage_choice,
        shots=shots,
        trace_samples=trace_samples,
        source=reading.describe(data) | index,
        **questions.settings,
        **sampling.settings,
    )
    print_line(console, "model", repr(loaded))
    print_skipped(console, file)
    print_notes(console, job.notes)
    print_recall(console, recall, retrieval.k)
    _run(console, job)
    scores = {"out": str(out), **_summarise(out), "skipped": len(file.errors)}
    if recall is not None:
        scores["recall"] = recall
    if as_json:
        typer.echo(json.dumps(scores, indent=1))
        return
    print_line(console, "scores", ", ".join(f"{name} {scores[name]['mean']:.1f}" for name in SCORES) + " %")
    print_line(console, "out", str(out))


def _run(console: Console, job: EvaluationJob) -> None:
    """Answer, then trace, with a progress bar each."""
    total = len(job.items)
    with explain_interrupt(lambda: f"{job.finished} of {total} answers are finished"):
        with show_progress(console, "answering", total, job.finished) as update:
            for event in job:
                update(event.done, f"acc {100 * event.acc:.1f} %, {format_time(event)}")
        traces = job.plan_traces()
        if traces is not None:
            with show_progress(console, "tracing", traces.total, traces.finished) as update:
                for traced in traces:
                    update(traced.done, format_time(traced))


def _summarise(out: Path) -> dict[str, Any]:
    """The scores of a folder, in percent with their 95 % CIs."""
    from floatscope.analysis.evaluations import open_evaluation
    from floatscope.reports.score_table import estimate_scores, measure_abstention

    evaluation = open_evaluation(out)
    scores: dict[str, Any] = {name: vars(interval) for name, interval in estimate_scores(evaluation.table).items()}
    if (pair := measure_abstention(evaluation.table)) is not None:
        scores["abstention"] = {"precision": pair[0], "recall": pair[1]}
    return {"n": len(evaluation.table), "missing": evaluation.missing, **scores}


def _parse_passages(text: str) -> int | str:
    if text in ("gold", "all"):
        return text
    if text.isdecimal():
        return int(text)
    raise UserError(f"--passages takes a number, gold or all, got '{text}'")
