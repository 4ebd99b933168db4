"""Wrong edits are refused in one sentence before anything is decoded."""

from __future__ import annotations

import re
from inspect import unwrap

import pytest
from reference import BOS, build_model

import floatscope as fs
from floatscope.interventions.conditions import build_conditions
from floatscope.interventions.edits import (
    Anchors,
    Bias,
    PositionKeys,
    RandomSameCount,
    ScaleKeys,
)
from floatscope.interventions.recipes import build_control, parse_edits

INF = float("inf")
PROMPTS = [[BOS, 1, 2, 3, 4, 5], [BOS, 6]]


def expect_error(sentence: str):
    return pytest.raises(fs.UserError, match=re.escape(sentence))


UNREADABLE = {
    "mask_anchor(k=5)": "unknown edit 'mask_anchor' (did you mean 'mask_anchors'?); allowed: mask_anchors, pin",
    "mask_anchors(kk=1)": "unknown argument of edit 'mask_anchors' 'kk' (did you mean 'k'?); allowed: k, of, only",
    "mask_anchors(of='bfore')": "unknown step of anchors 'bfore' (did you mean 'before'?)",
    "mask_anchors(5)": "cannot read 'mask_anchors(5)'",
    "mask_anchors(k=0)": "k must be a number of keys, 1 or more, got 0",
    "mask_anchors(k=1.5)": "edit 'mask_anchors' takes a whole number for k, got 1.5",
    "mask_anchors(steps=True)": "edit 'mask_anchors' takes whole numbers for steps, as in steps=[0, 1], got True",
    "mask_anchors(layers=[-1])": "takes whole numbers for layers",
    "pin(layer='a')": "edit 'pin' takes a whole number for layer, got 'a'",
    "pin(layer=1.5)": "edit 'pin' takes a whole number for layer, got 1.5",
    "freeze(steps=[1])": "edit 'freeze' sets its own steps; leave steps out",
    "zero_heads(pairs=[(0, 1)], layers=[0])": "sets its own layers",
    "zero_heads()": "zero_heads needs the heads",
    "zero_heads(pairs=[0, 1])": "zero_heads takes pairs of layer and head",
    "zero_heads(pairs=[('a', 0), (1, 0)])": "zero_heads takes pairs of layer and head",
    "zero_heads(pairs=[(0, 1.5)])": "zero_heads takes pairs of layer and head",
    "evict(keep=1.0)": "keep must be a number of keys, 1 or more, or a share between 0 and 1, got 1.0",
    "evict(keep=True)": "edit 'evict' takes a number for keep, got True",
    "evict(by='mask')": "unknown score to evict by 'mask' (did you mean 'masked'?)",
    "evict(by=['masked'])": "edit 'evict' takes a text for by, got ['masked']",
    "virtual_sink(score='x')": "edit 'virtual_sink' takes a number for score, got 'x'",
    "pin(only='structure')": "unknown type of anchors 'structure' (did you mean 'structural'?)",
    "drop_bos(x=1)": "unknown argument of edit 'drop_bos' 'x'",
    "knock_out(queries=5)": "edit 'knock_out' takes a text for queries, got 5",
    "replace_token(token=[1])": "edit 'replace_token' takes a text for token, got [1]",
}


