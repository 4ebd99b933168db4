"""`trace_samples`: a model over many samples, into a run folder. Glue like `decoding`, for more than fits one batch.

    tracing = trace_samples(model, read_samples("reading-5.jsonl"), "runs/mdm", new_tokens=8, controls=(0, 1, 2))
    tracing.size                                   # the forecast; everything is checked, nothing decoded yet
    for traced in tracing: print(traced.done, traced.total, traced.sample, traced.left)
    controls("runs/mdm")                           # the runs of the untrained controls, beside the model's own

Samples of like length share a batch, the longest come first, and which share one is written into the run. A batch that
was broken off is decoded whole again and what was missing is written: a resumed run has the bytes of an unbroken one.

Every model decodes all new tokens (`stop=False`): what stands behind an end of text is not part of the prediction, but
all samples of all runs have the same positions and, of one schedule, the same steps.
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
from floatscope.pipelines import prompts
from floatscope.pipelines.asking import PromptItem, batch_regions, batches, encode_samples, threads_for
from floatscope.pipelines.decode import decode
from floatscope.sampling import Sampling
from floatscope.sampling.settings import resolve_sampling
from floatscope.tasks.prompt import TEMPLATE, Prompt, prompt_of
from floatscope.tasks.sample import Sample
from floatscope.tasks.score import acc
from floatscope.traces import Forecast, Run, Trace, create_run, forecast, open_run
from floatscope.traces.file import file_name
from floatscope.traces.record import RECORD
from floatscope.traces.run import SAMPLES, check_run, control_path


@dataclass(frozen=True)
class SampleTraced:
    """A sample is on the disk."""

    run: Path
    sample: str
    acc: float | None  # None: it has no answers
    done: int  # finished samples of all runs, those of an earlier start among them
    total: int
    seconds: float  # since this start
    left: float  # seconds the rest will take at this pace


@dataclass(frozen=True)
class Summary:
    """A run in a line."""

    run: Path
    samples: int
    bytes: int
    acc: float | None  # mean over the samples that have answers; None: none has

    @property
    def as_json(self) -> dict[str, Any]:
        return {"run": str(self.run), "samples": self.samples, "bytes": self.bytes, "acc": self.acc}


def plan_trace(
    model: Model,
    samples: Sequence[Sample | str],
    out: str | Path,
    *,
    watch: Watch | None = None,
    batch: int | None = None,
    controls: Sequence[int] = (),
    resume: bool = True,
    chat: bool | None = None,
    preset: str | None = None,
    source: Mapping[str, Any] | None = None,
    write: Callable[[Sample], Prompt] = prompt_of,
    **settings: Any,
) -> TraceJob:
    """Everything is checked here; samples are decoded as the result is iterated.

    A sample is a question, asked as `write` puts it, or a text, taken as it is and called prompt-1, prompt-2, …
    `controls` are seeds: each is an untrained control, traced alike into a run inside the model's. `source` says where
    the samples come from, in the run's settings. `settings` are those of `Sampling`.
    """
    if not isinstance(model, Model):
        raise UserError(f"trace_samples needs a floatscope Model (fs.load), got {type(model).__name__}")
    settings = {"stop": False, **{name: value for name, value in settings.items() if value is not None}}
    if model.spec.paradigm == "arm" and settings.get("steps") == settings.get("new_tokens", Sampling.new_tokens):
        settings.pop("steps")  # a step per token is what it takes
    how = resolve_sampling(model.spec.paradigm, preset, **settings)
    items = encode_samples(model, [samples] if isinstance(samples, str) else samples, chat, how.new_tokens, write)
    tracing = TraceJob(
        model=model,
        path=Path(out),
        items=items,
        watch=watch or Watch(),
        sampling=how,
        template="chat" if prompts.uses_template(model, chat) else None,
        batch=batch,
        seeds=tuple(controls),
        source=dict(source or {}),
        arguments={"preset": preset, **settings},
    )
    names = [item.sample.id for item in items]
    check_run(out, tracing.settings(model), names, plan=tracing.plan(tracing.path), resume=resume)
    tracing.check_room()
    return tracing


@dataclass(frozen=True, eq=False, repr=False)
class TraceJob:
    """Ready to be iterated; again, and it goes on with what is missing."""

    model: Model
    path: Path
    items: list[PromptItem]
    watch: Watch
    sampling: Sampling
    template: str | None
    batch: int | None
    seeds: tuple[int, ...]
    source: dict[str, Any]
    arguments: dict[str, Any]

    def __iter__(self) -> Iterator[SampleTraced]:
        pace = _Pace(self.finished, self.total)
        yield from self._trace(self.model, self.path, None, pace)
        for seed in self.seeds:
            path = control_path(self.path, seed)
            if _finished(path) < len(self.items):
                yield from self._trace(untrained(self.model, seed), path, seed, pace)

    def __repr__(self) -> str:
        return f"Tracing({self.model.spec.name}: {self.finished} of {self.total} samples, in {self.path})"

    @property
    def paths(self) -> list[Path]:
        """The model's run and those of its controls."""
        return [self.path, *(control_path(self.path, seed) for seed in self.seeds)]

    @property
    def total(self) -> int:
        """Samples over all runs."""
        return len(self.items) * len(self.paths)

    @property
    def finished(self) -> int:
        """How many of them are on the disk now."""
        return sum(map(_finished, self.paths))

    @property
    def note(self) -> str | None:
        """What the traces lack, in a sentence."""
        without = [item.sample.id for item in self.items if not item.tokens.keys() - {"bos"}]
        if not without:
            return None
        return (
            f"{len(without)} of {len(self.items)} samples, such as '{without[0]}', have no regions but bos and answer:"
            f" the tokenizer of {self.model.spec.name} does not tell which characters a token stands for, or its chat"
            " template changes the prompt"
        )

    @cached_property
    def size(self) -> Forecast | None:
        """How large all runs will be together, at most; None where the model does not tell its layers and heads."""
        config: Any = getattr(self.model.module, "config", None)
        layers, heads = (getattr(config, f"num_{what}", None) for what in ("hidden_layers", "attention_heads"))
        if not isinstance(layers, int) or not isinstance(heads, int):
            return None
        new, arm = self.sampling.new_tokens, self.model.spec.paradigm == "arm"
        prompt = round(np.mean([len(item.ids) for item in self.items]))
        suffix = 0 if arm or self.model.tokenizer is None else len(self.model.tokenizer.suffix)
        return forecast(
            keep=None if self.watch.fields is not None else self.watch.level,
            fields=self.watch.fields,
            samples=self.total,
            steps=self.sampling.steps or new,
            layers=layers,
            heads=heads,
            keys=prompt + new - 1 if arm else prompt + new + suffix,
            regions=round(np.mean([len(item.tokens) + 1 for item in self.items])),
            commits=new,
            queries=prompt if arm else None,
            positions=prompt + new if arm else None,
            influence=self.watch.influence,
        )

    def check_room(self) -> None:
        """Refuse what the disk cannot hold."""
        if self.size is None:
            return
        needed = self.size.total * (self.total - self.finished) // self.total
        there = next(place for place in (self.path.absolute(), *self.path.absolute().parents) if place.exists())
        free = shutil.disk_usage(there).free
        if needed > free:
            raise UserError(
                f"the traces need {format_size(needed)} and the disk of {self.path} has {format_size(free)} left:"
                " take fewer samples or controls, keep less, or give a folder on another disk"
            )

    def summaries(self) -> list[Summary]:
        """The model's run and its controls, as far as they are."""
        return [_summary(path) for path in self.paths]

    def settings(self, model: Model, seed: int | None = None) -> dict[str, Any]:
        """All that the traces depend on."""
        asked = [[item.sample.id, item.prompt.text, *item.sample.answers] for item in self.items]
        return {
            **model.metadata,
            **self.sampling.as_json,
            "template": self.template,
            "prompt": TEMPLATE if any("prompt" not in item.prompt.spans for item in self.items) else None,
            "keep": self.watch.level if self.watch.fields is None else None,
            "fields": list(self.watch.field_names),
            "reducers": [reducer.name for reducer in self.watch.reducers],
            "control_seed": seed,
            "samples_sha256": hashlib.sha256(json.dumps(asked).encode()).hexdigest(),
            **self.source,
        }

    def plan(self, path: Path) -> list[list[str]] | None:
        """Which samples share a batch, the longest first; None: as the run in the folder says.

        A run that is finished is not decoded, and one that was begun keeps its batches unless others are asked for.
        """
        if (path / RECORD).exists() and (self.batch is None or _finished(path) == len(self.items)):
            return None
        return [[item.sample.id for item in batch] for batch in batches(self.model, self.items, self.batch)]

    def _trace(self, model: Model, path: Path, seed: int | None, pace: _Pace) -> Iterator[SampleTraced]:
        by_name = {item.sample.id: item for item in self.items}
        with create_run(path, self.settings(model, seed), list(by_name), plan=self.plan(path), resume=True) as run:
            assert run.plan is not None
            for names in run.plan:
                missing = set(names).difference(run.done)
                if not missing:
                    continue
                try:
                    traces = self._decode(model, [by_name[name] for name in names])
                except BaseException:
                    _forget_if_empty(run)
                    raise
                pace.decoded(len(missing))
                for trace in traces:
                    if trace.sample in missing:
                        run.write(trace)
                        yield pace.written(path, trace)

    def _decode(self, model: Model, items: Sequence[PromptItem]) -> list[Trace]:
        new, suffix = self.sampling.new_tokens, 0
        if model.spec.paradigm == "mdm" and model.tokenizer is not None:
            suffix = len(model.tokenizer.suffix)
        with threads_for(model):
            decoding = decode(
                model,
                [item.ids for item in items],
                watch=self.watch,
                samples=[item.sample.id for item in items],
                regions=batch_regions(items, new, suffix),
                meta={"template": self.template},
                **self.arguments,
            )
            told = zip(items, decoding.traces, decoding.texts, strict=True)
        return [replace(trace, meta={**trace.meta, **_about(model, item, trace, text)}) for item, trace, text in told]


