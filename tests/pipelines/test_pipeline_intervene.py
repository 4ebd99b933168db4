"""An experiment: an evaluation for each arm on the same questions, effects paired by question, a page."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import floatscope as fs
from floatscope.analysis.commit_order import kendall
from floatscope.analysis.evaluations import PREDICTIONS_FILE, open_evaluation
from floatscope.analysis.experiments import EXPERIMENT_FILE, MEASURES, effects, read_experiment
from floatscope.analysis.floating import floating_index, top_keys
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
from floatscope.tasks.sample_files import read_samples
from floatscope.tasks.template import load_template
from jobs import read_notes, run_batches
from pairs import slow_except

HOW = {"new_tokens": 4, "batch_size": 3}
FEW = read_samples("twin:reading-1", 4)
MASKED = [
    Condition("baseline"),
    *build_conditions("mask_anchors(k=2)", draws=1),
    *build_conditions("spread(steps=[999])", None, name="never"),
]


@pytest.fixture(scope="module")
def models():
    return {family: fs.load(f"twin:{family}", device="cpu") for family in ("arm", "mdm")}


@pytest.fixture(scope="module", params=slow_except(["arm", "mdm"], "mdm"))
def finished(request, models, tmp_path_factory):
    """The model and the folder of an experiment that was not broken off."""
    path = tmp_path_factory.mktemp(request.param) / "whole"
    list(plan_intervention(models[request.param], FEW, path, MASKED, **HOW))
    return models[request.param], path


def lines(path, condition):
    return [json.loads(line) for line in (path / condition / PREDICTIONS_FILE).read_text().splitlines()]


@pytest.mark.slow
def test_a_resumed_experiment_has_the_bytes_of_an_unbroken_one(finished, tmp_path):
    model, unbroken = finished
    begun = (event for event in plan_intervention(model, FEW, tmp_path / "cut", MASKED, **HOW))
    for _ in range(1 + 3):  # started, both batches of the first condition, one of the second
        next(begun)
    begun.close()
    file = tmp_path / "cut" / "edited" / PREDICTIONS_FILE
    assert len(lines(tmp_path / "cut", "edited")) == 3
    file.write_bytes(file.read_bytes() + b'{"id": "reading')  # and killed while it wrote
    again = plan_intervention(model, FEW, tmp_path / "cut", MASKED, **HOW)
    assert again.done == 4 + 3
    assert [batch.part for batch in run_batches(again)] == [
        "edited",
        *(condition.name for condition in MASKED[2:] for _ in range(2)),
    ]
    assert again.total == 4 * len(MASKED)
    for condition in MASKED:
        assert (tmp_path / "cut" / condition.name / PREDICTIONS_FILE).read_bytes() == (
            unbroken / condition.name / PREDICTIONS_FILE
        ).read_bytes()
    assert (tmp_path / "cut" / EXPERIMENT_FILE).read_bytes() == (unbroken / EXPERIMENT_FILE).read_bytes()
    assert run_batches(plan_intervention(model, FEW, unbroken, MASKED, **HOW)) == []


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
        special = {"eos": model.spec.eos_id}
        view = TraceView(replace(trace, meta={**trace.meta, "special": special}))
        step, position = (trace.arrays[name][view.commits] for name in ("commit_step", "commit_position"))
        table = floating_index(top_keys(view))
        moved = table[table["group"] == "all"]["moved"].mean()
        for name, expected in (("order", kendall(step, position)), ("moved", moved)):
            assert record[sample.id][name] == (None if np.isnan(expected) else pytest.approx(expected))
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
    never = [{key: line[key] for key in line if key not in ("notes", "digest")} for line in lines(path, "never")]
    assert never == [{key: line[key] for key in line if key != "digest"} for line in lines(path, "baseline")]
    row = effects([path]).set_index("condition").loc["never"]
    assert row["dose"] == 0
    for value in MEASURES:
        assert row[f"{value}_change"] == pytest.approx(0, abs=0) or np.isnan(row[value])  # one token moves nothing


def test_effects_are_what_the_lines_say(finished):
    _, path = finished
    table = effects([path]).set_index("condition")
    assert list(table.index) == [condition.name for condition in MASKED]
    every = {condition.name: pd.json_normalize(lines(path, condition.name)).set_index("id") for condition in MASKED}
    row = table.loc["edited"]
    for value in MEASURES:
        column = value if value in ("acc", "f1") else f"measures.{value}"
        own = {name: subset[column].astype(float) for name, subset in every.items()}
        assert row[value] == pytest.approx(own["edited"].mean(), nan_ok=True)
        assert row[f"{value}_change"] == pytest.approx((own["edited"] - own["baseline"]).mean(), nan_ok=True)
        for suffix, control in (("", own["edited-mass-0"]), ("_count", own["edited-random-0"])):
            assert row[f"{value}_control{suffix}"] == pytest.approx(control.mean(), nan_ok=True)
            assert row[f"{value}_effect{suffix}"] == pytest.approx((own["edited"] - control).mean(), nan_ok=True)
            mean, low, high = (row[f"{value}_effect{suffix}{end}"] for end in ("", "_low", "_high"))
            assert math.isnan(low) or low - 1e-12 <= mean <= high + 1e-12
        assert math.isnan(table.loc["edited-random-0", f"{value}_effect"])
        assert math.isnan(table.loc["baseline", f"{value}_change"])
    doses = {name: subset["measures.dose"].mean() for name, subset in every.items()}
    assert table["dose"].to_dict() == pytest.approx(doses)
    assert (doses["baseline"], doses["never"]) == (0, 0)
    assert row["dose_control"] == pytest.approx(doses["edited-mass-0"])
    assert row["dose_control_count"] == pytest.approx(doses["edited-random-0"])
    assert doses["edited-random-0"] < 0.5 * doses["edited-mass-0"]
    assert doses["edited-mass-0"] == pytest.approx(doses["edited"], rel=0.4)  # short prompts
    assert table["control_of"].tolist() == ["", "", "edited", "edited", ""]
    assert table["control"].tolist() == ["", "mass", "mass", "random", ""]


def test_folders_of_earlier_versions_open_without_doses(finished, tmp_path):
    """Their lines have no dose, and their conditions do not say what a control matches."""
    _, path = finished
    old = tmp_path / "old"
    shutil.copytree(path, old)
    record = read_experiment(old)
    conditions = [c for c in record["conditions"] if c["control"] != "mass"]
    for condition in conditions:
        del condition["control"]
        file = old / condition["name"] / PREDICTIONS_FILE
        kept = lines(old, condition["name"])
        for line in kept:
            del line["measures"]["dose"], line["digest"]
        file.write_text("".join(json.dumps(line) + "\n" for line in kept))
    (old / EXPERIMENT_FILE).write_text(json.dumps({**record, "conditions": conditions}))
    table, now = (effects([folder]).set_index("condition") for folder in (old, path))
    assert table["dose"].isna().all()
    assert table.loc["edited", "control"] == "random"
    for value in MEASURES:  # the only controls there were are those of equal count
        effect = now.loc["edited", f"{value}_effect_count"]
        assert table.loc["edited", f"{value}_effect"] == pytest.approx(effect, nan_ok=True)
    write_page(build_intervention_report([old]), tmp_path / "page.html")
    assert "as many random keys" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("recipe", ["pin(k=5, steps=[0])", "mask_anchors(k=5, only='evidence')"])
def test_the_effect_is_zero_where_nothing_is_edited(models, tmp_path, recipe):
    """At step 0 anchors are pinned to themselves; without passages there is no evidence among the anchors."""
    samples = [replace(sample, passages=()) for sample in FEW[:2]]
    if "evidence" in recipe:  # one sample has evidence, so that the region exists; it is in another batch
        samples.append(FEW[2])
    conditions = [Condition("baseline"), *build_conditions(recipe, draws=1)]
    list(plan_intervention(models["mdm"], samples, tmp_path / "z", conditions, new_tokens=2, batch_size=1))

    def without_evidence(condition):
        return [line for line in lines(tmp_path / "z", condition) if line["id"] != FEW[2].id]

    for condition in conditions[1:]:
        assert without_evidence(condition.name) == without_evidence("baseline")
    row = effects([tmp_path / "z"]).set_index("condition").loc["edited"]
    if "pin" in recipe:
        for value in ("acc", "nll"):
            assert [row[f"{value}_{part}"] for part in ("change", "effect", "effect_count")] == [0, 0, 0]


def test_nll_only_equals_the_nll_of_a_full_experiment(finished, tmp_path):
    model, path = finished
    conditions = MASKED[:2]
    list(plan_intervention(model, FEW, tmp_path / "nll", conditions, nll_only=True, **HOW))
    for condition in conditions:
        only, unbroken = lines(tmp_path / "nll", condition.name), lines(path, condition.name)
        for line, same in zip(only, unbroken, strict=True):
            assert line["id"] == same["id"]
            assert line["measures"].keys() == {"nll", "dose"}
            assert line["measures"]["nll"] == same["measures"]["nll"]
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
    settings = {"nll_only": True, "new_tokens": 6, "batch_size": 1}
    notes = read_notes(plan_intervention(models["mdm"], samples, tmp_path / "k", conditions, **settings))
    assert [re.sub(r"\d+ of \d+|[\d.]+ %", "n", note) for note in notes] == [
        "knock_out(keys='gold') selected no keys in n steps",
        "all other keys hold less attention than the edited keys in n of heads and steps: edited, mass control",
        "edited, mass control selected no keys in n steps",
        "edited, random control selected no keys in n steps",
    ]
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
    unnamed = [fs.edits.VirtualSink(score) for score in (0.0, 1.0)]  # both are called sink
    list(plan_evaluation(model, FEW[:1], path.parent / "sink", edits=unnamed[0], nll_only=True, **HOW))
    with pytest.raises(UserError, match="edits_sha256"):
        plan_evaluation(model, FEW[:1], path.parent / "sink", edits=unnamed[1], nll_only=True, **HOW)


def test_lines_along_an_axis_are_drawn_with_their_controls(models, tmp_path):
    conditions = [Condition("baseline")]
    for k in (1, 3):
        conditions += build_conditions(
            f"spread(k={k})", "mass", draws=1, name=f"spread-{k}", value=float(k), series="spread"
        )
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


@pytest.mark.slow
def test_the_command_shows_all_conditions(data_file):
    words = "twin:arm", "--edit", "zero_heads(pairs=[(3, 1)])", "--draws", "1"
    message = run_command(data_file, *words)
    assert message.exit_code == 0, message.output
    assert "edited-random-0" in message.output
    assert "relative to" in message.output
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
