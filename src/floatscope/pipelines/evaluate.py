"""`evaluate`: answer every question of a file, score the answers, write a folder that survives a crash.

    evaluation = evaluate(model, read_samples("nq.jsonl"), "runs/mdm-5", passages=5, new_tokens=32)
    evaluation.table                               # a row per sample: acc, em, f1, the prediction
    job = plan_evaluation(model, samples, "runs/mdm-5", passages=5)
    for event in job: print(event.done, event.total, event.acc)
    job.notes                                      # what was cut to fit the context
    evaluate(…, edits="mask_anchors(k=5)", measure=True)    # with edited attention; NLL, order and floating as well

    runs/mdm-5/run.json              settings, provenance, sample ids
    runs/mdm-5/predictions.jsonl     one line per sample, written batch by batch
    runs/mdm-5/traces/               a run of traces of the first samples, if asked for

The batches are always the same, and a batch is written as a whole or not at all, so a resumed evaluation has the bytes
of an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from floatscope.analysis.anchor_movement import floating_index, top_keys
from floatscope.analysis.commit_order import kendall
from floatscope.analysis.evaluations import (
    EVALUATION,
    LIKELIHOODS,
    PREDICTIONS_FILE,
    Evaluation,
    open_predictions,
    read_predictions,
)
from floatscope.analysis.trace_view import TraceView
from floatscope.capture.watcher import Watch
from floatscope.errors import UserError
from floatscope.interventions.edits import Edit
from floatscope.interventions.recipes import parse_edits
from floatscope.models.model import Model
from floatscope.pipelines.batching import limit_threads, make_batches
from floatscope.pipelines.decode import Decoding, decode
from floatscope.pipelines.likelihood import answer_nll, encode_continuation
from floatscope.pipelines.prompting import (
    PassageChoice,
    PromptConfig,
    PromptItem,
    batch_regions,
    build_items,
    choose_passages,
    require_tokenizer,
    uses_chat_template,
)
from floatscope.pipelines.trace import TraceJob, plan_trace
from floatscope.sampling import Sampling
from floatscope.sampling.settings import resolve_sampling
from floatscope.tasks.sample import Sample
from floatscope.tasks.scores import abstains, acc, em, f1, is_unanswerable
from floatscope.tasks.template import load_template
from floatscope.traces import Run, Trace, create_run
from floatscope.traces.run import check_run
from floatscope.traces.run_record import write_record

TRACES = "traces"
MEASURE_FIELDS = ("received", "uniform", "visible_rows", "eligible")
"""The trace fields that the floating index needs."""


@dataclass(frozen=True)
class BatchAnswered:
    """A batch has been written to disk."""

    done: int
    total: int
    acc: float  # mean so far; NaN if only likelihoods are computed
    seconds: float  # since this start
    seconds_left: float  # for the remaining samples, at the present rate


def evaluate(
    model: Model,
    samples: Sequence[Sample],
    out: str | Path,
    *,
    on_progress: Callable[[BatchAnswered], None] | None = None,
    **settings: Any,
) -> Evaluation:
    """Answer and score every sample, and open the folder of predictions.

    Args:
        model: A model from `fs.load`.
        samples: Questions, as `fs.read_samples` returns them.
        out: The folder. An interrupted evaluation resumes.
        on_progress: Called after each batch.
        **settings: As for `plan_evaluation`: `passages`, `shots`, `template`, `batch_size`, … and the settings of
            `Sampling` (`new_tokens`, `steps`, `sampler`, …).

    Returns:
        The evaluation: `evaluation.table` has a row per sample with `acc`, `em`, `f1` and `prediction`.

    Example:
        samples = fs.read_samples("twin:reading-1", limit=2)
        evaluation = fs.evaluate(fs.load("twin:mdm"), samples, "runs/eval", new_tokens=4)
        evaluation.table["acc"].mean()
    """
    job = plan_evaluation(model, samples, out, **settings)
    for event in job:
        if on_progress is not None:
            on_progress(event)
    for _ in job.plan_traces() or ():
        pass
    return open_predictions(out)


def plan_evaluation(
    model: Model,
    samples: Sequence[Sample],
    out: str | Path,
    *,
    passages: PassageChoice = "all",
    shots: int = 0,
    template: str | Path = "default",
    chat: bool | None = None,
    batch_size: int | None = None,
    trace_samples: int = 0,
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
) -> EvaluationJob:
    """Check everything and return a job; iterating the job answers the samples.

    Args:
        model: A model from `fs.load`.
        samples: The questions.
        out: The folder.
        passages: How many passages to show: a number (gold first), `gold` or `all`.
        shots: How many other samples to show with their answers and gold passages, drawn for each sample by its id.
        template: The name of a prompt template, or a file.
        chat: Whether prompts go through the chat template. Default: if the tokenizer has one.
        batch_size: Samples per batch. Default: 8, on a GPU 32.
        trace_samples: How many of the first samples are traced as well (`EvaluationJob.plan_traces`).
        attention: Measure the attention of the predicting rows on gold and other passages.
        placement: Where the question stands among the passages.
        extra_masks: Masks after the answer that are never filled (MDMs only).
        filler: A text after the answer (MDMs only).
        edits: Edits of the attention, as in `decode`.
        measure: Add the NLL of the first answer, the order of the commits and the floating index to each line.
        nll_only: Compute that NLL and nothing else, which needs one decoding instead of two.
        preset: The settings of a model's authors, `llada` or `dream`.
        source: Where the samples come from, for the run's settings.
        **settings: The settings of `Sampling`.
    """
    if not isinstance(model, Model):
        raise UserError(f"evaluate needs a floatscope Model (fs.load), got {type(model).__name__}")
    if shots < 0 or trace_samples < 0 or extra_masks < 0:
        raise UserError(
            f"shots, trace_samples and extra_masks must be 0 or more, got {min(shots, trace_samples, extra_masks)}"
        )
    if (extra_masks or filler) and model.spec.paradigm != "mdm":
        raise UserError(f"{model.spec.name} is autoregressive: nothing can stand after its answer")
    if trace_samples and edits:
        raise UserError("an evaluation with edits cannot be traced; leave out trace_samples or the edits")
    settings = {name: value for name, value in settings.items() if value is not None}
    if model.spec.paradigm == "arm" and settings.get("steps") == settings.get("new_tokens"):
        settings.pop("steps", None)  # an ARM takes one step per token anyway
    sampling = resolve_sampling(model.spec.paradigm, preset, **settings)
    if nll_only and not has_nll(model, sampling):
        raise UserError(
            f"{model.spec.name} writes no end of text, and the likelihood of an answer includes its end; use a model"
            " with an end token, and eos='free'"
        )
    config = PromptConfig(load_template(template), passages, shots, placement, extra_masks, filler, attention)
    shown = [choose_passages(sample, passages) for sample in samples]
    items, notes = build_items(model, shown, config, chat, sampling.new_tokens, settings.get("seed", 0))
    job = EvaluationJob(
        model=model,
        path=Path(out),
        items=items,
        prompt_config=config,
        chat=chat,
        batch_size=batch_size,
        trace_samples=trace_samples,
        edits=parse_edits(edits),
        measure=measure,
        nll_only=nll_only,
        source=dict(source or {}),
        arguments={"preset": preset, **settings},
        notes=notes,
    )
    job.check()
    return job


@dataclass(frozen=True, eq=False, repr=False)
class EvaluationJob:
    """A checked plan. Iterating it answers the samples that are missing; iterating it again resumes."""

    model: Model
    path: Path
    items: list[PromptItem]
    prompt_config: PromptConfig
    chat: bool | None
    batch_size: int | None
    trace_samples: int
    edits: tuple[Edit, ...]
    measure: bool
    nll_only: bool
    source: dict[str, Any]
    arguments: dict[str, Any]  # of `decode`
    notes: list[str]  # what was cut to fit the context

    def __repr__(self) -> str:
        return f"EvaluationJob({self.model.spec.name}: {self.finished} of {len(self.items)} samples, in {self.path})"

    def __iter__(self) -> Iterator[BatchAnswered]:
        by_id = {item.sample.id: item for item in self.items}
        began, answered = time.monotonic(), 0
        with create_run(self.path, self.settings, self.sample_ids, plan=self.batch_plan, resume=True) as run:
            assert run.plan is not None
            scores = [_read_acc(line) for line in _resume_predictions(run)]
            for ids in run.plan[_count_batches(run.plan, len(scores)) :]:
                lines = self._answer([by_id[sample] for sample in ids])
                _append(self.path / PREDICTIONS_FILE, lines)
                answered += len(lines)
                scores += [_read_acc(line) for line in lines]
                seconds = time.monotonic() - began
                left = seconds / answered * (len(self.items) - len(scores))
                mean = float(np.mean(scores)) if scores else float("nan")
                yield BatchAnswered(len(scores), len(self.items), mean, seconds, left)
            write_record(self.path, {**run.record, "status": "finished"})

    def check(self) -> None:
        """Refuse edits that do not fit the model or a sample, and a folder with other contents."""
        if self.edits:
            for items in make_batches(self.model, self.items, self.batch_size):
                decode(self.model, [item.ids for item in items], **self._decode_arguments(items))
        check_run(self.path, self.settings, self.sample_ids, plan=self.batch_plan, resume=True)

    @property
    def sampling(self) -> Sampling:
        """The sampling settings, with all defaults filled in."""
        return resolve_sampling(self.model.spec.paradigm, **self.arguments)

    @property
    def sample_ids(self) -> list[str]:
        """The ids of the samples, in the order of the file."""
        return [item.sample.id for item in self.items]

    @property
    def finished(self) -> int:
        """The number of samples that are on disk now."""
        return len(read_predictions(self.path))

    @property
    def batch_plan(self) -> list[list[str]]:
        """The sample ids of each batch."""
        return [[item.sample.id for item in items] for items in make_batches(self.model, self.items, self.batch_size)]

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that the predictions depend on."""
        contents = [[item.sample.id, item.prompt.text, *item.sample.answers] for item in self.items]
        edits = {"edits": [str(edit) for edit in self.edits], "edits_sha256": _digest_edits(self.edits)}
        return {
            **self.model.metadata,
            **self.sampling.as_json,
            **self.prompt_config.as_json,
            **(edits if self.edits else {}),
            **({"measure": True} if self.measure else {}),
            "kind": LIKELIHOODS if self.nll_only else EVALUATION,
            "chat": uses_chat_template(self.model, self.chat),
            "samples_sha256": hashlib.sha256(json.dumps(contents).encode()).hexdigest(),
            **self.source,
        }

    def plan_traces(self) -> TraceJob | None:
        """A job that traces the first samples into a run inside this folder; None if no traces are asked for."""
        if not self.trace_samples:
            return None
        first = self.items[: self.trace_samples]
        prompts = {item.sample.id: item.prompt for item in first}
        return plan_trace(
            self.model,
            [item.sample for item in first],
            self.path / TRACES,
            batch_size=self.batch_size,
            chat=self.chat,
            source={**self.prompt_config.as_json, **self.source},
            build_prompt=lambda sample: prompts[sample.id],
            **self.arguments,
        )

    def _answer(self, items: Sequence[PromptItem]) -> list[dict[str, Any]]:
        """The lines of `predictions.jsonl` for a batch."""
        with limit_threads(self.model):
            if self.nll_only:
                nlls = zip(items, self._compute_nll(items), strict=True)
                return [{"id": item.sample.id, "measures": {"nll": nll}} for item, nll in nlls]
            decoding = self._decode(items)
            lines = [_score_answer(item, text) for item, text in zip(items, decoding.texts, strict=True)]
            traces = decoding.traces if self.prompt_config.attention or self.measure else []
            if self.prompt_config.attention:
                ends = [
                    len(item.ids) + max(1, len(new)) for item, new in zip(items, decoding.generated_ids, strict=True)
                ]
                for line, trace, end in zip(lines, traces, ends, strict=True):
                    line["attention"] = _passage_attention(trace, end)
            if self.measure:
                for line, trace, nll in zip(lines, traces, self._compute_nll(items), strict=True):
                    line["measures"] = {"nll": nll, **measure_trace(trace)}
        return lines

    def _decode(self, items: Sequence[PromptItem]) -> Decoding:
        attention = ("row_regions",) if self.prompt_config.attention else ()
        fields = (*attention, *(MEASURE_FIELDS if self.measure else ()))
        watch = Watch(fields=fields) if fields else None
        return decode(self.model, [item.ids for item in items], watch=watch, **self._decode_arguments(items))

    def _compute_nll(self, items: Sequence[PromptItem]) -> list[float | None]:
        """The NLL of each sample's first answer; None without an answer, or if it is too long."""
        new_tokens = self.sampling.new_tokens
        usable = [item for item in items if has_target_answer(self.model, item, new_tokens)]
        if not usable or not has_nll(self.model, self.sampling):
            return [None] * len(items)
        arguments = {**self._decode_arguments(usable), "new_tokens": new_tokens, "stop": None}
        arguments["watch"] = Watch(fields=("received",))  # so that attention runs the same way with and without edits
        answers = [item.sample.answers[0] for item in usable]
        nlls = answer_nll(self.model, [item.ids for item in usable], answers, chat=self.chat, **arguments)
        by_id = {item.sample.id: finite_or_none(nll) for item, nll in zip(usable, nlls, strict=True)}
        return [by_id.get(item.sample.id) for item in items]

    def _decode_arguments(self, items: Sequence[PromptItem]) -> dict[str, Any]:
        """The arguments of `decode` for a batch, except its prompts."""
        suffix = self.prompt_config.suffix_ids(self.model)
        chat_suffix = 0 if self.model.spec.paradigm == "arm" else len(require_tokenizer(self.model).suffix)
        extra_regions = {name for item in self.items for name in item.tokens} if self.edits else set()
        return {
            "samples": [item.sample.id for item in items],
            "regions": batch_regions(items, self.sampling.new_tokens, len(suffix) + chat_suffix, sorted(extra_regions)),
            "suffix": suffix,
            "edits": self.edits,
            **self.arguments,
        }


