"""An evaluation asks every question once, scores it by the published rules, and loses nothing when it is killed."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import floatscope as fs
from floatscope.analysis.evaluations import PREDICTIONS_FILE, open_evaluation, read_predictions
from floatscope.errors import UserError
from floatscope.pipelines.evaluate import plan_evaluation, plan_part
from floatscope.pipelines.prompting import choose_passages
from floatscope.pipelines.trace import plan_trace
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.sample_files import read_samples
from floatscope.tasks.scores import acc, em, f1
from floatscope.tasks.template import load_template
from floatscope.traces.run_record import read_record, write_record
from jobs import run_batches

HOW = {"new_tokens": 6, "batch_size": 3}


@pytest.fixture(scope="module")
def mdm():
    return fs.load("twin:mdm", device="cpu")


@pytest.fixture(scope="module")
def arm():
    return fs.load("twin:arm", device="cpu")


def run_evaluation(model, out, samples=None, **settings):
    return run_batches(plan_evaluation(model, samples or read_samples("twin:reading-5", 7), out, **{**HOW, **settings}))


@pytest.fixture(scope="module")
def evaluated(mdm, tmp_path_factory) -> Path:
    """The folder of a finished evaluation of seven questions; tests change a copy of it."""
    folder = tmp_path_factory.mktemp("evaluated") / "e"
    run_evaluation(mdm, folder)
    return folder


@pytest.mark.parametrize("family", ["arm", "mdm"])
def test_every_question_is_answered_and_scored(family, arm, mdm, tmp_path):
    model = {"arm": arm, "mdm": mdm}[family]
    samples = read_samples("twin:reading-5", 7)
    lines = run_evaluation(model, tmp_path / "e")
    assert [each.done for each in lines] == [3, 6, 7]
    table = open_evaluation(tmp_path / "e").table.set_index("sample")
    for sample in samples:
        alone = fs.decode(model, load_template().prompt(sample).text, new_tokens=6, samples=[sample.id]).text
        row = table.loc[sample.id]
        assert row["prediction"] == alone
        assert (row["acc"], row["em"], row["f1"]) == tuple(rule(alone, sample.answers) for rule in (acc, em, f1))
    assert lines[-1].acc == table["acc"].mean()
    assert table["acc"].mean() > 0.5  # they can read


def test_passages_are_chosen_with_gold_among_them():
    passages = tuple(Passage("", f"text {i}", gold=i == 3) for i in range(5))
    sample = Sample("x", "What?", ("y",), passages)
    shown = {n: [p.text[-1] for p in choose_passages(sample, n).passages] for n in (0, 1, 2, 5, 9, "gold", "all")}
    assert shown == {
        0: [],
        1: ["3"],
        2: ["0", "3"],
        5: list("01234"),
        9: list("01234"),
        "gold": ["3"],
        "all": list("01234"),
    }
    with pytest.raises(UserError, match="a number, gold or all"):
        choose_passages(sample, "some")


def test_without_passages_fresh_facts_are_not_answered(mdm, tmp_path):
    run_evaluation(mdm, tmp_path / "closed", passages=0)
    table = open_evaluation(tmp_path / "closed").table
    assert (table["passages"] == 0).all()
    assert table["acc"].mean() < 0.5


def test_shots_are_other_samples_with_their_answers(mdm, tmp_path):
    samples = read_samples("twin:reading-1", 5)
    job = plan_evaluation(mdm, samples, tmp_path / "shots", shots=2, **HOW)
    for item in job.parts[0].items:
        shown = [other for other in samples if other.question in item.prompt.text and other.id != item.sample.id]
        assert len(shown) == 2
        assert all(other.answers[0] in item.prompt.text for other in shown)
        assert item.prompt.text.endswith(load_template().prompt(item.sample).text.rpartition("Question:")[2])
    again = plan_evaluation(mdm, samples, tmp_path / "again", shots=2, **HOW)
    assert [item.prompt for item in job.parts[0].items] == [item.prompt for item in again.parts[0].items]
    with pytest.raises(UserError, match="5 shots need 5 other samples"):
        plan_evaluation(mdm, samples, tmp_path / "many", shots=5, **HOW)


def test_a_long_prompt_loses_whole_passages_with_a_note(mdm, tmp_path):
    short = replace(mdm, spec=replace(mdm.spec, context=100))
    job = plan_evaluation(short, read_samples("twin:reading-5", 4), tmp_path / "cut", **HOW)
    assert "lost passages or shots" in job.notes[0]
    for item, sample in zip(job.parts[0].items, read_samples("twin:reading-5", 4), strict=True):
        assert len(item.ids) + 6 <= 100
        assert sample.question in item.prompt.text
        assert 0 < len(item.sample.passages) < 5
        assert set(item.sample.passages) <= set(sample.passages)
    tiny = replace(mdm, spec=replace(mdm.spec, context=12))
    with pytest.raises(UserError, match="reading-5-0"):
        plan_evaluation(tiny, read_samples("twin:reading-5", 1), tmp_path / "none", **HOW)


def test_evaluation_needs_a_tokenizer(mdm, tmp_path):
    with pytest.raises(UserError, match="has no tokenizer, so it cannot read text"):
        plan_evaluation(replace(mdm, tokenizer=None), read_samples("twin:reading-5", 2), tmp_path / "e", **HOW)


def test_shots_are_drawn_from_samples_with_an_answer(mdm, tmp_path):
    samples = [
        *(replace(sample, answers=()) for sample in read_samples("twin:unanswerable", 3)),
        *read_samples("twin:reading-1", 2),
    ]
    job = plan_evaluation(mdm, samples, tmp_path / "one", shots=1, **HOW)
    assert job.notes == []  # nothing was too long
    with pytest.raises(UserError, match="2 shots need 2 other samples with an answer, and there are 1 besides"):
        plan_evaluation(mdm, samples, tmp_path / "two", shots=2, **HOW)


def test_attention_is_that_of_the_predicting_rows(mdm, tmp_path):
    """Against the trace of the same decoding: rows up to the end of the answer, mean over layers and heads."""
    samples = read_samples("twin:reading-5", 2)
    run_evaluation(mdm, tmp_path / "e", samples, attention=True, trace_samples=2, batch_size=2)
    table = open_evaluation(tmp_path / "e").table.set_index("sample")
    for trace in fs.open_run(tmp_path / "e" / "traces"):
        start = len(trace.arrays["tokens_after"]) - 6
        written = trace.arrays["tokens_after"][start:].tolist()
        message = next(i for i, token in enumerate(written) if token in mdm.spec.stop_ids)
        assert mdm.tokenizer.decode(written[:message]) == table.loc[trace.sample, "prediction"]
        rows = trace.arrays["row_regions"][trace.arrays["commit_position"] < start + message].astype(float)
        names = trace.coords["region"]
        gold = rows[..., names.index("gold")].mean()
        others = sum(rows[..., names.index(f"document {i}")].mean() for i in range(1, 6)) - gold
        assert table.loc[trace.sample, "gold_mass"] == pytest.approx(gold, rel=1e-3)
        assert table.loc[trace.sample, "other_mass"] == pytest.approx(others, rel=1e-3)


def test_extra_masks_stay_masked_and_filler_follows_the_answer(mdm, tmp_path):
    samples = read_samples("twin:reading-1", 3)
    plain = run_evaluation(mdm, tmp_path / "plain", samples)
    for name, extra in {"masks": {"extra_masks": 12}, "filler": {"filler": " ." * 12}}.items():
        lines = run_evaluation(mdm, tmp_path / name, samples, **extra)
        assert lines[-1].acc == pytest.approx(plain[-1].acc, abs=0.7)
        for line in read_predictions(tmp_path / name):
            assert "." * 3 not in line["prediction"]


@pytest.mark.parametrize("extra", [1, 6, 8])
def test_the_number_of_extra_masks_is_exact(extra, mdm, tmp_path):
    part = plan_part(mdm, read_samples("twin:reading-1", 2), tmp_path / "e", extra_masks=extra, **HOW)
    decoding = part._decode(part.items)
    longest = max(len(item.ids) for item in part.items)
    for step in decoding:
        assert step.after.tokens.shape[1] == longest + 6 + extra
        assert (step.after.masked[:, -extra:]).all()
    assert len(decoding.steps) == 6
    assert not decoding.steps[-1].after.masked[:, :-extra].any()


def test_an_arm_takes_no_suffix(arm, tmp_path):
    with pytest.raises(UserError, match="is autoregressive: nothing can stand after its answer"):
        plan_evaluation(arm, read_samples("twin:reading-1", 2), tmp_path / "e", extra_masks=4, **HOW)


def test_abstaining_is_correct_where_there_is_no_answer(mdm, tmp_path):
    run_evaluation(mdm, tmp_path / "e", [*read_samples("twin:unanswerable", 3), *read_samples("twin:reading-5", 3)])
    table = open_evaluation(tmp_path / "e").table
    assert table["unanswerable"].tolist().count(True) == 3
    for row in table.itertuples():
        assert row.acc == (row.abstained if row.unanswerable else row.acc)


KILLED = """
import sys, time
import floatscope as fs
from floatscope.pipelines import evaluate, prediction_part
from floatscope.tasks.sample_files import read_samples
append = prediction_part._append
def slow(file, lines):
    append(file, lines)
    with file.open("ab") as half: half.write(b'{"id": "half')  # what a kill in the middle of a write leaves
    print("written", flush=True)
    time.sleep(60)