@pytest.mark.parametrize("text", UNREADABLE)
def test_invalid_recipes_are_refused(text):
    with expect_error(UNREADABLE[text]) as error:
        parse_edits(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", [None, 5, [None], [3.5], {"mask_anchors": 5}])
def test_values_that_are_not_edits_are_refused(given):
    with expect_error("an edit must be a recipe such as 'mask_anchors(k=5)' or an fs.Edit, got"):
        unwrap(parse_edits)(given)  # as outside of tests, where types are not checked


SAME_COUNT = RandomSameCount(Anchors(layer=5))
UNSUPPORTED = [
    ("unshifted", "mask_anchors(k=2, layers=[2])", "acts on layer 2, but unshifted has layers 0 to 1"),
    ("arm", "zero_heads(pairs=[(0, 4)])", "acts on head 4, but arm has heads 0 to 3"),
    ("arm", ScaleKeys(SAME_COUNT, 2.0), "uses anchors of layer 5, but arm has"),
    ("arm", "pin(k=1, layer=2)", "uses anchors of layer 2, but arm has layers 0 to 1"),
    ("arm", "pin(k=1, layer=1, layers=[0, 1])", "acts on layer 0 but uses anchors of layer 1 of the same step"),
    ("unshifted", "mask_anchors(k=5)", "picks 5 keys, but a canvas has 4; give a smaller k"),
    ("arm", "mask_anchors(k=3)", "picks 3 keys, but a canvas has 2; give a smaller k"),
    ("arm", "knock_out(keys='godl')", "the samples do not have 'godl' (did you mean 'gold'?); allowed: masked"),
    ("arm", "knock_out(queries='nobody', keys='gold')", "the samples do not have 'nobody'; allowed: others, masked"),
    ("arm", "freeze()", "freeze() needs the same queries at every step, but arm has new ones"),
    ("arm", "replace_token(token='mask')", "arm has no mask token; name another token"),
    ("arm", "replace_token(token='word')", "arm has no tokenizer; give the token as an id"),
    ("arm", "replace_token(token=50)", "names a token that arm does not have; ids go up to 49"),
    ("arm", "replace_token(token=-1)", "names a token that arm does not have"),
    ("arm", "replace_token(token=5, layers=[1])", "changes the input of the whole model and takes no layers"),
    ("shifted", "drop_bos(heads=[1])", "changes the input of the whole model and takes no heads; leave heads out"),
    ("unshifted", ["pin(k=1)", "spread(k=1, layers=[1])"], "pin(k=1) and spread(k=1, layers=[1]) conflict"),
    ("unshifted", ["freeze(step=0)", "freeze(step=1)"], "freeze(step=0) and freeze(step=1) conflict where both act"),
    ("unshifted", ["virtual_sink(score=1)", "virtual_sink(score=2, heads=[0])"], "conflict where both act"),
    ("unshifted", Bias(PositionKeys((1, 9)), 1.0), "position 9, but a canvas has 4"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "edits", "sentence"), UNSUPPORTED)
def test_edits_that_do_not_fit_the_model_or_its_samples_are_refused(kind, edits, sentence):
    regions = fs.Regions.from_spans([{"gold": [(4, 6)]}, {}], 8)
    with expect_error(sentence) as error:
        fs.decode(build_model(kind), PROMPTS, edits=edits, new_tokens=2, regions=regions)
    assert "\n" not in str(error.value)


def test_edits_that_do_not_overlap_do_not_conflict():
    edits = ["pin(k=1, steps=[0])", "spread(k=1, steps=[1])", "virtual_sink(heads=[0])", "virtual_sink(heads=[1])",
             "freeze(layers=[0])", "freeze(step=0, layers=[1])"]  # fmt: skip
    assert fs.decode(build_model("unshifted"), PROMPTS, edits=edits, new_tokens=2, steps=2).tokens.shape == (2, 8)


def test_a_bos_that_predicts_the_first_token_cannot_be_dropped():
    for kind in ("arm", "shifted"):
        with expect_error(
            "drop_bos() leaves no row that predicts the first new token, because a prompt is only the bos"
        ):
            fs.decode(build_model(kind), [[BOS], [BOS, 1]], edits="drop_bos()", new_tokens=2)
    assert fs.decode(build_model("unshifted"), [[BOS], [BOS, 1]], edits="drop_bos()", new_tokens=2).tokens.shape == (
        2,
        4,
    )


def test_drop_bos_needs_a_bos():
    module = build_model("arm").module
    bare = fs.Model(module, fs.ModelSpec("bare", fs.Paradigm.ARM, None, shift=True))
    with expect_error("bare has no bos token to drop"):
        fs.decode(bare, PROMPTS, edits="drop_bos()", new_tokens=2)


def test_a_text_of_several_tokens_is_refused_as_a_token(tmp_path):
    model = fs.load(fs.write_random(tmp_path / "llada", layers=1, width=16), device="cpu")
    with pytest.raises(fs.UserError, match=r"'some long text' is \d+ tokens in llada; give a text of one token"):
        fs.decode(model, [[1, 2, 3]], edits="replace_token(token='some long text')", new_tokens=2)


def test_edits_cannot_be_combined_with_guidance_or_influence():
    with expect_error("edits and guidance cannot be combined; leave one out"):
        fs.decode(build_model("unshifted"), PROMPTS, edits="mask_anchors(k=1)", guidance=1.0, new_tokens=2)
    with expect_error("edits and influence cannot be combined; leave one out"):
        fs.decode(
            build_model("unshifted"), PROMPTS, edits="mask_anchors(k=1)", watch=fs.Watch(influence=True), new_tokens=2
        )


def test_impossible_controls_are_refused():
    with expect_error("unknown control 'randm' (did you mean 'random'?); allowed: mass, random, middle"):
        build_control(parse_edits("mask_anchors(k=1)"), "randm")
    for recipe in ("freeze()", "virtual_sink()", "drop_bos()"):
        with expect_error(f"{recipe} has no matched control"):
            build_control(parse_edits(recipe), "random", 0, 4)
    for recipe in ("zero_heads(pairs=[(0, 1)])", "replace_token()", "freeze()"):
        with expect_error("has no control of equal mass"):
            build_control(parse_edits(recipe), "mass", 0, 4)
    for recipe in ("zero_heads(pairs=[(0, 1)])", "knock_out(keys='gold')", "evict()", "freeze()"):
        with expect_error("control 'middle' replaces anchors"):
            build_control(parse_edits(recipe), "middle", 0, 4)
    with expect_error("zeroes 3 of 4 heads in a layer"):
        build_control(parse_edits("zero_heads(pairs=[(0, 1), (0, 2), (0, 3)])"), "random", 0, 4)
    with expect_error("the control of zeroed heads needs `heads`"):
        build_conditions("zero_heads(pairs=[(0, 1)])")


def test_conditions_are_the_edit_and_its_controls():
    conditions = build_conditions("mask_anchors(k=2)", draws=2, series="line")
    assert [(each.name, each.control_of, each.control, each.series) for each in conditions] == [
        ("edited", "", "", "line"),
        ("edited-mass-0", "edited", "mass", "line"), ("edited-mass-1", "edited", "mass", "line"),
        ("edited-random-0", "edited", "random", "line"), ("edited-random-1", "edited", "random", "line"),
    ]  # fmt: skip
    assert len({condition.edits for condition in conditions}) == 5
    # Heads and tokens hold no attention of their own to match.
    for recipe in ("zero_heads(pairs=[(0, 1)])", "replace_token()"):
        assert [each.name for each in build_conditions(recipe, draws=1, heads=4)] == ["edited", "edited-random-0"]
    assert [condition.name for condition in build_conditions("mask_anchors(k=2)", control="middle")] == [
        "edited",
        "edited-middle-0",
    ]
    assert len(build_conditions("freeze()", control=None)) == 1


def test_the_final_state_of_an_edited_decoding_is_refused():
    model = build_model("unshifted")
    edited = fs.decode(model, [[1, 2, 3]], new_tokens=2, edits="spread(k=1)")
    with pytest.raises(fs.UserError, match="this decoding was edited; decode without edits"):
        fs.final_state(edited)
    assert fs.final_state(fs.decode(model, [[1, 2, 3]], new_tokens=2))
