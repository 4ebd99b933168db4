"""A stress test: an evaluation for each point on the same questions, a curve, a page."""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd
import pytest
from typer.testing import CliRunner

import floatscope as fs
from floatscope.analysis.evaluations import open_evaluation
from floatscope.analysis.stress_tests import position_gap, read_stress, stress_curve
from floatscope.cli.main import app
from floatscope.errors import UserError
from floatscope.pipelines.stress import plan_stress
from floatscope.reports.page import write_page
from floatscope.reports.stress_report import build_stress_report
from floatscope.tasks.index import Index
from floatscope.tasks.sample import Sample
from floatscope.tasks.sample_files import read_samples
from jobs import run_batches


@pytest.fixture(scope="module")
def arm():
    return fs.load("twin:arm", device="cpu")


def test_the_gold_passage_moves_and_nothing_else(arm, tmp_path):
    job = plan_stress(arm, read_samples("twin:reading-5", 2), tmp_path / "place", "position", new_tokens=4)
    met = [batch.part for batch in run_batches(job)]
    assert set(met) == {"gold-0", "gold-1", "gold-2", "gold-3", "gold-4", "closed-book", "oracle", "shuffled"}
    assert job.total == 2 * 8
    again = plan_stress(arm, read_samples("twin:reading-5", 2), tmp_path / "place", "position", new_tokens=4)
    assert run_batches(again) == []
    table = stress_curve([tmp_path / "place"]).set_index("name")
    for name in met:
        own = open_evaluation(tmp_path / "place" / name).table
        assert table.loc[name, "acc"] == own["acc"].mean()
        assert set(own["sample"]) == {sample.id for sample in read_samples("twin:reading-5", 2)}
    assert table.loc["gold-2", "acc"] > table.loc["closed-book", "acc"]
    own = open_evaluation(tmp_path / "place" / "gold-1").table
    lift = (own["gold_mass"] / own["gold_share"]).mean()
    assert table.loc["gold-1", "gold_lift"] == pytest.approx(lift)


def shortened(model, context):
    return replace(model, spec=replace(model.spec, context=context))


def test_a_sample_too_long_at_one_point_is_left_out_of_all(arm, tmp_path):
    samples = read_samples("twin:reading-5", 6)
    unbroken = plan_stress(arm, samples, tmp_path / "whole", "position", new_tokens=6)
    longest = {id: max(len(i.ids) for e in unbroken.parts for i in e.items if i.sample.id == id) for id in
               (sample.id for sample in samples)}  # fmt: skip
    room = min(longest.values())
    fit = {id for id, length in longest.items() if length <= room}
    assert 0 < len(fit) < 6
    job = plan_stress(shortened(arm, room + 6), samples, tmp_path / "few", "position", new_tokens=6)
    for own, other in zip(job.parts, unbroken.parts, strict=True):
        assert own.notes == []
        expected = [(i.sample.id, i.prompt.text) for i in other.items if i.sample.id in fit]
        assert [(i.sample.id, i.prompt.text) for i in own.items] == expected
    sentence = f"{6 - len(fit)} of 6 samples are longer at some point than the {room + 6} tokens twin:arm was trained"
    assert job.notes == [f"{sentence} for and are left out"]
    list(job)
    assert read_stress(tmp_path / "few")["notes"] == job.notes
    write_page(build_stress_report([tmp_path / "few"]), tmp_path / "page.html")
    assert sentence in (tmp_path / "page.html").read_text()
    with pytest.raises(UserError, match=r"every sample is longer at some point than the 60 tokens .* fewer documents"):
        plan_stress(shortened(arm, 60), samples, tmp_path / "none", "position", new_tokens=6)


def test_shots_of_the_remaining_samples_fit(arm, tmp_path):
    samples = read_samples("twin:reading-5", 6)
    job = plan_stress(shortened(arm, 196), samples, tmp_path / "s", "shots", options={"counts": (0, 1)}, new_tokens=6)
    assert job.notes
    names = {item.sample.id for evaluation in job.parts for item in evaluation.items}
    for evaluation in job.parts:
        assert evaluation.notes == []
        assert {item.sample.id for item in evaluation.items} == names


def test_samples_that_cannot_take_part_are_noted(arm, tmp_path):
    samples = [*read_samples("twin:reading-5", 2), Sample("bare", "Who?", ("Jon",))]
    job = plan_stress(arm, samples, tmp_path / "q", "query", options={"placements": "after"}, new_tokens=4)
    sentence = "1 of 3 samples cannot take part at every point and are left out"
    assert job.notes == [sentence]
    list(job)
    assert build_stress_report([tmp_path / "q"]).models[0].about == f"{sentence}."


def test_masks_after_the_answer_are_watched(tmp_path):
    mdm = fs.load("twin:mdm", device="cpu")
    options = {"counts": (0, 3)}
    list(plan_stress(mdm, read_samples("twin:reading-5", 2), tmp_path / "m", "masks", options=options, new_tokens=4))
    table = stress_curve([tmp_path / "m"])
    assert table["name"].tolist() == ["masks-0", "masks-3", "filler-0", "filler-3"]
    assert table["gold_lift"].notna().all()


def test_gaps_equal_a_hand_computation():
    rows = [("m", "s", value, acc) for value, acc in enumerate([0.9, 0.5, 0.7, 1.0])] + [("m", "s", None, 0.0)]
    table = pd.DataFrame(rows, columns=["model", "series", "value", "acc"])
    (row,) = position_gap(table).itertuples()
    assert (row.best, row.worst, row.gap) == (1.0, 0.5, 0.5)
    assert row.dip == pytest.approx(0.95 - 0.5)


