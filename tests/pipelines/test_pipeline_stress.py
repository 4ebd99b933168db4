"""A stress test: an evaluation for each point on the same questions, a curve, a page."""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd
import pytest
from typer.testing import CliRunner

import floatscope as fs
from floatscope.analysis.evaluations import open_evaluation
from floatscope.analysis.stress_tests import curve, gap, read_stress
from floatscope.cli.main import app
from floatscope.errors import UserError
from floatscope.lab.twins.heldout import read
from floatscope.pipelines.stress import plan_stress
from floatscope.reports.page import write_page
from floatscope.reports.stressed import stressed
from floatscope.tasks.index import Index
from floatscope.tasks.sample import Sample


@pytest.fixture(scope="module")
def arm():
    return fs.load("twin:arm", device="cpu")


def test_the_gold_passage_moves_and_nothing_else(arm, tmp_path):
    made = plan_stress(arm, read("reading-5")[:4], tmp_path / "place", "position", new_tokens=6)
    met = [point.name for point, _ in made]
    assert set(met) == {"gold-0", "gold-1", "gold-2", "gold-3", "gold-4", "closed-book", "oracle", "shuffled"}
    assert made.finished == made.total == 4 * 8
    assert list(plan_stress(arm, read("reading-5")[:4], tmp_path / "place", "position", new_tokens=6)) == []
    table = curve([tmp_path / "place"]).set_index("name")
    for name in met:
        own = open_evaluation(tmp_path / "place" / name).table
        assert table.loc[name, "acc"] == own["acc"].mean()
        assert set(own["sample"]) == {sample.id for sample in read("reading-5")[:4]}
    assert table.loc["gold-2", "acc"] > table.loc["closed-book", "acc"]
    own = open_evaluation(tmp_path / "place" / "gold-1").table
    lift = (own["gold_mass"] / own["gold_share"]).mean()
    assert table.loc["gold-1", "gold_lift"] == pytest.approx(lift)


def shortened(model, context):
    return replace(model, spec=replace(model.spec, context=context))


def test_who_is_too_long_at_one_point_is_in_none(arm, tmp_path):
    samples = read("reading-5")[:6]
    whole = plan_stress(arm, samples, tmp_path / "whole", "position", new_tokens=6)
    longest = {id: max(len(i.ids) for e in whole.evaluations for i in e.items if i.sample.id == id) for id in
               (sample.id for sample in samples)}  # fmt: skip
    room = sorted(longest.values())[2]
    fit = {id for id, length in longest.items() if length <= room}
    assert 0 < len(fit) < 6
    made = plan_stress(shortened(arm, room + 6), samples, tmp_path / "few", "position", new_tokens=6)
    for own, other in zip(made.evaluations, whole.evaluations, strict=True):
        assert own.notes == []
        asked = [(i.sample.id, i.prompt.text) for i in other.items if i.sample.id in fit]
        assert [(i.sample.id, i.prompt.text) for i in own.items] == asked
    sentence = f"{6 - len(fit)} of 6 samples are longer at some point than the {room + 6} tokens twin:arm was trained"
    assert made.notes == [f"{sentence} for, so they are in none"]
    list(made)
    assert read_stress(tmp_path / "few")["told"] == made.notes
    write_page(stressed([tmp_path / "few"]), tmp_path / "page.html")
    assert sentence in (tmp_path / "page.html").read_text()
    with pytest.raises(UserError, match=r"every sample is longer at some point than the 60 tokens .* fewer documents"):
        plan_stress(shortened(arm, 60), samples, tmp_path / "none", "position", new_tokens=6)


def test_shots_of_those_that_are_left_fit(arm, tmp_path):
    samples = read("reading-5")[:6]
    made = plan_stress(shortened(arm, 196), samples, tmp_path / "s", "shots", options={"counts": (0, 1)}, new_tokens=6)
    assert made.notes
    names = {item.sample.id for evaluation in made.evaluations for item in evaluation.items}
    for evaluation in made.evaluations:
        assert evaluation.notes == []
        assert {item.sample.id for item in evaluation.items} == names


def test_who_cannot_take_part_is_counted_and_told(arm, tmp_path):
    samples = [*read("reading-5")[:2], Sample("bare", "Who?", ("Jon",))]
    made = plan_stress(arm, samples, tmp_path / "q", "query", options={"placements": "after"}, new_tokens=4)
    sentence = "1 of 3 samples cannot take part in every point, so they are in none"
    assert made.notes == [sentence]
    list(made)
    assert stressed([tmp_path / "q"]).models[0].about == f"{sentence}."


def test_masks_behind_the_answer_are_watched_too(tmp_path):
    mdm = fs.load("twin:mdm", device="cpu")
    options = {"counts": (0, 3)}
    list(plan_stress(mdm, read("reading-5")[:2], tmp_path / "m", "masks", options=options, new_tokens=4))
    table = curve([tmp_path / "m"])
    assert table["name"].tolist() == ["masks-0", "masks-3", "filler-0", "filler-3"]
    assert table["gold_lift"].notna().all()


