"""`intervene`: the same questions with the attention as it is, edited, and edited elsewhere as a control.

    table = intervene(["twin:arm", "twin:mdm"], samples, "runs/mask", "mask_anchors(k=5)", new_tokens=8)

    conditions = [Condition("baseline"), *build_conditions("mask_anchors(k=5)", control="random", draws=3)]
    job = plan_intervention(model, samples, "runs/mask/mdm", conditions, new_tokens=8)     # one model, step by step
    for condition, event in job: print(condition.name, event.done, event.acc)
    effects([Path("runs/mask/mdm")])       # a row per model, subset and condition, with intervals

    runs/mask/mdm/experiment.json          the conditions, the model, the title
    runs/mask/mdm/edited/                  an evaluation per condition, in the folder of its subset if it has one
    runs/mask/effects.csv, report.html     the results of all models

Samples may come in subsets, `{"early": […], "late": […]}`. A condition runs on its own subset, or on all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from floatscope.analysis.experiments import EXPERIMENT_FILE, effects
from floatscope.errors import UserError
from floatscope.files.atomic import write_atomic
from floatscope.interventions.checks import count_layers_and_heads
from floatscope.interventions.conditions import BASELINE, Condition, build_conditions
from floatscope.interventions.edits import Edit
from floatscope.models.loader import load
from floatscope.models.model import Model
from floatscope.pipelines.evaluate import BatchAnswered, EvaluationJob, plan_evaluation
from floatscope.pipelines.folders import model_folders
from floatscope.reports.intervention_report import build_intervention_report
from floatscope.reports.page import write_page
from floatscope.tasks.sample import Sample


def intervene(
    models: Model | str | Sequence[Model | str],
    samples: Sequence[Sample],
    out: str | Path,
    edits: str | Edit | Sequence[str | Edit],
    *,
    control: str | None = "random",
    draws: int = 3,
    on_progress: Callable[[Condition, BatchAnswered], None] | None = None,
    **settings: Any,
) -> pd.DataFrame:
    """Answer questions at baseline, under edits and under their controls, and write the effects and the report.

    Args:
        models: Models from `fs.load`, or their names, which are loaded one after the other.
        samples: The questions.
        out: The folder, with a subfolder per model. An interrupted experiment resumes.
        edits: Recipes such as `"mask_anchors(k=5)"`, or `Edit`s; several apply together.
        control: The same edit on other keys or heads: `random`, `middle` or None.
        draws: How many random controls to run.
        on_progress: Called after each batch.
        **settings: The settings of `plan_evaluation`.

    Returns:
        A row per model and condition, as `floatscope.analysis.experiments.effects` defines it.

    Example:
        samples = fs.read_samples("twin:reading-1", limit=2)
        table = fs.intervene("twin:arm", samples, "runs/mask", "mask_anchors(k=1)", draws=1, new_tokens=4)
        table[["condition", "acc", "acc_effect"]]
    """
    listed = [models] if isinstance(models, Model | str) else list(models)
    paths = model_folders(listed, Path(out))
    for entry, path in zip(listed, paths, strict=True):
        model = load(entry) if isinstance(entry, str) else entry
        conditions = plan_conditions(model, edits, control, draws)
        for condition, event in plan_intervention(model, samples, path, conditions, title=_title(edits), **settings):
            if on_progress is not None:
                on_progress(condition, event)
    return write_effects(paths, Path(out))


def plan_conditions(
    model: Model, edits: str | Edit | Sequence[str | Edit], control: str | None = "random", draws: int = 3
) -> list[Condition]:
    """The baseline, the edited condition and its controls, for the number of heads this model has."""
    _, heads = count_layers_and_heads(model)
    return [Condition(BASELINE), *build_conditions(edits, control, draws, heads)]


def write_effects(paths: Sequence[Path], out: Path) -> pd.DataFrame:
    """Write `effects.csv` and `report.html` of finished experiments into `out`, and return the effects."""
    table = effects(paths)
    table.to_csv(out / "effects.csv", index=False)
    write_page(build_intervention_report(paths), out / "report.html")
    return table


def plan_intervention(
    model: Model,
    samples: Sequence[Sample] | Mapping[str, Sequence[Sample]],
    out: str | Path,
    conditions: Sequence[Condition],
    *,
    title: str = "",
    nll_only: bool = False,
    **settings: Any,
) -> InterventionJob:
    """Check everything and return a job; iterating the job answers the questions under every condition.

    Args:
        model: A model from `fs.load`.
        samples: The questions, or several subsets of them by name.
        out: The folder of this model.
        conditions: The first is the baseline, which has no edits.
        title: The title of the report.
        nll_only: Compute the likelihood of each sample's answer and decode nothing freely.
        **settings: The settings of `plan_evaluation`.
    """
    if not isinstance(model, Model):
        raise UserError(f"intervene needs a floatscope Model (fs.load), got {type(model).__name__}")
    path, subsets = Path(out), dict(samples) if isinstance(samples, Mapping) else {"": samples}
    all_conditions: list[Condition] = []
    evaluations: list[EvaluationJob] = []
    for subset, members in subsets.items():
        own = _conditions_of_subset(subset, conditions, subsets)
        folder = path / subset if subset else path
        first = plan_evaluation(
            model,
            members,
            folder / own[0].name,
            measure=not nll_only,
            nll_only=nll_only,
            edits=own[0].edits,
            **settings,
        )
        others = [replace(first, path=folder / each.name, edits=each.edits, notes=[]) for each in own[1:]]
        for job in others:
            job.check()
        all_conditions += own
        evaluations += [first, *others]
    notes = [note for job in evaluations for note in job.notes]
    records = [_condition_record(condition) for condition in all_conditions]
    record = {"model": model.spec.name, "title": title, "notes": notes, "conditions": records}
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_atomic(path / EXPERIMENT_FILE, [json.dumps(record, indent=1).encode()])
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}") from error
    return InterventionJob(path, all_conditions, evaluations, notes)


@dataclass(frozen=True, eq=False)
class InterventionJob:
    """A checked plan of one model. Iterating it answers what is missing; iterating it again resumes."""

    path: Path
    conditions: list[Condition]  # of every subset
    evaluations: list[EvaluationJob]  # one per condition
    notes: list[str]  # what was cut to fit the context

    def __iter__(self) -> Iterator[tuple[Condition, BatchAnswered]]:
        for condition, evaluation in zip(self.conditions, self.evaluations, strict=True):
            if evaluation.finished < len(evaluation.items):
                for event in evaluation:
                    yield condition, event

    @property
    def total(self) -> int:
        """The number of answers over all conditions."""
        return sum(len(each.items) for each in self.evaluations)

    @property
    def finished(self) -> int:
        """The number of answers that are on disk now."""
        return sum(each.finished for each in self.evaluations)


def _title(edits: str | Edit | Sequence[str | Edit]) -> str:
    return str(edits) if isinstance(edits, str | Edit) else " and ".join(map(str, edits))


def _conditions_of_subset(
    subset: str, conditions: Sequence[Condition], subsets: Mapping[str, Sequence[Sample]]
) -> list[Condition]:
    """The conditions that run on a subset, the baseline first."""
    if lost := [condition for condition in conditions if condition.subset not in ("", *subsets)]:
        raise UserError(
            f"condition '{lost[0].name}' runs on the subset '{lost[0].subset}', which has no samples; give some, as in"
            f" {{'{lost[0].subset}': samples}}"
        )
    own = [replace(condition, subset=subset) for condition in conditions if condition.subset in ("", subset)]
    names = [condition.name for condition in own]
    if not own or own[0].edits:
        raise UserError(
            "the first condition of an experiment must be its baseline, Condition('baseline'), without edits"
        )
    for name in [*names, *([subset] if subset else [])]:
        if not re.fullmatch(r"[\w.,=+ -]*[\w=+-]", name):
            raise UserError(f"'{name}' cannot be the name of a folder; use letters, digits, dots and dashes")
        if names.count(name) > 1:
            raise UserError(f"two conditions are named '{name}'; give each its own name")
    for condition in own:
        if condition.control_of and condition.control_of not in names:
            raise UserError(
                f"condition '{condition.name}' is a control of '{condition.control_of}', which does not exist; add it,"
                " or leave control_of out"
            )
    return own


def _condition_record(condition: Condition) -> dict[str, Any]:
    return {
        "name": condition.name,
        "edits": list(dict.fromkeys(map(str, condition.edits))),  # a recipe may consist of several edits
        "control_of": condition.control_of,
        "subset": condition.subset,
        "value": condition.value,
        "series": condition.series,
    }
