"""Runs that the studies are made of; a folder that is finished is not run again, and one that another process writes is
left to it, so that several processes can share the work.

evaluate_once(model, samples, Path("runs/nq-gold/arm"), passages="gold", new_tokens=16)
stress_once(model, samples, Path("runs/position/arm"), "position", {"documents": 5}, new_tokens=16)
study_once("sinks", model, samples, Path("runs/sinks/arm"), {"draws": 1}, {"new_tokens": 16})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import floatscope as fs
from floatscope.analysis.experiments import EXPERIMENT_FILE, read_experiment
from floatscope.analysis.stress_tests import STRESS_FILE, read_stress
from floatscope.analysis.studies import STUDIES
from floatscope.files.locks import LockedError
from floatscope.pipelines.evaluate import plan_evaluation
from floatscope.pipelines.intervene import plan_intervention
from floatscope.pipelines.job import BatchDone, Event, Job, Note, run_job
from floatscope.pipelines.stress import plan_stress
from floatscope.pipelines.studies import StudyInput, plan_study
from floatscope.tasks.sample import Sample
from floatscope.traces.run_record import FINISHED, RECORD_FILE, read_record


def evaluate_once(model: fs.Model, samples: Sequence[Sample], out: Path, **settings: Any) -> Path:
    """Answer the samples into `out`."""
    if not is_finished(out):
        run_unlocked(plan_evaluation(model, samples, out, **settings))
    return out


def stress_once(
    model: fs.Model, samples: Sequence[Sample], out: Path, kind: str, options: dict[str, Any], **settings: Any
) -> Path:
    """Run a stress sweep into `out`."""
    if not is_sweep_finished(out):
        run_unlocked(plan_stress(model, samples, out, kind, options=options, **settings))
    return out


def study_once(
    name: str,
    model: fs.Model,
    samples: Sequence[Sample],
    out: Path,
    options: Mapping[str, Any],
    settings: Mapping[str, Any],
    one_subset: bool = False,
) -> Path:
    """Run a named study into `out`; `one_subset` uses the samples as they are instead of the study's own subsets."""
    if not is_study_finished(out):
        planned = plan_study(name, StudyInput(model, tuple(samples), out, 0, settings), **options)
        study, subsets, conditions = STUDIES[name], planned.subsets, planned.conditions
        if one_subset:
            subsets, conditions = {"": list(samples)}, [replace(each, subset="") for each in conditions]
        job = plan_intervention(
            model, subsets, out, conditions, title=study.title, nll_only=study.nll_only, seed=0, **settings
        )
        run_unlocked(job)
    return out


def run_unlocked(job: Job) -> None:
    """Run the parts of a job that no other process is writing."""
    for part in job.parts:
        try:
            run_job(replace(job, parts=[part]), print_event)
        except LockedError as error:
            print(error, flush=True)


def print_event(event: Event) -> None:
    """Print what has been written, and notes."""
    if isinstance(event, BatchDone):
        acc = "" if event.acc is None else f", acc {100 * event.acc:.1f} %"
        print(f"{event.part} {event.done} of {event.total}{acc}", flush=True)
    elif isinstance(event, Note):
        print(event.text, flush=True)


def is_finished(folder: Path) -> bool:
    """Whether the run in `folder` is complete, on whatever machine it ran."""
    return (folder / RECORD_FILE).exists() and read_record(folder)["status"] == FINISHED


def is_sweep_finished(out: Path) -> bool:
    """Whether all points of a stress sweep are complete."""
    return (out / STRESS_FILE).exists() and all(
        is_finished(out / point["folder"]) for point in read_stress(out)["points"]
    )


def is_study_finished(out: Path) -> bool:
    """Whether all conditions of a study are complete."""
    if not (out / EXPERIMENT_FILE).exists():
        return False
    return all(is_finished(out / c["subset"] / c["name"]) for c in read_experiment(out)["conditions"])


def describe_machines(out: Path) -> str:
    """Return the devices, dtypes and torch versions of all runs under `out`."""
    records = [read_record(path.parent) for path in sorted(out.rglob(RECORD_FILE))]
    machines = [
        (machine, record["settings"]["dtype"])
        for record in records
        for machine in (record["provenance"], *record["resumed"])
    ]
    return " and ".join(dict.fromkeys(f"{m['device']} ({dtype}, torch {m['torch']})" for m, dtype in machines))
