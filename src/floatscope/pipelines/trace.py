"""`trace`: decode many samples, capture their attention, write a run folder that survives a crash.

    run = trace(model, read_samples("twin:reading-5"), "runs/mdm", new_tokens=8, controls=(0, 1, 2))
    job = plan_trace(model, samples, "runs/mdm", new_tokens=8)     # checked, nothing decoded yet
    job.forecast                                                   # its size on disk
    for event in job: print(event.done, event.total, event.sample, event.seconds_left)
    find_controls("runs/mdm")                                      # the runs of the untrained controls

Samples of similar length share a batch, and the longest come first. The run records its batches. An interrupted batch
is decoded again as a whole and only the missing samples are written, so a resumed run has the bytes of an
uninterrupted one.

Every model decodes all new tokens (`stop=False`). What follows an end of text is not part of the prediction, but all
samples of all runs have the same positions and, under one schedule, the same steps.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from floatscope.capture.watcher import Watch
from floatscope.errors import UserError
from floatscope.files.sizes import format_size
from floatscope.models.model import Model
from floatscope.models.untrained import untrained
from floatscope.pipelines.batching import limit_threads, make_batches
from floatscope.pipelines.decode import decode
from floatscope.pipelines.prompting import PromptItem, batch_regions, encode_samples, uses_chat_template
from floatscope.sampling import Sampling
from floatscope.sampling.settings import resolve_sampling
from floatscope.tasks.regions import Prompt
from floatscope.tasks.sample import Sample
from floatscope.tasks.scores import acc
from floatscope.tasks.template import load_template
from floatscope.traces import Forecast, Run, Trace, create_run, forecast, open_run
from floatscope.traces.run import SAMPLES_FOLDER, check_run, control_path
from floatscope.traces.run_record import RECORD_FILE
from floatscope.traces.trace_file import trace_file_name


@dataclass(frozen=True)
class SampleTraced:
    """A sample has been written to disk."""

    run: Path
    sample: str
    acc: float | None  # None: the sample has no answers
    done: int  # finished samples of all runs, including those of earlier starts
    total: int
    seconds: float  # since this start
    seconds_left: float  # for the remaining samples, at the present rate


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
    on_progress: Callable[[SampleTraced], None] | None = None,
    **settings: Any,
) -> Run:
    """Trace a model over many samples into a run folder, and open the folder.

    Args:
        model: A model from `fs.load`.
        samples: Questions (`fs.read_samples`) or plain texts.
        out: The run folder. An interrupted run resumes.
        on_progress: Called after each sample.
        **settings: As for `plan_trace`: `watch`, `batch_size`, `controls`, `chat`, `preset`, and the settings of
            `Sampling` (`new_tokens`, `steps`, `sampler`, …).

    Returns:
        The run: `len(run)`, `run["id"]`, `for trace in run`.

    Example:
        run = fs.trace(fs.load("twin:mdm"), fs.read_samples("twin:reading-5", limit=2), "runs/mdm", new_tokens=4)
        len(run), run[0].text
    """
    for event in plan_trace(model, samples, out, **settings):
        if on_progress is not None:
            on_progress(event)
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
        chat: Whether prompts go through the chat template. Default: if the tokenizer has one.
        preset: The settings of a model's authors, `llada` or `dream`.
        source: Where the samples come from, for the run's settings.
        build_prompt: How a question becomes a prompt. Default: the template `default`.
        **settings: The settings of `Sampling`.
    """
    if not isinstance(model, Model):
        raise UserError(f"trace needs a floatscope Model (fs.load), got {type(model).__name__}")
    settings = {"stop": False, **{name: value for name, value in settings.items() if value is not None}}
    if model.spec.paradigm == "arm" and settings.get("steps") == settings.get("new_tokens", Sampling.new_tokens):
        settings.pop("steps")  # an ARM takes one step per token anyway
    sampling = resolve_sampling(model.spec.paradigm, preset, **settings)
    job = TraceJob(
        model=model,
        path=Path(out),
        items=encode_samples(
            model,
            [samples] if isinstance(samples, str) else samples,
            chat,
            sampling.new_tokens,
            build_prompt or load_template("default").prompt,
        ),
        watch=watch or Watch(),
        sampling=sampling,
        chat=uses_chat_template(model, chat),
        batch_size=batch_size,
        control_seeds=tuple(controls),
        source=dict(source or {}),
        arguments={"preset": preset, **settings},
    )
    ids = [item.sample.id for item in job.items]
    check_run(out, job.settings(model), ids, plan=job.batch_plan(job.path), resume=resume)
    job.check_disk_space()
    return job


