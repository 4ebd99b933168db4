"""A recorder turns batched steps into one trace per sample, which does not depend on the batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from synthetic_decodings import REGIONS, SyntheticStep, as_capture, batch_steps, decode_arm, decode_mdm, record_traces
from trace_equality import assert_equal_traces

from example_counts import examples
from floatscope.canvas import CanvasState, Reductions, Regions
from floatscope.errors import UserError
from floatscope.schema import EXPERT_FIELDS, FIELDS, State, fields_at_level
from floatscope.traces.recorder import Recorder
from floatscope.traces.trace_fields import TRACE_FIELDS, stored_axes

few = examples(25)


def step_with_fields(samples: list[SyntheticStep], change: dict[str, torch.Tensor], layer: int = 1):
    """One step of a batch, with some fields of one layer replaced."""
    step, layers, visibility = batch_steps(samples)
    layers[layer] = Reductions(layer, {**layers[layer].fields, **change})
    return step, as_capture(layers, visibility)


@few
@given(st.integers(0, 99), st.lists(st.integers(2, 20), min_size=2, max_size=4), st.integers(1, 6), st.integers(1, 4))
def test_a_sample_in_a_left_padded_batch_equals_the_sample_alone(seed, prompts, new, steps):
    decodings = [decode_mdm(seed + i, prompt, new, steps) for i, prompt in enumerate(prompts)]
    for i, trace in enumerate(record_traces(decodings, "left")):
        assert_equal_traces(trace, record_traces([decodings[i]], names=[f"sample-{i}"])[0])


@few
@given(st.integers(0, 99), st.integers(2, 20), st.lists(st.integers(2, 6), min_size=2, max_size=4), st.integers(1, 4))
def test_a_sample_in_a_right_padded_batch_equals_the_sample_alone(seed, prompt, news, steps):
    decodings = [decode_mdm(seed + i, prompt, new, steps) for i, new in enumerate(news)]
    for i, trace in enumerate(record_traces(decodings, "right")):
        assert_equal_traces(trace, record_traces([decodings[i]], names=[f"sample-{i}"])[0])


@few
@given(st.integers(0, 99), st.lists(st.integers(2, 20), min_size=2, max_size=3), st.integers(1, 6))
def test_a_growing_sample_in_a_padded_batch_equals_the_sample_alone(seed, prompts, new):
    decodings = [decode_arm(seed + i, prompt, new)[0] for i, prompt in enumerate(prompts)]
    meta = {"rows": "cache"}
    for i, trace in enumerate(record_traces(decodings, "left", meta=meta)):
        assert_equal_traces(trace, record_traces([decodings[i]], names=[f"sample-{i}"], meta=meta)[0])


def test_a_sample_that_finishes_early_has_only_its_own_steps():
    short, long = decode_mdm(0, 6, 4, 2), decode_mdm(1, 6, 4, 4)
    recorder = Recorder(["sample-0", "sample-1"])
    for t, step_data in enumerate(long):
        step, layers, visibility = batch_steps([short[t % 2], step_data])
        before = replace(step.before, active=torch.tensor([t < 2, True]))
        recorder.add(replace(step, before=before), as_capture(layers, visibility))
    for trace, decoding in zip(recorder.build_traces(), (short, long), strict=True):
        assert_equal_traces(trace, record_traces([decoding], names=[trace.sample])[0])


def test_regions_do_not_depend_on_the_neighbours():
    """A batch names the regions of all its samples; a trace has the sample's own regions, in reading order."""

    def build_trace(names: list[str], columns: list[int]):
        step_data = decode_mdm(3, 6, 4, 1)[0]
        step, layers, _ = batch_steps([step_data])
        pick = [c if c is not None else 0 for c in columns]
        member = step.before.regions.member[:, :, pick]
        member[:, :, [i for i, c in enumerate(columns) if c is None]] = False
        regions = Regions(tuple(names), member)
        chosen = {
            n: f[..., pick] if n == "row_regions" else f[..., pick, :][..., pick] if n in ("regions", "rollout") else f
            for n, f in layers[0].fields.items()
        }
        recorder = Recorder(["x"])
        recorder.add(
            replace(step, before=replace(step.before, regions=regions)), as_capture([Reductions(0, chosen)], [0])
        )
        return recorder.build_traces()[0]

    alone = build_trace(["document", "question"], [1, 0])
    batch = build_trace(["question", "elsewhere", "document"], [0, None, 1])
    assert alone.coords["region"] == ("question", "document")
    assert_equal_traces(alone, batch)


