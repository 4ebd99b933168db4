"""Jobs: events, a status that is always true, one count of what is done, notes as values."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache

import pytest

import floatscope as fs
from floatscope.interventions.conditions import Condition, build_conditions
from floatscope.interventions.notes import EditNote, Problem, merge_notes
from floatscope.pipelines import prediction_part
from floatscope.pipelines.evaluate import plan_evaluation
from floatscope.pipelines.intervene import plan_intervention
from floatscope.pipelines.job import BatchDone, Finished, Note, Started
from floatscope.pipelines.stress import plan_stress
from floatscope.pipelines.trace import plan_trace
from floatscope.tasks.sample_files import read_samples
from floatscope.traces.run_record import FINISHED, UNFINISHED, read_record, write_record
from jobs import read_notes, run_batches

SAMPLES = read_samples("twin:reading-1", 3)
HOW = {"new_tokens": 4, "batch_size": 2}
CONDITIONS = [Condition("baseline"), *build_conditions("mask_anchors(k=1)", "random", draws=1)]


@pytest.fixture(scope="module")
def arm():
    return fs.load("twin:arm", device="cpu")


def plan(verb: str, model: fs.Model, out):
    if verb == "trace":
        return plan_trace(model, SAMPLES, out, controls=(0,), **HOW)
    if verb == "evaluate":
        return plan_evaluation(model, SAMPLES, out, trace_samples=1, **HOW)
    if verb == "stress":
        return plan_stress(model, read_samples("twin:reading-5", 3), out, "query", **HOW)
    return plan_intervention(model, SAMPLES, out, CONDITIONS, nll_only=True, **HOW)


@pytest.fixture(scope="module")
def finished(arm, tmp_path_factory):
    """Run the job of a verb, once for all tests; return it, its folder and its events."""

    @cache
    def run(verb: str):
        folder = tmp_path_factory.mktemp(verb) / "run"
        job = plan(verb, arm, folder)
        return job, folder, list(job)

    return run


PARTS = {"trace": 2, "evaluate": 2, "stress": 4, "intervene": 3}


@pytest.mark.parametrize("verb", PARTS)
def test_every_job_says_the_same_things(verb, arm, finished):
    job, folder, events = finished(verb)
    assert events[0] == Started(0, job.total)
    assert isinstance(events[-1], Finished)
    assert len({event.part for event in events if isinstance(event, BatchDone)}) == PARTS[verb] == len(job.parts)
    assert [event.done for event in events if isinstance(event, BatchDone)][-1] == job.done == job.total
    assert all(json.loads(json.dumps(event.as_json))["event"] == event.kind for event in events)
    assert all(read_record(part.path)["status"] == FINISHED and part.is_finished for part in job.parts)
    again = list(plan(verb, arm, folder))
    assert again[0] == Started(job.total, job.total)
    assert [type(event) for event in again if not isinstance(event, Note)] == [Started, Finished]


@pytest.mark.parametrize("verb", PARTS)
def test_a_job_killed_before_its_last_status_ends_as_finished(verb, arm, finished, tmp_path):
    shutil.copytree(finished(verb)[1], tmp_path / "run")
    job = plan(verb, arm, tmp_path / "run")
    for part in job.parts:
        write_record(part.path, {**read_record(part.path), "status": UNFINISHED})
        (part.path / "run.json.part").write_text("{")  # what a kill while run.json is written leaves
        assert not part.is_finished
    assert run_batches(job) == []
    assert all(part.is_finished for part in job.parts)


def test_progress_reads_the_finished_files_once(arm, tmp_path, monkeypatch):
    reads = []
    monkeypatch.setattr(prediction_part, "read_predictions", lambda path: reads.append(path) or [])
    job = plan_evaluation(arm, SAMPLES, tmp_path / "run", new_tokens=4, batch_size=1)
    counts = [len(reads) for event in job if isinstance(event, BatchDone)]
    assert len(counts) == 3
    assert len(set(counts)) == 1


def test_notes_of_draws_and_batches_are_added_up():
    empty = EditNote("mask", Problem.NO_KEYS, 3, 40)
    short = EditNote("mask", Problem.TOO_LITTLE_ATTENTION, 1, 8)
    late = EditNote("mask", Problem.NEVER_ACTIVE, 4, 4)
    merged = merge_notes([empty, short, late, replace(empty, count=1), short, late])
    assert [str(note) for note in merged] == [
        "mask selected no keys in 4 of 80 steps",
        "all other keys hold less attention than the edited keys in 12 % of heads and steps: mask",
        "mask was never active: there were only 4 steps",
    ]


def test_notes_come_before_the_work_and_edits_report_after_it(arm, tmp_path):
    short = replace(arm, spec=replace(arm.spec, context=60))
    job = plan_intervention(short, read_samples("twin:reading-5", 2), tmp_path / "run", CONDITIONS[:2], **HOW)
    events = list(job)
    assert read_notes(events[:2]) == ["2 of 2 prompts exceeded 56 tokens and lost passages or shots"]
    never = [Condition("baseline"), *build_conditions("mask_anchors(k=1, steps=[9])", None)]
    for _ in range(2):  # the second job has nothing left to do
        events = list(plan_intervention(arm, SAMPLES, tmp_path / "late", never, nll_only=True, **HOW))
        assert read_notes(events[-2:]) == ["mask_anchors(k=1, steps=[9]) was never active: there were only 4 steps"]


@pytest.mark.parametrize("steps", [4, 3])
def test_steps_of_an_autoregressive_model_mean_the_same_everywhere(arm, tmp_path, steps):
    verbs = (
        lambda: fs.decode(arm, "Where?", new_tokens=4, steps=steps),
        lambda: plan_trace(arm, SAMPLES, tmp_path / "trace", new_tokens=4, steps=steps),
        lambda: plan_evaluation(arm, SAMPLES, tmp_path / "eval", new_tokens=4, steps=steps),
    )
    for verb in verbs:
        if steps == 4:  # one step per token, as an ARM takes anyway
            verb()
        else:
            with pytest.raises(fs.UserError, match="steps does not apply to 'ar'"):
                verb()
