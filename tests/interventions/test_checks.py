"""What is wrong with edits is said in one sentence before anything is decoded."""

from __future__ import annotations

import re
from inspect import unwrap

import pytest
from restated import BOS, model_of

import floatscope as fs
from floatscope.interventions.arm import build_conditions
from floatscope.interventions.edits import Edit, Keys
from floatscope.interventions.recipes import build_control, parse_edits

INF = float("inf")
PROMPTS = [[BOS, 1, 2, 3, 4, 5], [BOS, 6]]


def refused(sentence: str):
    return pytest.raises(fs.UserError, match=re.escape(sentence))


READING = {
    "mask_anchor(k=5)": "unknown edit 'mask_anchor' (did you mean 'mask_anchors'?); allowed: mask_anchors, pin",
    "mask_anchors(kk=1)": "unknown argument of edit 'mask_anchors' 'kk' (did you mean 'k'?); allowed: k, of, steps",
    "mask_anchors(of='bfore')": "unknown step of anchors 'bfore' (did you mean 'before'?)",
    "mask_anchors(5)": "cannot read 'mask_anchors(5)'",
    "mask_anchors(k=0)": "k is how many keys, 1 or more, got 0",
    "mask_anchors(k=1.5)": "edit 'mask_anchors' takes a whole number for k, got 1.5",
    "mask_anchors(steps=True)": "edit 'mask_anchors' takes whole numbers for steps, as in steps=[0, 1], got True",
    "mask_anchors(layers=[-1])": "takes whole numbers for layers",
    "pin(layer='a')": "edit 'pin' takes a whole number for layer, got 'a'",
    "pin(layer=1.5)": "edit 'pin' takes a whole number for layer, got 1.5",
    "freeze(steps=[1])": "edit 'freeze' says itself which steps it acts on; leave steps out",
    "zero_heads(pairs=[(0, 1)], layers=[0])": "says itself which layers it acts on",
    "zero_heads()": "zero_heads needs the heads",
    "zero_heads(pairs=[0, 1])": "zero_heads takes pairs of layer and head",
    "zero_heads(pairs=[('a', 0), (1, 0)])": "zero_heads takes pairs of layer and head",
    "zero_heads(pairs=[(0, 1.5)])": "zero_heads takes pairs of layer and head",
    "evict(keep=1.0)": "k is how many keys, 1 or more, or below 1 a share of them, got 1.0",
    "evict(keep=True)": "edit 'evict' takes a number for keep, got True",
    "evict(by='mask')": "unknown score to evict by 'mask' (did you mean 'masked'?)",
    "evict(by=['masked'])": "edit 'evict' takes a text for by, got ['masked']",
    "virtual_sink(score='x')": "edit 'virtual_sink' takes a number for score, got 'x'",
    "drop_bos(x=1)": "unknown argument of edit 'drop_bos' 'x'",
    "knock_out(queries=5)": "edit 'knock_out' takes a text for queries, got 5",
    "replace_token(token=[1])": "edit 'replace_token' takes a text for token, got [1]",
}


