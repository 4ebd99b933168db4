"""Settings: what is given beats the preset, the preset the family's default; a wrong one is refused with its remedy."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import FrozenInstanceError, fields
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from floatscope.errors import UserError
from floatscope.sampling import SAMPLERS


def as_production_runs_it():
    """`floatscope.sampling.settings` without the tests' type checks, which would speak before its own do."""
    spec = spec_from_file_location("sampling_unchecked", sys.modules["floatscope.sampling.settings"].__file__)
    module = sys.modules["sampling_unchecked"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_module = as_production_runs_it()
PRESETS, Sampling, resolve_sampling = _module.PRESETS, _module.Sampling, _module.resolve_sampling


def refused(family="mdm", preset=None, **given) -> str:
    with pytest.raises(UserError) as error:
        resolve_sampling(family, preset, **given)
    return str(error.value)


# ---- what a run gets


def test_a_masked_diffusion_model_is_filled_by_confidence_one_token_a_step():
    how = resolve_sampling("mdm")
    assert (how.sampler, how.new_tokens, how.steps, how.block, how.temperature) == ("confidence", 32, None, None, 0.0)
    assert (how.stop, how.schedule, how.judged, how.eos, how.guidance) == (False, "even", "model", "free", 0.0)


def test_an_autoregressive_model_appends_and_stops():
    how = resolve_sampling("arm")
    assert (how.sampler, how.stop, how.temperature) == ("ar", True, 0.0)
    assert resolve_sampling("arm", stop=False).stop is False


def test_a_preset_is_its_authors_defaults():
    llada, dream = resolve_sampling("mdm", "llada"), resolve_sampling("mdm", "dream")
    assert (llada.sampler, llada.new_tokens, llada.steps, llada.block) == ("confidence", 128, None, None)
    assert (llada.schedule, llada.judged, llada.temperature) == ("even", "model", 0.0)
    assert (dream.sampler, dream.new_tokens, dream.steps, dream.schedule) == ("origin", 512, 512, "time")
    assert (dream.judged, dream.eps, dream.temperature, dream.top_p) == ("drawn", 1e-3, 0.0, None)


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_given_replaces_that_part_of_a_preset(preset):
    how = resolve_sampling("mdm", preset, sampler="entropy", new_tokens=64, steps=16, temperature=0.2)
    assert (how.sampler, how.new_tokens, how.steps, how.temperature) == ("entropy", 64, 16, 0.2)
    assert how.schedule == PRESETS[preset].get("schedule", "even")
    assert how.judged == PRESETS[preset].get("judged", "model")


def test_none_is_not_given():
    assert resolve_sampling("mdm", "dream", sampler=None, new_tokens=None, stop=None) == resolve_sampling(
        "mdm", "dream"
    )


def test_a_preset_is_not_changed_by_using_it():
    before = json.dumps(PRESETS)
    resolve_sampling("mdm", "dream", sampler="entropy", steps=3)
    assert json.dumps(PRESETS) == before


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "pc"])  # which needs a file
def test_a_sampler_has_its_arguments_with_their_defaults(name):
    how = resolve_sampling("mdm", sampler=name)
    assert how.sampler == name
    assert how.arguments == {**SAMPLERS[name].arguments, **SAMPLERS[name].scored_by}


def test_the_published_defaults_of_the_rules(tmp_path):
    assert resolve_sampling("mdm", sampler="threshold").arguments == {"tau": 0.9}
    assert resolve_sampling("mdm", sampler="factor").arguments == {"factor": 1.0}
    assert resolve_sampling("mdm", sampler="eb").arguments == {"gamma": 0.01}
    assert resolve_sampling("mdm", sampler="klass").arguments == {"confidence": 0.6, "kl": 0.015, "history": 2}
    counts = tmp_path / "counts.json"
    counts.write_text('{"1": 2}')
    how = resolve_sampling("mdm", sampler=f"pc(background={str(counts)!r})")
    assert how.arguments == {"decay": 0.25, "background": str(counts)}


def test_a_sampler_is_spelled_with_its_arguments():
    how = resolve_sampling("mdm", sampler="klass(confidence=0.9, kl=0.001)")
    assert how.arguments == {"confidence": 0.9, "kl": 0.001, "history": 2}


def test_settings_are_frozen_and_equal_when_they_say_the_same():
    how = resolve_sampling("mdm", sampler="threshold")
    assert how == resolve_sampling("mdm", sampler="threshold(tau=0.9)")
    with pytest.raises(FrozenInstanceError):
        how.steps = 3  # type: ignore[misc]


