"""`evaluate`: every question of a file, asked and scored, into a folder that can be broken off and gone on with.

    evaluation = evaluate(model, read_samples("nq.jsonl"), "runs/mdm-5", passages=5, new_tokens=32)
    for answered in evaluation: print(answered.done, answered.total, answered.acc)
    open_evaluation("runs/mdm-5").table            # a row per sample: acc, em, f1, what was said
    evaluation.told                                # what was cut to fit, in sentences

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
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from floatscope import prompts
from floatscope.asking import Item, as_items, batches, regions_of, threads_for
from floatscope.capture.watcher import Watch
from floatscope.decode import sampling
from floatscope.decoding import Decoding, decode
from floatscope.errors import UserError
from floatscope.models import Model
from floatscope.tasks.fit import fit
from floatscope.tasks.sample import Sample
from floatscope.tasks.score import abstains, acc, em, f1, is_unanswerable
from floatscope.tasks.template import Template, template
from floatscope.trace import Run, Trace, create_run, open_run
from floatscope.trace.record import write_record
from floatscope.trace.run import check_run
from floatscope.tracing import Tracing, trace_samples

PREDICTIONS, TRACES = "predictions.jsonl", "traces"
Passages = int | str
"""How many of a sample's passages are shown, its gold ones always among them; `gold`: those alone; `all`."""


@dataclass(frozen=True)
class Answered:
    """A batch is on the disk."""

    done: int
    total: int
    acc: float  # so far
    seconds: float  # since this start
    left: float  # seconds the rest will take at this pace


@dataclass(frozen=True)
class Ask:
    """How questions are asked, besides the sampling."""

    template: Template
    passages: Passages
    shots: int
    placement: str | None = None  # of the question among the passages
    extra_masks: int = 0  # behind the answer; they are never filled
    filler: str = ""  # a text behind the answer
    attention: bool = False  # watch how much the rows that decide the answer give to gold and other passages

    @property
    def as_json(self) -> dict[str, Any]:
        told = {"passages": self.passages, "shots": self.shots, "placement": self.placement}
        told |= {"extra_masks": self.extra_masks, "filler": self.filler, "attention": self.attention}
        return {"prompt": self.template.name, "prompt_sha256": self.template.sha256, **told}