@pytest.mark.parametrize("text", READING)
def test_what_cannot_be_read_is_refused(text):
    with refused(READING[text]) as error:
        parse_edits(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", [None, 5, [None], [3.5], {"mask_anchors": 5}])
def test_what_is_no_edit_is_refused(given):
    with refused("an edit is a recipe such as 'mask_anchors(k=5)' or a fs.Edit, got"):
        unwrap(parse_edits)(given)  # as outside of tests, where types are not checked


def test_edits_that_make_no_sense_are_refused():
    with refused("edit 'bias' takes a finite amount, got inf"):
        Edit("bias", keys=Keys("first"), amount=INF)
    with refused("edit 'scale' takes a finite amount, got nan"):
        Edit("scale", keys=Keys("first"), what="key", amount=float("nan"))
    with refused("edit 'sink' takes a finite amount, got -inf"):
        Edit("sink", amount=-INF)
    with refused("positions of a rule for keys: whole numbers from 0 on, got (-1,)"):
        Keys("positions", positions=(-1,))
    for keys in (Keys("first", 2), Keys("positions", positions=(1, 1))):
        with refused("mass can be taken from a key once"):
            Edit("move", keys=keys)
    with refused("mass is moved between counted keys, not between all of 'region'"):
        Edit("move", keys=Keys("anchors"), to=Keys("region", region="gold"))
    with refused("layers of an edit are whole numbers from 0 on, got (True,)"):
        Edit("zero", layers=(True,), heads=(0,))
    Edit("move", keys=Keys("anchors", 2), to=Keys("positions", positions=(0, 0)))  # to one key twice is well


LIKE = Keys("random", like=Keys("anchors", layer=5))
ASKED = [
    ("unshifted", "mask_anchors(k=2, layers=[2])", "acts on layer 2, and unshifted has layers 0 to 1"),
    ("arm", "zero_heads(pairs=[(0, 4)])", "acts on head 4, and arm has heads 0 to 3"),
    ("arm", Edit("scale", keys=LIKE, what="key", amount=2.0), "takes anchors of layer 5, and arm has layers 0 to 1"),
    ("arm", "pin(k=1, layer=2)", "takes anchors of layer 2, and arm has layers 0 to 1"),
    ("arm", "pin(k=1, layer=1, layers=[0, 1])", "acts on layer 0 and takes anchors of layer 1 in the same step"),
    ("unshifted", "mask_anchors(k=5)", "picks 5 keys, and a canvas has 4; give a smaller k"),
    ("arm", "mask_anchors(k=3)", "picks 3 keys, and a canvas has 2; give a smaller k"),
    ("arm", "knock_out(keys='godl')", "the samples do not have 'godl' (did you mean 'gold'?); allowed: masked"),
    ("arm", "knock_out(queries='nobody', keys='gold')", "the samples do not have 'nobody'; allowed: others, masked"),
    ("arm", "freeze()", "freeze() keeps the queries of a step, and arm has new ones at every step"),
    ("arm", "replace_token(token='mask')", "arm has no mask token to put in another's place"),
    ("arm", "replace_token(token='word')", "arm has no tokenizer, so a token is named by its id"),
    ("arm", "replace_token(token=50)", "names a token that arm does not have: ids end at 49"),
    ("arm", "replace_token(token=-1)", "names a token that arm does not have"),
    ("arm", "replace_token(token=5, layers=[1])", "changes what the whole model sees, so that it takes no layers"),
    ("shifted", "drop_bos(heads=[1])", "changes what the whole model sees, so that it takes no heads; leave heads out"),
    ("unshifted", ["pin(k=1)", "spread(k=1, layers=[1])"], "pin(k=1) and spread(k=1, layers=[1]) contradict each"),
    ("unshifted", ["freeze(step=0)", "freeze(step=1)"], "freeze(step=0) and freeze(step=1) contradict each other"),
    ("unshifted", ["virtual_sink(score=1)", "virtual_sink(score=2, heads=[0])"], "contradict each other"),
    ("unshifted", Edit("bias", keys=Keys("positions", positions=(1, 9)), amount=1.0), "position 9, and a canvas has 4"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "edits", "sentence"), ASKED)
def test_what_a_model_or_its_samples_do_not_have_is_refused(kind, edits, sentence):
    regions = fs.Regions.from_spans([{"gold": [(4, 6)]}, {}], 8)
    with refused(sentence) as error:
        fs.decode(model_of(kind), PROMPTS, edits=edits, new_tokens=2, regions=regions)
    assert "\n" not in str(error.value)


def test_what_does_not_meet_does_not_contradict():
    edits = ["pin(k=1, steps=[0])", "spread(k=1, steps=[1])", "virtual_sink(heads=[0])", "virtual_sink(heads=[1])",
             "freeze(layers=[0])", "freeze(step=0, layers=[1])"]  # fmt: skip
    assert fs.decode(model_of("unshifted"), PROMPTS, edits=edits, new_tokens=2, steps=2).tokens.shape == (2, 8)


def test_a_bos_alone_cannot_be_dropped_where_it_decides_the_first_token():
    for kind in ("arm", "shifted"):
        with refused("drop_bos() leaves nothing that decides the first new token where a prompt is only the bos"):
            fs.decode(model_of(kind), [[BOS], [BOS, 1]], edits="drop_bos()", new_tokens=2)
    assert fs.decode(model_of("unshifted"), [[BOS], [BOS, 1]], edits="drop_bos()", new_tokens=2).tokens.shape == (2, 4)


def test_a_model_without_a_bos_has_none_to_drop():
    module = model_of("arm").module
    bare = fs.Model(module, fs.ModelSpec("bare", "arm", None, shift=True))
    with refused("bare has no bos to drop"):
        fs.decode(bare, PROMPTS, edits="drop_bos()", new_tokens=2)


def test_a_text_of_several_tokens_is_no_token(tmp_path):
    model = fs.load(fs.write_random(tmp_path / "llada", layers=1, width=16), device="cpu")
    with pytest.raises(fs.UserError, match=r"'some long text' is \d+ tokens to llada; name a text that is one"):
        fs.decode(model, [[1, 2, 3]], edits="replace_token(token='some long text')", new_tokens=2)


def test_what_does_not_go_together_with_edits():
    with refused("edits and guidance do not go together; leave one out"):
        fs.decode(model_of("unshifted"), PROMPTS, edits="mask_anchors(k=1)", guidance=1.0, new_tokens=2)
    with refused("edits and influence do not go together; leave one out"):
        fs.decode(
            model_of("unshifted"), PROMPTS, edits="mask_anchors(k=1)", watch=fs.Watch(influence=True), new_tokens=2
        )


def test_controls_that_do_not_exist():
    with refused("unknown control 'randm' (did you mean 'random'?); allowed: random, middle"):
        build_control(parse_edits("mask_anchors(k=1)"), "randm")
    for recipe in ("freeze()", "virtual_sink()", "drop_bos()"):
        with refused(f"{recipe} has no matched control"):
            build_control(parse_edits(recipe), "random", 0, 4)
    for recipe in ("zero_heads(pairs=[(0, 1)])", "knock_out(keys='gold')", "evict()", "freeze()"):
        with refused("mid-rank keys are the control of anchors"):
            build_control(parse_edits(recipe), "middle", 0, 4)
    with refused("zeroes 3 of 4 heads of a layer"):
        build_control(parse_edits("zero_heads(pairs=[(0, 1), (0, 2), (0, 3)])"), "random", 0, 4)
    with refused("the control of zeroed heads needs to know how many heads a layer has"):
        build_conditions("zero_heads(pairs=[(0, 1)])")


def test_arms_are_the_edited_one_and_its_controls():
    arms = build_conditions("mask_anchors(k=2)", draws=2, series="line")
    assert [(arm.name, arm.control_of, arm.series) for arm in arms] == [
        ("edited", "", "line"), ("edited-random-0", "edited", "line"), ("edited-random-1", "edited", "line"),
    ]  # fmt: skip
    assert arms[1].edits != arms[2].edits
    assert [arm.name for arm in build_conditions("mask_anchors(k=2)", control="middle")] == [
        "edited",
        "edited-middle-0",
    ]
    assert len(build_conditions("freeze()", control=None)) == 1


def test_the_final_state_of_an_edited_decoding_is_refused():
    model = model_of("unshifted")
    edited = fs.decode(model, [[1, 2, 3]], new_tokens=2, edits="spread(k=1)")
    with pytest.raises(fs.UserError, match="this decoding was edited; decode without edits"):
        fs.final_state(edited)
    assert fs.final_state(fs.decode(model, [[1, 2, 3]], new_tokens=2))
