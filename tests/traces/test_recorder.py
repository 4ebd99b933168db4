"""A recorder turns batched steps into one trace per sample, and the batch leaves no mark."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from alike import assert_alike
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import REGIONS, Moment, arm, batched, mdm, record

from floatscope.canvas import CanvasState, Reductions, Regions
from floatscope.errors import UserError
from floatscope.schema import FIELDS, State
from floatscope.traces.layout import TRACE_FIELDS, stored_axes
from floatscope.traces.recorder import Recorder

few = settings(max_examples=25, deadline=None)


def watched(moments: list[Moment], change: dict[str, torch.Tensor], layer: int = 1):
    """A step whose fields in one layer are replaced."""
    step, layers, visibility = batched(moments)
    layers[layer] = Reductions(layer, {**layers[layer].fields, **change})
    return step, layers, visibility


@few
@given(st.integers(0, 99), st.lists(st.integers(2, 20), min_size=2, max_size=4), st.integers(1, 6), st.integers(1, 4))
def test_a_sample_in_a_left_padded_batch_equals_the_sample_alone(seed, prompts, new, steps):
    worlds = [mdm(seed + i, prompt, new, steps) for i, prompt in enumerate(prompts)]
    for i, trace in enumerate(record(worlds, "left")):
        assert_alike(trace, record([worlds[i]], names=[f"sample-{i}"])[0])


@few
@given(st.integers(0, 99), st.integers(2, 20), st.lists(st.integers(2, 6), min_size=2, max_size=4), st.integers(1, 4))
def test_a_sample_in_a_right_padded_batch_equals_the_sample_alone(seed, prompt, news, steps):
    worlds = [mdm(seed + i, prompt, new, steps) for i, new in enumerate(news)]
    for i, trace in enumerate(record(worlds, "right")):
        assert_alike(trace, record([worlds[i]], names=[f"sample-{i}"])[0])


@few
@given(st.integers(0, 99), st.lists(st.integers(2, 20), min_size=2, max_size=3), st.integers(1, 6))
def test_a_growing_sample_in_a_padded_batch_equals_the_sample_alone(seed, prompts, new):
    worlds = [arm(seed + i, prompt, new)[0] for i, prompt in enumerate(prompts)]
    meta = {"rows": "cache"}
    for i, trace in enumerate(record(worlds, "left", meta=meta)):
        assert_alike(trace, record([worlds[i]], names=[f"sample-{i}"], meta=meta)[0])


def test_a_sample_that_finishes_early_has_only_its_own_steps():
    short, long = mdm(0, 6, 4, 2), mdm(1, 6, 4, 4)
    recorder = Recorder(["sample-0", "sample-1"])
    for t, moment in enumerate(long):
        step, layers, visibility = batched([short[t % 2], moment])
        before = replace(step.before, active=torch.tensor([t < 2, True]))
        recorder.add(replace(step, before=before), layers, visibility)
    for trace, world in zip(recorder.traces(), (short, long), strict=True):
        assert_alike(trace, record([world], names=[trace.sample])[0])


def test_regions_do_not_depend_on_the_neighbours():
    """A batch names the regions of all its samples, in the order met; a sample keeps its own, in reading order."""

    def traced(names: list[str], columns: list[int]):
        moment = mdm(3, 6, 4, 1)[0]
        step, layers, _ = batched([moment])
        pick = [c if c is not None else 0 for c in columns]
        member = step.before.regions.member[:, :, pick]
        member[:, :, [i for i, c in enumerate(columns) if c is None]] = False
        regions = Regions(tuple(names), member)
        chosen = {
            n: f[..., pick] if n == "row_regions" else f[..., pick, :][..., pick] if n in ("regions", "rollout") else f
            for n, f in layers[0].fields.items()
        }
        recorder = Recorder(["x"])
        recorder.add(replace(step, before=replace(step.before, regions=regions)), [Reductions(0, chosen)], [0])
        return recorder.traces()[0]

    alone = traced(["document", "question"], [1, 0])
    batch = traced(["question", "elsewhere", "document"], [0, None, 1])
    assert alone.coords["region"] == ("question", "document")
    assert_alike(alone, batch)


def test_every_field_has_its_axes_and_type():
    trace = record([mdm(0, 5, 6, 3)])[0]
    assert set(trace.arrays) == set(TRACE_FIELDS) | set(FIELDS)
    for name, field in FIELDS.items():
        assert trace.axes[name] == stored_axes(name, field.axes)
        assert trace.arrays[name].dtype == field.dtype
    for name, field in TRACE_FIELDS.items():
        assert (trace.axes[name], trace.arrays[name].dtype) == (field.axes, field.dtype)
    assert trace.axes["rows"] == ("commit", "layer", "head", "key")
    assert trace.axes["uniform"] == ("step", "visibility", "group", "key")
    assert trace.coords["region"] == REGIONS == trace.coords["key_region"]


@pytest.mark.parametrize("seed", range(3))
def test_values_land_where_their_axes_say(seed):
    world = mdm(seed, 5, 6, 4)
    trace = record([world])[0]
    n = 0
    for t, moment in enumerate(world):
        np.testing.assert_array_equal(trace.arrays["tokens"][t], moment.tokens)
        np.testing.assert_array_equal(trace.arrays["block"][t], moment.block or (-1, -1))
        for layer, fields in enumerate(moment.fields):
            np.testing.assert_array_equal(trace.arrays["received"][t, layer], fields["received"])
            np.testing.assert_array_equal(trace.arrays["rows"][n : n + len(moment.commits), layer], fields["rows"])
        for position, row, token, confidence in moment.commits:
            found = [trace.arrays[f"commit_{x}"][n] for x in ("step", "position", "row", "token")]
            assert found == [t, position, row, token]
            assert trace.arrays["commit_confidence"][n] == np.float32(confidence)
            n += 1
    assert n == len(trace.arrays["commit_step"]) == 6
    np.testing.assert_array_equal(trace.arrays["uniform"][:, 1], [m.fields[1]["uniform"] for m in world])
    np.testing.assert_array_equal(trace.arrays["tokens_after"], world[-1].after)
    np.testing.assert_array_equal(trace.arrays["region_member"], world[-1].member)
    assert trace.arrays["layer_visibility"].tolist() == [0, 1, 0]


def test_keys_that_are_not_there_yet_are_nan_and_never_zero():
    prompt, new = 5, 4
    trace = record([arm(0, prompt, new)[0]], meta={"rows": "cache"})[0]
    assert trace.arrays["keys"].tolist() == [5, 6, 7, 8]
    assert trace.arrays["queries"].tolist() == [5, 1, 1, 1]
    absent = np.arange(prompt + new - 1) >= trace.arrays["keys"][:, None]
    received = np.moveaxis(trace.arrays["received"], -1, 1)
    assert np.isnan(received[absent]).all()
    assert np.isfinite(received[~absent]).all()
    assert (trace.arrays["tokens"][absent] == -1).all()
    assert (trace.arrays["states"][absent] == State.PAD).all()
    assert np.isnan(trace.arrays["matrix"][1:, :, :, 1:]).all()  # one new row a step, after the prompt's
    assert len(trace.arrays["tokens_after"]) == prompt + new


def test_a_field_a_layer_or_step_did_not_keep_is_nan_there():
    recorder = Recorder(["x"])
    for t, moment in enumerate(mdm(0, 5, 4, 3)):
        step, layers, visibility = batched([moment])
        if t == 1:
            layers[2] = Reductions(2, {n: f for n, f in layers[2].fields.items() if n != "residual"})
        if t == 2:
            layers = [Reductions(r.layer, {n: f for n, f in r.fields.items() if n != "residual"}) for r in layers]
        recorder.add(step, layers, visibility)
    kept = np.isfinite(recorder.traces()[0].arrays["residual"]).all(-1)
    assert kept.tolist() == [[True, True, True], [True, True, False], [False, False, False]]


def test_layers_that_part_ways_at_one_step_have_different_visibilities():
    recorder = Recorder(["x"])
    for t, moment in enumerate(mdm(0, 5, 4, 2)):
        step, layers, visibility = batched([moment])
        recorder.add(step, layers, [0, 0, 0] if t == 0 else visibility)
    trace = recorder.traces()[0]
    assert trace.arrays["layer_visibility"].tolist() == [0, 1, 0]
    np.testing.assert_array_equal(trace.arrays["uniform"][0, 0], trace.arrays["uniform"][0, 1])
    assert (trace.arrays["uniform"][1, 0] != trace.arrays["uniform"][1, 1]).any()


def test_a_users_field_is_stored_with_its_axes():
    moments = mdm(0, 5, 4, 3)
    recorder = Recorder(
        ["x"], extra_axes={"sharp": ("head", "query"), "far_key": ("head",), "says": ("commit", "word")}
    )
    for moment in moments:
        step, layers, visibility = batched([moment])
        extra = {
            "sharp": torch.rand(1, 2, 9, dtype=torch.bfloat16),
            "far_key": torch.tensor([[8, -1]]),
            "says": torch.zeros(len(step.commits), 5, dtype=torch.float64),
        }
        recorder.add(step, [Reductions(r.layer, extra) for r in layers], visibility)
    trace = recorder.traces()[0]
    assert trace.axes["sharp"] == ("step", "layer", "head", "query")
    assert trace.axes["says"] == ("commit", "layer", "word")
    assert trace.arrays["sharp"].shape == (3, 3, 2, 9)
    assert trace.arrays["sharp"].dtype == np.float32
    assert trace.arrays["says"].dtype == np.float64
    assert trace.to_xarray().sizes["word"] == 5


def test_positions_of_a_users_key_field_count_from_the_first_valid_one():
    short, long = mdm(0, 3, 4, 1)[0], mdm(1, 8, 4, 1)[0]
    recorder = Recorder(["short", "long"], extra_axes={"far_key": ("head",)})
    step, layers, visibility = batched([short, long], "left")
    fields = {"far_key": torch.tensor([[7, -1], [7, 0]])}
    recorder.add(step, [Reductions(r.layer, fields) for r in layers], visibility)
    assert [t.arrays["far_key"][0, 0].tolist() for t in recorder.traces()] == [[2, -1], [7, 0]]


def test_coords_name_the_layers():
    step, layers, visibility = batched([mdm(0, 5, 4, 1)[0]])
    names = ["model.layers.4", "model.layers.9"]
    recorder = Recorder(["x"], coords={"layer": names})
    recorder.add(step, [replace(layers[0], layer=4), replace(layers[1], layer=9)], visibility[:2])
    trace = recorder.traces()[0]
    assert trace.coords["layer"] == tuple(names)
    assert trace.arrays["layers"].tolist() == [4, 9]


def test_a_value_float16_cannot_hold_is_refused_by_name():
    moments = [mdm(0, 5, 4, 1)[0]]
    mass = batched(moments)[1][1].fields["regions"].clone()
    mass[0, 1, 0, 0] = 70000.0
    message = r"'regions' of layer 1 holds 70000, and is stored as float16, which ends at 65504.*without 'regions'"
    with pytest.raises(UserError, match=message):
        Recorder(["x"]).add(*watched(moments, {"regions": mass}))


def test_an_infinity_that_was_measured_is_kept():
    moments = [mdm(0, 5, 4, 1)[0]]
    top = batched(moments)[1][1].fields["top"].clone()
    top[0, 0, 0, 0, 0] = torch.inf
    recorder = Recorder(["x"])
    recorder.add(*watched(moments, {"top": top}))
    assert np.isinf(recorder.traces()[0].arrays["top"]).sum() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"mine": torch.zeros(1, 2)},
            r"field 'mine' has no axes: name them, Recorder\(extra_axes=\{'mine': \('head', …\)\}\)",
        ),
        ({"residual": torch.zeros(1, 8)}, r"field 'residual' of layer 1 has shape \(1, 8\), not \(batch 1, key 9\)"),
        ({"received": torch.zeros(1, 3, 9)}, r"has shape \(1, 3, 9\), not \(batch 1, group 4, key 9\)"),
        ({"rows": torch.zeros(1, 9)}, r"field 'rows' of layer 1 has shape \(1, 9\), not \(commit 4, head, key 9\)"),
    ],
)
def test_a_field_of_the_wrong_shape_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        Recorder(["x"]).add(*watched([mdm(0, 5, 4, 1)[0]], change))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"tokens": ("key",)}, "a field cannot be called 'tokens'"),
        ({"received": ("key",)}, "a field cannot be called 'received'"),
        ({"head": ("key",)}, "a field cannot be called 'head'"),
        ({"mine": ("key", "key")}, r"field 'mine' has axes \(key, key\): name each axis once"),
        ({"mine": ("head", "commit")}, "`commit` first if it has one"),
        ({"mine": ("layer", "key")}, "leave step, layer and batch to the recorder"),
    ],
)
def test_extra_axes_that_cannot_be_stored_are_refused(extra, message):
    with pytest.raises(UserError, match=message):
        Recorder(["x"], extra_axes=extra)


def test_an_unsigned_field_is_refused():
    recorder = Recorder(["x"], extra_axes={"mine": ("key",)})
    with pytest.raises(UserError, match="field 'mine' is uint8; a trace keeps floats, signed integers and booleans"):
        recorder.add(*watched([mdm(0, 5, 4, 1)[0]], {"mine": torch.zeros(1, 9, dtype=torch.uint8)}))


def test_padding_in_the_middle_is_refused():
    step, layers, visibility = batched([mdm(0, 5, 4, 1)[0]])
    states = step.before.states.clone()
    states[0, 5] = State.PAD
    canvas = CanvasState(step.before.tokens, states, regions=step.before.regions)
    with pytest.raises(UserError, match="sample 'x' has padding between its positions 0 and 8: pad left or right"):
        Recorder(["x"]).add(replace(step, before=canvas), layers, visibility)


def test_a_sample_without_steps_is_refused():
    with pytest.raises(UserError, match="sample 'x' has no steps"):
        Recorder(["x"]).traces()


def test_a_key_under_the_padding_is_a_bug_and_crashes():
    moments = [mdm(0, 3, 4, 1)[0], mdm(1, 8, 4, 1)[0]]
    step, layers, visibility = batched(moments, "left")
    layers[0].fields["top_key"][0, 0, 0, 0] = 1
    with pytest.raises(ValueError, match="field 'top_key' names a key outside the valid positions 5 to 11"):
        Recorder(["short", "long"]).add(step, layers, visibility)