def measure_trace(trace: Trace) -> dict[str, float | None]:
    """What an experiment measures of a decoding besides its score; None where a value is not defined.

    `order` is Kendall's τ of commit step and position. `floating` is the index within the sample, mean over layers.
    """
    arrays = trace.arrays
    return {
        "order": finite_or_none(kendall(arrays["commit_step"], arrays["commit_position"])),
        "floating": finite_or_none(float(floating_index(top_keys(TraceView(trace)))["within"].mean())),
    }


def has_nll(model: Model, sampling: Sampling) -> bool:
    """Whether answers have an end, which the likelihood of an answer includes."""
    return bool(model.spec.stop_ids) and sampling.eos == "free"


def has_target_answer(model: Model, item: PromptItem, new_tokens: int) -> bool:
    """Whether the sample has an answer that fits into the new tokens together with its end."""
    if not item.sample.answers or not item.sample.answers[0].strip():
        return False
    ids = encode_continuation(require_tokenizer(model), item.ids, item.sample.answers[0])
    return 0 < len(ids) < new_tokens and not {model.spec.mask_id, *model.spec.stop_ids} & set(ids)


def finite_or_none(value: float) -> float | None:
    """The value, or None if it is NaN or infinite, which JSON does not have."""
    return value if math.isfinite(value) else None


