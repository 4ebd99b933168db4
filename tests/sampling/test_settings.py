"""Settings override a preset, a preset the defaults; a wrong setting is refused with a remedy."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import FrozenInstanceError, fields
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from floatscope.errors import UserError
from floatscope.sampling import SAMPLERS
from floatscope.schema import Paradigm


def import_without_type_checks():
    """`floatscope.sampling.settings` without the tests' type checks, which would fail before its own checks."""
    spec = spec_from_file_location("sampling_unchecked", sys.modules["floatscope.sampling.settings"].__file__)
    module = sys.modules["sampling_unchecked"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_module = import_without_type_checks()
PRESETS, Sampling, resolve_sampling = _module.PRESETS, _module.Sampling, _module.resolve_sampling


def refusal(paradigm=Paradigm.MDM, preset=None, **given) -> str:
    with pytest.raises(UserError) as error:
        resolve_sampling(paradigm, preset, **given)
    return str(error.value)


# ---- defaults, presets, overrides


@pytest.mark.parametrize("sampler", ["confidence", "threshold(tau=0.6)", "eb(gamma=0.5)"])
def test_settings_as_one_value_equal_keywords(sampler):
    given = {"sampler": sampler, "new_tokens": 12, "block": 4, "temperature": 0.5, "seed": 3}
    resolved = resolve_sampling(Paradigm.MDM, **given)
    assert resolve_sampling(Paradigm.MDM, sampling=Sampling(**given)) == resolved
    assert resolve_sampling(Paradigm.MDM, sampling=resolved) == resolved
    assert resolve_sampling(Paradigm.MDM, sampling=resolved, seed=4).seed == 4


def test_settings_as_one_value_are_checked_for_the_paradigm():
    assert "'confidence' is not for an autoregressive model" in refusal(Paradigm.ARM, sampling=Sampling("confidence"))
    assert "leave one of them out" in refusal(preset="llada", sampling=Sampling("confidence"))
    assert "sampling must be a fs.Sampling(…) or None, got 'confidence'" in refusal(sampling="confidence")
    assert "new_tokens must be a whole number" in refusal(sampling=Sampling("confidence", new_tokens=-1))


def test_the_mdm_default_is_confidence_with_one_token_per_step():
    sampling = resolve_sampling(Paradigm.MDM)
    assert (sampling.sampler, sampling.new_tokens, sampling.steps, sampling.block, sampling.temperature) == (
        "confidence",
        32,
        None,
        None,
        0.0,
    )
    assert (sampling.stop, sampling.schedule, sampling.confidence_from, sampling.eos, sampling.guidance) == (
        False,
        "even",
        "model",
        "free",
        0.0,
    )


def test_the_arm_default_appends_and_stops():
    sampling = resolve_sampling(Paradigm.ARM)
    assert (sampling.sampler, sampling.stop, sampling.temperature) == ("ar", True, 0.0)
    assert resolve_sampling(Paradigm.ARM, stop=False).stop is False


def test_a_preset_holds_its_authors_defaults():
    llada, dream = resolve_sampling(Paradigm.MDM, "llada"), resolve_sampling(Paradigm.MDM, "dream")
    assert (llada.sampler, llada.new_tokens, llada.steps, llada.block) == ("confidence", 128, None, None)
    assert (llada.schedule, llada.confidence_from, llada.temperature) == ("even", "model", 0.0)
    assert (dream.sampler, dream.new_tokens, dream.steps, dream.schedule) == ("origin", 512, 512, "time")
    assert (dream.confidence_from, dream.eps, dream.temperature, dream.top_p) == ("drawn", 1e-3, 0.0, None)


@pytest.mark.parametrize("preset", PRESETS)
def test_settings_override_a_preset(preset):
    sampling = resolve_sampling(Paradigm.MDM, preset, sampler="entropy", new_tokens=64, steps=16, temperature=0.2)
    assert (sampling.sampler, sampling.new_tokens, sampling.steps, sampling.temperature) == ("entropy", 64, 16, 0.2)
    assert sampling.schedule == PRESETS[preset].get("schedule", "even")
    assert sampling.confidence_from == PRESETS[preset].get("confidence_from", "model")


def test_none_counts_as_not_given():
    assert resolve_sampling(Paradigm.MDM, "dream", sampler=None, new_tokens=None, stop=None) == resolve_sampling(
        Paradigm.MDM, "dream"
    )


def test_a_preset_is_not_changed_by_using_it():
    before = json.dumps(PRESETS)
    resolve_sampling(Paradigm.MDM, "dream", sampler="entropy", steps=3)
    assert json.dumps(PRESETS) == before


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "pc"])  # which needs a file
def test_a_sampler_has_its_arguments_with_their_defaults(name):
    sampling = resolve_sampling(Paradigm.MDM, sampler=name)
    assert sampling.sampler == name
    assert sampling.arguments == SAMPLERS[name].arguments


