"""`Trace`: received attention on every scale and view, against slow restatements of docs/methods.md; text, xarray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from synthetic_decodings import (
    HEADS,
    LAYERS,
    VISIBILITY,
    as_capture,
    batch_steps,
    decode_arm,
    decode_mdm,
    record_traces,
)

from floatscope.canvas import Reductions
from floatscope.errors import UserError
from floatscope.schema import State
from floatscope.traces import Trace
from floatscope.traces.recorder import Recorder

seeds = pytest.mark.parametrize("seed", range(4))
GROUP = {"all": 0, "masked": 1, "committed": 2, "predicting": 3}


def with_uniform_attention(trace: Trace) -> Trace:
    """The same trace if every row attended uniformly."""
    received = trace.arrays["uniform"][:, trace.arrays["layer_visibility"]]
    return replace(trace, arrays={**trace.arrays, "received": received})


@seeds
@pytest.mark.parametrize("group", GROUP)
def test_scales_of_one_layer(seed, group):
    trace = record_traces([decode_mdm(seed, 6, 5, 4)])[0]
    for layer in range(LAYERS):
        mean = trace.arrays["received"][:, layer, GROUP[group]]
        uniform = trace.arrays["uniform"][:, VISIBILITY[layer], GROUP[group]]
        np.testing.assert_array_equal(trace.received(layer, group), mean)
        np.testing.assert_allclose(trace.received(layer, group, "percent"), 100 * mean, rtol=1e-6)
        np.testing.assert_allclose(trace.received(layer, group, "sum"), 11 * mean, rtol=1e-6)
        with np.errstate(invalid="ignore"):
            np.testing.assert_allclose(trace.received(layer, group, "lift"), mean / uniform, rtol=1e-6)
        np.testing.assert_array_equal(trace.received(group=group)[:, layer], mean)
        assert trace.received(group=group).dtype == np.float32
        np.testing.assert_array_equal(trace.uniform(group)[:, layer], uniform)


@seeds
@pytest.mark.parametrize("scale", ["mean", "sum", "percent", "lift"])
def test_without_a_layer_every_layer_is_returned(seed, scale):
    trace = record_traces([decode_mdm(seed, 6, 5, 4)])[0]
    layers = [trace.received(layer, scale=scale) for layer in range(LAYERS)]
    assert trace.received(scale=scale).shape == (4, LAYERS, 11)
    np.testing.assert_array_equal(trace.received(scale=scale), np.stack(layers, 1))


@seeds
@pytest.mark.parametrize("scale", ["mean", "sum", "percent", "lift"])
def test_the_layer_mean_is_the_mean_over_layers_of_the_scaled_value(seed, scale):
    trace = record_traces([decode_mdm(seed, 6, 5, 4)])[0]
    layers = [trace.received(layer, scale=scale) for layer in range(LAYERS)]
    np.testing.assert_allclose(trace.received("mean", scale=scale), np.mean(layers, 0), rtol=1e-5)


@seeds
def test_the_mean_over_heads_is_the_head_mean(seed):
    trace = record_traces([decode_mdm(seed, 6, 5, 4)])[0]
    heads = [trace.received(1, "masked", "lift", head=h) for h in range(HEADS)]
    np.testing.assert_allclose(trace.received(1, "masked", "lift"), np.mean(heads, 0), rtol=1e-5)


@seeds
def test_uniform_attention_has_lift_one_everywhere(seed):
    for trace in (
        record_traces([decode_mdm(seed, 6, 5, 4)])[0],
        record_traces([decode_arm(seed, 6, 5)[0]], meta={"rows": "cache"})[0],
    ):
        lift = with_uniform_attention(trace).received("mean", scale="lift")
        is_visible = np.isfinite(lift)
        assert (lift[is_visible] == 1).all()
        assert is_visible.any(1).all()


@seeds
def test_uniform_attention_has_lift_one_over_the_whole_prefix(seed):
    trace = with_uniform_attention(record_traces([decode_arm(seed, 6, 5)[0]], meta={"rows": "cache"})[0])
    lift = trace.received("mean", scale="lift", view="prefix")
    on_canvas = np.arange(lift.shape[1]) < trace.arrays["keys"][:, None]
    assert (lift[on_canvas] == 1).all()
    assert np.isnan(lift[~on_canvas]).all()


@seeds
@pytest.mark.parametrize("prompt", [2, 7])
def test_the_prefix_view_equals_the_attention_matrix_rows(seed, prompt):
    steps, attention = decode_arm(seed, prompt, 6)
    trace = record_traces([steps], meta={"rows": "cache"})[0]
    assert trace.arrays["layer_visibility"].tolist() == list(VISIBILITY)
    for t in range(6):
        n = prompt + t
        for layer in range(LAYERS):
            rows = attention[layer, :, :n, :n]  # causal rows never change, so a forward without a cache shows the same
            slow = np.array([sum(rows[h, i, j] for h in range(HEADS) for i in range(n)) / HEADS / n for j in range(n)])
            visible = np.stack([rows[0, i] > 0 for i in range(n)])
            uniform = np.array([sum(visible[i, j] / visible[i].sum() for i in range(n)) / n for j in range(n)])
            scales = {"mean": slow, "sum": n * slow, "percent": 100 * slow, "lift": slow / uniform}
            scales["visible"] = slow * n / visible.sum(0)
            for scale, expected in scales.items():
                received = trace.received(layer, scale=scale, view="prefix")[t]
                np.testing.assert_allclose(received[:n], expected, rtol=1e-5, err_msg=scale)
                assert np.isnan(received[n:]).all()
                np.testing.assert_array_equal(trace.received(scale=scale)[t, layer], received)
            np.testing.assert_allclose(trace.uniform()[t, layer, :n], uniform, rtol=1e-5)
        one_head = trace.received(0, head=1, view="prefix")[t, :n]
        np.testing.assert_allclose(one_head, attention[0, 1, :n, :n].sum(0) / n, rtol=1e-5)


def test_the_sum_scale_counts_the_keys_of_its_own_step():
    trace = record_traces([decode_arm(0, 4, 3)[0]], meta={"rows": "cache"})[0]
    ratio = trace.received(0, scale="sum") / trace.received(0)
    assert np.nanmax(ratio, 1).round(4).tolist() == [4, 5, 6]


def build_trace(level: str = "heads") -> Trace:
    return record_traces([decode_mdm(0, 6, 5, 2)], level=level)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"scale": "lifts"},
            r"unknown scale 'lifts' \(did you mean 'lift'\?\); allowed: mean, sum, percent, visible, lift",
        ),
        ({"group": "mask"}, r"unknown group 'mask' \(did you mean 'masked'\?\)"),
        ({"view": "rows"}, r"unknown view 'rows' \(did you mean 'row'\?\); allowed: prefix, row"),
        ({"layer": 3}, "layer 3 is not in the trace of 'sample-0', which has layers 0 to 2"),
        ({"layer": -1}, "layer -1 is not in the trace"),
        ({"head": 2}, "head 2 is not in the trace of 'sample-0', which has heads 0 to 1"),
    ],
)
def test_unknown_arguments_are_refused_with_the_valid_ones(arguments, message):
    with pytest.raises(UserError, match=message):
        build_trace().received(**arguments)


def test_one_head_needs_keep_heads():
    with pytest.raises(UserError, match=r"does not store 'received_heads': .* level=\"heads\" and above"):
        build_trace("summary").received(head=0)


@pytest.mark.parametrize(
    ("missing", "message"), [("uniform", "use one of mean, sum, percent"), ("received", 'level="summary"')]
)
def test_a_field_that_is_not_stored_is_named(missing, message):
    trace = build_trace()
    trace = replace(trace, arrays={n: a for n, a in trace.arrays.items() if n != missing})
    with pytest.raises(UserError, match=f"does not store '{missing}': .*{message}"):
        trace.received(scale="lift")


@seeds
def test_groups_of_the_prefix_are_the_rows_rows(seed):
    """Committed rows accumulate; a causal model has no masked rows, and one predicting row per step."""
    prompt, new = 4, 5
    steps, attention = decode_arm(seed, prompt, new)
    trace = record_traces([steps], meta={"rows": "cache"})[0]
    assert np.isnan(trace.received(group="masked")).all()
    np.testing.assert_array_equal(trace.received(group="predicting"), trace.received(group="predicting", view="row"))
    committed = trace.received(0, group="committed")
    assert np.isnan(committed[0]).all()
    for t in range(1, new):
        n = prompt + t
        np.testing.assert_allclose(committed[t, :n], attention[0, :, prompt:n, :n].mean((0, 1)), rtol=1e-5)


def test_both_views_are_equal_without_a_cache():
    np.testing.assert_array_equal(build_trace().received(view="row"), build_trace().received(view="prefix"))


def test_layers_have_the_numbers_of_the_model():
    trace = build_trace()
    trace = replace(trace, arrays={**trace.arrays, "layers": np.array([4, 9, 12], np.int32)})
    np.testing.assert_array_equal(trace.received(9), trace.arrays["received"][:, 1, 0])
    with pytest.raises(UserError, match="has layers 4, 9, 12"):
        trace.received(0)


def test_to_xarray_has_the_same_values_under_the_same_names():
    meta = {"model": "twin:mdm", "steps": 2, "sampler": {"name": "confidence"}, "greedy": True}
    trace = record_traces([decode_mdm(0, 6, 5, 2)], meta=meta)[0]
    data = trace.to_xarray()
    assert set(data.data_vars) == set(trace.arrays)
    for name, array in trace.arrays.items():
        assert data[name].dims == trace.axes[name]
        np.testing.assert_array_equal(data[name].values, array)
    lift = data.received.sel(layer=1, group="masked") / data.uniform.sel(visibility=1, group="masked")
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(lift.values, trace.received(1, "masked", "lift"), rtol=1e-6)
    assert list(data.coords["region"].values) == ["question", "document", "answer"]
    assert data.attrs == {
        "sample": "sample-0",
        "masks": json.dumps([{"kind": "mask", "size": 0}] * 2),
        "model": "twin:mdm",
        "steps": 2,
        "sampler": '{"name": "confidence"}',
        "greedy": "true",
    }


def test_layer_names_are_a_coordinate():
    trace = build_trace()
    trace = replace(trace, coords={**trace.coords, "layer": ("a", "b", "c")})
    assert list(trace.to_xarray().layer_name.values) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axes": {"x": ("key",)}}, "array 'x' has 2 axes but 1 axis names: key"),
        ({"coords": {"group": ("a",)}}, r"axis 'group' has length 2 in array 'x' and 1 in coords\['group'\]"),
        (
            {"arrays": {"x": np.zeros((2, 3)), "y": np.zeros(4)}},
            "axis 'key' has length 4 in array 'y' and 3 in array 'x'",
        ),
        ({"meta": {"a": object()}}, "meta must be plain JSON"),
        ({"meta": {"a": float("inf")}}, "meta has a number that JSON cannot write .*write inf or nan as text"),
    ],
)
def test_inconsistent_axes_are_refused(change, message):
    valid = {
        "arrays": {"x": np.zeros((2, 3))},
        "axes": {"x": ("group", "key"), "y": ("key",)},
        "coords": {},
        "meta": {},
    }
    with pytest.raises(UserError, match=message):
        Trace(sample="s", **{**valid, **change})


def test_a_trace_without_watched_layers_has_its_canvas():
    recorder = Recorder(["x"])
    for step_data in decode_mdm(0, 5, 4, 2):
        recorder.add(batch_steps([step_data])[0], as_capture([], []))
    trace = recorder.build_traces()[0]
    assert trace.arrays["tokens"].shape == (2, 9)
    assert len(trace.to_xarray().layer) == 0
    with pytest.raises(UserError, match="the trace of 'x' does not store 'received'"):
        trace.received()


def test_the_repr_of_a_trace_is_one_line():
    assert repr(build_trace()).startswith("Trace('sample-0': step 2, layer 3, key 11, commit 5; ")


def test_importing_traces_is_light():
    heavy = "{'torch', 'matplotlib', 'xarray', 'transformers', 'pandas'}"
    code = f"import sys, floatscope.traces; sys.exit(len({heavy} & set(sys.modules)))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        ).returncode
        == 0
    )


def test_other_groups_have_their_own_names():
    step, layers, visibility = batch_steps([decode_mdm(0, 5, 4, 1)[0]])
    recorder = Recorder(["x"], coords={"group": ["prompt"]})
    recorder.add(
        step, as_capture([Reductions(r.layer, {"received": r.fields["received"][:, :1]}) for r in layers], visibility)
    )
    trace = recorder.build_traces()[0]
    np.testing.assert_array_equal(trace.received(2, "prompt"), trace.arrays["received"][:, 2, 0])
    with pytest.raises(UserError, match="unknown group 'all'; allowed: prompt"):
        trace.received()


def test_a_key_that_is_not_eligible_at_one_step_is_eligible_at_none():
    trace = record_traces([decode_mdm(0, 6, 5, 4)])[0]
    trace.arrays["eligible"][:] = 1
    trace.arrays["eligible"][1, :, :, 4] = 0
    eligible = trace.received(layer=1, eligible=True)
    expected = trace.received(layer=1)
    expected[:, 4] = np.nan
    np.testing.assert_array_equal(eligible, expected)


def test_a_step_without_rows_of_the_group_does_not_decide_which_keys_are_eligible():
    trace = record_traces([decode_mdm(0, 6, 5, 4)])[0]
    trace.arrays["eligible"][:] = 1
    trace.arrays["eligible"][2, :, GROUP["masked"]] = 0
    trace.arrays["states"][2] = State.PROMPT  # no row is masked
    eligible, expected = (trace.received(1, "masked", eligible=flag) for flag in (True, False))
    expected[2] = np.nan
    np.testing.assert_array_equal(eligible, expected)
    trace.arrays["states"][2] = State.MASKED  # rows that have no eligible key leave none
    assert np.isnan(trace.received(1, "masked", eligible=True)).all()
    trace.arrays["states"][:] = State.PROMPT
    assert np.isnan(trace.received(1, "masked", eligible=True)).all()


def count_visible_rows(trace: Trace, step: int, layer: int, group: str, key: int) -> tuple[int, int]:
    """The rows of the group at a step, and how many of them see the key; of a cached model the rows so far. Layer 1 has
    a window of 2."""
    n, is_cached = int(trace.arrays["keys"][step]), trace.meta.get("rows") == "cache"
    commits = zip(*(trace.arrays[f"commit_{name}"].tolist() for name in ("step", "row")), strict=True)
    predicting = {row for t, row in commits if t == step}
    states = trace.arrays["states"][step]
    rows = {"all": range(n), "masked": np.flatnonzero(states[:n] == State.MASKED), "predicting": predicting}[group]
    seen = [row for row in rows if (not is_cached or key <= row) and (layer != 1 or abs(row - key) <= 2)]
    return len(rows), len(seen)


@seeds
@pytest.mark.parametrize("group", ["all", "masked", "predicting"])
@pytest.mark.parametrize("is_cached", [False, True])
def test_eligible_keys_are_seen_by_enough_rows_at_every_step(seed, group, is_cached):
    """At least 16 rows, or all rows of a smaller group; by counting."""
    if is_cached:
        trace = record_traces([decode_arm(seed, 20, 6)[0]], meta={"rows": "cache"})[0]
    else:
        trace = record_traces([decode_mdm(seed, 14, 8, 4)])[0]
    values, every = (trace.received(group=group, eligible=flag) for flag in (True, False))
    steps, keys = range(len(trace.arrays["keys"])), range(values.shape[-1])
    for layer in range(LAYERS):
        counts = {(t, j): count_visible_rows(trace, t, layer, group, j) for t in steps for j in keys}
        measured = [t for t in steps if counts[t, 0][0]]
        enough = [j for j in keys if all(counts[t, j][1] >= min(16, counts[t, j][0]) for t in measured)]
        for t in steps:
            own = enough if t in measured else []
            assert np.flatnonzero(np.isfinite(values[t, layer])).tolist() == own
            np.testing.assert_array_equal(values[t, layer, own], every[t, layer, own])
    if is_cached and group == "all":
        assert np.isfinite(values[-1, 0]).sum() == 5  # at the first step 16 of 20 rows see key 4


@seeds
@pytest.mark.parametrize("group", ["all", "predicting"])
def test_the_anchor_path_is_the_top_key_where_its_lift_is_at_least_two(seed, group):
    trace = record_traces([decode_mdm(seed, 6, 5, 4)])[0]
    for layer in (*range(LAYERS), "mean"):
        lift = trace.received(layer, group, "lift", eligible=True)
        expected = []
        for row in lift:
            best = max((x for x in row if x == x), default=0.0)
            expected.append(int(np.flatnonzero(row == best)[0]) if best >= 2 else -1)
        path = trace.anchor_path(layer, group)
        assert path.tolist() == expected
        is_anchor = path >= 0
        assert (path[is_anchor] == trace.top_key(layer, group)[is_anchor]).all()
    np.testing.assert_array_equal(trace.anchor_path(group=group)[:, 1], trace.anchor_path(1, group))


@pytest.mark.parametrize(("lift", "is_anchor"), [(1.99, False), (2.0, True), (2.01, True)])
def test_a_lift_of_two_is_an_anchor(lift, is_anchor):
    trace = record_traces([decode_mdm(0, 6, 5, 4)])[0]
    trace.arrays["uniform"][:] = 1 / 16  # so that a lift of 2 has no rounding error
    trace.arrays["received"][:] = 1 / 16
    trace.arrays["received"][..., 3] = lift / 16
    trace.arrays["eligible"][:] = 1
    assert (trace.anchor_path() == (3 if is_anchor else -1)).all()
    assert (trace.top_key() == 3).all()


def test_top_key_has_the_shape_of_the_layers_it_is_given():
    trace = build_trace()
    every = trace.top_key()
    assert every.shape == (2, LAYERS)
    for layer in range(LAYERS):
        lift = trace.received(layer, scale="lift", eligible=True)
        expected = [max(np.flatnonzero(np.isfinite(row)), key=lambda j: row[j], default=-1) for row in lift]
        assert trace.top_key(layer).tolist() == every[:, layer].tolist() == expected
    assert trace.top_key("mean").shape == (2,)


def with_pieces(trace: Trace) -> Trace:
    """With a text for every token: 7 is "<7>"."""
    pieces = {str(i): f"<{i}>" for i in range(100)}
    return replace(trace, meta={**trace.meta, "pieces": pieces, "special_ids": [0]})


def test_tokens_and_text_of_a_trace():
    trace = build_trace()
    assert trace.text is None
    assert trace.pieces is None
    np.testing.assert_array_equal(trace.tokens, trace.arrays["tokens"])
    spelled = with_pieces(trace)
    assert spelled.pieces[7] == "<7>"
    assert spelled.text == "".join(f"<{i}>" for i in trace.arrays["tokens_after"])
    grown = with_pieces(record_traces([decode_arm(0, 4, 3)[0]], meta={"rows": "cache"})[0])
    assert grown.text.count("<") == 7  # the token that the last step wrote is part of the text


def test_special_tokens_are_left_out_of_the_text():
    trace = with_pieces(build_trace())
    first = int(trace.arrays["tokens_after"][0])
    without = replace(trace, meta={**trace.meta, "special_ids": [first]})
    assert without.text == trace.text.replace(f"<{first}>", "")


@pytest.mark.parametrize("keys", [11, 6])
def test_to_xarray_names_the_token_of_each_key(keys):
    trace = build_trace() if keys == 11 else record_traces([decode_arm(0, 4, 3)[0]], meta={"rows": "cache"})[0]
    assert "token" not in trace.to_xarray().coords
    data = with_pieces(trace).to_xarray()
    assert data.coords["token"].dims == ("key",)
    assert "token" not in data.indexes
    assert data.token.values.tolist() == [f"<{i}>" for i in trace.arrays["tokens_after"][:keys]]
    assert data.received.mean("step").token.values[0] == data.token.values[0]