@dataclass(frozen=True, eq=False, repr=False)
class TraceJob:
    """A checked plan. Iterating it decodes the samples that are missing; iterating it again resumes."""

    model: Model
    path: Path
    items: list[PromptItem]
    watch: Watch
    sampling: Sampling
    chat: bool  # prompts go through the chat template
    batch_size: int | None
    control_seeds: tuple[int, ...]
    source: dict[str, Any]
    arguments: dict[str, Any]  # of `decode`

    def __iter__(self) -> Iterator[SampleTraced]:
        progress = _Progress(self.finished, self.total)
        yield from self._trace(self.model, self.path, None, progress)
        for seed in self.control_seeds:
            path = control_path(self.path, seed)
            if _count_finished(path) < len(self.items):
                yield from self._trace(untrained(self.model, seed), path, seed, progress)

    def __repr__(self) -> str:
        return f"TraceJob({self.model.spec.name}: {self.finished} of {self.total} samples, in {self.path})"

    @property
    def paths(self) -> list[Path]:
        """The folders of the model's run and of its controls."""
        return [self.path, *(control_path(self.path, seed) for seed in self.control_seeds)]

    @property
    def total(self) -> int:
        """The number of samples over all runs."""
        return len(self.items) * len(self.paths)

    @property
    def finished(self) -> int:
        """The number of samples that are on disk now."""
        return sum(map(_count_finished, self.paths))

    @property
    def note(self) -> str | None:
        """One sentence about what the traces lack, or None."""
        without = [item.sample.id for item in self.items if not item.tokens.keys() - {"bos"}]
        if not without:
            return None
        return (
            f"{len(without)} of {len(self.items)} samples, such as '{without[0]}', have no regions except bos and"
            f" answer: the tokenizer of {self.model.spec.name} does not give the characters of each token, or its chat"
            " template changes the prompt"
        )

    @cached_property
    def forecast(self) -> Forecast | None:
        """The size of all runs together, at most; None where the model's config names no layers and heads."""
        config: Any = getattr(self.model.module, "config", None)
        layers, heads = (getattr(config, f"num_{part}", None) for part in ("hidden_layers", "attention_heads"))
        if not isinstance(layers, int) or not isinstance(heads, int):
            return None
        new, is_arm = self.sampling.new_tokens, self.model.spec.paradigm == "arm"
        prompt = round(np.mean([len(item.ids) for item in self.items]))
        suffix = 0 if is_arm or self.model.tokenizer is None else len(self.model.tokenizer.suffix)
        return forecast(
            level=None if self.watch.fields is not None else self.watch.level,
            fields=self.watch.fields,
            samples=self.total,
            steps=self.sampling.steps or new,
            layers=layers,
            heads=heads,
            keys=prompt + new - 1 if is_arm else prompt + new + suffix,
            regions=round(np.mean([len(item.tokens) + 1 for item in self.items])),
            commits=new,
            queries=prompt if is_arm else None,
            positions=prompt + new if is_arm else None,
            influence=self.watch.influence,
        )

    def check_disk_space(self) -> None:
        """Refuse a run that does not fit on the disk."""
        if self.forecast is None:
            return
        needed = self.forecast.total * (self.total - self.finished) // self.total
        existing = next(place for place in (self.path.absolute(), *self.path.absolute().parents) if place.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise UserError(
                f"the traces need {format_size(needed)} and the disk of {self.path} has {format_size(free)} left; use"
                " fewer samples or controls, a smaller level, or a folder on another disk"
            )

    def summaries(self) -> list[RunSummary]:
        """One line about the model's run and about each control, as far as they are finished."""
        return [_summarise_run(path) for path in self.paths]

    def settings(self, model: Model, seed: int | None = None) -> dict[str, Any]:
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
            "control_seed": seed,
            "samples_sha256": hashlib.sha256(json.dumps(contents).encode()).hexdigest(),
            **self.source,
        }

    def batch_plan(self, path: Path) -> list[list[str]] | None:
        """The sample ids of each batch, the longest samples first; None: use the plan of the run in the folder.

        A finished run is not decoded again. An interrupted run keeps its batches unless another size is asked for.
        """
        if (path / RECORD_FILE).exists() and (self.batch_size is None or _count_finished(path) == len(self.items)):
            return None
        return [[item.sample.id for item in batch] for batch in make_batches(self.model, self.items, self.batch_size)]

    def _trace(self, model: Model, path: Path, seed: int | None, progress: _Progress) -> Iterator[SampleTraced]:
        by_id = {item.sample.id: item for item in self.items}
        with create_run(path, self.settings(model, seed), list(by_id), plan=self.batch_plan(path), resume=True) as run:
            assert run.plan is not None
            for ids in run.plan:
                missing = set(ids).difference(run.finished)
                if not missing:
                    continue
                try:
                    traces = self._decode(model, [by_id[sample] for sample in ids])
                except BaseException:
                    _remove_if_empty(run)
                    raise
                progress.add_decoded(len(missing))
                for each in traces:
                    if each.sample in missing:
                        run.write(each)
                        yield progress.add_written(path, each)

    def _decode(self, model: Model, items: Sequence[PromptItem]) -> list[Trace]:
        suffix = 0
        if model.spec.paradigm == "mdm" and model.tokenizer is not None:
            suffix = len(model.tokenizer.suffix)
        with limit_threads(model):
            decoding = decode(
                model,
                [item.ids for item in items],
                watch=self.watch,
                samples=[item.sample.id for item in items],
                regions=batch_regions(items, self.sampling.new_tokens, suffix),
                meta={"chat": self.chat},
                **self.arguments,
            )
            results = zip(items, decoding.traces, decoding.texts, strict=True)
        return [
            replace(each, meta={**each.meta, **_sample_meta(model, item, each, text)}) for item, each, text in results
        ]


