"""`evaluate`: every question of a file, asked and scored, into a folder that can be broken off and gone on with.

    evaluation = evaluate(model, read_samples("nq.jsonl"), "runs/mdm-5", passages=5, new_tokens=32)
    for answered in evaluation: print(answered.done, answered.total, answered.acc)
    open_evaluation("runs/mdm-5").table            # a row per sample: acc, em, f1, what was said
    evaluation.told                                # what was cut to fit, in sentences
    evaluate(…, edits="mask_anchors(k=5)", measure=True)    # of an edited model; likelihood, order and floating beside

    runs/mdm-5/run.json              what was asked, by what, on what
    runs/mdm-5/predictions.jsonl     a line per sample, written batch by batch
    runs/mdm-5/traces/               a run of traces, of the first samples, where some were asked for

The same batches are decoded whatever happens, and a batch is written whole or not at all: what was resumed has the
bytes of what was not broken.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from floatscope.analysis.evaluations import EVALUATION, LIKELIHOODS, PREDICTIONS, read_predictions
from floatscope.capture.watcher import Watch
from floatscope.errors import UserError
from floatscope.interventions.edits import Edit
from floatscope.interventions.recipes import parse_edits
from floatscope.models.model import Model
from floatscope.pipelines import prompts
from floatscope.pipelines.asking import PromptItem, batch_regions, batches, require_tokenizer, threads_for
from floatscope.pipelines.decode import Decoding, decode
from floatscope.pipelines.likelihood import answer_nll
from floatscope.pipelines.measures import FIELDS, has_nll, has_target_answer, known, measure_trace
from floatscope.pipelines.posing import Passages, PromptConfig, build_items, choose
from floatscope.pipelines.trace import TraceJob, plan_trace
from floatscope.sampling import Sampling
from floatscope.sampling.settings import resolve_sampling
from floatscope.tasks.sample import Sample
from floatscope.tasks.score import abstains, acc, em, f1, is_unanswerable
from floatscope.tasks.template import template
from floatscope.traces import Run, Trace, create_run
from floatscope.traces.record import write_record
from floatscope.traces.run import check_run

TRACES = "traces"


@dataclass(frozen=True)
class BatchAnswered:
    """A batch is on the disk."""

    done: int
    total: int
    acc: float  # so far; NaN where only likelihoods are asked for
    seconds: float  # since this start
    left: float  # seconds the rest will take at this pace


def plan_evaluation(
    model: Model,
    samples: Sequence[Sample],
    out: str | Path,
    *,
    passages: Passages = "all",
    shots: int = 0,
    prompt: str | Path = "default",
    chat: bool | None = None,
    batch: int | None = None,
    trace: int = 0,
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
    """Everything is checked here; samples are asked as the result is iterated. `settings` are those of `Sampling`.

    `trace` of the samples, the first, are watched as well. Shots are other samples of the same file with their answers
    and gold passages, drawn for each sample by its id. `edits` are at work while it answers, as in `decode`. `measure`
    adds to every line the negative log-likelihood of the first right answer, the order of the commits and the floating
    index; `nll_only` asks for that likelihood and nothing else, which is one decoding instead of two.
    """
    if not isinstance(model, Model):
        raise UserError(f"evaluate needs a floatscope Model (fs.load), got {type(model).__name__}")
    if shots < 0 or trace < 0 or extra_masks < 0:
        raise UserError(f"shots, traces and extra masks are 0 or more, got {min(shots, trace, extra_masks)}")
    if (extra_masks or filler) and model.spec.paradigm != "mdm":
        raise UserError(f"{model.spec.name} writes from left to right: nothing can stand behind its answer")
    if trace and edits:
        raise UserError("traces are of the model as it is; leave out trace, or the edits")
    chosen = [choose(sample, passages) for sample in samples]
    settings = {name: value for name, value in settings.items() if value is not None}
    if model.spec.paradigm == "arm" and settings.get("steps") == settings.get("new_tokens"):
        settings.pop("steps", None)  # a step per token is what it takes
    asked = PromptConfig(template(prompt), passages, shots, placement, extra_masks, filler, attention)
    how = resolve_sampling(model.spec.paradigm, preset, **settings)
    if nll_only and not has_nll(model, how):
        raise UserError(f"{model.spec.name} writes no end of text, and the likelihood of an answer is up to its end")
    items, told = build_items(model, chosen, asked, chat, how.new_tokens, settings.get("seed", 0))
    evaluation = EvaluationJob(
        model,
        Path(out),
        items,
        asked,
        chat,
        batch,
        trace,
        parse_edits(edits),
        measure,
        nll_only,
        dict(source or {}),
        {"preset": preset, **settings},
        told,
    )
    evaluation.check()
    return evaluation


@dataclass(frozen=True, eq=False, repr=False)
class EvaluationJob:
    """Ready to be iterated; again, and it goes on with what is missing."""

    model: Model
    path: Path
    items: list[PromptItem]
    prompt_config: PromptConfig
    chat: bool | None
    batch: int | None
    trace: int
    edits: tuple[Edit, ...]
    measure: bool
    nll_only: bool
    source: dict[str, Any]
    arguments: dict[str, Any]
    notes: list[str]

    def __repr__(self) -> str:
        return f"Evaluation({self.model.spec.name}: {self.finished} of {len(self.items)} samples, in {self.path})"

    def __iter__(self) -> Iterator[BatchAnswered]:
        by_name = {item.sample.id: item for item in self.items}
        began, fresh = time.monotonic(), 0
        with create_run(self.path, self.settings, self.names, plan=self.plan, resume=True) as run:
            assert run.plan is not None
            scores = [_score(line) for line in _go_on(run)]
            for names in run.plan[_batches_in(run.plan, len(scores)) :]:
                lines = self._answer([by_name[name] for name in names])
                _append(self.path / PREDICTIONS, lines)
                fresh += len(lines)
                scores += [_score(line) for line in lines]
                seconds = time.monotonic() - began
                left = seconds / fresh * (len(self.items) - len(scores))
                yield BatchAnswered(len(scores), len(self.items), _mean(scores), seconds, left)
            write_record(self.path, {**run.record, "status": "finished"})

    def check(self) -> None:
        """Refuse edits the model or a sample cannot have, and a folder that holds something else."""
        if self.edits:
            for some in batches(self.model, self.items, self.batch):
                decode(self.model, [item.ids for item in some], **self._around(some))
        check_run(self.path, self.settings, self.names, plan=self.plan, resume=True)

    @property
    def sampling(self) -> Sampling:
        return resolve_sampling(self.model.spec.paradigm, **self.arguments)

    @property
    def names(self) -> list[str]:
        return [item.sample.id for item in self.items]

    @property
    def finished(self) -> int:
        return len(read_predictions(self.path))

    @property
    def plan(self) -> list[list[str]]:
        return [[item.sample.id for item in some] for some in batches(self.model, self.items, self.batch)]

    @property
    def settings(self) -> dict[str, Any]:
        """All that the predictions depend on."""
        asked = [[item.sample.id, item.prompt.text, *item.sample.answers] for item in self.items]
        return {
            **self.model.metadata,
            **self.sampling.as_json,
            **self.prompt_config.as_json,
            **(
                {"edits": [str(edit) for edit in self.edits], "edits_sha256": _digest(self.edits)} if self.edits else {}
            ),
            **({"measure": True} if self.measure else {}),
            "what": LIKELIHOODS if self.nll_only else EVALUATION,
            "template": "chat" if prompts.uses_template(self.model, self.chat) else None,
            "samples_sha256": hashlib.sha256(json.dumps(asked).encode()).hexdigest(),
            **self.source,
        }

    def traces(self) -> TraceJob | None:
        """The first samples, watched, as a run inside this one; to be iterated."""
        if not self.trace:
            return None
        first = self.items[: self.trace]
        written = {item.sample.id: item.prompt for item in first}
        return plan_trace(
            self.model,
            [item.sample for item in first],
            self.path / TRACES,
            batch=self.batch,
            chat=self.chat,
            source={**self.prompt_config.as_json, **self.source},
            write=lambda sample: written[sample.id],
            **self.arguments,
        )

    def _answer(self, items: Sequence[PromptItem]) -> list[dict[str, Any]]:
        with threads_for(self.model):
            if self.nll_only:
                nlls = zip(items, self._nll(items), strict=True)
                return [{"id": item.sample.id, "measures": {"nll": nll}} for item, nll in nlls]
            decoding = self._decode(items)
            lines = [_line(item, text) for item, text in zip(items, decoding.texts, strict=True)]
            traces = decoding.traces if self.prompt_config.attention or self.measure else []
            if self.prompt_config.attention:
                ends = [len(item.ids) + max(1, len(new)) for item, new in zip(items, decoding.generated, strict=True)]
                for line, trace, end in zip(lines, traces, ends, strict=True):
                    line["attention"] = _attention(trace, end)
            if self.measure:
                for line, trace, nll in zip(lines, traces, self._nll(items), strict=True):
                    line["measures"] = {"nll": nll, **measure_trace(trace)}
        return lines

    def _decode(self, items: Sequence[PromptItem]) -> Decoding:
        fields = (*(("row_regions",) if self.prompt_config.attention else ()), *(FIELDS if self.measure else ()))
        watch = Watch(fields=fields) if fields else None
        return decode(self.model, [item.ids for item in items], watch=watch, **self._around(items))

    def _nll(self, items: Sequence[PromptItem]) -> list[float | None]:
        """Of each sample's first right answer; None without one, or where it is too long."""
        new = self.sampling.new_tokens
        able = [
            item for item in items if has_nll(self.model, self.sampling) and has_target_answer(self.model, item, new)
        ]
        if not able:
            return [None] * len(items)
        told = {**self._around(able), "new_tokens": new, "stop": None}
        told["watch"] = Watch(fields=("received",))  # edited or not, attention is computed in the same way
        answers = [item.sample.answers[0] for item in able]
        found = answer_nll(self.model, [item.ids for item in able], answers, chat=self.chat, **told)
        by_name = {item.sample.id: known(nll) for item, nll in zip(able, found, strict=True)}
        return [by_name.get(item.sample.id) for item in items]

    def _around(self, items: Sequence[PromptItem]) -> dict[str, Any]:
        """What `decode` is told of a batch besides its prompts."""
        behind = self.prompt_config.suffix_ids(self.model)
        suffix = 0 if self.model.spec.paradigm == "arm" else len(require_tokenizer(self.model).suffix)
        everywhere = {name for item in self.items for name in item.tokens} if self.edits else set()
        return {
            "samples": [item.sample.id for item in items],
            "regions": batch_regions(items, self.sampling.new_tokens, len(behind) + suffix, sorted(everywhere)),
            "behind": behind,
            "edits": self.edits,
            **self.arguments,
        }