def _score_answer(item: PromptItem, prediction: str) -> dict[str, Any]:
    sample = item.sample
    unanswerable = is_unanswerable(sample)
    accuracy = float(abstains(prediction)) if unanswerable else acc(prediction, sample.answers)
    return {
        "id": sample.id,
        "prediction": prediction,
        "answers": list(sample.answers),
        "acc": accuracy,
        "em": accuracy if unanswerable else em(prediction, sample.answers),
        "f1": accuracy if unanswerable else f1(prediction, sample.answers),
        "abstained": abstains(prediction),
        "unanswerable": unanswerable,
        "passages": len(sample.passages),
        "tokens": len(item.ids),
    }


def _passage_attention(trace: Trace, end: int) -> dict[str, float]:
    """The attention that the predicting rows of the answer give to gold and to other passages, mean over layers and
    heads; and the share of the canvas that those passages are."""
    names, member = list(trace.coords["region"]), trace.arrays["region_member"]
    in_answer = trace.arrays["commit_position"] < end
    mass = trace.arrays["row_regions"][in_answer].astype(np.float64).mean((0, 1, 2))
    documents = [i for i, name in enumerate(names) if name.startswith("document ")]
    gold = names.index("gold") if "gold" in names else None
    gold_mass, gold_share = (0.0, 0.0) if gold is None else (mass[gold], member[:, gold].mean())
    return {
        "gold_mass": float(gold_mass),
        "gold_share": float(gold_share),
        "other_mass": float(sum(mass[i] for i in documents) - gold_mass),
        "other_share": float(sum(member[:, i].mean() for i in documents) - gold_share),
    }


