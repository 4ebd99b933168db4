"""`evaluate`: answer every question of a file, score the answers, write a folder that survives a crash.

evaluation = evaluate(model, read_samples("nq.jsonl"), "runs/mdm-5", passages=5, new_tokens=32)
evaluation.table                               # a row per sample: acc, em, f1, the prediction
job = plan_evaluation(model, samples, "runs/mdm-5", passages=5, trace_samples=2)
for event in job: print(event)                 # the events of `job`
job.notes                                      # what was cut to fit the context
evaluate(…, edits="mask_anchors(k=5)", measure=True)    # with edited attention; NLL, order, attention moved

runs/mdm-5/           run.json and predictions.jsonl (`evaluation_part`)
runs/mdm-5/traces/    a run of traces of the first samples, if asked for
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from floatscope.analysis.evaluations import Evaluation, open_predictions
from floatscope.errors import UserError
from floatscope.interventions.edits import Edit
from floatscope.interventions.recipes import parse_edits
from floatscope.models.model import Model
from floatscope.pipelines.answer_measures import has_nll
from floatscope.pipelines.evaluation_part import EvaluationPart
from floatscope.pipelines.job import Event, Job, run_job
from floatscope.pipelines.prompting import PassageChoice, PromptConfig, build_items, choose_passages
from floatscope.pipelines.trace import TraceJob, plan_trace
from floatscope.sampling.settings import resolve_sampling
from floatscope.schema import Paradigm
from floatscope.tasks.sample import Sample
from floatscope.tasks.template import load_template

TRACES = "traces"


def evaluate(
    model: Model,
    samples: Sequence[Sample],
    out: str | Path,
    *,
    on_event: Callable[[Event], None] | None = None,
    **settings: Any,
) -> Evaluation:
    """Answer and score every sample, and open the folder of predictions.

    Args:
        model: A model from `fs.load`.
        samples: Questions, as `fs.read_samples` returns them.
        out: The folder. An interrupted evaluation resumes.
        on_event: Called with each event of the job (`floatscope.pipelines.job`).
        **settings: As for `plan_evaluation`: `passages`, `shots`, `template`, `batch_size`, … and the settings of
            `Sampling` (`new_tokens`, `steps`, `sampler`, …).

    Returns:
        The evaluation: `evaluation.table` has a row per sample with `acc`, `em`, `f1` and `prediction`.

    Example:
        samples = fs.read_samples("twin:reading-1", limit=2)
        evaluation = fs.evaluate(fs.load("twin:mdm"), samples, "runs/eval", new_tokens=4)
        evaluation.table["acc"].mean()
    """
    run_job(plan_evaluation(model, samples, out, **settings), on_event)
    return open_predictions(out)


def plan_evaluation(
    model: Model, samples: Sequence[Sample], out: str | Path, *, trace_samples: int = 0, **settings: Any
) -> Job:
    """Check everything and return a job; iterating the job answers the samples.

    Args:
        model: A model from `fs.load`.
        samples: The questions.
        out: The folder.
        trace_samples: How many of the first samples are traced as well, into a run inside this folder.
        **settings: As for `plan_part`.
    """
    part = plan_part(model, samples, out, **settings)
    if trace_samples < 0:
        raise UserError(f"trace_samples must be 0 or more, got {trace_samples}")
    if trace_samples and part.edits:
        raise UserError("an evaluation with edits cannot be traced; leave out trace_samples or the edits")
    traces = _plan_traces(part, trace_samples).parts if trace_samples else ()
    return Job(part.path, (part, *traces), part.notes)


def plan_part(
    model: Model,
    samples: Sequence[Sample],
    out: str | Path,
    *,
    passages: PassageChoice = "all",
    shots: int = 0,
    template: str | Path = "default",
    chat: bool | None = None,
    batch_size: int | None = None,
    attention: bool = False,
    placement: str | None = None,
    extra_masks: int = 0,
    filler: str = "",
    edits: str | Edit | Sequence[str | Edit] = (),
    measure: bool = False,
    nll_only: bool = False,
    preset: str | None = None,
    source: Mapping[str, Any] | None = None,
    **settings: Any,
) -> EvaluationPart:
    """Check everything and return the part of a job that answers the samples.

    Args:
        model: A model from `fs.load`.
        samples: The questions.
        out: The folder.
        passages: How many passages to show: a number (gold first), `gold` or `all`.
        shots: How many other samples to show with their answers and gold passages, drawn for each sample by its id.
        template: The name of a prompt template, or a file.
        chat: Whether prompts go through the chat template. Default: if the tokenizer has one.
        batch_size: Samples per batch. Default: 8, on a GPU 32.
        attention: Measure the attention of the predicting rows on gold and other passages.
        placement: Where the question stands among the passages.
        extra_masks: Masks after the answer that are never filled (MDMs only).
        filler: A text after the answer (MDMs only).
        edits: Edits of the attention, as in `decode`.
        measure: Add the NLL of the first answer, the order of the commits, the attention moved and the dose of the
            edits to each line.
        nll_only: Compute that NLL and the dose and nothing else, which needs one decoding instead of two.
        preset: The settings of a model's authors, such as `llada` or `sdar`.
        source: Where the samples come from, for the run's settings.
        **settings: The settings of `Sampling`.
    """
    if not isinstance(model, Model):
        raise UserError(f"evaluate needs a floatscope Model (fs.load), got {type(model).__name__}")
    if shots < 0 or extra_masks < 0:
        raise UserError(f"shots and extra_masks must be 0 or more, got {min(shots, extra_masks)}")
    if (extra_masks or filler) and model.spec.paradigm is not Paradigm.MDM:
        raise UserError(f"{model.spec.name} is autoregressive: nothing can stand after its answer")
    settings = {name: value for name, value in settings.items() if value is not None}
    sampling = resolve_sampling(
        model.spec.paradigm, preset, block_size=model.spec.block_size, canvas_size=model.spec.canvas_size, **settings
    )
    if nll_only and not has_nll(model, sampling):
        raise UserError(
            f"{model.spec.name} writes no end of text, and the likelihood of an answer includes its end; use a model"
            " with an end token, and eos='free'"
        )
    config = PromptConfig(load_template(template), passages, shots, placement, extra_masks, filler, attention)
    shown = [choose_passages(sample, passages) for sample in samples]
    items, notes = build_items(model, shown, config, chat, sampling.new_tokens, sampling.seed)
    part = EvaluationPart(
        model=model,
        path=Path(out),
        items=items,
        prompt_config=config,
        chat=chat,
        batch_size=batch_size,
        edits=parse_edits(edits),
        measure=measure,
        nll_only=nll_only,
        source=dict(source or {}),
        arguments={"preset": preset, **settings},
        notes=notes,
    )
    part.check()
    return part


def _plan_traces(part: EvaluationPart, count: int) -> TraceJob:
    """A job that traces the first samples into a run inside the evaluation's folder."""
    first = part.items[:count]
    prompts = {item.sample.id: item.prompt for item in first}
    return plan_trace(
        part.model,
        [item.sample for item in first],
        part.path / TRACES,
        batch_size=part.batch_size,
        chat=part.chat,
        source={**part.prompt_config.as_json, **part.source},
        build_prompt=lambda sample: prompts[sample.id],
        **part.arguments,
    )
