"""Runs that studies are made of: asked once, kept in a folder, and not asked again where that folder is finished.

asked(model, samples, Path("runs/nq-gold/arm"), passages="gold", new_tokens=16)
under(model, samples, Path("runs/position/arm"), "position", {"documents": 5}, new_tokens=16)
studied("sinks", model, samples, Path("runs/sinks/arm"), {"draws": 1}, {"new_tokens": 16})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import floatscope as fs
from floatscope.analysis.experiments import EXPERIMENT, read_experiment
from floatscope.analysis.stress_tests import STRESS, read_stress
from floatscope.analysis.studies import STUDIES
from floatscope.pipelines.evaluate import plan_evaluation
from floatscope.pipelines.intervene import plan_intervention
from floatscope.pipelines.stress import plan_stress
from floatscope.pipelines.studies import StudyInput, plan
from floatscope.tasks.sample import Sample
from floatscope.traces.record import RECORD, read_record


def asked(model: fs.Model, samples: Sequence[Sample], out: Path, **how: Any) -> Path:
    if not finished(out):
        for answered in plan_evaluation(model, samples, out, **how):
            print(out, answered.done, f"{100 * answered.acc:.1f}", flush=True)
    return out


def under(
    model: fs.Model, samples: Sequence[Sample], out: Path, kind: str, options: dict[str, Any], **how: Any
) -> Path:
    if not swept(out):
        for point, answered in plan_stress(model, samples, out, kind, options=options, **how):
            print(out, point.name, answered.done, f"{100 * answered.acc:.1f}", flush=True)
    return out


def studied(
    name: str,
    model: fs.Model,
    samples: Sequence[Sample],
    out: Path,
    options: Mapping[str, Any],
    how: Mapping[str, Any],
    as_they_are: bool = False,
) -> Path:
    """`as_they_are`: in none of the study's conditions but the samples' own."""
    if not tried(out):
        planned = plan(name, StudyInput(model, tuple(samples), out, 0, how), **options)
        study, conditions = STUDIES[name], {"": list(samples)} if as_they_are else planned.subsets
        for arm, answered in plan_intervention(
            model, conditions, out, planned.conditions, title=study.title, nll_only=study.nll_only, seed=0, **how
        ):
            print(out, arm.subset, arm.name, answered.done, flush=True)
    return out


def finished(folder: Path) -> bool:
    """Whether nothing is left to ask there, on whatever machine it was asked."""
    return (folder / RECORD).exists() and read_record(folder)["status"] == "finished"


def swept(out: Path) -> bool:
    """Whether all points of a sweep are finished."""
    return (out / STRESS).exists() and all(finished(out / point["asked"]) for point in read_stress(out)["points"])


def tried(out: Path) -> bool:
    """Whether all arms of a study are finished."""
    if not (out / EXPERIMENT).exists():
        return False
    return all(finished(out / arm["condition"] / arm["name"]) for arm in read_experiment(out)["arms"])


def machines(out: Path) -> str:
    """What the runs were made on, and in which type."""
    records = [read_record(path.parent) for path in sorted(out.rglob(RECORD))]
    made = [(on, each["settings"]["dtype"]) for each in records for on in (each["provenance"], *each["resumed"])]
    return " and ".join(dict.fromkeys(f"{on['device']} ({dtype}, torch {on['torch']})" for on, dtype in made))