def test_settings_are_written_as_json():
    how = resolve_sampling("mdm", sampler="threshold(tau=0.95)", new_tokens=8, block=4, top_p=0.9)
    written = json.loads(json.dumps(how.as_json))
    assert set(written) == {f.name for f in fields(Sampling)}
    assert Sampling(**written) == how


def test_blocks_are_counted():
    assert resolve_sampling("mdm", new_tokens=12, block=4).blocks == 3
    assert resolve_sampling("mdm", new_tokens=12).blocks == 1
    assert resolve_sampling("mdm", new_tokens=0).blocks == 1


# ---- what is refused


def test_an_unknown_sampler_is_answered_with_the_nearest():
    says = refused(sampler="confidense")
    assert says.startswith("unknown sampler 'confidense' (did you mean 'confidence'?); allowed: ar, confidence, ")
    assert all(name in says for name in SAMPLERS)
    assert "did you mean 'threshold'" in refused(sampler="treshold(tau=0.9)")


def test_an_unknown_preset_is_answered_with_the_nearest():
    assert refused(preset="drem") == "unknown preset 'drem' (did you mean 'dream'?); allowed: llada, dream"


def test_an_unknown_setting_is_answered_with_the_nearest():
    assert "unknown setting of decode 'temprature' (did you mean 'temperature'?)" in refused(temprature=1)
    assert "unknown setting of decode 'arguments'" in refused(arguments={})  # they are spelled with the sampler


def test_an_unknown_argument_is_answered_with_the_nearest():
    assert refused(sampler="threshold(tua=1)") == (
        "unknown argument of sampler 'threshold' 'tua' (did you mean 'tau'?); allowed: tau"
    )
    assert refused(sampler="confidence(tau=0.9)") == "sampler 'confidence' takes no arguments, got tau=0.9"
    assert refused("arm", sampler="ar(beams=4)") == "sampler 'ar' takes no arguments, got beams=4"


@pytest.mark.parametrize("value", ["'high'", "None", "True", "[0.9]"])
def test_an_argument_of_another_type_is_refused(value):
    assert "sampler 'threshold' takes a number for tau, got " in refused(sampler=f"threshold(tau={value})")


def test_a_sampler_that_cannot_be_read_is_refused():
    assert refused(sampler="threshold(0.9)") == (
        "cannot read 'threshold(0.9)': write a name, or a name with arguments, as in threshold(tau=0.95)"
    )
    assert "cannot read '3'" in refused(sampler=3)


def test_a_sampler_for_the_other_kind_of_model_is_refused():
    said = "sampler 'confidence' is not for an autoregressive model, which takes 'ar'"
    assert refused("arm", sampler="confidence") == said
    assert refused("arm", preset="llada").startswith("preset 'llada' is for masked diffusion models")
    said = "sampler 'ar' is not for a masked diffusion model, which takes confidence, margin, entropy"
    assert refused("mdm", sampler="ar").startswith(said)


WHOLE = {"new_tokens": 0, "steps": 1, "block": 1, "top_k": 1}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [-1, 1.5, 2.0, True, "8", math.nan, math.inf, [4]], ids=repr)
def test_a_count_must_be_a_whole_number(name, value):
    assert refused(**{name: value}) == f"{name} must be a whole number of at least {WHOLE[name]}, got {value!r}"


@pytest.mark.parametrize("name", ["steps", "block", "top_k"])
def test_a_count_of_0_is_refused(name):
    assert refused(**{name: 0}) == f"{name} must be a whole number of at least 1, got 0"


@pytest.mark.parametrize("value", [1.5, True, "0", math.nan], ids=repr)
def test_a_seed_must_be_a_whole_number(value):
    assert refused(seed=value) == f"seed must be a whole number, got {value!r}"
    assert resolve_sampling("mdm", seed=-3).seed == -3


@pytest.mark.parametrize("name", ["temperature", "order_temperature", "guidance"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, -math.inf, True, "1", [1.0]], ids=repr)
def test_a_strength_must_be_0_or_more(name, value):
    assert refused(**{name: value}) == f"{name} must be 0 or more, got {value!r}"


