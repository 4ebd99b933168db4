"""An evaluation asks every question once, scores it by the published rules, and loses nothing when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import floatscope as fs
from floatscope.analysis.evaluations import PREDICTIONS, open_evaluation, read_predictions
from floatscope.errors import UserError
from floatscope.lab.twins.heldout import read
from floatscope.pipelines.evaluate import plan_evaluation
from floatscope.pipelines.posing import choose
from floatscope.tasks.prompt import prompt_of
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.score import acc, em, f1

HOW = {"new_tokens": 6, "batch": 3}


@pytest.fixture(scope="module")
def mdm():
    return fs.load("twin:mdm", device="cpu")


@pytest.fixture(scope="module")
def arm():
    return fs.load("twin:arm", device="cpu")


def asked(model, out, samples=None, **settings):
    return list(plan_evaluation(model, samples or read("reading-5")[:7], out, **{**HOW, **settings}))


@pytest.mark.parametrize("family", ["arm", "mdm"])
def test_every_question_is_asked_and_scored(family, arm, mdm, tmp_path):
    model = {"arm": arm, "mdm": mdm}[family]
    samples = read("reading-5")[:7]
    told = asked(model, tmp_path / "e")
    assert [each.done for each in told] == [3, 6, 7]
    table = open_evaluation(tmp_path / "e").table.set_index("sample")
    for sample in samples:
        alone = fs.decode(model, prompt_of(sample).text, new_tokens=6, samples=[sample.id]).text
        row = table.loc[sample.id]
        assert row["prediction"] == alone
        assert (row["acc"], row["em"], row["f1"]) == tuple(rule(alone, sample.answers) for rule in (acc, em, f1))
    assert told[-1].acc == table["acc"].mean()
    assert table["acc"].mean() > 0.5  # they can read


def test_passages_are_chosen_with_gold_among_them():
    passages = tuple(Passage("", f"text {i}", gold=i == 3) for i in range(5))
    sample = Sample("x", "What?", ("y",), passages)
    shown = {n: [p.text[-1] for p in choose(sample, n).passages] for n in (0, 1, 2, 5, 9, "gold", "all")}
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
        choose(sample, "some")


def test_without_passages_nobody_can_know(mdm, tmp_path):
    asked(mdm, tmp_path / "closed", passages=0)
    table = open_evaluation(tmp_path / "closed").table
    assert (table["passages"] == 0).all()
    assert table["acc"].mean() < 0.5


def test_shots_are_other_samples_with_their_answers(mdm, tmp_path):
    samples = read("reading-1")[:5]
    made = plan_evaluation(mdm, samples, tmp_path / "shots", shots=2, **HOW)
    for item in made.items:
        shown = [other for other in samples if other.question in item.prompt.text and other.id != item.sample.id]
        assert len(shown) == 2
        assert all(other.answers[0] in item.prompt.text for other in shown)
        assert item.prompt.text.endswith(prompt_of(item.sample).text.rpartition("Question:")[2])
    again = plan_evaluation(mdm, samples, tmp_path / "again", shots=2, **HOW)
    assert [item.prompt for item in made.items] == [item.prompt for item in again.items]
    with pytest.raises(UserError, match="5 shots need as many other samples"):
        plan_evaluation(mdm, samples, tmp_path / "many", shots=5, **HOW)


def test_what_is_too_long_loses_whole_passages_and_it_is_said(mdm, tmp_path):
    short = replace(mdm, spec=replace(mdm.spec, context=100))
    made = plan_evaluation(short, read("reading-5")[:4], tmp_path / "cut", **HOW)
    assert "lost passages or shots" in made.notes[0]
    for item, sample in zip(made.items, read("reading-5"), strict=False):
        assert len(item.ids) + 6 <= 100
        assert sample.question in item.prompt.text
        assert 0 < len(item.sample.passages) < 5
        assert set(item.sample.passages) <= set(sample.passages)
    tiny = replace(mdm, spec=replace(mdm.spec, context=12))
    with pytest.raises(UserError, match="reading-5-0"):
        plan_evaluation(tiny, read("reading-5")[:1], tmp_path / "none", **HOW)


def test_without_a_tokenizer_nothing_can_be_asked(mdm, tmp_path):
    with pytest.raises(UserError, match="has no tokenizer, so it cannot be asked in words"):
        plan_evaluation(replace(mdm, text=None), read("reading-5")[:2], tmp_path / "e", **HOW)


def test_shots_are_drawn_from_those_that_have_an_answer(mdm, tmp_path):
    samples = [*(replace(sample, answers=()) for sample in read("unanswerable")[:3]), *read("reading-1")[:2]]
    made = plan_evaluation(mdm, samples, tmp_path / "one", shots=1, **HOW)
    assert made.notes == []  # nothing was too long
    with pytest.raises(UserError, match="2 shots need as many other samples with an answer, and there are 1 beside"):
        plan_evaluation(mdm, samples, tmp_path / "two", shots=2, **HOW)


def test_attention_is_that_of_the_deciding_rows(mdm, tmp_path):
    """Against the trace of the same decoding: rows up to the end of the answer, mean over layers and heads."""
    samples = read("reading-5")[:2]
    asked(mdm, tmp_path / "e", samples, attention=True, trace=2, batch=2)
    made = plan_evaluation(mdm, samples, tmp_path / "e", attention=True, trace=2, **{**HOW, "batch": 2})
    list(made.traces())
    table = open_evaluation(tmp_path / "e").table.set_index("sample")
    for trace in fs.open_run(tmp_path / "e" / "traces"):
        start = len(trace.arrays["tokens_after"]) - 6
        written = trace.arrays["tokens_after"][start:].tolist()
        said = next(i for i, token in enumerate(written) if token in mdm.spec.stop_ids)
        assert mdm.text.decode(written[:said]) == table.loc[trace.sample, "prediction"]
        rows = trace.arrays["row_regions"][trace.arrays["commit_position"] < start + said].astype(float)
        names = trace.coords["region"]
        gold = rows[..., names.index("gold")].mean()
        others = sum(rows[..., names.index(f"document {i}")].mean() for i in range(1, 6)) - gold
        assert table.loc[trace.sample, "gold_mass"] == pytest.approx(gold, rel=1e-3)
        assert table.loc[trace.sample, "other_mass"] == pytest.approx(others, rel=1e-3)


def test_extra_masks_stay_and_filler_stands_behind(mdm, tmp_path):
    samples = read("reading-1")[:3]
    plain = asked(mdm, tmp_path / "plain", samples)
    for name, extra in {"masks": {"extra_masks": 12}, "filler": {"filler": " ." * 12}}.items():
        told = asked(mdm, tmp_path / name, samples, **extra)
        assert told[-1].acc == pytest.approx(plain[-1].acc, abs=0.7)
        for line in read_predictions(tmp_path / name):
            assert "." * 3 not in line["prediction"]


@pytest.mark.parametrize("extra", [1, 6, 8])
def test_there_are_as_many_extra_masks_as_were_asked_for(extra, mdm, tmp_path):
    made = plan_evaluation(mdm, read("reading-1")[:2], tmp_path / "e", extra_masks=extra, **HOW)
    decoding = made._decode(made.items)
    longest = max(len(item.ids) for item in made.items)
    for step in decoding:
        assert step.after.tokens.shape[1] == longest + 6 + extra
        assert (step.after.masked[:, -extra:]).all()
    assert len(decoding.steps) == 6
    assert not decoding.steps[-1].after.masked[:, :-extra].any()


def test_nothing_stands_behind_an_autoregressive_answer(arm, tmp_path):
    with pytest.raises(UserError, match="writes from left to right"):
        plan_evaluation(arm, read("reading-1")[:2], tmp_path / "e", extra_masks=4, **HOW)


def test_abstaining_is_right_where_there_is_no_answer(mdm, tmp_path):
    asked(mdm, tmp_path / "e", [*read("unanswerable")[:3], *read("reading-5")[:3]])
    table = open_evaluation(tmp_path / "e").table
    assert table["unanswerable"].tolist().count(True) == 3
    for row in table.itertuples():
        assert row.acc == (row.abstained if row.unanswerable else row.acc)


KILLED = """
import sys, time
import floatscope as fs
from floatscope.pipelines import evaluate as evaluating
from floatscope.lab.twins.heldout import read
append = evaluating._append
def slow(file, lines):
    append(file, lines)
    with file.open("ab") as half: half.write(b'{"id": "half')  # what a kill in the middle of a write leaves
    print("written", flush=True)
    time.sleep(60)
