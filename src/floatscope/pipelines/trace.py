"""`trace`: decode many samples, capture their attention, write a run folder that survives a crash.

    run = trace(model, read_samples("twin:reading-5"), "runs/mdm", new_tokens=8, controls=(0, 1, 2))
    job = plan_trace(model, samples, "runs/mdm", new_tokens=8)     # checked, nothing decoded yet
    job.forecast                                                   # its size on disk
    for event in job: print(event)                                 # the events of `job`

The parts of the job are the model's run and those of the untrained controls. Samples of similar length share a batch,
and the longest come first. The run records its batches. An interrupted batch is decoded again as a whole and only the
missing samples are written, so a resumed run has the bytes of an uninterrupted one.

Every model decodes all new tokens (`stop=False`). What follows an end of text is not part of the prediction, but all
samples of all runs have the same positions and, under one schedule, the same steps.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from floatscope.capture.experts import find_experts
from floatscope.capture.watcher import Watch
from floatscope.compat import experts_per_token
from floatscope.errors import UserError
from floatscope.files.sizes import format_size
from floatscope.interventions.checks import count_layers_and_heads
from floatscope.models.model import Model
from floatscope.models.untrained import untrained
from floatscope.pipelines.batching import limit_threads, make_batches
from floatscope.pipelines.canvas_layout import CanvasLayout, plan_layout
from floatscope.pipelines.decode import decode, supported_watch
from floatscope.pipelines.job import Batch, Event, Job, Part, run_job
from floatscope.pipelines.prompting import PromptItem, batch_regions, encode_samples, uses_chat_template
from floatscope.sampling import Sampling
from floatscope.sampling.settings import resolve_sampling
from floatscope.schema import RowSource
from floatscope.tasks.regions import Prompt
from floatscope.tasks.sample import Sample
from floatscope.tasks.scores import acc
from floatscope.tasks.template import load_template
from floatscope.traces import Forecast, Run, Trace, create_run, forecast, open_run
from floatscope.traces.run import SAMPLES_FOLDER, check_run, control_path
from floatscope.traces.run_record import RECORD_FILE
from floatscope.traces.trace_file import trace_file_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSummary:
    """One line about a run."""

    run: Path
    samples: int
    bytes: int
    acc: float | None  # mean over the samples with answers; None: there are none

    @property
    def as_json(self) -> dict[str, Any]:
        """The summary as JSON values."""
        return {"run": str(self.run), "samples": self.samples, "bytes": self.bytes, "acc": self.acc}


def trace(
    model: Model,
    samples: Sequence[Sample | str],
    out: str | Path,
    *,
    on_event: Callable[[Event], None] | None = None,
    **settings: Any,
) -> Run:
    """Trace a model over many samples into a run folder, and open the folder.

    Args:
        model: A model from `fs.load`.
        samples: Questions (`fs.read_samples`) or plain texts.
        out: The run folder. An interrupted run resumes.
        on_event: Called with each event of the job (`floatscope.pipelines.job`).
        **settings: As for `plan_trace`: `watch`, `batch_size`, `controls`, `chat`, `preset`, and the settings of
            `Sampling` (`new_tokens`, `steps`, `sampler`, …).

    Returns:
        The run: `len(run)`, `run["id"]`, `for trace in run`.

    Example:
        run = fs.trace(fs.load("twin:mdm"), fs.read_samples("twin:reading-5", limit=2), "runs/mdm", new_tokens=4)
        len(run), run[0].text
    """
    run_job(plan_trace(model, samples, out, **settings), on_event)
    return open_run(out)


def plan_trace(
    model: Model,
    samples: Sequence[Sample | str],
    out: str | Path,
    *,
    watch: Watch | None = None,
    batch_size: int | None = None,
    controls: Sequence[int] = (),
    resume: bool = True,
    redo_damaged: bool = False,
    chat: bool | None = None,
    preset: str | None = None,
    source: Mapping[str, Any] | None = None,
    build_prompt: Callable[[Sample], Prompt] | None = None,
    **settings: Any,
) -> TraceJob:
    """Check everything and return a job; iterating the job decodes the samples.

    Args:
        model: A model from `fs.load`.
        samples: Questions, or plain texts, which are used as they are and get the ids prompt-1, prompt-2, …
        out: The run folder.
        watch: What to capture. Default: `Watch()`.
        batch_size: Samples per batch. Default: 8, on a GPU 32.
        controls: Seeds. Each is an untrained control, traced in the same way into a run inside the model's folder.
        resume: Whether `out` may hold an interrupted run with the same settings.
        redo_damaged: Whether files of finished samples that are damaged are deleted and decoded again; else a run with
            such files is not resumed.
        chat: Whether prompts go through the chat template. Default: if the tokenizer has one.
        preset: The settings of a model's authors, such as `llada` or `sdar`.
        source: Where the samples come from, for the run's settings.
        build_prompt: How a question becomes a prompt. Default: the template `default`.
        **settings: The settings of `Sampling`.
    """
    if not isinstance(model, Model):
        raise UserError(f"trace needs a floatscope Model (fs.load), got {type(model).__name__}")
    if watch is not None and watch.captures_experts:
        find_experts(model.module)  # raises if the model has none
    given = {name: value for name, value in settings.items() if value is not None}
    if "sampling" not in given:
        given.setdefault("stop", False)
    sampling = resolve_sampling(
        model.spec.paradigm, preset, block_size=model.spec.block_size, canvas_size=model.spec.canvas_size, **given
    )
    layout = plan_layout(model, sampling.new_tokens)
    listed = [samples] if isinstance(samples, str) else samples
    part = TracePart(
        model=model,
        path=Path(out),
        items=encode_samples(model, listed, chat, layout, build_prompt or load_template("default").prompt),
        layout=layout,
        watch=supported_watch(model, watch or Watch()),
        sampling=sampling,
        chat=uses_chat_template(model, chat),
        batch_size=batch_size,
        source=dict(source or {}),
        arguments={"preset": preset, **given},
        redo_damaged=redo_damaged,
    )
    part.check(resume)
    control_parts = [replace(part, path=control_path(part.path, seed), seed=seed) for seed in controls]
    job = TraceJob(part.path, (part, *control_parts), part.notes)
    job.check_disk_space()
    return job


@dataclass(frozen=True, eq=False)
class TracePart(Part):
    """The run of a model, or of its untrained control with the seed `seed`."""

    model: Model  # the trained one
    path: Path
    items: list[PromptItem]
    layout: CanvasLayout
    watch: Watch
    sampling: Sampling
    chat: bool  # prompts go through the chat template
    batch_size: int | None
    source: dict[str, Any]
    arguments: dict[str, Any]  # of `decode`
    redo_damaged: bool = False
    seed: int | None = None

    @property
    def name(self) -> str:
        """The name of its folder; that of a control follows the name of the model's run."""
        return self.path.name if self.seed is None else f"{self.path.parent.name}/{self.path.name}"

    @property
    def total(self) -> int:
        """The number of samples."""
        return len(self.items)

    def count_done(self) -> int:
        """Return the number of samples on disk now, without damaged ones if those are decoded again."""
        if not (self.path / RECORD_FILE).exists():
            return 0
        run = open_run(self.path)
        return len(run) - (len(run.find_damaged()) if self.redo_damaged else 0)

    @property
    def is_finished(self) -> bool:
        """Whether everything is on disk as it was written, and the folder says so."""
        return super().is_finished and not open_run(self.path).find_damaged()

    @property
    def notes(self) -> list[str]:
        """A sentence about what the traces lack, if anything."""
        without = [item.sample.id for item in self.items if not item.tokens.keys() - {"bos"}]
        if not without:
            return []
        return [
            f"{len(without)} of {len(self.items)} samples, such as '{without[0]}', have no regions except bos and"
            f" answer: the tokenizer of {self.model.spec.name} does not give the characters of each token, or its chat"
            " template changes the prompt"
        ]

    def check(self, resume: bool) -> None:
        """Refuse a folder with other contents."""
        ids = [item.sample.id for item in self.items]
        check_run(self.path, self.settings(self.model), ids, plan=self.batch_plan, resume=resume)

    def settings(self, model: Model) -> dict[str, Any]:
        """Everything that the traces depend on."""
        contents = [[item.sample.id, item.prompt.text, *item.sample.answers] for item in self.items]
        return {
            **model.metadata,
            **self.sampling.as_json,
            "chat": self.chat,
            "template": "default" if any("prompt" not in item.prompt.spans for item in self.items) else None,
            "level": self.watch.level if self.watch.fields is None else None,
            "fields": list(self.watch.field_names),
            "reducers": [reducer.name for reducer in self.watch.reducers],
            "control_seed": self.seed,
            "samples_sha256": hashlib.sha256(json.dumps(contents).encode()).hexdigest(),
            **self.source,
        }

    @property
    def batch_plan(self) -> list[list[str]] | None:
        """The sample ids of each batch, the longest samples first; None: use the plan of the run in the folder.

        A finished run is not decoded again. An interrupted run keeps its batches unless another size is asked for.
        """
        if (self.path / RECORD_FILE).exists() and (self.batch_size is None or self.count_done() == self.total):
            return None
        return [[item.sample.id for item in batch] for batch in make_batches(self.model, self.items, self.batch_size)]

    def work(self) -> Iterator[Batch]:
        """Decode the missing samples and write their traces."""
        model = self.model if self.seed is None else untrained(self.model, self.seed)
        by_id, scores = {item.sample.id: item for item in self.items}, list[float]()
        with create_run(self.path, self.settings(model), list(by_id), plan=self.batch_plan, resume=True) as run:
            assert run.plan is not None
            self._check_files(run)
            left, size = sum(not set(ids) <= set(run.finished) for ids in run.plan), max(map(len, run.plan))
            logger.info("%s: %d of %d batches to do, up to %d samples each", self.name, left, len(run.plan), size)
            for ids in run.plan:
                missing = set(ids).difference(run.finished)
                if not missing:
                    continue
                try:
                    traces = [each for each in self._decode(model, [by_id[i] for i in ids]) if each.sample in missing]
                except BaseException:
                    _remove_if_empty(run)
                    raise
                for each in traces:
                    run.write(each)
                scores += [each.meta["acc"] for each in traces if each.meta["acc"] is not None]
                yield Batch(tuple(each.sample for each in traces), float(np.mean(scores)) if scores else None)

    def _check_files(self, run: Run) -> None:
        """Compare the finished samples with their digests; delete damaged ones, or refuse to resume."""
        damaged = run.find_damaged()
        if damaged and not self.redo_damaged:
            raise UserError(
                "\n".join(damaged.values())
                + f"\n{self.path} is not resumed; redo_damaged=True decodes such samples again"
            )
        for sample in damaged:
            run.remove(sample)

    def _decode(self, model: Model, items: Sequence[PromptItem]) -> list[Trace]:
        with limit_threads(model):
            decoding = decode(
                model,
                [item.ids for item in items],
                watch=self.watch,
                samples=[item.sample.id for item in items],
                regions=batch_regions(items, self.layout),
                meta={"chat": self.chat},
                **self.arguments,
            )
            results = zip(items, decoding.traces, decoding.texts, strict=True)
        return [
            replace(each, meta={**each.meta, **_sample_meta(model, item, each, text)}) for item, each, text in results
        ]


