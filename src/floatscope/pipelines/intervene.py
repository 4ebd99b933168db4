"""`experiment`: the same questions asked as they are, under edits and under the controls of those edits.

    arms = [Arm("baseline"), *arms_of("mask_anchors(k=5)", control="random", draws=3)]
    made = experiment(model, samples, "runs/mask/mdm", arms, new_tokens=8)
    for arm, answered in made: print(arm.name, answered.done, answered.acc)
    effects([Path("runs/mask/mdm")])       # a row per model, condition and arm, with intervals

    runs/mask/mdm/experiment.json          the arms, the model, the title
    runs/mask/mdm/edited/                  an evaluation for each arm, in the folder of its condition if it has one

Samples may be of several conditions, `{"early": […], "late": […]}`: an arm is asked on those of its own, or on all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from floatscope.analysis.experiments import EXPERIMENT
from floatscope.errors import UserError
from floatscope.files.atomic import write_atomic
from floatscope.interventions.arm import Condition
from floatscope.models.model import Model
from floatscope.pipelines.evaluate import BatchAnswered, EvaluationJob, plan_evaluation
from floatscope.tasks.sample import Sample


@dataclass(frozen=True, eq=False)
class InterventionJob:
    """Ready to be iterated, arm by arm; again, and it goes on with what is missing."""

    path: Path
    conditions: list[Condition]  # of every condition
    evaluations: list[EvaluationJob]  # of each arm
    notes: list[str]  # what was cut to fit, in sentences

    def __iter__(self) -> Iterator[tuple[Condition, BatchAnswered]]:
        for arm, evaluation in zip(self.conditions, self.evaluations, strict=True):
            if evaluation.finished < len(evaluation.items):
                for answered in evaluation:
                    yield arm, answered

    @property
    def total(self) -> int:
        return sum(len(each.items) for each in self.evaluations)

    @property
    def finished(self) -> int:
        return sum(each.finished for each in self.evaluations)


def plan_intervention(
    model: Model,
    samples: Sequence[Sample] | Mapping[str, Sequence[Sample]],
    out: str | Path,
    arms: Sequence[Condition],
    *,
    title: str = "",
    nll_only: bool = False,
    **settings: Any,
) -> InterventionJob:
    """Everything is checked here. `settings` are those of `evaluate`; the first arm is the baseline, without edits.

    With `nll_only` nothing is decoded freely: of each sample the likelihood of its answer is all that is asked for.
    """
    if not isinstance(model, Model):
        raise UserError(f"experiment needs a floatscope Model (fs.load), got {type(model).__name__}")
    path, conditions = Path(out), dict(samples) if isinstance(samples, Mapping) else {"": samples}
    asked: list[Condition] = []
    made: list[EvaluationJob] = []
    for condition, some in conditions.items():
        own = _arms_on(condition, arms, conditions)
        folder = path / condition if condition else path
        first = plan_evaluation(
            model, some, folder / own[0].name, measure=not nll_only, nll_only=nll_only, edits=own[0].edits, **settings
        )
        others = [replace(first, path=folder / arm.name, edits=arm.edits, notes=[]) for arm in own[1:]]
        for each in others:
            each.check()
        asked += own
        made += [first, *others]
    told = [sentence for each in made for sentence in each.notes]
    record = {"model": model.spec.name, "title": title, "told": told, "arms": [_told(arm) for arm in asked]}
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_atomic(path / EXPERIMENT, [json.dumps(record, indent=1).encode()])
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}") from error
    return InterventionJob(path, asked, made, told)


def _arms_on(condition: str, arms: Sequence[Condition], conditions: Mapping[str, Sequence[Sample]]) -> list[Condition]:
    """The arms that are asked on the samples of a condition, the baseline first."""
    if lost := [arm for arm in arms if arm.subset not in ("", *conditions)]:
        raise UserError(
            f"arm '{lost[0].name}' is asked on '{lost[0].subset}', and there are no such samples; give some, as in"
            f" {{'{lost[0].subset}': samples}}"
        )
    own = [replace(arm, subset=condition) for arm in arms if arm.subset in ("", condition)]
    names = [arm.name for arm in own]
    if not own or own[0].edits:
        raise UserError("the first arm of an experiment is its baseline, Arm('baseline'), which has no edits")
    for name in [*names, *([condition] if condition else [])]:
        if not re.fullmatch(r"[\w.,=+ -]*[\w=+-]", name):
            raise UserError(f"'{name}' cannot be the name of a folder; use letters, digits, dots and dashes")
        if names.count(name) > 1:
            raise UserError(f"two arms are called '{name}'; give each a name of its own")
    for arm in own:
        if arm.control_of and arm.control_of not in names:
            raise UserError(f"arm '{arm.name}' is a control of '{arm.control_of}', and there is no such arm")
    return own


def _told(arm: Condition) -> dict[str, Any]:
    return {
        "name": arm.name,
        "edits": list(dict.fromkeys(map(str, arm.edits))),  # a recipe may be several edits
        "control_of": arm.control_of,
        "condition": arm.subset,
        "value": arm.value,
        "series": arm.series,
    }