def test_the_command_draws_models_together(tmp_path):
    data = tmp_path / "few.jsonl"
    data.write_text("".join(json.dumps(sample.as_json()) + "\n" for sample in read_samples("twin:reading-5", 3)))
    words = ["stress", "twin:arm", "twin:mdm", "--data", str(data), "--kind", "query", "--new-tokens", "6"]
    message = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out"), "--set", "placements=before,after"])
    assert message.exit_code == 0, message.output
    assert "twin:mdm" in message.output
    table = pd.read_csv(tmp_path / "out" / "curve.csv")
    assert table[["model", "name"]].to_numpy().tolist() == [
        [model, name] for model in ("twin:arm", "twin:mdm") for name in ("before", "after")
    ]
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000


@pytest.fixture
def data_file(tmp_path):
    data = tmp_path / "few.jsonl"
    bad = '{"answer": "Velmora"}\n'
    data.write_text("".join(json.dumps(sample.as_json()) + "\n" for sample in read_samples("twin:reading-5", 2)) + bad)
    return data


def run_command(data, *words):
    out = ["--data", str(data), "--out", str(data.parent / "out"), "--new-tokens", "4"]
    return CliRunner().invoke(app, ["stress", *words, *out])


def test_masks_are_refused_for_arms_before_anything_is_decoded(data_file):
    message = run_command(data_file, "twin:mdm", "twin:arm", "--kind", "masks", "--skip-bad")
    assert message.exit_code == 2
    assert "twin:arm is autoregressive: nothing can stand after its answer" in message.stderr
    assert not (data_file.parent / "out").exists()


def test_bad_lines_are_refused_or_skipped_with_a_note(data_file):
    words = "twin:arm", "--kind", "query", "--set", "placements=after"
    assert "line 3" in run_command(data_file, *words).stderr
    message = run_command(data_file, *words, "--skip-bad")
    assert message.exit_code == 0, message.output
    assert "1 line that cannot be read; the first is line 3: " in message.output


def test_distractors_come_from_an_index(data_file, tmp_path):
    questions = [sample.question for sample in read_samples("twin:reading-5", 2)]
    Index.create(tmp_path / "wiki").add([(f"p{i}", "", f"{questions[i]} Nobody knows, {i}.") for i in (0, 1)])
    words = "twin:arm", "--kind", "noise", "--set", "distractors=retrieved", "--set", "counts=1", "--skip-bad"
    assert "(--set retrieve=INDEX)" in run_command(data_file, *words).stderr
    assert "is not an index" in run_command(data_file, *words, "--set", f"retrieve={tmp_path / 'nowhere'}").stderr
    done = run_command(data_file, *words, "--set", "lengths=growing", "--set", f"retrieve={tmp_path / 'wiki'}")
    assert done.exit_code == 0, done.output
    assert open_evaluation(data_file.parent / "out" / "twin-arm" / "retrieved-1").table["passages"].tolist() == [2, 2]


def test_passages_come_from_an_index_and_the_recall_is_printed(data_file, tmp_path):
    first, second = read_samples("twin:reading-5", 2)
    gold = next(passage for passage in first.passages if passage.gold)
    other = [("p1", "", f"{second.question} Nobody knows."), ("p2", "", f"{first.question} Nobody knows.")]
    Index.create(tmp_path / "wiki").add([("p0", gold.title, gold.text), *other])
    words = "twin:arm", "--kind", "query", "--set", "placements=after", "--skip-bad"
    done = run_command(data_file, *words, "--retrieve", str(tmp_path / "wiki"), "-k", "2")
    assert done.exit_code == 0, done.output
    assert "0.500 of the gold passages are among the 2 retrieved" in done.output
    evaluation = open_evaluation(data_file.parent / "out" / "twin-arm" / "after")
    assert evaluation.table["passages"].tolist() == [2, 2]
    assert evaluation.settings["index_passages"] == 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["twin:arm", "twin:arm", "--kind", "query"], "give each model once"),
        (["twin:arm", "twin:none", "--kind", "query"], "unknown twin 'none'"),
        (["twin:arm", "--kind", "query", "--shift"], "shift"),
        (["twin:arm", "--kind", "needle", "--set", "counts=2", "--set", "counts=3"], "--set counts is given twice"),
        (["twin:arm", "--kind", "needle", "--set", "counts"], "--set takes NAME=VALUE"),
    ],
)
def test_models_that_do_not_fit_the_kind_are_refused_first(data_file, words, sentence):
    message = run_command(data_file, *words, "--skip-bad")
    assert message.exit_code == 2, message.output
    assert sentence in message.stderr
    assert not (data_file.parent / "out").exists()


def test_mistakes_are_one_sentence(arm, tmp_path):
    with pytest.raises(UserError, match="unknown"):
        plan_stress(arm, read_samples("twin:reading-5", 3), tmp_path / "x", "posittion")
    with pytest.raises(UserError, match="is not a stress test"):
        stress_curve([tmp_path])
    missing, out = str(tmp_path / "no.jsonl"), str(tmp_path / "o")
    wrong = CliRunner().invoke(app, ["stress", "twin:arm", "--data", missing, "--kind", "noise", "--out", out])
    assert wrong.exit_code == 2