class _Progress:
    """Counts finished samples and estimates the time that remains."""

    def __init__(self, done: int, total: int) -> None:
        self.done, self.total, self.decoded, self.began = done, total, 0, time.monotonic()

    def add_decoded(self, samples: int) -> None:
        self.decoded += samples

    def add_written(self, run: Path, trace: Trace) -> SampleTraced:
        self.done += 1
        seconds = time.monotonic() - self.began
        left = seconds / self.decoded * (self.total - self.done)
        return SampleTraced(run, trace.sample, trace.meta["acc"], self.done, self.total, seconds, left)


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


def _count_finished(path: Path) -> int:
    return len(open_run(path).finished) if (path / RECORD_FILE).exists() else 0


def _summarise_run(path: Path) -> RunSummary:
    files = [path / SAMPLES_FOLDER / trace_file_name(sample) for sample in open_run(path).finished]
    scores = [score for file in files if (score := _read_meta(file)["acc"]) is not None]
    return RunSummary(
        path, len(files), sum(file.stat().st_size for file in files), float(np.mean(scores)) if scores else None
    )


def _read_meta(file: Path) -> dict[str, Any]:
    """The metadata of a trace, without its arrays."""
    with safe_open(file, "np") as opened:
        meta: dict[str, Any] = json.loads(opened.metadata()["meta"])
    return meta


def _remove_if_empty(run: Run) -> None:
    """Remove a run that failed before its first sample, so that it can be tried with other settings."""
    if not run.finished:
        with suppress(OSError):  # report the error that led here, not this one
            (run.path / SAMPLES_FOLDER).rmdir()
            (run.path / RECORD_FILE).unlink()