class _Pace:
    """Counts what is finished and how long the rest will take."""

    def __init__(self, done: int, total: int) -> None:
        self.done, self.total, self.fresh, self.began = done, total, 0, time.monotonic()

    def decoded(self, samples: int) -> None:
        self.fresh += samples

    def written(self, run: Path, trace: Trace) -> SampleTraced:
        self.done += 1
        seconds = time.monotonic() - self.began
        left = seconds / self.fresh * (self.total - self.done)
        return SampleTraced(run, trace.sample, trace.meta["acc"], self.done, self.total, seconds, left)


def _about(model: Model, item: PromptItem, trace: Trace, prediction: str) -> dict[str, Any]:
    """What a reader of the run needs of the model and the sample, without either."""
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


def _finished(path: Path) -> int:
    return len(open_run(path).done) if (path / RECORD).exists() else 0


def _summary(path: Path) -> Summary:
    files = [path / SAMPLES / file_name(sample) for sample in open_run(path).done]
    scores = [score for file in files if (score := _meta(file)["acc"]) is not None]
    return Summary(
        path, len(files), sum(file.stat().st_size for file in files), float(np.mean(scores)) if scores else None
    )


def _meta(file: Path) -> dict[str, Any]:
    """What a trace says of itself, without reading its arrays."""
    with safe_open(file, "np") as opened:
        told: dict[str, Any] = json.loads(opened.metadata()["meta"])
    return told


def _forget_if_empty(run: Run) -> None:
    """What failed before its first sample leaves no run behind, so that it may be tried with other settings."""
    if not run.done:
        with suppress(OSError):  # the error that brought us here is the one to tell
            (run.path / SAMPLES).rmdir()
            (run.path / RECORD).unlink()