evaluating._append = slow
list(evaluating.evaluate(fs.load("twin:mdm", device="cpu"), read("reading-5")[:7], sys.argv[1], new_tokens=6, batch=3))
"""


def test_a_killed_evaluation_goes_on_to_the_same_bytes(mdm, tmp_path):
    asked(mdm, tmp_path / "whole")
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "killed")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"written\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(read_predictions(tmp_path / "killed")) == 3
    assert [each.done for each in asked(mdm, tmp_path / "killed")] == [6, 7]
    whole, killed = ((tmp_path / name / PREDICTIONS).read_bytes() for name in ("whole", "killed"))
    assert whole == killed
    assert asked(mdm, tmp_path / "killed") == []


def test_other_settings_are_refused(mdm, tmp_path):
    asked(mdm, tmp_path / "e")
    with pytest.raises(UserError, match="cannot be resumed with other settings"):
        plan_evaluation(mdm, read("reading-5")[:7], tmp_path / "e", passages=0, **HOW)


def test_a_folder_of_traces_is_no_evaluation(mdm, tmp_path):
    list(fs.plan_trace(mdm, ["What floats?"], tmp_path / "t", new_tokens=4))
    with pytest.raises(UserError, match="a run of traces, not of scores"):
        open_evaluation(tmp_path / "t")
    with pytest.raises(UserError, match="t holds a run of traces, and this would be another kind of run"):
        asked(mdm, tmp_path / "t")


def test_a_batch_holds_a_sample_or_more(mdm, tmp_path):
    with pytest.raises(UserError, match="a batch must hold at least 1 sample, got 0"):
        asked(mdm, tmp_path / "e", batch=0)


def test_a_damaged_file_is_named(mdm, tmp_path):
    asked(mdm, tmp_path / "e")
    file: Path = tmp_path / "e" / PREDICTIONS
    file.write_bytes(b"no json\n" + file.read_bytes())
    with pytest.raises(UserError, match=r"predictions\.jsonl is damaged"):
        open_evaluation(tmp_path / "e")


def test_a_line_says_what_it_was_asked_with(mdm, tmp_path):
    began = time.time()
    asked(mdm, tmp_path / "e", prompt="instruct")
    record = json.loads((tmp_path / "e" / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["settings"]["prompt"] == "instruct"
    assert record["settings"]["passages"] == "all"
    assert (tmp_path / "e" / PREDICTIONS).stat().st_mtime >= began - 1