@pytest.mark.parametrize("name", ["eps", "top_p"])
@pytest.mark.parametrize("value", [0, 0.0, -0.1, 1.01, math.nan, math.inf, True, "0.9"], ids=repr)
def test_a_share_must_be_above_0_and_at_most_1(name, value):
    assert refused(**{name: value}) == f"{name} must be more than 0 and at most 1, got {value!r}"
    assert getattr(resolve_sampling("mdm", **{name: 1}), name) == 1


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("schedule", "tme", "unknown schedule 'tme' (did you mean 'time'?); allowed: even, time"),
        ("judged", "draw", "unknown judged 'draw' (did you mean 'drawn'?); allowed: model, drawn"),
        ("eos", "nevr", "unknown eos 'nevr' (did you mean 'never'?); allowed: free, never, last"),
        ("eos", 3, "unknown eos '3'; allowed: free, never, last"),
    ],
)
def test_a_word_must_be_one_of_a_few(name, value, says):
    assert refused(**{name: value}) == says


def test_a_block_longer_than_the_answer_is_refused():
    assert refused(new_tokens=8, block=9) == "a block of 9 is longer than the 8 new tokens; give a shorter one"
    assert refused(new_tokens=0, block=4) == "a block of 4 is longer than the 0 new tokens; give a shorter one"
    assert resolve_sampling("mdm", new_tokens=8, block=8).blocks == 1


@pytest.mark.parametrize(("new", "block", "near"), [(12, 5, 4), (128, 30, 32), (7, 3, 1), (100, 60, 50)])
def test_a_block_that_does_not_divide_the_answer_is_answered_with_one_that_would(new, block, near):
    says = refused(new_tokens=new, block=block)
    assert says == f"{new} new tokens do not divide into blocks of {block}; {near} would do"
    assert resolve_sampling("mdm", new_tokens=new, block=near).blocks == new // near


@pytest.mark.parametrize(("steps", "blocks", "near"), [(10, 4, 8), (7, 2, 8), (3, 4, 4), (1, 8, 8)])
def test_steps_that_do_not_divide_are_answered_with_a_number_that_would(steps, blocks, near):
    says = refused(new_tokens=8 * blocks, block=8, steps=steps)
    assert says.startswith(f"{steps} steps do not divide among {blocks} blocks; give a multiple of {blocks}, such as ")
    assert says.endswith(f" {near}")
    assert resolve_sampling("mdm", new_tokens=8 * blocks, block=8, steps=near).steps == near


@pytest.mark.parametrize("name", [n for n, rule in SAMPLERS.items() if rule.pace == "own"])
def test_steps_are_refused_by_samplers_that_decide_them(name):
    assert refused(sampler=name, steps=8) == (
        f"sampler '{name}' decides by itself how many steps it takes; leave `steps` out"
    )


@pytest.mark.parametrize("name", [n for n, rule in SAMPLERS.items() if rule.pace != "own" and n != "pc"])
def test_steps_are_taken_by_the_others(name):
    assert resolve_sampling("mdm", sampler=name, steps=8).steps == 8


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps", 8), ("block", 8), ("schedule", "time"), ("guidance", 1.0), ("order_temperature", 0.5)],
)
def test_ar_has_no_steps_and_no_blocks(name, value):
    assert refused("arm", **{name: value}) == (
        f"{name} means nothing to 'ar', which generates one token a step; leave it out"
    )


def test_ar_must_append_something():
    assert refused("arm", new_tokens=0) == "an autoregressive model only appends: new_tokens must be at least 1"


def test_ar_takes_what_belongs_to_a_token():
    how = resolve_sampling("arm", temperature=0.7, top_p=0.9, top_k=40, seed=3, new_tokens=5)
    assert (how.temperature, how.top_p, how.top_k, how.seed, how.new_tokens) == (0.7, 0.9, 40, 3, 5)


# ---- open


@pytest.mark.parametrize("sampler", ["threshold", "factor", "eb"])
def test_a_preset_can_be_used_with_a_sampler_that_decides_its_steps(sampler):
    assert resolve_sampling("mdm", "dream", sampler=sampler, new_tokens=64).steps is None


@pytest.mark.parametrize("value", ["no", 1, 0, []])
def test_stop_is_true_or_false(value):
    refused(stop=value)


@pytest.mark.parametrize("sampler", ["klass(history=0)", "klass(history=-1)", "klass(history=1.5)"])
def test_a_history_is_a_whole_number_of_at_least_1(sampler):
    refused(sampler=sampler)


def test_pc_without_a_table_is_refused_before_decoding_begins():
    refused(sampler="pc")
