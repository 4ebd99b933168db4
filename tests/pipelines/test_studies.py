"""Studies: the arms and conditions they are made of, and what is read from their effects."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pandas as pd
import pytest

import floatscope as fs
from floatscope.analysis.look import trace_views
from floatscope.analysis.retrieval import head_map, retrieval
from floatscope.analysis.studies import STUDIES, is_dormant
from floatscope.interventions.recipes import parse_edits
from floatscope.lab.twins.heldout import read
from floatscope.pipelines.studies import StudyInput, plan
from floatscope.pipelines.studies.heads import TRACED, ranked_heads
from floatscope.traces import open_run


@pytest.fixture(scope="module")
def mdm():
    return fs.load("twin:mdm", device="cpu")


def asked(model, samples, out, **settings):
    return StudyInput(model, tuple(samples), out, settings={"new_tokens": 8, **settings})


def by_name(made):
    assert made.arms[0].name == "baseline"
    assert not made.arms[0].edits
    names = [arm.name for arm in made.arms]
    assert len(set(names)) == len(names)
    assert {arm.control_of for arm in made.arms} - {""} <= set(names)
    return {arm.name: arm for arm in made.arms}


def controls(arms, name):
    return [arm for arm in arms.values() if arm.control_of == name]


def zeroed(arm):
    return {(edit.layers[0], head) for edit in arm.edits for head in edit.heads}


def test_sinks_are_masked_beside_as_many_random_and_middling_keys(mdm, tmp_path):
    made = plan("sinks", asked(mdm, read("reading-5")[:2], tmp_path))
    arms = by_name(made)
    assert len(arms) == 1 + 3 * (1 + 3 + 1)
    for k in (1, 5, 10):
        arm = arms[f"anchors-{k}"]
        assert (arm.edits, arm.value, arm.series) == (parse_edits(f"mask_anchors(k={k})"), k, "anchors")
        drawn = controls(arms, arm.name)
        assert [each.series for each in drawn] == ["random"] * 3
        assert {(each.edits[0].keys.rule, each.edits[0].keys.k) for each in drawn} == {("random", k)}
        assert len({each.edits[0].keys.seed for each in drawn}) == 3
        middle = arms[f"middle-{k}"]
        assert (middle.edits[0].keys.rule, middle.edits[0].keys.k, middle.series) == ("middle", k, "middle")
        assert middle.control_of == ""  # the effect is that against random keys
    assert len(by_name(plan("sinks", asked(mdm, read("reading-5")[:2], tmp_path), counts=2, draws=1))) == 4


def test_pinned_mass_goes_where_that_of_its_control_goes(mdm, tmp_path):
    samples = read("reading-5")[:6]
    made = plan("pin", asked(mdm, samples, tmp_path))
    arms = by_name(made)
    assert len(arms) == 1 + 4 * 2
    for name in ("step-0-1", "step-0-5", "layer-0-1", "layer-0-5"):
        (edit,), (control,) = arms[name].edits, controls(arms, name)
        (other,) = control.edits
        assert other.to == edit.to
        assert (other.keys.rule, other.keys.k) == ("random", edit.keys.k)
        assert (edit.to.layer, edit.to.of) == ((0, "now") if "layer" in name else (None, "first"))
    assert list(made.subsets) == ["reading", "counterfactual", "random", "gold-first", "gold-middle", "gold-last"]
    assert made.subsets["reading"] == samples
    for some in made.subsets.values():
        assert [sample.id for sample in some] == [sample.id for sample in samples]
    for name, place in (("gold-first", 0), ("gold-middle", 2), ("gold-last", 4)):
        assert all(sample.passages[place].gold for sample in made.subsets[name])
    assert made.notes == []


def test_conditions_that_samples_cannot_take_are_left_out_and_told(mdm, tmp_path):
    several = read("two-hop")[:6]
    made = plan("pin", asked(mdm, several, tmp_path))
    assert "gold-first" not in made.subsets
    assert any("gold-first" in sentence and "exactly one gold passage" in sentence for sentence in made.notes)
    mixed = plan("pin", asked(mdm, [*several[:4], *read("reading-5")[:1]], tmp_path))
    assert "gold-first" not in mixed.subsets
    assert any("only 1 of 5" in sentence for sentence in mixed.notes)
    few = plan("pin", asked(mdm, [*several[:1], *read("reading-5")[:4]], tmp_path))
    assert {len(some) for some in few.subsets.values()} == {4}
    assert any("1 of 5 samples cannot take part" in sentence for sentence in few.notes)


@pytest.mark.parametrize("name", ["twin:mdm", "twin:arm"])
def test_heads_are_found_on_other_samples_than_are_asked_and_have_controls_of_their_layers(name, tmp_path):
    model, samples = fs.load(name, device="cpu"), read("reading-5")[:10]
    made = plan("heads", asked(model, samples, tmp_path), counts=(2, 5, 64), draws=2)
    arms = by_name(made)
    run = open_run(tmp_path / TRACED)
    assert set(run.samples) == {sample.id for sample in samples[:8]}
    assert made.subsets == {"": samples[8:]}
    scores = head_map(pd.concat(retrieval(look) for look in trace_views(run)), "wu_set")
    first = zeroed(arms["heads-2"])
    assert scores.stack()[list(first)].min() >= scores.stack().drop(list(first)).max()
    assert first < zeroed(arms["heads-5"])
    assert any("without 64 heads" in sentence for sentence in made.notes)
    for arm in (arms["heads-2"], arms["heads-5"]):
        own = zeroed(arm)
        assert len(own) == arm.value
        for control in controls(arms, arm.name):
            assert not own & zeroed(control)
            assert Counter(layer for layer, _ in zeroed(control)) == Counter(layer for layer, _ in own)
    assert plan("heads", asked(model, samples, tmp_path), counts=(2, 5, 64), draws=2) == made  # what is traced is kept


def test_equal_heads_are_told_apart_by_their_mass_on_the_evidence(mdm, tmp_path):
    samples = read("reading-1")[:8]
    found = ranked_heads(asked(mdm, samples, tmp_path), samples, "wu_set")
    assert len(found) == 64
    pairs = list(zip(found["wu_set"], found["mass"], strict=True))
    assert pairs == sorted(pairs, reverse=True)


def test_heads_need_samples_with_evidence(mdm, tmp_path):
    with pytest.raises(fs.UserError, match="8 samples with evidence"):
        plan("heads", asked(mdm, read("reading-5")[:8], tmp_path))
    with pytest.raises(fs.UserError, match="of 12 samples 0 have evidence"):
        plan("heads", asked(mdm, read("closed-book")[:12], tmp_path))


def test_every_head_has_an_arm_that_tells_its_layer_and_place(mdm, tmp_path):
    arms = by_name(plan("dormant", asked(mdm, read("reading-5")[:2], tmp_path)))
    assert len(arms) == 1 + 64
    arm = arms["head-3-6"]
    assert (zeroed(arm), arm.series, arm.value) == ({(3, 6)}, "layer 3", 6)
    some = by_name(plan("dormant", asked(mdm, read("reading-5")[:2], tmp_path), layers=(1, 2)))
    assert {arm.series for arm in some.values()} == {"", "layer 1", "layer 2"}


def test_every_region_that_all_samples_have_is_hidden_in_turn(mdm, tmp_path):
    made = plan("blank", asked(mdm, read("reading-5")[:3], tmp_path), draws=2)
    arms = by_name(made)
    edited = [arm for arm in arms.values() if controls(arms, arm.name)]
    documents = [f"document-{number}" for number in range(1, 6)]
    assert [arm.name for arm in edited] == ["bos", "template", "question", "gold", "evidence", *documents]
    for arm in edited:
        for control in controls(arms, arm.name):
            assert control.edits[0].keys.like == arm.edits[0].keys
            assert control.edits[0].queries == arm.edits[0].queries == "others"
    assert arms["document-4"].value == 4
    short = replace(read("reading-5")[3], passages=read("reading-5")[3].passages[:4])
    made = plan("blank", asked(mdm, [*read("reading-5")[:3], short], tmp_path))
    assert made.notes == ["without document 5: not all samples have them"]


def test_what_a_study_does_not_know_is_said(mdm, tmp_path):
    with pytest.raises(fs.UserError, match="sinks"):
        plan("sink", asked(mdm, read("reading-5")[:2], tmp_path))
    with pytest.raises(fs.UserError, match="counts, draws"):
        plan("sinks", asked(mdm, read("reading-5")[:2], tmp_path), k=3)
    with pytest.raises(fs.UserError, match="no samples"):
        plan("blank", asked(mdm, [], tmp_path))


def told(name, mean, low, high, **more):
    return {name: mean, f"{name}_low": low, f"{name}_high": high, "model": "twin:mdm", "condition": "", **more}


def test_effects_are_read_as_sentences():
    table = pd.DataFrame(
        [
            told("acc_effect", float("nan"), float("nan"), float("nan"), arm="baseline", value=0),
            told("acc_effect", -0.02, -0.05, 0.01, arm="anchors-1", value=1),
            told("acc_effect", -0.61, -0.72, -0.5, arm="anchors-5", value=5),
        ]
    )
    assert STUDIES["sinks"].summarise(table) == [
        "masking 1, 5 anchors costs twin:mdm 2 [−1, 5], 61 [50, 72] points more than masking as many random keys"
    ]
    (pinned,) = STUDIES["pin"].summarise(table.assign(condition="noise"))
    assert "61 [50, 72]" in pinned
    assert "(anchors-5, noise); of 2 such intervals 1 leave out 0" in pinned
    heads = pd.DataFrame(
        [
            told("nll_change", 0.0, -0.002, 0.003, value=0),
            told("nll_change", 0.02, 0.01, 0.03, value=1),
            told("nll_change", 0.0, -0.02, 0.02, value=2),
        ]
    )
    assert list(is_dormant(heads)) == [True, False, False]
    assert STUDIES["dormant"].summarise(heads)[0].startswith("1 of 3 heads of twin:mdm are dormant by loss")
    regions = pd.DataFrame(
        [told("nll_effect", 0.1, 0, 0.2, arm="bos"), told("nll_effect", 3.2, 2.5, 4, arm="gold")],
    )
    assert (
        STUDIES["blank"].summarise(regions)[0].startswith("most missed by twin:mdm: gold 3.20 [2.50, 4.00], bos 0.10")
    )
