"""`EvaluationPart`: the answers to a file of questions, written batch by batch.

    part = plan_part(model, samples, "runs/mdm-5", passages=5)     # of `evaluate`
    for batch in part.work(): ...                                  # lines of predictions.jsonl (`prediction_part`)

An evaluation is a job of one part, a stress test has a part per point, an experiment one per condition.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from floatscope.analysis.evaluations import EVALUATION, LIKELIHOODS, read_predictions
from floatscope.capture.watcher import Watch
from floatscope.interventions.edits import Edit
from floatscope.interventions.notes import EditNote, EditWarning
from floatscope.models.model import Model
from floatscope.pipelines.answer_measures import (
    MEASURE_FIELDS,
    finite_or_none,
    has_nll,
    has_target_answer,
    measure_trace,
    passage_attention,
    score_answer,
)
from floatscope.pipelines.batching import limit_threads, make_batches
from floatscope.pipelines.decode import decode
from floatscope.pipelines.decoding import Decoding
from floatscope.pipelines.likelihood import measure_answers
from floatscope.pipelines.prediction_part import Lines, PredictionPart
from floatscope.pipelines.prompting import (
    PromptConfig,
    PromptItem,
    batch_regions,
    uses_chat_template,
)
from floatscope.sampling import Sampling
from floatscope.sampling.settings import resolve_sampling
from floatscope.traces.run import check_run


@dataclass(frozen=True, eq=False)
class EvaluationPart(PredictionPart):
    """The answers to a file of questions, in one folder."""

    model: Model
    path: Path
    items: list[PromptItem]
    prompt_config: PromptConfig
    chat: bool | None
    batch_size: int | None
    edits: tuple[Edit, ...]
    measure: bool
    nll_only: bool
    source: dict[str, Any]
    arguments: dict[str, Any]  # of `decode`
    notes: list[str]  # what was cut to fit the context
    label: str = ""  # in events, in place of the folder's name
    edit_label: str = ""  # in notes about edits

    @property
    def name(self) -> str:
        """Its label, or the name of its folder."""
        return self.label or self.path.name

    @property
    def subject(self) -> str:
        """Its edits in notes about them."""
        return self.edit_label or " and ".join(map(str, self.edits))

    def predict(self, batches: Sequence[Sequence[str]]) -> Iterator[Lines]:
        """Answer the samples of each batch."""
        by_id = {item.sample.id: item for item in self.items}
        for ids in batches:
            lines, notes = self._answer([by_id[sample] for sample in ids])
            if notes:
                lines[0]["notes"] = [note.as_json for note in notes]
            yield lines

    def read_notes(self) -> list[EditNote]:
        """Return the notes about edits that are on disk; the first line of a batch has them."""
        return [EditNote.from_json(note) for line in read_predictions(self.path) for note in line.get("notes", ())]

    def check(self) -> None:
        """Refuse edits that do not fit the model or a sample, and a folder with other contents."""
        if self.edits:
            for items in make_batches(self.model, self.items, self.batch_size):
                decode(self.model, [item.ids for item in items], **self._decode_arguments(items))
        check_run(self.path, self.settings, self.sample_ids, plan=self.batch_plan, resume=True)

    @property
    def sampling(self) -> Sampling:
        """The sampling settings, with all defaults filled in."""
        return resolve_sampling(
            self.model.spec.paradigm,
            block_size=self.model.spec.block_size,
            canvas_size=self.model.spec.canvas_size,
            **self.arguments,
        )

    @property
    def sample_ids(self) -> list[str]:
        """The ids of the samples, in the order of the file."""
        return [item.sample.id for item in self.items]

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

    def _answer(self, items: Sequence[PromptItem]) -> tuple[Lines, list[EditNote]]:
        """The lines of `predictions.jsonl` for a batch, and notes about the edits."""
        with limit_threads(self.model), warnings.catch_warnings():
            warnings.simplefilter("ignore", EditWarning)  # the notes say the same
            if self.nll_only:
                measured, notes = self._measure_answers(items)
                return [{"id": i.sample.id, "measures": each} for i, each in zip(items, measured, strict=True)], notes
            decoding = self._decode(items)
            lines = [score_answer(item, text) for item, text in zip(items, decoding.texts, strict=True)]
            traces = decoding.traces if self.prompt_config.attention or self.measure else []
            if self.prompt_config.attention:
                ends = [
                    len(item.ids) + max(1, len(new)) for item, new in zip(items, decoding.generated_ids, strict=True)
                ]
                for line, trace, end in zip(lines, traces, ends, strict=True):
                    line["attention"] = passage_attention(trace, end)
            if self.measure:
                measured, _ = self._measure_answers(items)
                for line, trace, dose, answer in zip(lines, traces, decoding.doses, measured, strict=True):
                    measures = measure_trace(trace, self.model.spec.stop_ids)
                    line["measures"] = {"nll": answer["nll"], **measures, "dose": finite_or_none(dose)}
            return lines, decoding.notes

    def _decode(self, items: Sequence[PromptItem]) -> Decoding:
        attention = ("row_regions",) if self.prompt_config.attention else ()
        fields = (*attention, *(MEASURE_FIELDS if self.measure else ()))
        watch = Watch(fields=fields) if fields else None
        return decode(self.model, [item.ids for item in items], watch=watch, **self._decode_arguments(items))

    def _measure_answers(self, items: Sequence[PromptItem]) -> tuple[list[dict[str, float | None]], list[EditNote]]:
        """The NLL of each sample's first answer and the dose of the edits, None without an answer or if it is too long;
        and notes about the edits."""
        new_tokens = self.sampling.new_tokens
        usable = [item for item in items if has_target_answer(self.model, item, new_tokens)]
        if not usable or not has_nll(self.model, self.sampling):
            return [{"nll": None, "dose": None} for _ in items], []
        arguments = {**self._decode_arguments(usable), "new_tokens": new_tokens, "stop": None}
        arguments["watch"] = Watch(fields=("received",))  # so that attention runs the same way with and without edits
        answers = [item.sample.answers[0] for item in usable]
        measured = measure_answers(self.model, [item.ids for item in usable], answers, chat=self.chat, **arguments)
        by_id = {
            item.sample.id: {"nll": finite_or_none(nll), "dose": finite_or_none(dose)}
            for item, nll, dose in zip(usable, measured.nlls, measured.doses, strict=True)
        }
        return [by_id.get(item.sample.id, {"nll": None, "dose": None}) for item in items], measured.notes

    def _decode_arguments(self, items: Sequence[PromptItem]) -> dict[str, Any]:
        """The arguments of `decode` for a batch, except its prompts."""
        layout = self.prompt_config.plan_layout(self.model, self.sampling.new_tokens)
        extra_regions = {name for item in self.items for name in item.tokens} if self.edits else set()
        return {
            "samples": [item.sample.id for item in items],
            "regions": batch_regions(items, layout, sorted(extra_regions)),
            "suffix": self.prompt_config.suffix_ids(self.model),
            "edits": self.edits,
            **self.arguments,
        }


def _digest_edits(edits: Sequence[Edit]) -> str:
    """A digest of all fields of the edits: two different edits may have the same name."""
    return hashlib.sha256(repr(edits).encode()).hexdigest()