def test_gaps_by_hand():
    rows = [("m", "s", value, acc) for value, acc in enumerate([0.9, 0.5, 0.7, 1.0])] + [("m", "s", None, 0.0)]
    table = pd.DataFrame(rows, columns=["model", "series", "value", "acc"])
    (row,) = gap(table).itertuples()
    assert (row.best, row.worst, row.gap) == (1.0, 0.5, 0.5)
    assert row.dip == pytest.approx(0.95 - 0.5)


def test_the_command_draws_models_together(tmp_path):
    data = tmp_path / "few.jsonl"
    data.write_text("".join(json.dumps(sample.as_json()) + "\n" for sample in read("reading-5")[:3]))
    words = ["stress", "twin:arm", "twin:mdm", "--data", str(data), "--kind", "query", "--new-tokens", "6"]
    said = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out"), "--set", "placements=before,after"])
    assert said.exit_code == 0, said.output
    assert "twin:mdm" in said.output
    table = pd.read_csv(tmp_path / "out" / "curve.csv")
    assert table[["model", "name"]].to_numpy().tolist() == [
        [model, name] for model in ("twin:arm", "twin:mdm") for name in ("before", "after")
    ]
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000


@pytest.fixture
def few(tmp_path):
    data = tmp_path / "few.jsonl"
    bad = '{"answer": "Velmora"}\n'
    data.write_text("".join(json.dumps(sample.as_json()) + "\n" for sample in read("reading-5")[:2]) + bad)
    return data


def ask(data, *words):
    out = ["--data", str(data), "--out", str(data.parent / "out"), "--new-tokens", "4"]
    return CliRunner().invoke(app, ["stress", *words, *out])


def test_masks_are_refused_before_anybody_is_asked(few):
    said = ask(few, "twin:mdm", "twin:arm", "--kind", "masks", "--skip-bad")
    assert said.exit_code == 2
    assert "twin:arm writes from left to right: nothing can stand behind its answer" in said.stderr
    assert not (few.parent / "out").exists()


def test_bad_lines_are_refused_or_left_out_and_told(few):
    words = "twin:arm", "--kind", "query", "--set", "placements=after"
    assert "line 3" in ask(few, *words).stderr
    said = ask(few, *words, "--skip-bad")
    assert said.exit_code == 0, said.output
    assert "1 line that cannot be read; the first is line 3: " in said.output


def test_distractors_come_from_an_index(few, tmp_path):
    asked = [sample.question for sample in read("reading-5")[:2]]
    Index.create(tmp_path / "wiki").add([(f"p{i}", "", f"{asked[i]} Nobody knows, {i}.") for i in (0, 1)])
    words = "twin:arm", "--kind", "noise", "--set", "distractors=retrieved", "--set", "counts=1", "--skip-bad"
    assert "(--set retrieve=INDEX)" in ask(few, *words).stderr
    assert "is no index" in ask(few, *words, "--set", f"retrieve={tmp_path / 'nowhere'}").stderr
    done = ask(few, *words, "--set", "lengths=growing", "--set", f"retrieve={tmp_path / 'wiki'}")
    assert done.exit_code == 0, done.output
    assert open_evaluation(few.parent / "out" / "twin-arm" / "retrieved-1").table["passages"].tolist() == [2, 2]


def test_passages_come_from_an_index_and_the_recall_is_told(few, tmp_path):
    first, second = read("reading-5")[:2]
    gold = next(passage for passage in first.passages if passage.gold)
    other = [("p1", "", f"{second.question} Nobody knows."), ("p2", "", f"{first.question} Nobody knows.")]
    Index.create(tmp_path / "wiki").add([("p0", gold.title, gold.text), *other])
    words = "twin:arm", "--kind", "query", "--set", "placements=after", "--skip-bad"
    done = ask(few, *words, "--retrieve", str(tmp_path / "wiki"), "-k", "2")
    assert done.exit_code == 0, done.output
    assert "0.500 of the gold passages are among the 2 retrieved" in done.output
    asked = open_evaluation(few.parent / "out" / "twin-arm" / "after")
    assert asked.table["passages"].tolist() == [2, 2]
    assert asked.settings["index_passages"] == 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["twin:arm", "twin:arm", "--kind", "query"], "give each model once"),
        (["twin:arm", "twin:none", "--kind", "query"], "unknown twin 'none'"),
        (["twin:arm", "--kind", "query", "--shift"], "shift"),
        (["twin:arm", "--kind", "needle", "--set", "counts=2", "--set", "counts=3"], "--set counts is given twice"),
        (["twin:arm", "--kind", "needle", "--set", "counts"], "--set takes name=value"),
    ],
)
def test_models_that_cannot_be_asked_are_refused_first(few, words, sentence):
    said = ask(few, *words, "--skip-bad")
    assert said.exit_code == 2, said.output
    assert sentence in said.stderr
    assert not (few.parent / "out").exists()


def test_mistakes_are_one_sentence(arm, tmp_path):
    with pytest.raises(UserError, match="unknown"):
        plan_stress(arm, read("reading-5")[:3], tmp_path / "x", "posittion")
    with pytest.raises(UserError, match="holds no stress test"):
        curve([tmp_path])
    missing, out = str(tmp_path / "no.jsonl"), str(tmp_path / "o")
    wrong = CliRunner().invoke(app, ["stress", "twin:arm", "--data", missing, "--kind", "noise", "--out", out])
    assert wrong.exit_code == 2
