"""An experiment: an evaluation for each arm on the same questions, effects paired by question, a page."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import floatscope as fs
from floatscope.analysis.anchor_movement import floating_index, top_keys
from floatscope.analysis.evaluations import PREDICTIONS_FILE, open_evaluation
from floatscope.analysis.experiments import EXPERIMENT_FILE, MEASURES, effects, read_experiment
from floatscope.analysis.trace_view import TraceView
from floatscope.cli.main import app
from floatscope.errors import UserError
from floatscope.interventions.conditions import Condition, build_conditions
from floatscope.interventions.recipes import RECIPES
from floatscope.pipelines.evaluate import plan_evaluation
from floatscope.pipelines.intervene import plan_intervention
from floatscope.reports.intervention_report import build_intervention_report
from floatscope.reports.page import write_page
from floatscope.tasks.sample import Sample
from floatscope.tasks.sample_files import read_shipped
from floatscope.tasks.template import load_template

HOW = {"new_tokens": 4, "batch_size": 3}
FEW = read_shipped("reading-1")[:4]
MASKED = [
    Condition("baseline"),
    *build_conditions("mask_anchors(k=2)", draws=2),
    *build_conditions("spread(steps=[999])", None, name="never"),
]


@pytest.fixture(scope="module")
def models():
    return {family: fs.load(f"twin:{family}", device="cpu") for family in ("arm", "mdm")}


@pytest.fixture(scope="module", params=["arm", "mdm"])
def finished(request, models, tmp_path_factory):
    """The model and the folder of an experiment that was not broken off."""
    path = tmp_path_factory.mktemp(request.param) / "whole"
    list(plan_intervention(models[request.param], FEW, path, MASKED, **HOW))
    return models[request.param], path


def lines(path, condition):
    return [json.loads(line) for line in (path / condition / PREDICTIONS_FILE).read_text().splitlines()]


def test_a_resumed_experiment_has_the_bytes_of_an_unbroken_one(finished, tmp_path):
    model, unbroken = finished
    for at, _ in enumerate(plan_intervention(model, FEW, tmp_path / "cut", MASKED, **HOW)):
        if at == 2:
            break  # between the batches of the second arm
    file = tmp_path / "cut" / "edited" / PREDICTIONS_FILE
    assert len(lines(tmp_path / "cut", "edited")) == 3
    file.write_bytes(file.read_bytes() + b'{"id": "reading')  # and killed while it wrote
    again = plan_intervention(model, FEW, tmp_path / "cut", MASKED, **HOW)
    assert again.finished == 4 + 3
    assert [condition.name for condition, _ in again] == [
        "edited",
        *(condition.name for condition in MASKED[2:] for _ in range(2)),
    ]
    assert again.finished == again.total == 4 * len(MASKED)
    for condition in MASKED:
        assert (tmp_path / "cut" / condition.name / PREDICTIONS_FILE).read_bytes() == (
            unbroken / condition.name / PREDICTIONS_FILE
        ).read_bytes()
    assert (tmp_path / "cut" / EXPERIMENT_FILE).read_bytes() == (unbroken / EXPERIMENT_FILE).read_bytes()
    assert list(plan_intervention(model, FEW, unbroken, MASKED, **HOW)) == []


def in_order(trace):
    """Of all pairs of commits, those from left to right less those from right to left."""
    when = sorted(zip(trace.arrays["commit_step"], trace.arrays["commit_position"], strict=True))
    signs = [np.sign(later - earlier) for i, (_, earlier) in enumerate(when) for _, later in when[i + 1 :]]
    return np.mean(signs) if signs else None


def test_measures_are_those_of_the_analyses(finished):
    model, path = finished
    watched = fs.decode(
        model,
        [load_template().prompt(sample).text for sample in FEW],
        new_tokens=4,
        watch=fs.Watch(),
        samples=[sample.id for sample in FEW],
        edits="mask_anchors(k=2)",
    )
    record = {line["id"]: line["measures"] for line in lines(path, "edited")}
    for sample, trace in zip(FEW, watched.traces, strict=True):
        view = TraceView(trace)
        assert record[sample.id]["order"] == pytest.approx(in_order(trace))
        assert record[sample.id]["floating"] == pytest.approx(floating_index(top_keys(view))["within"].mean())
        prompt, answer = load_template().prompt(sample).text, sample.answers[0]
        try:
            nll = fs.answer_nll(
                model, prompt, answer, new_tokens=4, samples=[sample.id], edits="mask_anchors(k=2)"
            )[0]  # fmt: skip
        except UserError:  # too long
            nll = None
        assert record[sample.id]["nll"] == (nll if nll is None else pytest.approx(nll, rel=1e-4, abs=1e-6))


def test_an_edit_that_acts_on_no_step_changes_nothing(finished):
    _, path = finished
    assert lines(path, "never") == lines(path, "baseline")
    row = effects([path]).set_index("condition").loc["never"]
    for value in MEASURES:
        assert [row[f"{value}_change{end}"] for end in ("", "_low", "_high")] == [0, 0, 0]


def test_effects_are_what_the_lines_say(finished):
    _, path = finished
    table = effects([path]).set_index("condition")
    assert list(table.index) == [condition.name for condition in MASKED]
    every = {condition.name: pd.json_normalize(lines(path, condition.name)).set_index("id") for condition in MASKED}
    for value in MEASURES:
        column = value if value in ("acc", "f1") else f"measures.{value}"
        own = {name: subset[column].astype(float) for name, subset in every.items()}
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


def test_nll_only_equals_the_nll_of_a_full_experiment(finished, tmp_path):
    model, path = finished
    conditions = MASKED[:2]
    list(plan_intervention(model, FEW, tmp_path / "nll", conditions, nll_only=True, **HOW))
    for condition in conditions:
        only, unbroken = lines(tmp_path / "nll", condition.name), lines(path, condition.name)
        assert only == [{"id": line["id"], "measures": {"nll": line["measures"]["nll"]}} for line in unbroken]
    record = effects([tmp_path / "nll"])
    assert "nll_change" in record
    assert "acc" not in record
    with pytest.raises(UserError, match="has only the likelihoods of answers"):
        open_evaluation(tmp_path / "nll" / "edited")
    write_page(build_intervention_report([tmp_path / "nll"]), tmp_path / "page.html")
    with pytest.raises(UserError, match="the new run is of another kind"):
        plan_intervention(model, FEW, tmp_path / "nll", conditions, **HOW)


def test_undefined_measures_are_null(models, tmp_path):
    samples = [Sample("none", "What floats?", ()), Sample("long", "What sinks?", ("a very long answer indeed, is it",))]
    list(plan_evaluation(models["arm"], samples, tmp_path / "e", measure=True, new_tokens=2))
    assert [line["measures"]["nll"] for line in lines(tmp_path, "e")] == [None, None]
    assert open_evaluation(tmp_path / "e").table["nll"].dtype == float


def test_conditions_run_on_their_own_subset(models, tmp_path):
    conditions = [
        Condition("baseline"),
        *build_conditions("drop_bos", None),
        *build_conditions("spread", None, name="late", subset="b"),
    ]
    finished = plan_intervention(
        models["arm"], {"a": FEW[:2], "b": FEW[2:]}, tmp_path / "c", conditions, nll_only=True, **HOW
    )
    list(finished)
    record = effects([tmp_path / "c"])
    assert record[["subset", "condition"]].to_numpy().tolist() == [
        ["a", "baseline"], ["a", "edited"], ["b", "baseline"], ["b", "edited"], ["b", "late"]]  # fmt: skip
    assert {line["id"] for line in lines(tmp_path / "c" / "b", "late")} == {sample.id for sample in FEW[2:]}
    assert [section.title for section in build_intervention_report([tmp_path / "c"]).sections] == [
        "twin:arm, a",
        "twin:arm, b",
    ]


def test_a_region_that_only_some_samples_have_can_be_knocked_out(models, tmp_path):
    samples = [FEW[0], Sample("bare", "What floats?", ("wood",))]
    conditions = [Condition("baseline"), *build_conditions("knock_out(keys='gold')", draws=1)]
    with pytest.warns(UserWarning, match="selected no keys"):
        list(
            plan_intervention(
                models["mdm"], samples, tmp_path / "k", conditions, nll_only=True, new_tokens=6, batch_size=1
            )
        )
    records = (
        {line["id"]: line["measures"]["nll"] for line in lines(tmp_path / "k", condition.name)}
        for condition in conditions[:2]
    )
    before, after = records
    assert after["bare"] == pytest.approx(before["bare"])
    assert after[FEW[0].id] > before[FEW[0].id] + 1


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        (
            [Condition("baseline"), *build_conditions("spread(layers=[99])", None)],
            "acts on layer 99, but twin:arm has layers 0 to 7",
        ),
        ([Condition("baseline"), *build_conditions("knock_out(keys='godl')", None)], "did you mean 'gold'"),
        ([Condition("baseline"), *build_conditions("freeze", None)], "needs the same queries at every step"),
        (build_conditions("spread", None), "the first condition of an experiment must be its baseline"),
        ([Condition("baseline"), Condition("baseline")], "two conditions are named 'baseline'"),
        ([Condition("baseline"), Condition("../x")], "cannot be the name of a folder"),
        ([Condition("baseline"), Condition("x", control_of="y")], "a control of 'y', which does not exist"),
        ([Condition("baseline"), Condition("x", subset="y")], "runs on the subset 'y', which has no samples"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(conditions, message, models, tmp_path):
    with pytest.raises(UserError, match=message):
        plan_intervention(models["arm"], FEW, tmp_path / "wrong", conditions, **HOW)
    assert not (tmp_path / "wrong").exists()


def test_other_edits_are_another_experiment(finished):
    model, path = finished
    with pytest.raises(UserError, match=r"cannot be resumed with other settings: edits: .*k=2.*k=3"):
        plan_intervention(model, FEW, path, [Condition("baseline"), *build_conditions("mask_anchors(k=3)")], **HOW)
    unnamed = [fs.Edit("sink", amount=score) for score in (0.0, 1.0)]  # both are called sink
    list(plan_evaluation(model, FEW[:1], path.parent / "sink", edits=unnamed[0], nll_only=True, **HOW))
    with pytest.raises(UserError, match="edits_sha256"):
        plan_evaluation(model, FEW[:1], path.parent / "sink", edits=unnamed[1], nll_only=True, **HOW)


def test_lines_along_an_axis_are_drawn_with_their_controls(models, tmp_path):
    conditions = [Condition("baseline")]
    for k in (1, 3):
        conditions += build_conditions(f"spread(k={k})", draws=1, name=f"spread-{k}", value=float(k), series="spread")
    list(plan_intervention(models["arm"], FEW[:2], tmp_path / "x", conditions, nll_only=True, **HOW))
    (section,) = build_intervention_report([tmp_path / "x"]).sections
    chart = section.charts[0]
    assert (chart.title, chart.x) == ("NLL of the right answer, spread", [1.0, 3.0])
    assert [(series.name, series.control) for series in chart.series] == [("spread", False), ("control", True)]
    record = effects([tmp_path / "x"]).set_index("condition")
    assert np.allclose(chart.series[1].y, record.loc[["spread-1", "spread-3"], "nll_control"])


@pytest.fixture
def data_file(tmp_path):
    file = tmp_path / "few.jsonl"
    file.write_text("".join(json.dumps(sample.as_json()) + "\n" for sample in FEW[:2]))
    return file


def run_command(data_file, *words):
    out = ["--data", str(data_file), "--out", str(data_file.parent / "out"), "--new-tokens", "4"]
    return CliRunner().invoke(app, ["intervene", *words, *out])


def test_the_command_shows_all_conditions(data_file):
    words = "twin:arm", "--edit", "zero_heads(pairs=[(3, 1)])", "--draws", "1"
    message = run_command(data_file, *words)
    assert message.exit_code == 0, message.output
    assert "edited-random-0" in message.output
    assert "effect (− control)" in message.output
    table = pd.read_csv(data_file.parent / "out" / "effects.csv")
    assert table["condition"].tolist() == ["baseline", "edited", "edited-random-0"]
    page = (data_file.parent / "out" / "report.html").read_text()
    assert "as many random heads of the same layers" in page
    again = run_command(data_file, *words, "--json")
    assert [row["condition"] for row in json.loads(again.stdout)["effects"]] == table["condition"].tolist()
    assert read_experiment(data_file.parent / "out" / "twin-arm")["title"] == "zero_heads(pairs=[(3, 1)])"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--edit", "mask_anchor(k=5)"], "did you mean 'mask_anchors'"),
        (["--edit", "spread", "--control", "rnadom"], "did you mean 'random'"),
        (["--edit", "virtual_sink"], "use --control none"),
        (["--edit", "spread(layers=[99])"], "acts on layer 99"),
    ],
)
def test_mistakes_are_one_sentence(data_file, words, message):
    done = run_command(data_file, "twin:arm", *words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not (data_file.parent / "out").exists()


def test_the_edits_are_listed():
    message = CliRunner().invoke(app, ["intervene", "--list"])
    assert message.exit_code == 0
    assert all(f"{name}(" in message.output for name in RECIPES)
