"""`stress`: the same questions under changing conditions, scored, with the attention on gold and other passages beside.

stressed = stress(model, samples, "runs/position/mdm", "position", new_tokens=8)
for point, answered in stressed: print(point.name, answered.done, answered.acc)
curve([Path("runs/position/mdm")])            # a row per model and point, with intervals
stressed.told                                 # who is left out of all points, in sentences

runs/position/mdm/gold-0/     an evaluation for each point
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from floatscope.analysis.stress_tests import STRESS
from floatscope.errors import UserError
from floatscope.files.atomic import write_atomic
from floatscope.models.model import Model, ModelSpec
from floatscope.pipelines.evaluate import BatchAnswered, EvaluationJob, plan_evaluation
from floatscope.pipelines.posing import PromptConfig, too_long
from floatscope.sampling.settings import resolve_sampling
from floatscope.tasks.sample import Sample
from floatscope.tasks.stress import Point, points
from floatscope.tasks.template import template


@dataclass(frozen=True, eq=False)
class StressJob:
    """Ready to be iterated, point by point; again, and it goes on with what is missing."""

    path: Path
    points: list[Point]
    evaluations: list[EvaluationJob]
    notes: list[str]  # who is left out, in sentences

    def __iter__(self) -> Iterator[tuple[Point, BatchAnswered]]:
        asked = (point for point in self.points if not point.same_as)
        for point, evaluation in zip(asked, self.evaluations, strict=True):
            if evaluation.finished < len(evaluation.items):
                for answered in evaluation:
                    yield point, answered

    @property
    def total(self) -> int:
        return sum(len(each.items) for each in self.evaluations)

    @property
    def finished(self) -> int:
        return sum(each.finished for each in self.evaluations)


def check_kind(kind: str, spec: ModelSpec) -> None:
    """Refuse a sweep of which a model has no point but the first."""
    if kind == "masks" and spec.paradigm == "arm":
        raise UserError(
            f"{spec.name} writes from left to right: nothing can stand behind its answer, masks has nothing to sweep"
            " over; leave it out, or choose another kind"
        )


def plan_stress(
    model: Model,
    samples: Sequence[Sample],
    out: str | Path,
    kind: str,
    *,
    seed: int = 0,
    options: dict[str, Any] | None = None,
    prompt: str | Path = "default",
    chat: bool | None = None,
    **settings: Any,
) -> StressJob:
    """Everything is checked here. `options` are those of the kind, `settings` those of `evaluate`.

    Nothing is cut to fit: a sample that is too long for the model at any point is in none, and that is told.
    """
    if not isinstance(model, Model):
        raise UserError(f"stress needs a floatscope Model (fs.load), got {type(model).__name__}")
    check_kind(kind, model.spec)
    able, path = points(kind, samples, seed=seed, **(options or {})), Path(out)
    new = resolve_sampling(
        model.spec.paradigm, settings.get("preset"), new_tokens=settings.get("new_tokens")
    ).new_tokens
    made = _whole(model, able, prompt, chat, new, seed)
    evaluations = [
        plan_evaluation(
            model,
            point.samples,
            path / point.name,
            placement=point.placement,
            shots=point.shots,
            extra_masks=point.extra_masks,
            filler=point.filler,
            attention=True,
            prompt=prompt,
            chat=chat,
            seed=seed,
            **settings,
        )
        for point in made
        if not point.same_as
    ]
    told = _left_out(model.spec, len(samples), able[0], made[0])
    record = {"kind": kind, "model": model.spec.name, "told": told, "points": [_told(point) for point in made]}
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_atomic(path / STRESS, [json.dumps(record, indent=1).encode()])
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}") from error
    return StressJob(path, made, evaluations, told)


def _whole(model: Model, made: list[Point], prompt: str | Path, chat: bool | None, new: int, seed: int) -> list[Point]:
    """The points with the samples whose prompts fit at all of them; who is left out can be a shot of nobody."""
    asked = template(prompt)
    while made[0].samples:
        long: set[str] = set()
        for p in (point for point in made if not point.same_as):
            ask = PromptConfig(asked, "all", p.shots, p.placement, p.extra_masks, p.filler)
            long |= too_long(model, p.samples, ask, chat, new, seed)
        if not long:
            return made
        made = [replace(p, samples=tuple(s for s in p.samples if s.id not in long)) for p in made]
    raise UserError(
        f"every sample is longer at some point than the {model.spec.context} tokens {model.spec.name} was trained for:"
        " give fewer documents or smaller counts, shorter passages, or ask for fewer new tokens"
    )


def _left_out(spec: ModelSpec, count: int, able: Point, asked: Point) -> list[str]:
    long, told = len(able.samples) - len(asked.samples), []
    if able.left_out:
        told.append(f"{able.left_out} of {count} samples cannot take part in every point, so they are in none")
    if long:
        told.append(
            f"{long} of {count} samples are longer at some point than the {spec.context} tokens {spec.name} was trained"
            " for, so they are in none"
        )
    return told


def _told(point: Point) -> dict[str, Any]:
    return {
        "name": point.name,
        "value": point.value,
        "series": point.series,
        "note": point.note,
        "asked": point.same_as or point.name,
    }