def test_every_field_has_its_axes_and_type():
    trace = record_traces([decode_mdm(0, 5, 6, 3)])[0]
    fields = {name: FIELDS[name] for name in fields_at_level("full")}
    assert set(FIELDS) == set(fields) | set(EXPERT_FIELDS)
    assert set(trace.arrays) == set(TRACE_FIELDS) | set(fields)
    for name, field in fields.items():
        assert trace.axes[name] == stored_axes(name, field.axes)
        assert trace.arrays[name].dtype == field.dtype
    for name, field in TRACE_FIELDS.items():
        assert (trace.axes[name], trace.arrays[name].dtype) == (field.axes, field.dtype)
    assert trace.axes["rows"] == ("commit", "layer", "head", "key")
    assert trace.axes["uniform"] == ("step", "visibility", "group", "key")
    assert trace.coords["region"] == REGIONS == trace.coords["key_region"]


@pytest.mark.parametrize("seed", range(3))
def test_values_are_where_their_axes_say(seed):
    decoding = decode_mdm(seed, 5, 6, 4)
    trace = record_traces([decoding])[0]
    n = 0
    for t, step_data in enumerate(decoding):
        np.testing.assert_array_equal(trace.arrays["tokens"][t], step_data.tokens)
        np.testing.assert_array_equal(trace.arrays["block"][t], step_data.block or (-1, -1))
        for layer, fields in enumerate(step_data.fields):
            np.testing.assert_array_equal(trace.arrays["received"][t, layer], fields["received"])
            np.testing.assert_array_equal(trace.arrays["rows"][n : n + len(step_data.commits), layer], fields["rows"])
        for position, row, token, confidence in step_data.commits:
            commit = [trace.arrays[f"commit_{x}"][n] for x in ("step", "position", "row", "token")]
            assert commit == [t, position, row, token]
            assert trace.arrays["commit_confidence"][n] == np.float32(confidence)
            n += 1
    assert n == len(trace.arrays["commit_step"]) == 6
    np.testing.assert_array_equal(trace.arrays["uniform"][:, 1], [m.fields[1]["uniform"] for m in decoding])
    np.testing.assert_array_equal(trace.arrays["tokens_after"], decoding[-1].after)
    np.testing.assert_array_equal(trace.arrays["region_member"], decoding[-1].member)
    assert trace.arrays["layer_visibility"].tolist() == [0, 1, 0]


def test_keys_beyond_the_canvas_are_nan_and_never_zero():
    prompt, new = 5, 4
    trace = record_traces([decode_arm(0, prompt, new)[0]], meta={"rows": "cache"})[0]
    assert trace.arrays["keys"].tolist() == [5, 6, 7, 8]
    assert trace.arrays["queries"].tolist() == [5, 1, 1, 1]
    beyond = np.arange(prompt + new - 1) >= trace.arrays["keys"][:, None]
    received = np.moveaxis(trace.arrays["received"], -1, 1)
    assert np.isnan(received[beyond]).all()
    assert np.isfinite(received[~beyond]).all()
    assert (trace.arrays["tokens"][beyond] == -1).all()
    assert (trace.arrays["states"][beyond] == State.PAD).all()
    assert np.isnan(trace.arrays["matrix"][1:, :, :, 1:]).all()  # one new row per step after the prompt
    assert len(trace.arrays["tokens_after"]) == prompt + new