def _line(item: PromptItem, said: str) -> dict[str, Any]:
    sample = item.sample
    unanswerable = is_unanswerable(sample)
    right = float(abstains(said)) if unanswerable else acc(said, sample.answers)
    return {
        "id": sample.id,
        "prediction": said,
        "answers": list(sample.answers),
        "acc": right,
        "em": right if unanswerable else em(said, sample.answers),
        "f1": right if unanswerable else f1(said, sample.answers),
        "abstained": abstains(said),
        "unanswerable": unanswerable,
        "passages": len(sample.passages),
        "tokens": len(item.ids),
    }


def _attention(trace: Trace, end: int) -> dict[str, float]:
    """What the rows that decide the answer, up to its end, give to gold and to other passages, mean over layers and
    heads; and what share of the canvas those are."""
    names, member = list(trace.coords["region"]), trace.arrays["region_member"]
    answer = trace.arrays["commit_position"] < end
    mass = trace.arrays["row_regions"][answer].astype(np.float64).mean((0, 1, 2))
    documents = [i for i, name in enumerate(names) if name.startswith("document ")]
    gold = names.index("gold") if "gold" in names else None
    on_gold, of_gold = (0.0, 0.0) if gold is None else (mass[gold], member[:, gold].mean())
    return {
        "gold_mass": float(on_gold),
        "gold_share": float(of_gold),
        "other_mass": float(sum(mass[i] for i in documents) - on_gold),
        "other_share": float(sum(member[:, i].mean() for i in documents) - of_gold),
    }


