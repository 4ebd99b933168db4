"""`Trace.received` on every scale and view, against slow restatements of docs/methods.md."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from synthetic import HEADS, LAYERS, VISIBILITY, arm, batched, mdm, record

from floatscope.canvas import Reductions
from floatscope.errors import UserError
from floatscope.traces import Trace
from floatscope.traces.recorder import Recorder

seeds = pytest.mark.parametrize("seed", range(4))
GROUP = {"all": 0, "masked": 1, "committed": 2, "predicting": 3}


def uniformly(trace: Trace) -> Trace:
    """The same trace, had every row attended uniformly."""
    received = trace.arrays["uniform"][:, trace.arrays["layer_visibility"]]
    return replace(trace, arrays={**trace.arrays, "received": received})


@seeds
@pytest.mark.parametrize("group", GROUP)
def test_scales_of_one_layer(seed, group):
    trace = record([mdm(seed, 6, 5, 4)])[0]
    for layer in range(LAYERS):
        mean = trace.arrays["received"][:, layer, GROUP[group]]
        uniform = trace.arrays["uniform"][:, VISIBILITY[layer], GROUP[group]]
        np.testing.assert_array_equal(trace.received(layer, group), mean)
        np.testing.assert_allclose(trace.received(layer, group, "percent"), 100 * mean, rtol=1e-6)
        np.testing.assert_allclose(trace.received(layer, group, "sum"), 11 * mean, rtol=1e-6)
        with np.errstate(invalid="ignore"):
            np.testing.assert_allclose(trace.received(layer, group, "lift"), mean / uniform, rtol=1e-6)
        np.testing.assert_array_equal(trace.by_layer(group)[:, layer], mean)
        np.testing.assert_array_equal(trace.uniform(group)[:, layer], uniform)


@seeds
@pytest.mark.parametrize("scale", ["mean", "sum", "percent", "lift"])
def test_without_a_layer_it_is_the_mean_over_layers_of_the_scaled_value(seed, scale):
    trace = record([mdm(seed, 6, 5, 4)])[0]
    each = [trace.received(layer, scale=scale) for layer in range(LAYERS)]
    np.testing.assert_allclose(trace.received(scale=scale), np.mean(each, 0), rtol=1e-5)


@seeds
def test_the_mean_over_heads_is_the_head_mean(seed):
    trace = record([mdm(seed, 6, 5, 4)])[0]
    each = [trace.received(1, "masked", "lift", head=h) for h in range(HEADS)]
    np.testing.assert_allclose(trace.received(1, "masked", "lift"), np.mean(each, 0), rtol=1e-5)


@seeds
def test_uniform_attention_has_lift_one_everywhere(seed):
    for trace in (record([mdm(seed, 6, 5, 4)])[0], record([arm(seed, 6, 5)[0]], meta={"rows": "cache"})[0]):
        lift = uniformly(trace).received(scale="lift")
        seen = np.isfinite(lift)
        assert (lift[seen] == 1).all()
        assert seen.any(1).all()


@seeds
def test_uniform_attention_has_lift_one_over_the_whole_prefix(seed):
    trace = uniformly(record([arm(seed, 6, 5)[0]], meta={"rows": "cache"})[0])
    lift = trace.received(scale="lift", view="prefix")
    there = np.arange(lift.shape[1]) < trace.arrays["keys"][:, None]
    assert (lift[there] == 1).all()
    assert np.isnan(lift[~there]).all()


@seeds
@pytest.mark.parametrize("prompt", [2, 7])
def test_the_prefix_view_is_the_whole_matrix_so_far(seed, prompt):
    moments, whole = arm(seed, prompt, 6)
    trace = record([moments], meta={"rows": "cache"})[0]
    assert trace.arrays["layer_visibility"].tolist() == list(VISIBILITY)
    for t in range(6):
        n = prompt + t
        for layer in range(LAYERS):
            seen = whole[layer, :, :n, :n]  # causal rows never change, so this is what a forward without a cache shows
            slow = np.array([sum(seen[h, i, j] for h in range(HEADS) for i in range(n)) / HEADS / n for j in range(n)])
            visible = np.stack([seen[0, i] > 0 for i in range(n)])
            uniform = np.array([sum(visible[i, j] / visible[i].sum() for i in range(n)) / n for j in range(n)])
            scales = {"mean": slow, "sum": n * slow, "percent": 100 * slow, "lift": slow / uniform}
            scales["visible"] = slow * n / visible.sum(0)
            for scale, wanted in scales.items():
                found = trace.received(layer, scale=scale, view="prefix")[t]
                np.testing.assert_allclose(found[:n], wanted, rtol=1e-5, err_msg=scale)
                assert np.isnan(found[n:]).all()
                np.testing.assert_array_equal(trace.by_layer(scale=scale)[t, layer], found)
            np.testing.assert_allclose(trace.uniform()[t, layer, :n], uniform, rtol=1e-5)
        one = trace.received(0, head=1, view="prefix")[t, :n]
        np.testing.assert_allclose(one, whole[0, 1, :n, :n].sum(0) / n, rtol=1e-5)


def test_the_sum_scale_counts_the_keys_of_its_own_step():
    trace = record([arm(0, 4, 3)[0]], meta={"rows": "cache"})[0]
    ratio = trace.received(0, scale="sum") / trace.received(0)
    assert np.nanmax(ratio, 1).round(4).tolist() == [4, 5, 6]


def traced(keep: str = "heads") -> Trace:
    return record([mdm(0, 6, 5, 2)], keep=keep)[0]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"scale": "lifts"},
            r"unknown scale 'lifts' \(did you mean 'lift'\?\); allowed: mean, sum, percent, visible, lift",
        ),
        ({"group": "mask"}, r"unknown group 'mask' \(did you mean 'masked'\?\)"),
        ({"view": "rows"}, r"unknown view 'rows' \(did you mean 'row'\?\); allowed: prefix, row"),
        ({"layer": 3}, "layer 3 is not in the trace of 'sample-0', which holds layers 0 to 2"),
        ({"layer": -1}, "layer -1 is not in the trace"),
        ({"head": 2}, "head 2 is not in the trace of 'sample-0', which holds heads 0 to 1"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(asked, message):
    with pytest.raises(UserError, match=message):
        traced().received(**asked)


def test_one_head_needs_keep_heads():
    with pytest.raises(UserError, match=r"does not keep 'received_heads': .* keep=\"heads\" or more"):
        traced("summary").received(head=0)


@pytest.mark.parametrize(
    ("missing", "message"), [("uniform", "use one of mean, sum, percent"), ("received", 'keep="summary"')]
)
def test_a_field_that_was_not_kept_is_named(missing, message):
    trace = traced()
    trace = replace(trace, arrays={n: a for n, a in trace.arrays.items() if n != missing})
    with pytest.raises(UserError, match=f"does not keep '{missing}': .*{message}"):
        trace.received(scale="lift")


@seeds
def test_groups_of_the_prefix_are_the_rows_shown_so_far(seed):
    """Committed rows add up from the first step that has one; a causal model has no masked rows; predicting is one."""
    prompt, new = 4, 5
    moments, whole = arm(seed, prompt, new)
    trace = record([moments], meta={"rows": "cache"})[0]
    assert np.isnan(trace.received(group="masked")).all()
    np.testing.assert_array_equal(trace.received(group="predicting"), trace.received(group="predicting", view="row"))
    committed = trace.received(0, group="committed")
    assert np.isnan(committed[0]).all()
    for t in range(1, new):
        n = prompt + t
        np.testing.assert_allclose(committed[t, :n], whole[0, :, prompt:n, :n].mean((0, 1)), rtol=1e-5)


def test_a_model_without_a_cache_shows_all_its_rows_in_both_views():
    np.testing.assert_array_equal(traced().received(view="row"), traced().received(view="prefix"))


def test_layers_go_by_the_models_numbers():
    trace = traced()
    trace = replace(trace, arrays={**trace.arrays, "layers": np.array([4, 9, 12], np.int32)})
    np.testing.assert_array_equal(trace.received(9), trace.arrays["received"][:, 1, 0])
    with pytest.raises(UserError, match="holds layers 4, 9, 12"):
        trace.received(0)


def test_to_xarray_has_the_same_numbers_under_the_same_names():
    meta = {"model": "twin:mdm", "steps": 2, "sampler": {"name": "confidence"}, "greedy": True}
    trace = record([mdm(0, 6, 5, 2)], meta=meta)[0]
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
        "model": "twin:mdm",
        "steps": 2,
        "sampler": '{"name": "confidence"}',
        "greedy": "true",
    }


def test_layer_names_are_a_coordinate():
    trace = traced()
    trace = replace(trace, coords={**trace.coords, "layer": ("a", "b", "c")})
    assert list(trace.to_xarray().layer_name.values) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axes": {"x": ("key",)}}, "array 'x' has 2 axes, and 1 names for them: key"),
        ({"coords": {"group": ("a",)}}, r"axis 'group' is 2 long in array 'x' and 1 long in coords\['group'\]"),
        (
            {"arrays": {"x": np.zeros((2, 3)), "y": np.zeros(4)}},
            "axis 'key' is 4 long in array 'y' and 3 long in array 'x'",
        ),
        ({"meta": {"a": object()}}, "meta must be plain JSON"),
        ({"meta": {"a": float("inf")}}, "meta holds a number JSON has no word for .*write inf or nan as text"),
    ],
)
def test_a_trace_that_contradicts_itself_is_refused(change, message):
    whole = {
        "arrays": {"x": np.zeros((2, 3))},
        "axes": {"x": ("group", "key"), "y": ("key",)},
        "coords": {},
        "meta": {},
    }
    with pytest.raises(UserError, match=message):
        Trace(sample="s", **{**whole, **change})


def test_a_decoding_that_nobody_watched_still_has_its_canvas():
    recorder = Recorder(["x"])
    for moment in mdm(0, 5, 4, 2):
        recorder.add(batched([moment])[0], [], [])
    trace = recorder.traces()[0]
    assert trace.arrays["tokens"].shape == (2, 9)
    assert len(trace.to_xarray().layer) == 0
    with pytest.raises(UserError, match="the trace of 'x' does not keep 'received'"):
        trace.received()


def test_a_trace_is_shown_in_one_line():
    assert repr(traced()).startswith("Trace('sample-0': step 2, layer 3, key 11, commit 5; ")


def test_importing_the_room_imports_nothing_to_draw_with():
    heavy = "{'matplotlib', 'xarray', 'transformers', 'pandas'}"
    code = f"import sys, floatscope.traces; sys.exit(len({heavy} & set(sys.modules)))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        ).returncode
        == 0
    )


def test_other_groups_go_by_their_own_names():
    step, layers, visibility = batched([mdm(0, 5, 4, 1)[0]])
    recorder = Recorder(["x"], coords={"group": ["prompt"]})
    recorder.add(step, [Reductions(r.layer, {"received": r.fields["received"][:, :1]}) for r in layers], visibility)
    trace = recorder.traces()[0]
    np.testing.assert_array_equal(trace.received(2, "prompt"), trace.arrays["received"][:, 2, 0])
    with pytest.raises(UserError, match="unknown group 'all'; allowed: prompt"):
        trace.received()


def test_keys_too_few_rows_see_are_left_out_of_the_ranking():
    trace = record([mdm(0, 6, 5, 4)])[0]
    trace.arrays["eligible"][:] = 1
    trace.arrays["eligible"][1, :, :, 4] = 0
    ranked = trace.received(layer=1, eligible=True)
    assert np.isnan(ranked[1, 4])
    everything = trace.received(layer=1)
    everything[1, 4] = np.nan
    np.testing.assert_array_equal(ranked, everything)