def test_a_field_missing_in_a_layer_or_step_is_nan_there():
    recorder = Recorder(["x"])
    for t, step_data in enumerate(decode_mdm(0, 5, 4, 3)):
        step, layers, visibility = batch_steps([step_data])
        if t == 1:
            layers[2] = Reductions(2, {n: f for n, f in layers[2].fields.items() if n != "residual"})
        if t == 2:
            layers = [Reductions(r.layer, {n: f for n, f in r.fields.items() if n != "residual"}) for r in layers]
        recorder.add(step, as_capture(layers, visibility))
    is_stored = np.isfinite(recorder.build_traces()[0].arrays["residual"]).all(-1)
    assert is_stored.tolist() == [[True, True, True], [True, True, False], [False, False, False]]


def test_layers_that_differ_at_one_step_have_different_visibilities():
    recorder = Recorder(["x"])
    for t, step_data in enumerate(decode_mdm(0, 5, 4, 2)):
        step, layers, visibility = batch_steps([step_data])
        recorder.add(step, as_capture(layers, [0, 0, 0] if t == 0 else visibility))
    trace = recorder.build_traces()[0]
    assert trace.arrays["layer_visibility"].tolist() == [0, 1, 0]
    np.testing.assert_array_equal(trace.arrays["uniform"][0, 0], trace.arrays["uniform"][0, 1])
    assert (trace.arrays["uniform"][1, 0] != trace.arrays["uniform"][1, 1]).any()


def test_a_users_field_is_stored_with_its_axes():
    steps = decode_mdm(0, 5, 4, 3)
    recorder = Recorder(
        ["x"], extra_axes={"sharp": ("head", "query"), "far_key": ("head",), "says": ("commit", "word")}
    )
    for step_data in steps:
        step, layers, visibility = batch_steps([step_data])
        extra = {
            "sharp": torch.rand(1, 2, 9, dtype=torch.bfloat16),
            "far_key": torch.tensor([[8, -1]]),
            "says": torch.zeros(len(step.commits), 5, dtype=torch.float64),
        }
        recorder.add(step, as_capture([Reductions(r.layer, extra) for r in layers], visibility))
    trace = recorder.build_traces()[0]
    assert trace.axes["sharp"] == ("step", "layer", "head", "query")
    assert trace.axes["says"] == ("commit", "layer", "word")
    assert trace.arrays["sharp"].shape == (3, 3, 2, 9)
    assert trace.arrays["sharp"].dtype == np.float32
    assert trace.arrays["says"].dtype == np.float64
    assert trace.to_xarray().sizes["word"] == 5


def test_positions_of_a_users_key_field_count_from_the_first_valid_one():
    short, long = decode_mdm(0, 3, 4, 1)[0], decode_mdm(1, 8, 4, 1)[0]
    recorder = Recorder(["short", "long"], extra_axes={"far_key": ("head",)})
    step, layers, visibility = batch_steps([short, long], "left")
    fields = {"far_key": torch.tensor([[7, -1], [7, 0]])}
    recorder.add(step, as_capture([Reductions(r.layer, fields) for r in layers], visibility))
    assert [t.arrays["far_key"][0, 0].tolist() for t in recorder.build_traces()] == [[2, -1], [7, 0]]


def test_coords_name_the_layers():
    step, layers, visibility = batch_steps([decode_mdm(0, 5, 4, 1)[0]])
    names = ["model.layers.4", "model.layers.9"]
    recorder = Recorder(["x"], coords={"layer": names})
    recorder.add(step, as_capture([replace(layers[0], layer=4), replace(layers[1], layer=9)], visibility[:2]))
    trace = recorder.build_traces()[0]
    assert trace.coords["layer"] == tuple(names)
    assert trace.arrays["layers"].tolist() == [4, 9]