def test_the_published_defaults_of_the_rules(tmp_path):
    assert resolve_sampling(Paradigm.MDM, sampler="threshold").arguments == {"tau": 0.9}
    assert resolve_sampling(Paradigm.MDM, sampler="factor").arguments == {"factor": 1.0}
    assert resolve_sampling(Paradigm.MDM, sampler="eb").arguments == {"gamma": 0.01}
    assert resolve_sampling(Paradigm.MDM, sampler="klass").arguments == {"confidence": 0.6, "kl": 0.015, "history": 2}
    counts = tmp_path / "counts.json"
    counts.write_text('{"1": 2}')
    sampling = resolve_sampling(Paradigm.MDM, sampler=f"pc(background={str(counts)!r})")
    assert sampling.arguments == {"decay": 0.25, "background": str(counts)}


def test_a_sampler_is_written_with_its_arguments():
    sampling = resolve_sampling(Paradigm.MDM, sampler="klass(confidence=0.9, kl=0.001)")
    assert sampling.arguments == {"confidence": 0.9, "kl": 0.001, "history": 2}


def test_settings_are_frozen_and_compare_by_value():
    sampling = resolve_sampling(Paradigm.MDM, sampler="threshold")
    assert sampling == resolve_sampling(Paradigm.MDM, sampler="threshold(tau=0.9)")
    with pytest.raises(FrozenInstanceError):
        sampling.steps = 3  # type: ignore[misc]


def test_settings_round_trip_through_json():
    sampling = resolve_sampling(Paradigm.MDM, sampler="threshold(tau=0.95)", new_tokens=8, block=4, top_p=0.9)
    written = json.loads(json.dumps(sampling.as_json))
    assert set(written) == {f.name for f in fields(Sampling)}
    assert Sampling(**written) == sampling


def test_blocks_are_counted():
    assert resolve_sampling(Paradigm.MDM, new_tokens=12, block=4).blocks == 3
    assert resolve_sampling(Paradigm.MDM, new_tokens=12).blocks == 1
    assert resolve_sampling(Paradigm.MDM, new_tokens=0).blocks == 1


# ---- refusals


def test_an_unknown_sampler_gets_a_suggestion():
    message = refusal(sampler="confidense")
    assert message.startswith("unknown sampler 'confidense' (did you mean 'confidence'?); allowed: ar, confidence, ")
    assert all(name in message for name in SAMPLERS)
    assert "did you mean 'threshold'" in refusal(sampler="treshold(tau=0.9)")


def test_an_unknown_preset_gets_a_suggestion():
    allowed = "llada, dream, llada2, llada2.1, sdar, fast-dllm-v2, diffusion-gemma"
    assert refusal(preset="drem") == f"unknown preset 'drem' (did you mean 'dream'?); allowed: {allowed}"


def test_an_unknown_setting_gets_a_suggestion():
    assert "unknown setting of decode 'temprature' (did you mean 'temperature'?)" in refusal(temprature=1)
    assert "unknown setting of decode 'arguments'" in refusal(arguments={})  # they are written with the sampler


def test_an_unknown_argument_gets_a_suggestion():
    assert refusal(sampler="threshold(tua=1)") == (
        "unknown argument of sampler 'threshold' 'tua' (did you mean 'tau'?); allowed: tau"
    )
    assert refusal(sampler="confidence(tau=0.9)") == "sampler 'confidence' takes no arguments, got tau=0.9"
    assert refusal(Paradigm.ARM, sampler="ar(beams=4)") == "sampler 'ar' takes no arguments, got beams=4"


@pytest.mark.parametrize("value", ["'high'", "None", "True", "[0.9]"])
def test_an_argument_of_another_type_is_refused(value):
    assert "sampler 'threshold' takes a number for tau, got " in refusal(sampler=f"threshold(tau={value})")


def test_a_sampler_that_cannot_be_read_is_refused():
    assert refusal(sampler="threshold(0.9)") == (
        "cannot read 'threshold(0.9)': write a name, or a name with arguments, as in threshold(tau=0.95)"
    )
    assert "cannot read '3'" in refusal(sampler=3)