prediction_part._append = slow
samples = read_samples("twin:reading-5", 7)
evaluate.evaluate(fs.load("twin:mdm", device="cpu"), samples, sys.argv[1], new_tokens=6, batch_size=3)
"""


@pytest.mark.slow
def test_a_killed_evaluation_resumes_to_the_same_bytes(mdm, tmp_path):
    run_evaluation(mdm, tmp_path / "whole")
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "killed")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"written\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(read_predictions(tmp_path / "killed")) == 3
    assert [each.done for each in run_evaluation(mdm, tmp_path / "killed")] == [6, 7]
    unbroken, killed = ((tmp_path / name / PREDICTIONS_FILE).read_bytes() for name in ("whole", "killed"))
    assert unbroken == killed
    assert run_evaluation(mdm, tmp_path / "killed") == []


def test_other_settings_are_refused(mdm, evaluated):
    with pytest.raises(UserError, match="cannot be resumed with other settings"):
        plan_evaluation(mdm, read_samples("twin:reading-5", 7), evaluated, passages=0, **HOW)


def test_a_folder_of_traces_is_refused_as_an_evaluation(mdm, tmp_path):
    list(plan_trace(mdm, ["What floats?"], tmp_path / "t", new_tokens=4))
    with pytest.raises(UserError, match="a run of traces, not of scores"):
        open_evaluation(tmp_path / "t")
    with pytest.raises(UserError, match="t holds a run of traces, but the new run is of another kind"):
        run_evaluation(mdm, tmp_path / "t")


def test_a_batch_size_is_at_least_one(mdm, tmp_path):
    with pytest.raises(UserError, match="a batch must hold at least 1 sample, got 0"):
        run_evaluation(mdm, tmp_path / "e", batch_size=0)


def test_a_disk_that_is_full_at_any_write_loses_nothing(mdm, tmp_path, monkeypatch):
    """The disk takes n writes and no more; then there is room again."""
    samples, fsync, writes = read_samples("twin:reading-1", 3), os.fsync, []

    def fsync_or_fail(descriptor):
        writes.append(descriptor)
        if len(writes) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    def evaluate(name):
        run_evaluation(mdm, tmp_path / name, samples, new_tokens=1, batch_size=2)

    evaluate("unbroken")
    monkeypatch.setattr(os, "fsync", fsync_or_fail)
    for room in range(99):
        writes.clear()
        try:
            evaluate(f"full-{room}")
        except UserError as error:
            message = str(error)
        else:
            break
        assert re.search(r"^cannot (write|create) .*No space left on device", message)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            evaluate(f"full-{room}")
        assert (tmp_path / f"full-{room}/predictions.jsonl").read_bytes() == (
            tmp_path / "unbroken/predictions.jsonl"
        ).read_bytes()
        assert read_record(tmp_path / f"full-{room}")["status"] == "finished"
    assert 5 < room < 20


def test_a_damaged_file_is_named(evaluated, tmp_path):
    shutil.copytree(evaluated, tmp_path / "e")
    file: Path = tmp_path / "e" / PREDICTIONS_FILE
    file.write_bytes(b"no json\n" + file.read_bytes())
    with pytest.raises(UserError, match=r"predictions\.jsonl is damaged"):
        open_evaluation(tmp_path / "e")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [*lines, lines[0]], "line 8 is a second one of"),
        (lambda lines: [lines[0].replace(b'"acc"', b'"axx"'), *lines[1:]], "line 1: its contents do not match"),
        (lambda lines: [lines[0].replace(b'"id": "', b'"id": "x'), *lines[1:]], "line 1: its contents do not match"),
        (lambda lines: [b"[]", *lines[1:]], "line 1: Expected 'object', got 'array'"),
        (lambda lines: lines[:-1], "has 6 of 7 answers, although all were written"),
    ],
)
def test_changed_predictions_are_refused(evaluated, tmp_path, damage, message):
    shutil.copytree(evaluated, tmp_path / "e")
    file: Path = tmp_path / "e" / PREDICTIONS_FILE
    file.write_bytes(b"".join(line + b"\n" for line in damage(file.read_bytes().splitlines())))
    with pytest.raises(UserError, match=message):
        open_evaluation(tmp_path / "e")


def test_predictions_of_another_run_are_refused(mdm, evaluated, tmp_path):
    shutil.copytree(evaluated, tmp_path / "e")
    run_evaluation(mdm, tmp_path / "other", read_samples("twin:reading-5", 9)[7:])
    shutil.copy(tmp_path / "other" / PREDICTIONS_FILE, tmp_path / "e" / PREDICTIONS_FILE)
    write_record(tmp_path / "e", read_record(tmp_path / "e") | {"status": "unfinished"})
    with pytest.raises(UserError, match="is not a sample of the run"):
        open_evaluation(tmp_path / "e")
    with pytest.raises(UserError, match="has other samples than the run, or another order; restore it"):
        run_evaluation(mdm, tmp_path / "e")
    assert (tmp_path / "e" / PREDICTIONS_FILE).read_bytes() == (tmp_path / "other" / PREDICTIONS_FILE).read_bytes()


def test_a_line_records_passages_and_tokens(mdm, tmp_path):
    began = time.time()
    run_evaluation(mdm, tmp_path / "e", template="instruct")
    record = json.loads((tmp_path / "e" / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["settings"]["template"] == "instruct"
    assert record["settings"]["passages"] == "all"
    assert (tmp_path / "e" / PREDICTIONS_FILE).stat().st_mtime >= began - 1
