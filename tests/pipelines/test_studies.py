"""Studies: the subsets and conditions they plan, and how their effects are summarised."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pandas as pd
import pytest

import floatscope as fs
from floatscope.analysis.retrieval_heads import head_map, retrieval
from floatscope.analysis.studies import STUDIES, is_dormant
from floatscope.analysis.trace_view import trace_views
from floatscope.interventions.edits import Anchors, MiddleSameCount, RandomSameCount, RandomSameMass
from floatscope.interventions.recipes import parse_edits
from floatscope.pipelines.job import BatchDone, Started, run_job
from floatscope.pipelines.studies import HEAD_TRACES, StudyInput, plan_study, rank_heads, study_jobs
from floatscope.tasks.sample_files import read_samples
from floatscope.traces import open_run
from pairs import slow_except


@pytest.fixture(scope="module")
def mdm():
    return fs.load("twin:mdm", device="cpu")


def study_input(model, samples, out, **settings):
    return StudyInput(model, tuple(samples), out, settings={"new_tokens": 8, **settings})


def by_name(plan):
    assert plan.conditions[0].name == "baseline"
    assert not plan.conditions[0].edits
    names = [condition.name for condition in plan.conditions]
    assert len(set(names)) == len(names)
    assert {condition.control_of for condition in plan.conditions} - {""} <= set(names)
    return {condition.name: condition for condition in plan.conditions}


def controls(conditions, name):
    return [condition for condition in conditions.values() if condition.control_of == name]


def zeroed(condition):
    return {(edit.layers[0], head) for edit in condition.edits for head in edit.heads}


def test_sinks_are_masked_beside_random_keys_of_equal_mass_and_count_and_middling_keys(mdm, tmp_path):
    plan = plan_study("sinks", study_input(mdm, read_samples("twin:reading-5", 2), tmp_path))
    conditions = by_name(plan)
    assert len(conditions) == 1 + 3 * (1 + 3 + 3 + 1) + 4 * (1 + 3)
    for k in (1, 5, 10):
        condition = conditions[f"anchors-{k}"]
        assert (condition.edits, condition.value, condition.series) == (
            parse_edits(f"mask_anchors(k={k})"),
            k,
            "anchors",
        )
        random_controls = controls(conditions, condition.name)
        assert [each.series for each in random_controls] == ["random"] * 6
        assert [each.control for each in random_controls] == ["mass"] * 3 + ["random"] * 3
        assert {each.edits[0].keys.reference for each in random_controls} == {condition.edits[0].keys}
        assert len({each.edits[0].keys for each in random_controls}) == 6
        middle = conditions[f"middle-{k}"]
        assert (middle.edits[0].keys, middle.series) == (MiddleSameCount(Anchors(k)), "middle")
        assert middle.control_of == ""  # the effect is that against random keys
    for name in ("first", "structural", "evidence", "all but evidence"):
        condition = conditions[f"anchors-5-{name.replace(' ', '-')}"]
        assert (condition.edits, condition.series) == (parse_edits(f"mask_anchors(k=5, only={name!r})"), name)
        assert [each.control for each in controls(conditions, condition.name)] == ["mass"] * 3
    few = plan_study(
        "sinks", study_input(mdm, read_samples("twin:reading-5", 2), tmp_path), counts=2, draws=1, types="first"
    )
    assert list(by_name(few)) == [
        "baseline", "anchors-2", "anchors-2-mass-0", "anchors-2-random-0", "middle-2",
        "anchors-2-first", "anchors-2-first-mass-0"]  # fmt: skip
    for options in ({"counts": 2}, {"counts": 5, "types": "none"}):
        none = plan_study("sinks", study_input(mdm, read_samples("twin:reading-5", 2), tmp_path), **options)
        assert len(none.conditions) == 1 + 1 + 6 + 1


def test_types_that_no_sample_has_are_left_out_with_a_note(mdm, tmp_path):
    plan = plan_study("sinks", study_input(mdm, read_samples("twin:closed-book", 2), tmp_path))
    assert plan.notes == ["evidence, all but evidence left out: no sample has evidence"]
    assert not any("evidence" in condition.name for condition in plan.conditions)
    assert "anchors-5-structural" in by_name(plan)


def test_pinned_mass_goes_where_that_of_its_control_goes(mdm, tmp_path):
    samples = read_samples("twin:reading-5", 6)
    plan = plan_study("pin", study_input(mdm, samples, tmp_path))
    conditions = by_name(plan)
    assert len(conditions) == 1 + 4 * (1 + 3 + 3) + 3 * 2 * (1 + 3)
    for name in ("step-0-1", "step-0-5", "layer-0-1", "layer-0-5"):
        (edit,) = conditions[name].edits
        for control in controls(conditions, name):
            (other,) = control.edits
            assert other.to == edit.to
            assert isinstance(other.keys, RandomSameMass | RandomSameCount)
            assert other.keys.matched == edit.keys
        assert (edit.to.layer, edit.to.of) == ((0, "now") if "layer" in name else (None, "first"))
        assert edit.keys.only == edit.to.only == "all but evidence"
        assert conditions[name].subset == ""
    for name in ("structural", "evidence", "all"):
        for place in ("step", "layer"):
            condition = conditions[f"{place}-0-5-{name}"]
            assert condition.edits[0].keys.only == name
            assert {each.subset for each in (condition, *controls(conditions, condition.name))} == {"reading"}
    assert list(plan.subsets) == ["reading", "counterfactual", "random", "gold-first", "gold-middle", "gold-last"]
    assert plan.subsets["reading"] == samples
    for subset in plan.subsets.values():
        assert [sample.id for sample in subset] == [sample.id for sample in samples]
    for name, place in (("gold-first", 0), ("gold-middle", 2), ("gold-last", 4)):
        assert all(sample.passages[place].gold for sample in plan.subsets[name])
    assert plan.notes == []


def test_subsets_that_samples_cannot_take_are_left_out_with_a_note(mdm, tmp_path):
    several = read_samples("twin:two-hop", 6)
    plan = plan_study("pin", study_input(mdm, several, tmp_path))
    assert "gold-first" not in plan.subsets
    assert any("gold-first" in sentence and "exactly one gold passage" in sentence for sentence in plan.notes)
    mixed = plan_study("pin", study_input(mdm, [*several[:4], *read_samples("twin:reading-5", 1)], tmp_path))
    assert "gold-first" not in mixed.subsets
    assert any("only 1 of 5" in sentence for sentence in mixed.notes)
    few = plan_study("pin", study_input(mdm, [*several[:1], *read_samples("twin:reading-5", 4)], tmp_path))
    assert {len(subset) for subset in few.subsets.values()} == {4}
    assert any("1 of 5 samples cannot be used in every subset" in sentence for sentence in few.notes)


@pytest.mark.parametrize("name", slow_except(["twin:mdm", "twin:arm"], "twin:mdm"))
def test_heads_are_found_and_tested_on_different_samples_with_controls_of_their_layers(name, tmp_path):
    model, samples = fs.load(name, device="cpu"), read_samples("twin:reading-5", 10)
    given = study_input(model, samples, tmp_path, new_tokens=4)
    plan = plan_study("heads", given, counts=(2, 5, 64), draws=2)
    conditions = by_name(plan)
    run = open_run(tmp_path / HEAD_TRACES)
    assert set(run.samples) == {sample.id for sample in samples[:8]}
    assert plan.subsets == {"": samples[8:]}
    scores = head_map(pd.concat(retrieval(view) for view in trace_views(run)), "wu_set")
    first = zeroed(conditions["heads-2"])
    assert scores.stack()[list(first)].min() >= scores.stack().drop(list(first)).max()
    assert first < zeroed(conditions["heads-5"])
    assert any("64 heads are left out" in sentence for sentence in plan.notes)
    for condition in (conditions["heads-2"], conditions["heads-5"]):
        own = zeroed(condition)
        assert len(own) == condition.value
        for control in controls(conditions, condition.name):
            assert not own & zeroed(control)
            assert Counter(layer for layer, _ in zeroed(control)) == Counter(layer for layer, _ in own)
    assert plan_study("heads", given, counts=(2, 5, 64), draws=2) == plan  # the traces are not made again


def test_the_traces_of_heads_are_a_job_that_resumes(mdm, tmp_path):
    given = study_input(mdm, read_samples("twin:reading-1", 10), tmp_path, batch_size=4, new_tokens=2)
    with pytest.raises(fs.UserError, match="unknown score 'mas'"):
        next(study_jobs("heads", given, score="mas"))
    jobs = study_jobs("heads", given, counts=2, draws=1)
    traces = next(jobs)
    next(event for event in traces if isinstance(event, BatchDone))
    assert (traces.done, traces.total) == (4, 8)
    assert next(iter(traces)) == Started(4, 8)
    run_job(traces)
    (study,) = jobs
    assert [part.name for part in study.parts] == ["baseline", "heads-2", "heads-2-random-0"]


def test_equal_heads_are_ranked_by_their_mass_on_the_evidence(mdm, tmp_path):
    samples = read_samples("twin:reading-1", 8)
    found = rank_heads(study_input(mdm, samples, tmp_path), samples, "wu_set")
    assert len(found) == 64
    pairs = list(zip(found["wu_set"], found["mass"], strict=True))
    assert pairs == sorted(pairs, reverse=True)


def test_heads_need_samples_with_evidence(mdm, tmp_path):
    with pytest.raises(fs.UserError, match="8 samples with evidence"):
        plan_study("heads", study_input(mdm, read_samples("twin:reading-5", 8), tmp_path))
    with pytest.raises(fs.UserError, match="of 12 samples 0 have evidence"):
        plan_study("heads", study_input(mdm, read_samples("twin:closed-book", 12), tmp_path))


def test_every_head_has_a_condition_with_its_layer_and_number(mdm, tmp_path):
    conditions = by_name(plan_study("dormant", study_input(mdm, read_samples("twin:reading-5", 2), tmp_path)))
    assert len(conditions) == 1 + 64
    condition = conditions["head-3-6"]
    assert (zeroed(condition), condition.series, condition.value) == ({(3, 6)}, "layer 3", 6)
    two = study_input(mdm, read_samples("twin:reading-5", 2), tmp_path)
    subset = by_name(plan_study("dormant", two, layers=(1, 2)))
    assert {condition.series for condition in subset.values()} == {"", "layer 1", "layer 2"}


def test_every_region_that_all_samples_have_is_hidden_in_turn(mdm, tmp_path):
    plan = plan_study("blank", study_input(mdm, read_samples("twin:reading-5", 3), tmp_path), draws=2)
    conditions = by_name(plan)
    edited = [condition for condition in conditions.values() if controls(conditions, condition.name)]
    documents = [f"document-{number}" for number in range(1, 6)]
    assert [condition.name for condition in edited] == ["bos", "template", "question", "gold", "evidence", *documents]
    for condition in edited:
        for control in controls(conditions, condition.name):
            assert control.edits[0].keys.reference == condition.edits[0].keys
            assert control.edits[0].queries == condition.edits[0].queries == "others"
    assert conditions["document-4"].value == 4
    fourth = read_samples("twin:reading-5", 4)[3]
    short = replace(fourth, passages=fourth.passages[:4])
    plan = plan_study("blank", study_input(mdm, [*read_samples("twin:reading-5", 3), short], tmp_path))
    assert plan.notes == ["document 5 left out: not all samples have them"]


def test_unknown_studies_and_options_are_refused(mdm, tmp_path):
    with pytest.raises(fs.UserError, match="sinks"):
        plan_study("sink", study_input(mdm, read_samples("twin:reading-5", 2), tmp_path))
    with pytest.raises(fs.UserError, match="counts, types, draws"):
        plan_study("sinks", study_input(mdm, read_samples("twin:reading-5", 2), tmp_path), k=3)
    with pytest.raises(fs.UserError, match="a study needs samples"):
        plan_study("blank", study_input(mdm, [], tmp_path))


def effect_row(name, mean, low, high, **more):
    return {name: mean, f"{name}_low": low, f"{name}_high": high, "model": "twin:mdm", "subset": "", **more}


def test_effects_are_summarised_in_sentences():
    nan = float("nan")
    doses = {"dose": 0.3, "dose_control": 0.31, "dose_control_count": 0.052}
    table = pd.DataFrame(
        [
            effect_row("acc_effect", nan, nan, nan, condition="baseline", value=0, control=""),
            effect_row("acc_effect", -0.02, -0.05, 0.01, condition="anchors-1", value=1, control="mass", **doses),
            effect_row("acc_effect", -0.61, -0.72, -0.5, condition="anchors-5", value=5, control="mass", **doses),
            effect_row("acc_effect", 0.1, 0, 0.2, condition="anchors-5-first", series="first", control="mass", **doses),
        ]
    )
    by_number, by_type = STUDIES["sinks"].summarise(table)
    assert by_number == (
        "masking anchors instead of other keys that hold as much attention: twin:mdm, 1: loses 2 points [−1, 5] (dose"
        " 30 % against 31 %), 5: loses 61 points [50, 72] (dose 30 % against 31 %)"
    )
    assert by_type.endswith("attention: twin:mdm, first: gains 10 points [0, 20] (dose 30 % against 31 %)")
    counted = table.assign(**{f"acc_effect_count{end}": -0.5 for end in ("", "_low", "_high")})
    by_number, _ = STUDIES["sinks"].summarise(counted)
    assert "; instead of as many random keys: 1: loses 50 points [50, 50] (dose 30 % against 5.2 %), 5: lo" in by_number
    old = table.drop(columns=list(doses)).assign(control="random")  # of an earlier version
    assert STUDIES["sinks"].summarise(old)[0] == (
        "masking anchors instead of as many random keys: twin:mdm, 1: loses 2 points [−1, 5], 5: loses 61 points"
        " [50, 72]"
    )
    pinned, _ = STUDIES["pin"].summarise(table.assign(subset="noise"))
    assert "at worst twin:mdm loses 61 points [50, 72] (dose 30 % against 31 %), in anchors-5, noise" in pinned
    assert "anchors-5, noise; 1 of 2 such intervals exclude 0" in pinned
    small = pd.DataFrame([effect_row("acc_effect", x, nan, nan, value=1) for x in (-0.01, 0.002)])
    assert STUDIES["heads"].summarise(small)[0].endswith("layers: twin:mdm, 1: loses 1 point, 1: changes by 0 points")
    heads = pd.DataFrame(
        [
            effect_row("nll_change", 0.0, -0.002, 0.003, value=0),
            effect_row("nll_change", 0.02, 0.01, 0.03, value=1),
            effect_row("nll_change", 0.0, -0.02, 0.02, value=2),
        ]
    )
    assert list(is_dormant(heads)) == [True, False, False]
    assert STUDIES["dormant"].summarise(heads)[0].startswith("1 of 3 heads of twin:mdm are dormant by loss")
    regions = pd.DataFrame(
        [
            effect_row("nll_effect", 0.1, 0, 0.2, condition="bos"),
            effect_row("nll_effect", 3.2, 2.5, 4, condition="gold"),
        ],
    )
    assert (
        STUDIES["blank"].summarise(regions)[0].startswith("most missed by twin:mdm: gold 3.20 [2.50, 4.00], bos 0.10")
    )