def test_a_sampler_for_the_other_kind_of_model_is_refused():
    message = "sampler 'confidence' is not for an autoregressive model, which takes 'ar'"
    assert refusal(Paradigm.ARM, sampler="confidence") == message
    assert refusal(Paradigm.ARM, preset="llada").startswith("preset 'llada' is for masked diffusion models")
    message = "sampler 'ar' is not for a masked diffusion model, which takes confidence, margin, entropy"
    assert refusal(Paradigm.MDM, sampler="ar").startswith(message)


WHOLE = {"new_tokens": 0, "steps": 1, "block": 1, "top_k": 1}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [-1, 1.5, 2.0, True, "8", math.nan, math.inf, [4]], ids=repr)
def test_a_count_must_be_a_whole_number(name, value):
    assert refusal(**{name: value}) == f"{name} must be a whole number of at least {WHOLE[name]}, got {value!r}"


@pytest.mark.parametrize("name", ["steps", "block", "top_k"])
def test_a_count_of_0_is_refused(name):
    assert refusal(**{name: 0}) == f"{name} must be a whole number of at least 1, got 0"


@pytest.mark.parametrize("value", [1.5, True, "0", math.nan], ids=repr)
def test_a_seed_must_be_a_whole_number(value):
    assert refusal(seed=value) == f"seed must be a whole number, got {value!r}"
    assert resolve_sampling(Paradigm.MDM, seed=-3).seed == -3


@pytest.mark.parametrize("name", ["temperature", "order_temperature", "guidance"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, -math.inf, True, "1", [1.0]], ids=repr)
def test_temperatures_and_guidance_must_be_0_or_more(name, value):
    assert refusal(**{name: value}) == f"{name} must be 0 or more, got {value!r}"


@pytest.mark.parametrize("name", ["eps", "top_p"])
@pytest.mark.parametrize("value", [0, 0.0, -0.1, 1.01, math.nan, math.inf, True, "0.9"], ids=repr)
def test_a_share_must_be_above_0_and_at_most_1(name, value):
    assert refusal(**{name: value}) == f"{name} must be more than 0 and at most 1, got {value!r}"
    assert getattr(resolve_sampling(Paradigm.MDM, **{name: 1}), name) == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("schedule", "tme", "unknown schedule 'tme' (did you mean 'time'?); allowed: even, time"),
        ("confidence_from", "draw", "unknown confidence_from 'draw' (did you mean 'drawn'?); allowed: model, drawn"),
        ("eos", "nevr", "unknown eos 'nevr' (did you mean 'never'?); allowed: free, never, last"),
        ("eos", 3, "unknown eos '3'; allowed: free, never, last"),
    ],
)
def test_an_unknown_choice_is_refused(name, value, message):
    assert refusal(**{name: value}) == message


def test_a_block_longer_than_the_answer_is_refused():
    assert refusal(new_tokens=8, block=9) == "a block of 9 is longer than the 8 new tokens; give a shorter one"
    assert refusal(new_tokens=0, block=4) == "a block of 4 is longer than the 0 new tokens; give a shorter one"
    assert resolve_sampling(Paradigm.MDM, new_tokens=8, block=8).blocks == 1


@pytest.mark.parametrize(("new", "block", "near"), [(12, 5, 4), (128, 30, 32), (7, 3, 1), (100, 60, 50)])
def test_a_block_that_does_not_divide_the_answer_gets_a_suggestion(new, block, near):
    message = refusal(new_tokens=new, block=block)
    assert message == f"{new} new tokens do not divide into blocks of {block}; use block={near}"
    assert resolve_sampling(Paradigm.MDM, new_tokens=new, block=near).blocks == new // near


@pytest.mark.parametrize(("steps", "blocks", "near"), [(10, 4, 8), (7, 2, 8), (3, 4, 4), (1, 8, 8)])
def test_steps_that_do_not_divide_get_a_suggestion(steps, blocks, near):
    message = refusal(new_tokens=8 * blocks, block=8, steps=steps)
    assert message.startswith(
        f"{steps} steps do not divide among {blocks} blocks; give a multiple of {blocks}, such as "
    )
    assert message.endswith(f" {near}")
    assert resolve_sampling(Paradigm.MDM, new_tokens=8 * blocks, block=8, steps=near).steps == near


@pytest.mark.parametrize("name", [n for n, rule in SAMPLERS.items() if rule.pace == "adaptive"])
def test_adaptive_samplers_refuse_steps(name):
    assert refusal(sampler=name, steps=8) == (f"sampler '{name}' decides its own number of steps; leave `steps` out")