@dataclass(frozen=True, eq=False, repr=False)
class TraceJob(Job):
    """The run of a model and those of its untrained controls."""

    parts: tuple[TracePart, ...]

    @cached_property
    def forecast(self) -> Forecast | None:
        """The size of all runs together, at most (token editing and renoising add to it); None where the model's config
        does not say how many layers, heads or experts it has."""
        part = self.parts[0]
        layers, heads = count_layers_and_heads(part.model)
        if not isinstance(layers, int) or not isinstance(heads, int):
            return None
        experts = experts_per_token(part.model.module.config) if part.watch.captures_experts else 0
        if experts is None:
            return None
        layout, spec, prompt = part.layout, part.model.spec, round(np.mean([len(item.ids) for item in part.items]))
        to_fill = layout.length(prompt) - prompt - len(layout.suffix)  # token editing adds to it
        keys, queries, canvases = layout.longest_forward(prompt), prompt if layout.grows else None, 1
        if spec.canvas_size is not None:
            queries, canvases = spec.canvas_size, layout.filled_tokens // layout.canvas_size
        elif spec.row_source is RowSource.BLOCK:
            queries = min(keys, layout.block_size + int(spec.shift))
        return forecast(
            level=None if part.watch.fields is not None else part.watch.level,
            fields=part.watch.fields,
            samples=self.total,
            steps=to_fill if layout.block_size > 1 else canvases * (part.sampling.steps or to_fill),
            layers=layers,
            heads=heads,
            keys=keys,
            regions=round(np.mean([len(item.tokens) + 1 for item in part.items])),
            commits=to_fill,
            queries=queries,
            positions=layout.length(prompt) if layout.grows else None,
            influence=part.watch.influence,
            experts=experts,
        )

    def check_disk_space(self) -> None:
        """Refuse a run that does not fit on the disk."""
        if self.forecast is None:
            return
        needed = self.forecast.total * (self.total - self.done) // self.total
        existing = next(place for place in (self.path.absolute(), *self.path.absolute().parents) if place.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise UserError(
                f"the traces need {format_size(needed)} and the disk of {self.path} has {format_size(free)} left; use"
                " fewer samples or controls, a smaller level, or a folder on another disk"
            )

    def summaries(self) -> list[RunSummary]:
        """One line about the model's run and about each control, as far as they are finished."""
        return [_summarise_run(part.path) for part in self.parts]


def _sample_meta(model: Model, item: PromptItem, trace: Trace, prediction: str) -> dict[str, Any]:
    """What a reader of the run needs to know of the model and the sample, without either."""
    assert model.tokenizer is not None
    spec, sample, arrays = model.spec, item.sample, trace.arrays
    used = np.unique(np.concatenate([arrays[name].ravel() for name in ("tokens", "tokens_after", "commit_token")]))
    ids = [int(i) for i in used if i >= 0]
    roles = {"bos": spec.bos_id, "eos": spec.eos_id, "eot": spec.eot_id, "mask": spec.mask_id, "pad": spec.pad_id}
    special = {role: token for role, token in roles.items() if token is not None}
    return {
        "pieces": {str(i): model.tokenizer.pieces([i])[0] for i in ids},
        "special": special,
        "special_ids": [i for i in ids if i in model.tokenizer.special_ids or i in special.values()],
        "answers": list(sample.answers),
        "prediction": prediction,
        "acc": acc(prediction, sample.answers) if sample.answers else None,
        "sample_meta": sample.meta,
    }


def _summarise_run(path: Path) -> RunSummary:
    files = [path / SAMPLES_FOLDER / trace_file_name(sample) for sample in open_run(path).finished]
    scores = [score for file in files if (score := _read_acc(file)) is not None]
    return RunSummary(
        path, len(files), sum(file.stat().st_size for file in files), float(np.mean(scores)) if scores else None
    )


def _read_acc(file: Path) -> float | None:
    """The score of a trace, from its metadata."""
    try:
        with safe_open(file, "np") as opened:
            score: float | None = json.loads(opened.metadata()["meta"])["acc"]
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged; delete it and resume the run") from error
    return score


def _remove_if_empty(run: Run) -> None:
    """Remove a run that failed before its first sample, so that it can be tried with other settings."""
    if not run.finished:
        with suppress(OSError):  # report the error that led here, not this one
            (run.path / SAMPLES_FOLDER).rmdir()
            (run.path / RECORD_FILE).unlink()