def _go_on(run: Run) -> list[dict[str, Any]]:
    """What is kept of an earlier start: whole batches, in the order they are decoded in; the rest is cut off."""
    lines = read_predictions(run.path)
    assert run.plan is not None
    order = [name for names in run.plan for name in names]
    same = next((i for i, line in enumerate(lines) if i >= len(order) or line["id"] != order[i]), len(lines))
    keep = sum(len(names) for names in run.plan[: _batches_in(run.plan, same)])
    file = run.path / PREDICTIONS
    if file.exists():
        kept = b"".join(line + b"\n" for line in file.read_bytes().split(b"\n")[:keep])
        os.truncate(file, len(kept))
    return lines[:keep]


def _batches_in(plan: Sequence[Sequence[str]], count: int) -> int:
    """How many batches the first so many lines are."""
    at = np.cumsum([len(names) for names in plan])
    return int((at <= count).sum())


def _append(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    try:
        with file.open("ab") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}; mend that, and the same command goes on") from error


def _score(line: Mapping[str, Any]) -> float:
    return float(line.get("acc", np.nan))


def _digest(edits: Sequence[Edit]) -> str:
    """Of all an edit says: two may be called the same."""
    return hashlib.sha256(repr(edits).encode()).hexdigest()


def _mean(scores: Sequence[float]) -> float:
    return float(np.mean(scores)) if scores else float("nan")