def test_a_value_that_float16_cannot_represent_is_refused():
    steps = [decode_mdm(0, 5, 4, 1)[0]]
    mass = batch_steps(steps)[1][1].fields["regions"].clone()
    mass[0, 1, 0, 0] = 70000.0
    message = (
        r"'regions' of layer 1 has the value 70000, but float16, its stored type, ends at 65504.*without 'regions'"
    )
    with pytest.raises(UserError, match=message):
        Recorder(["x"]).add(*step_with_fields(steps, {"regions": mass}))


def test_a_measured_infinity_is_stored():
    steps = [decode_mdm(0, 5, 4, 1)[0]]
    top = batch_steps(steps)[1][1].fields["top"].clone()
    top[0, 0, 0, 0, 0] = torch.inf
    recorder = Recorder(["x"])
    recorder.add(*step_with_fields(steps, {"top": top}))
    assert np.isinf(recorder.build_traces()[0].arrays["top"]).sum() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"mine": torch.zeros(1, 2)},
            r"field 'mine' has no axes: name them, Recorder\(extra_axes=\{'mine': \('head', …\)\}\)",
        ),
        (
            {"residual": torch.zeros(1, 8)},
            r"'residual' of layer 1 has shape \(1, 8\); expected \(batch 1, key 9\)",
        ),
        ({"received": torch.zeros(1, 3, 9)}, r"has shape \(1, 3, 9\); expected \(batch 1, group 4, key 9\)"),
        (
            {"rows": torch.zeros(1, 9)},
            r"'rows' of layer 1 has shape \(1, 9\); expected \(commit 4, head, key 9\)",
        ),
    ],
)
def test_a_field_of_the_wrong_shape_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        Recorder(["x"]).add(*step_with_fields([decode_mdm(0, 5, 4, 1)[0]], change))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"tokens": ("key",)}, "a field cannot be called 'tokens'"),
        ({"received": ("key",)}, "a field cannot be called 'received'"),
        ({"head": ("key",)}, "a field cannot be called 'head'"),
        ({"mine": ("key", "key")}, r"field 'mine' has axes \(key, key\): name each axis once"),
        ({"mine": ("head", "commit")}, "put `commit` first if there is one"),
        ({"mine": ("layer", "key")}, "leave out step, layer and batch"),
    ],
)
def test_extra_axes_that_cannot_be_stored_are_refused(extra, message):
    with pytest.raises(UserError, match=message):
        Recorder(["x"], extra_axes=extra)


def test_an_unsigned_field_is_refused():
    recorder = Recorder(["x"], extra_axes={"mine": ("key",)})
    with pytest.raises(UserError, match="field 'mine' is uint8, but a trace stores floats, signed integers"):
        recorder.add(*step_with_fields([decode_mdm(0, 5, 4, 1)[0]], {"mine": torch.zeros(1, 9, dtype=torch.uint8)}))


def test_padding_in_the_middle_is_refused():
    step, layers, visibility = batch_steps([decode_mdm(0, 5, 4, 1)[0]])
    states = step.before.states.clone()
    states[0, 5] = State.PAD
    canvas = CanvasState(step.before.tokens, states, regions=step.before.regions)
    with pytest.raises(UserError, match="sample 'x' has padding between its positions 0 and 8: pad left or right"):
        Recorder(["x"]).add(replace(step, before=canvas), as_capture(layers, visibility))


def test_a_sample_without_steps_is_refused():
    with pytest.raises(UserError, match="sample 'x' has no steps"):
        Recorder(["x"]).build_traces()


def test_a_key_under_the_padding_raises_a_value_error():
    steps = [decode_mdm(0, 3, 4, 1)[0], decode_mdm(1, 8, 4, 1)[0]]
    step, layers, visibility = batch_steps(steps, "left")
    layers[0].fields["top_key"][0, 0, 0, 0] = 1
    with pytest.raises(ValueError, match="field 'top_key' names a key outside the valid positions 5 to 11"):
        Recorder(["short", "long"]).add(step, as_capture(layers, visibility))