@pytest.mark.parametrize("name", [n for n, rule in SAMPLERS.items() if rule.pace != "adaptive" and n != "pc"])
def test_other_samplers_accept_steps(name):
    assert resolve_sampling(Paradigm.MDM, sampler=name, steps=8).steps == 8


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps", 8), ("block", 8), ("schedule", "time"), ("guidance", 1.0), ("order_temperature", 0.5)],
)
def test_ar_has_no_steps_and_no_blocks(name, value):
    assert refusal(Paradigm.ARM, **{name: value}) == (
        f"{name} does not apply to 'ar', which generates one token per step; leave it out"
    )


def test_ar_must_append_something():
    assert refusal(Paradigm.ARM, new_tokens=0) == "an autoregressive model only appends: new_tokens must be at least 1"


def test_ar_accepts_token_settings():
    sampling = resolve_sampling(Paradigm.ARM, temperature=0.7, top_p=0.9, top_k=40, seed=3, new_tokens=5)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed, sampling.new_tokens) == (
        0.7,
        0.9,
        40,
        3,
        5,
    )


# ---- more refusals


@pytest.mark.parametrize("sampler", ["threshold", "factor", "eb"])
def test_an_adaptive_sampler_drops_the_steps_of_a_preset(sampler):
    assert resolve_sampling(Paradigm.MDM, "dream", sampler=sampler, new_tokens=64).steps is None


@pytest.mark.parametrize("value", ["no", 1, 0, []])
def test_stop_is_true_or_false(value):
    refusal(stop=value)


@pytest.mark.parametrize("sampler", ["klass(history=0)", "klass(history=-1)", "klass(history=1.5)"])
def test_a_history_is_a_whole_number_of_at_least_1(sampler):
    refusal(sampler=sampler)


def test_pc_without_a_table_is_refused_before_decoding_begins():
    refusal(sampler="pc")


@pytest.mark.parametrize("tau", [2, 1.01, -0.5])
def test_a_threshold_is_a_probability(tau):
    with pytest.raises(UserError, match="is a probability, from 0 to 1"):
        resolve_sampling(Paradigm.MDM, sampler=f"threshold(tau={tau})")


# ---- models that attend in blocks


def test_presets_of_block_models_have_the_authors_defaults():
    def resolve(preset):
        sampling = resolve_sampling(Paradigm.MDM, preset, block_size=32)
        return sampling.sampler, sampling.arguments, sampling.block, sampling.steps, sampling.temperature, sampling.stop

    off = {"editing": None, "extra_steps": 16}
    assert resolve("llada2") == ("dynamic", {"tau": 0.95, **off}, None, None, 0.0, True)
    assert resolve("llada2.1") == ("dynamic", {"tau": 0.95, **off, "editing": 0.9}, None, None, 0.0, True)
    assert resolve("sdar") == ("dynamic", {"tau": 0.85, **off}, None, None, 1.0, True)
    assert resolve("fast-dllm-v2") == ("threshold", {"tau": 0.95}, 8, None, 0.0, True)


def test_a_preset_is_for_one_kind_of_attention():
    message = "preset 'sdar' is for models that attend in blocks, and this one attends to all positions"
    assert refusal(preset="sdar").startswith(message)
    message = "preset 'llada' is for models that attend to all positions, and this one attends in blocks of 4"
    assert refusal(preset="llada", block_size=4).startswith(message)
    assert "autoregressive" in refusal(Paradigm.ARM, "llada2")


def test_blocks_of_decoding_divide_those_of_the_attention():
    assert resolve_sampling(Paradigm.MDM, block_size=8, block=4, new_tokens=9, steps=3).block == 4
    for block in (3, 16):
        assert refusal(block_size=8, block=block) == (
            f"this model attends in blocks of 8, and blocks of {block} would cross their borders; leave block out, or"
            " give a divisor of 8"
        )
    assert "decides its own number of steps" in refusal(block_size=8, sampler="threshold", steps=4)


def test_a_block_model_needs_new_tokens():
    message = "this model fills whole blocks of 4 after the prompt: new_tokens must be at least 1, got 0"
    assert refusal(block_size=4, new_tokens=0) == message


@pytest.mark.parametrize("editing", ["-0.1", "1.5", "True", "'high'"])
def test_a_threshold_of_editing_is_a_probability_or_none(editing):
    expected = "editing of sampler 'dynamic' is a probability, from 0 to 1, or None for no token editing, got "
    assert refusal(sampler=f"dynamic(editing={editing})") == f"{expected}{editing}"
    assert resolve_sampling(Paradigm.MDM, sampler="dynamic(editing=None)").arguments["editing"] is None


def test_extra_steps_are_a_count():
    assert "extra_steps of sampler 'dynamic' must be 0 to 1,000,000" in refusal(sampler="dynamic(extra_steps=-1)")