def evaluate(
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
    preset: str | None = None,
    source: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Evaluation:
    """Everything is checked here; samples are asked as the result is iterated. `settings` are those of `Sampling`.

    `trace` of the samples, the first, are watched as well. Shots are other samples of the same file with their answers
    and gold passages, drawn for each sample by its id.
    """
    if not isinstance(model, Model):
        raise UserError(f"evaluate needs a floatscope Model (fs.load), got {type(model).__name__}")
    if shots < 0 or trace < 0 or extra_masks < 0:
        raise UserError(f"shots, traces and extra masks are 0 or more, got {min(shots, trace, extra_masks)}")
    if (extra_masks or filler) and model.spec.family != "mdm":
        raise UserError(f"{model.spec.name} writes from left to right: nothing can stand behind its answer")
    if shots >= len(samples):
        raise UserError(f"{shots} shots need as many other samples, and the file has {len(samples)}")
    chosen = [choose(sample, passages) for sample in samples]
    settings = {name: value for name, value in settings.items() if value is not None}
    if model.spec.family == "arm" and settings.get("steps") == settings.get("new_tokens"):
        settings.pop("steps", None)  # a step per token is what it takes
    asked = Ask(template(prompt), passages, shots, placement, extra_masks, filler, attention)
    how = sampling(model.spec.family, preset, **settings)
    items, told = _items(model, chosen, asked, chat, how.new_tokens + extra_masks, settings.get("seed", 0))
    evaluation = Evaluation(
        model, Path(out), items, asked, chat, batch, trace, dict(source or {}), {"preset": preset, **settings}, told
    )
    check_run(out, evaluation.settings, evaluation.names, plan=evaluation.plan, resume=True)
    return evaluation


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """Ready to be iterated; again, and it goes on with what is missing."""

    model: Model
    path: Path
    items: list[Item]
    ask: Ask
    chat: bool | None
    batch: int | None
    trace: int
    source: dict[str, Any]
    arguments: dict[str, Any]
    told: list[str]

    def __repr__(self) -> str:
        return f"Evaluation({self.model.spec.name}: {self.finished} of {len(self.items)} samples, in {self.path})"

    def __iter__(self) -> Iterator[Answered]:
        by_name = {item.sample.id: item for item in self.items}
        began, fresh = time.monotonic(), 0
        with create_run(self.path, self.settings, self.names, plan=self.plan, resume=True) as run:
            assert run.plan is not None
            scores = [line["acc"] for line in _go_on(run)]
            for names in run.plan[_batches_in(run.plan, len(scores)) :]:
                lines = self._answer([by_name[name] for name in names])
                _append(self.path / PREDICTIONS, lines)
                fresh += len(lines)
                scores += [line["acc"] for line in lines]
                seconds = time.monotonic() - began
                left = seconds / fresh * (len(self.items) - len(scores))
                yield Answered(len(scores), len(self.items), _mean(scores), seconds, left)
            write_record(self.path, {**run.record, "status": "finished"})

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
        how = sampling(self.model.spec.family, **self.arguments)
        asked = [[item.sample.id, item.prompt.text, *item.sample.answers] for item in self.items]
        return {
            **self.model.facts,
            **how.as_json,
            **self.ask.as_json,
            "what": "evaluation",
            "template": "chat" if prompts.uses_template(self.model, self.chat) else None,
            "samples_sha256": hashlib.sha256(json.dumps(asked).encode()).hexdigest(),
            **self.source,
        }

    def traces(self) -> Tracing | None:
        """The first samples, watched, as a run inside this one; to be iterated."""
        if not self.trace:
            return None
        first = self.items[: self.trace]
        written = {item.sample.id: item.prompt for item in first}
        return trace_samples(
            self.model,
            [item.sample for item in first],
            self.path / TRACES,
            batch=self.batch,
            chat=self.chat,
            source={**self.ask.as_json, **self.source},
            write=lambda sample: written[sample.id],
            **self.arguments,
        )

    def _answer(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        with threads_for(self.model):
            decoding = self._decode(items)
            said = self._said(decoding, items)
            looks: list[dict[str, float] | None] = [None] * len(items)
            if self.ask.attention:
                told = zip(items, decoding.traces, decoding.generated, strict=True)
                looks = [_attention(trace, len(item.ids) + max(1, len(new))) for item, trace, new in told]
        return [_line(item, text, look) for item, text, look in zip(items, said, looks, strict=True)]

    def _decode(self, items: Sequence[Item]) -> Decoding:
        spec, new = self.model.spec, sampling(self.model.spec.family, **self.arguments).new_tokens
        suffix = 0 if spec.family == "arm" or self.model.text is None else len(self.model.text.suffix)
        names = [item.sample.id for item in items]
        if self.ask.filler:
            return self._beside_filler(items, names, new)
        watch = Watch(fields=("row_regions",)) if self.ask.attention else None
        arguments = dict(self.arguments)
        if self.ask.extra_masks:  # the answer is the first block; the others are never reached
            arguments |= {"block": new, "new_tokens": new * (1 + -(-self.ask.extra_masks // new)), "steps": None}
        return decode(
            self.model,
            [item.ids for item in items],
            watch=watch,
            samples=names,
            regions=regions_of(items, int(arguments.get("new_tokens", new)), suffix),
            **arguments,
        )

    def _beside_filler(self, items: Sequence[Item], names: list[str], new: int) -> Decoding:
        assert self.model.text is not None
        assert self.model.spec.mask_id is not None
        behind = self.model.text.encode(self.ask.filler, chat=False)
        ids = [[*item.ids, *[self.model.spec.mask_id] * new, *behind] for item in items]
        return decode(self.model, ids, samples=names, infill=True, **{**self.arguments, "new_tokens": 0})

    def _said(self, decoding: Decoding, items: Sequence[Item]) -> list[str]:
        """What stands in the answer, up to its end; of extra masks none is filled."""
        if not self.ask.extra_masks and not self.ask.filler:
            return decoding.texts
        assert self.model.text is not None
        new, ends = sampling(self.model.spec.family, **self.arguments).new_tokens, set(self.model.spec.stop_ids)
        last = list(islice(decoding, new))[-1].after  # the steps of the first block
        said = []
        for row, valid, item in zip(last.tokens, last.valid, items, strict=True):
            written = row[valid].tolist()[len(item.ids) : len(item.ids) + new]
            said.append(self.model.text.decode(written[: next((i for i, t in enumerate(written) if t in ends), new)]))
        return said


@dataclass(frozen=True)
class Results:
    """A folder of predictions, read."""

    path: Path
    run: Run
    table: pd.DataFrame  # a row per sample that is answered

    @property
    def settings(self) -> dict[str, Any]:
        return self.run.settings

    @property
    def missing(self) -> int:
        return len(self.run.samples) - len(self.table)


def open_evaluation(path: str | Path) -> Results:
    run = open_run(path)
    if run.settings.get("what") != "evaluation":
        raise UserError(f"{path} is a run of traces, not of scores; floatscope eval makes those")
    lines = read_predictions(Path(path))
    if not lines:
        raise UserError(f"{path} has no answer yet; the same floatscope eval goes on with it")
    flat = [{k: v for k, v in line.items() if k != "attention"} | line.get("attention", {}) for line in lines]
    table = pd.DataFrame(flat).rename(columns={"id": "sample"})
    return Results(Path(path), run, table)


def choose(sample: Sample, passages: Passages) -> Sample:
    """The sample with so many of its passages: its gold ones and the first of the others, in their order."""
    if passages == "all":
        return sample
    if passages == "gold":
        return replace(sample, passages=tuple(p for p in sample.passages if p.gold))
    if not isinstance(passages, int) or passages < 0:
        raise UserError(f"passages are a number, gold or all, got {passages!r}")
    gold = [i for i, p in enumerate(sample.passages) if p.gold][:passages]
    others = [i for i, p in enumerate(sample.passages) if not p.gold][: passages - len(gold)]
    return replace(sample, passages=tuple(sample.passages[i] for i in sorted([*gold, *others])))


def read_predictions(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole; what a killed writer left half done is not read."""
    file = path / PREDICTIONS
    if not file.exists():
        return []
    try:
        whole, _, _ = file.read_bytes().rpartition(b"\n")
        return [json.loads(line) for line in whole.splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}); delete it and evaluate again") from error


def _items(
    model: Model, samples: Sequence[Sample], asked: Ask, chat: bool | None, new: int, seed: int
) -> tuple[list[Item], list[str]]:
    """The questions as they will be asked, cut by whole passages where they are too long; and what was cut."""
    by_name = {sample.id: _shots_of(sample, samples, asked.shots, seed) for sample in samples}
    assert model.text is not None
    used = prompts.uses_template(model, chat)

    def write(sample: Sample, shots: Sequence[Sample]) -> Any:
        return asked.template.prompt(sample, shots, asked.placement)

    def length(sample: Sample, shots: Sequence[Sample]) -> int:
        assert model.text is not None
        return len(model.text.encode(write(sample, shots).text, chat=used))

    kept, cut = list(samples), 0
    behind = new + len(model.text.encode(asked.filler, chat=False) if asked.filler else ())
    behind += len(model.text.suffix) if model.spec.family == "mdm" else 0
    room = None if model.spec.context is None else model.spec.context - behind
    if room is not None:
        for at, sample in enumerate(samples):
            fitted = fit(sample, by_name[sample.id], room, length)
            kept[at], by_name[sample.id] = fitted.sample, list(fitted.shots)
            cut += fitted.sample != sample or len(fitted.shots) < asked.shots
    told = [f"{cut} of {len(samples)} prompts were longer than {room} tokens and lost passages or shots"] if cut else []
    return as_items(model, kept, chat, new, lambda sample: write(sample, by_name[sample.id])), told


def _shots_of(sample: Sample, samples: Sequence[Sample], count: int, seed: int) -> list[Sample]:
    others = [other for other in samples if other.id != sample.id and other.answers]
    drawn = random.Random(f"{seed} {sample.id}").sample(others, min(count, len(others)))
    shown: Passages = "gold" if sample.passages else 0
    return [choose(other, shown) for other in drawn]


def _line(item: Item, said: str, look: dict[str, float] | None) -> dict[str, Any]:
    sample = item.sample
    unanswerable = is_unanswerable(sample)
    right = float(abstains(said)) if unanswerable else acc(said, sample.answers)
    told: dict[str, Any] = {
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
    return told if look is None else {**told, "attention": look}


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


def _mean(scores: Sequence[float]) -> float:
    return float(np.mean(scores)) if scores else float("nan")
