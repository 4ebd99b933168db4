"""An experiment: an evaluation for each arm on the same questions, effects paired by question, a page."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import floatscope as fs
from floatscope.analysis.evaluations import PREDICTIONS, open_evaluation
from floatscope.analysis.experiments import EXPERIMENT, VALUES, effects, read_experiment
from floatscope.analysis.floating import floating_index, tops
from floatscope.analysis.look import TraceView
from floatscope.cli.main import app
from floatscope.errors import UserError
from floatscope.interventions.arm import Condition, build_conditions
from floatscope.interventions.recipes import RECIPES
from floatscope.lab.twins.heldout import read
from floatscope.pipelines.evaluate import plan_evaluation
from floatscope.pipelines.intervene import plan_intervention
from floatscope.reports.intervened import intervened
from floatscope.reports.page import write_page
from floatscope.tasks.prompt import prompt_of
from floatscope.tasks.sample import Sample

HOW = {"new_tokens": 4, "batch": 3}
FEW = read("reading-1")[:4]
MASKED = [
    Condition("baseline"),
    *build_conditions("mask_anchors(k=2)", draws=2),
    *build_conditions("spread(steps=[999])", None, name="never"),
]


@pytest.fixture(scope="module")
def models():
    return {family: fs.load(f"twin:{family}", device="cpu") for family in ("arm", "mdm")}


@pytest.fixture(scope="module", params=["arm", "mdm"])
def made(request, models, tmp_path_factory):
    """The model and the folder of an experiment that was not broken off."""
    path = tmp_path_factory.mktemp(request.param) / "whole"
    list(plan_intervention(models[request.param], FEW, path, MASKED, **HOW))
    return models[request.param], path


def lines(path, arm):
    return [json.loads(line) for line in (path / arm / PREDICTIONS).read_text().splitlines()]


def test_what_is_broken_off_and_resumed_has_the_bytes_of_what_was_not(made, tmp_path):
    model, whole = made
    for at, _ in enumerate(plan_intervention(model, FEW, tmp_path / "cut", MASKED, **HOW)):
        if at == 2:
            break  # between the batches of the second arm
    file = tmp_path / "cut" / "edited" / PREDICTIONS
    assert len(lines(tmp_path / "cut", "edited")) == 3
    file.write_bytes(file.read_bytes() + b'{"id": "reading')  # and killed while it wrote
    again = plan_intervention(model, FEW, tmp_path / "cut", MASKED, **HOW)
    assert again.finished == 4 + 3
    assert [arm.name for arm, _ in again] == ["edited", *(arm.name for arm in MASKED[2:] for _ in range(2))]
    assert again.finished == again.total == 4 * len(MASKED)
    for arm in MASKED:
        assert (tmp_path / "cut" / arm.name / PREDICTIONS).read_bytes() == (whole / arm.name / PREDICTIONS).read_bytes()
    assert (tmp_path / "cut" / EXPERIMENT).read_bytes() == (whole / EXPERIMENT).read_bytes()
    assert list(plan_intervention(model, FEW, whole, MASKED, **HOW)) == []


def in_order(trace):
    """Of all pairs of commits, those from left to right less those from right to left."""
    when = sorted(zip(trace.arrays["commit_step"], trace.arrays["commit_position"], strict=True))
    signs = [np.sign(later - earlier) for i, (_, earlier) in enumerate(when) for _, later in when[i + 1 :]]
    return np.mean(signs) if signs else None


def test_measures_are_those_of_the_analyses(made):
    model, path = made
    watched = fs.decode(
        model,
        [prompt_of(sample).text for sample in FEW],
        new_tokens=4,
        watch=fs.Watch(),
        samples=[sample.id for sample in FEW],
        edits="mask_anchors(k=2)",
    )
    told = {line["id"]: line["measures"] for line in lines(path, "edited")}
    for sample, trace in zip(FEW, watched.traces, strict=True):
        look = TraceView(trace)
        assert told[sample.id]["order"] == pytest.approx(in_order(trace))
        assert told[sample.id]["floating"] == pytest.approx(floating_index(tops(look))["within"].mean())
        prompt, answer = prompt_of(sample).text, sample.answers[0]
        try:
            nll = fs.answer_nll(
                model, prompt, answer, new_tokens=4, samples=[sample.id], edits="mask_anchors(k=2)"
            )[0]  # fmt: skip
        except UserError:  # too long
            nll = None
        assert told[sample.id]["nll"] == (nll if nll is None else pytest.approx(nll, rel=1e-4, abs=1e-6))


def test_an_edit_that_acts_on_no_step_changes_nothing(made):
    _, path = made
    assert lines(path, "never") == lines(path, "baseline")
    row = effects([path]).set_index("arm").loc["never"]
    for value in VALUES:
        assert [row[f"{value}_change{end}"] for end in ("", "_low", "_high")] == [0, 0, 0]


def test_effects_are_what_the_lines_say(made):
    _, path = made
    table = effects([path]).set_index("arm")
    assert list(table.index) == [arm.name for arm in MASKED]
    every = {arm.name: pd.json_normalize(lines(path, arm.name)).set_index("id") for arm in MASKED}
    for value in VALUES:
        column = value if value in ("acc", "f1") else f"measures.{value}"
        own = {name: some[column].astype(float) for name, some in every.items()}
        controls = pd.concat([own["edited-random-0"], own["edited-random-1"]], axis=1).mean(axis=1)
        row = table.loc["edited"]
        assert row[value] == pytest.approx(own["edited"].mean())
        assert row[f"{value}_change"] == pytest.approx((own["edited"] - own["baseline"]).mean())
        assert row[f"{value}_control"] == pytest.approx(controls.mean())
        assert row[f"{value}_effect"] == pytest.approx((own["edited"] - controls).mean())
        assert row[f"{value}_effect_low"] <= row[f"{value}_effect"] + 1e-12
        assert row[f"{value}_effect"] <= row[f"{value}_effect_high"] + 1e-12
        assert math.isnan(table.loc["edited-random-0", f"{value}_effect"])
        assert math.isnan(table.loc["baseline", f"{value}_change"])
    assert table["control_of"].tolist() == ["", "", "edited", "edited", ""]


def test_only_likelihoods_are_those_of_the_whole(made, tmp_path):
    model, path = made
    arms = MASKED[:2]
    list(plan_intervention(model, FEW, tmp_path / "nll", arms, nll_only=True, **HOW))
    for arm in arms:
        only, whole = lines(tmp_path / "nll", arm.name), lines(path, arm.name)
        assert only == [{"id": line["id"], "measures": {"nll": line["measures"]["nll"]}} for line in whole]
    told = effects([tmp_path / "nll"])
    assert "nll_change" in told
    assert "acc" not in told
    with pytest.raises(UserError, match="likelihoods of answers alone"):
        open_evaluation(tmp_path / "nll" / "edited")
    write_page(intervened([tmp_path / "nll"]), tmp_path / "page.html")
    with pytest.raises(UserError, match="another kind of run"):
        plan_intervention(model, FEW, tmp_path / "nll", arms, **HOW)


def test_what_is_not_defined_is_null(models, tmp_path):
    samples = [Sample("none", "What floats?", ()), Sample("long", "What sinks?", ("a very long answer indeed, is it",))]
    list(plan_evaluation(models["arm"], samples, tmp_path / "e", measure=True, new_tokens=2))
    assert [line["measures"]["nll"] for line in lines(tmp_path, "e")] == [None, None]
    assert open_evaluation(tmp_path / "e").table["nll"].dtype == float


def test_conditions_have_samples_of_their_own(models, tmp_path):
    arms = [
        Condition("baseline"),
        *build_conditions("drop_bos", None),
        *build_conditions("spread", None, name="late", condition="b"),
    ]
    made = plan_intervention(models["arm"], {"a": FEW[:2], "b": FEW[2:]}, tmp_path / "c", arms, nll_only=True, **HOW)
    list(made)
    told = effects([tmp_path / "c"])
    assert told[["condition", "arm"]].to_numpy().tolist() == [
        ["a", "baseline"], ["a", "edited"], ["b", "baseline"], ["b", "edited"], ["b", "late"]]  # fmt: skip
    assert {line["id"] for line in lines(tmp_path / "c" / "b", "late")} == {sample.id for sample in FEW[2:]}
    assert [section.title for section in intervened([tmp_path / "c"]).sections] == ["twin:arm, a", "twin:arm, b"]


def test_a_region_that_only_some_samples_have_can_be_knocked_out(models, tmp_path):
    samples = [FEW[0], Sample("bare", "What floats?", ("wood",))]
    arms = [Condition("baseline"), *build_conditions("knock_out(keys='gold')", draws=1)]
    with pytest.warns(UserWarning, match="picked nothing"):
        list(plan_intervention(models["mdm"], samples, tmp_path / "k", arms, nll_only=True, new_tokens=6, batch=1))
    asked = ({line["id"]: line["measures"]["nll"] for line in lines(tmp_path / "k", arm.name)} for arm in arms[:2])
    before, after = asked
    assert after["bare"] == pytest.approx(before["bare"])
    assert after[FEW[0].id] > before[FEW[0].id] + 1


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        (
            [Condition("baseline"), *build_conditions("spread(layers=[99])", None)],
            "acts on layer 99, and twin:arm has layers 0 to 7",
        ),
        ([Condition("baseline"), *build_conditions("knock_out(keys='godl')", None)], "did you mean 'gold'"),
        ([Condition("baseline"), *build_conditions("freeze", None)], "has new ones at every step"),
        (build_conditions("spread", None), "the first arm of an experiment is its baseline"),
        ([Condition("baseline"), Condition("baseline")], "two arms are called 'baseline'"),
        ([Condition("baseline"), Condition("../x")], "cannot be the name of a folder"),
        ([Condition("baseline"), Condition("x", control_of="y")], "a control of 'y', and there is no such arm"),
        ([Condition("baseline"), Condition("x", subset="y")], "asked on 'y', and there are no such samples"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(arms, said, models, tmp_path):
    with pytest.raises(UserError, match=said):
        plan_intervention(models["arm"], FEW, tmp_path / "wrong", arms, **HOW)
    assert not (tmp_path / "wrong").exists()


def test_other_edits_are_another_experiment(made):
    model, path = made
    with pytest.raises(UserError, match=r"cannot be resumed with other settings: edits: .*k=2.*k=3"):
        plan_intervention(model, FEW, path, [Condition("baseline"), *build_conditions("mask_anchors(k=3)")], **HOW)
    unnamed = [fs.Edit("sink", amount=score) for score in (0.0, 1.0)]  # both are called sink
    list(plan_evaluation(model, FEW[:1], path.parent / "sink", edits=unnamed[0], nll_only=True, **HOW))
    with pytest.raises(UserError, match="edits_sha256"):
        plan_evaluation(model, FEW[:1], path.parent / "sink", edits=unnamed[1], nll_only=True, **HOW)


def test_lines_along_an_axis_are_drawn_with_their_controls(models, tmp_path):
    arms = [Condition("baseline")]
    for k in (1, 3):
        arms += build_conditions(f"spread(k={k})", draws=1, name=f"spread-{k}", value=float(k), series="spread")
    list(plan_intervention(models["arm"], FEW[:2], tmp_path / "x", arms, nll_only=True, **HOW))
    (section,) = intervened([tmp_path / "x"]).sections
    chart = section.charts[0]
    assert (chart.title, chart.x) == ("Unlikeliness of the right answer, spread", [1.0, 3.0])
    assert [(series.name, series.control) for series in chart.series] == [("spread", False), ("control", True)]
    told = effects([tmp_path / "x"]).set_index("arm")
    assert np.allclose(chart.series[1].y, told.loc[["spread-1", "spread-3"], "nll_control"])


@pytest.fixture
def few(tmp_path):
    file = tmp_path / "few.jsonl"
    file.write_text("".join(json.dumps(sample.as_json()) + "\n" for sample in FEW[:2]))
    return file


def ask(few, *words):
    out = ["--data", str(few), "--out", str(few.parent / "out"), "--new-tokens", "4"]
    return CliRunner().invoke(app, ["intervene", *words, *out])


def test_the_command_shows_all_arms(few):
    words = "twin:arm", "--edit", "zero_heads(pairs=[(3, 1)])", "--draws", "1"
    said = ask(few, *words)
    assert said.exit_code == 0, said.output
    assert "edited-random-0" in said.output
    assert "less its control" in said.output
    table = pd.read_csv(few.parent / "out" / "effects.csv")
    assert table["arm"].tolist() == ["baseline", "edited", "edited-random-0"]
    page = (few.parent / "out" / "report.html").read_text()
    assert "as many random heads of the same layers" in page
    again = ask(few, *words, "--json")
    assert [row["arm"] for row in json.loads(again.stdout)["effects"]] == table["arm"].tolist()
    assert read_experiment(few.parent / "out" / "twin-arm")["title"] == "zero_heads(pairs=[(3, 1)])"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--edit", "mask_anchor(k=5)"], "did you mean 'mask_anchors'"),
        (["--edit", "spread", "--control", "rnadom"], "did you mean 'random'"),
        (["--edit", "virtual_sink"], "(--control none)"),
        (["--edit", "spread(layers=[99])"], "acts on layer 99"),
    ],
)
def test_mistakes_are_one_sentence(few, words, said):
    done = ask(few, "twin:arm", *words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert not (few.parent / "out").exists()


def test_the_edits_are_listed():
    said = CliRunner().invoke(app, ["intervene", "--list"])
    assert said.exit_code == 0
    assert all(f"{name}(" in said.output for name in RECIPES)
