"""`floatscope eval`: answer the questions of a file and score the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from floatscope.cli import options as o
from floatscope.cli.output import Output
from floatscope.errors import UserError

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
    output = Output(as_json)
    output.line("opening", model)

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
    output.line("model", repr(loaded))
    skipped = output.skipped(file)
    output.recall(recall, retrieval.k)
    output.run("answering", job)
    scores = {"out": str(out), **_summarise(out), "skipped": skipped}
    if recall is not None:
        scores["recall"] = recall
    if as_json:
        output.finish(scores)
        return
    output.line("scores", ", ".join(f"{name} {scores[name]['mean']:.1f}" for name in SCORES) + " %")
    output.line("out", str(out))


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