def _resume_predictions(run: Run) -> list[dict[str, Any]]:
    """The complete batches of an earlier start, in the order of the plan. The file is cut after them."""
    lines = read_predictions(run.path)
    assert run.plan is not None
    order = [sample for ids in run.plan for sample in ids]
    same = next((i for i, line in enumerate(lines) if i >= len(order) or line["id"] != order[i]), len(lines))
    keep = sum(len(ids) for ids in run.plan[: _count_batches(run.plan, same)])
    file = run.path / PREDICTIONS_FILE
    if file.exists():
        head = b"".join(line + b"\n" for line in file.read_bytes().split(b"\n")[:keep])
        os.truncate(file, len(head))
    return lines[:keep]


def _count_batches(plan: Sequence[Sequence[str]], lines: int) -> int:
    """How many complete batches the first lines of the file are."""
    ends = np.cumsum([len(ids) for ids in plan])
    return int((ends <= lines).sum())


def _append(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    try:
        with file.open("ab") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        raise UserError(
            f"cannot write {file}: {error.strerror}; fix that and run the same command again, it resumes"
        ) from error


def _read_acc(line: Mapping[str, Any]) -> float:
    return float(line.get("acc", np.nan))


def _digest_edits(edits: Sequence[Edit]) -> str:
    """A digest of all fields of the edits: two different edits may have the same name."""
    return hashlib.sha256(repr(edits).encode()).hexdigest()
