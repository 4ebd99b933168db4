"""`intervene`: the same questions with the attention as it is, edited, and edited elsewhere as a control.

    table = intervene(["twin:arm", "twin:mdm"], samples, "runs/mask", "mask_anchors(k=5)", new_tokens=8)

    conditions = [Condition("baseline"), *build_conditions("mask_anchors(k=5)", draws=3)]
    job = plan_intervention(model, samples, "runs/mask/mdm", conditions, new_tokens=8)     # one model, step by step
    for event in job: print(event)         # the events of `job`; each condition is a part
    effects([Path("runs/mask/mdm")])       # a row per model, subset and condition, with intervals

    runs/mask/mdm/experiment.json          the conditions, the model, the title
    runs/mask/mdm/edited/                  an evaluation per condition, in the folder of its subset if it has one
    runs/mask/effects.csv, report.html     the results of all models

Samples may come in subsets, `{"early": […], "late": […]}`. A condition runs on its own subset, or on all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from floatscope.analysis.experiments import EXPERIMENT_FILE, effects
from floatscope.errors import UserError
from floatscope.files.atomic import explain_write_errors
from floatscope.files.records import write_record
from floatscope.interventions.checks import count_layers_and_heads
from floatscope.interventions.conditions import BASELINE, BOTH, Condition, build_conditions
from floatscope.interventions.edits import Edit
from floatscope.models.loader import load
from floatscope.models.model import Model
from floatscope.pipelines.evaluate import plan_part
from floatscope.pipelines.evaluation_part import EvaluationPart
from floatscope.pipelines.folders import model_folders
from floatscope.pipelines.job import Event, Job, run_job
from floatscope.reports.intervention_report import build_intervention_report
from floatscope.reports.page import write_page
from floatscope.tasks.sample import Sample


def intervene(
    models: Model | str | Sequence[Model | str],
    samples: Sequence[Sample],
    out: str | Path,
    edits: str | Edit | Sequence[str | Edit],
    *,
    control: str | None = BOTH,
    draws: int = 3,
    on_event: Callable[[Event], None] | None = None,
    **settings: Any,
) -> pd.DataFrame:
    """Answer questions at baseline, under edits and under their controls, and write the effects and the report.

    Args:
        models: Models from `fs.load`, or their names, which are loaded one after the other.
        samples: The questions.
        out: The folder, with a subfolder per model. An interrupted experiment resumes.
        edits: Recipes such as `"mask_anchors(k=5)"`, or `Edit`s; several apply together.
        control: The same edit on other keys or heads: `mass` (random keys that hold as much attention), `random` (as
            many random keys), `middle`, `both` (mass and random) or None.
        draws: How many controls of each kind to run.
        on_event: Called with each event of the jobs (`floatscope.pipelines.job`).
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
        run_job(plan_intervention(model, samples, path, conditions, title=_title(edits), **settings), on_event)
    return write_effects(paths, Path(out))


def plan_conditions(
    model: Model, edits: str | Edit | Sequence[str | Edit], control: str | None = BOTH, draws: int = 3
) -> list[Condition]:
    """The baseline, the edited condition and its controls, for the number of heads this model has."""
    _, heads = count_layers_and_heads(model)
    return [Condition(BASELINE), *build_conditions(edits, control, draws, heads)]


def write_effects(paths: Sequence[Path], out: Path) -> pd.DataFrame:
    """Write `effects.csv` and `report.html` of finished experiments into `out`, and return the effects."""
    table = effects(paths)
    with explain_write_errors("the table", out / "effects.csv"):
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
) -> Job:
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
    parts: list[EvaluationPart] = []
    notes: list[str] = []
    for subset, members in subsets.items():
        own = _conditions_of_subset(subset, conditions, subsets)
        folder = path / subset if subset else path
        first = plan_part(
            model,
            members,
            folder / own[0].name,
            measure=not nll_only,
            nll_only=nll_only,
            edits=own[0].edits,
            **settings,
        )
        notes += first.notes
        parts += [_condition_part(first, folder, condition) for condition in own]
        all_conditions += own
    for part in parts:
        part.check()
    records = [_condition_record(condition) for condition in all_conditions]
    record = {"model": model.spec.name, "title": title, "notes": notes, "conditions": records}
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_record(path / EXPERIMENT_FILE, record)
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}") from error
    return Job(path, parts, notes)


def _condition_part(first: EvaluationPart, folder: Path, condition: Condition) -> EvaluationPart:
    """The part of a job that answers the samples of `first` under a condition."""
    edits = " and ".join(dict.fromkeys(map(str, condition.edits)))
    return replace(
        first,
        path=folder / condition.name,
        edits=condition.edits,
        label=f"{condition.subset} {condition.name}".strip(),
        edit_label=f"{condition.control_of}, {condition.control} control" if condition.control_of else edits,
    )


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
        "control": condition.control,
        "subset": condition.subset,
        "value": condition.value,
        "series": condition.series,
    }
