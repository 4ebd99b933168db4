"""The payload of the explorer has the data of the trace, within its size limit."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from example_charts import UNSAFE_TEXTS
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from floatscope.errors import UserError
from floatscope.reports.charts import Report
from floatscope.reports.explorer import MAX_BYTES, RANKS, build_payload, decode, encode, pack, unpack
from floatscope.reports.page import render_page


@pytest.fixture(params=["mdm", "arm"])
def trace(request):
    return request.getfixturevalue(request.param)


def max_error(encoded: dict) -> np.ndarray:
    """The largest relative error of each layer: half a level of its scale."""
    ratio = np.array(encoded["high"]) / np.array(encoded["low"])
    return ratio ** (0.5 / encoded["max_level"]) - 1 + 1e-6


def test_lift_is_exact_within_half_a_level(trace):
    payload = build_payload(trace, "run")
    lift = decode(payload["lift"])
    for i, layer in enumerate(payload["layers"]):
        exact = trace.received(layer, scale="lift", eligible=True)
        assert np.array_equal(np.isnan(lift[:, i]), np.isnan(exact))
        error = np.abs(lift[:, i] / exact - 1)
        assert np.nanmax(error) <= max_error(payload["lift"])[i] < 0.012


def test_top_keys_are_the_anchor_path_of_the_trace(trace):
    payload = build_payload(trace, "run")
    top_keys = unpack(payload["top_keys"]).astype(int) - 1
    lift = trace.received(scale="lift", eligible=True)
    expected = np.where(np.nanmax(lift, -1) >= 2, np.nan_to_num(lift, nan=-1).argmax(-1), -1)
    assert np.array_equal(top_keys, expected[:, payload["layers"]])
    assert np.array_equal(top_keys, trace.anchor_path()[:, payload["layers"]])
    assert {-1} < set(top_keys.ravel().tolist())  # steps with an anchor and steps without


def test_percentages_follow_from_lift_and_uniform(trace):
    payload = build_payload(trace, "run")
    percent = decode(payload["lift"]) * decode(payload["uniform"])[:, payload["layer_visibility"]]
    exact = trace.received(scale="percent", eligible=True)
    measured = np.isfinite(exact)
    assert np.allclose(percent[measured], exact[measured], rtol=0.012)


def test_top_keys_of_heads_are_those_of_the_trace(trace):
    payload = build_payload(trace, "run")
    group = trace.coords["group"].index("all")
    keys = unpack(payload["heads"]["keys"]).astype(int) - 1
    assert payload["heads"]["count"] == trace.arrays["top_key"].shape[2]
    assert np.array_equal(keys, trace.arrays["top_key"][:, :, :, group, :RANKS])
    exact = trace.arrays["top"][:, :, :, group, :RANKS, 0]
    low = np.array(payload["heads"]["lift"]["low"])[:, None, None]
    on_scale = exact >= low  # a row may give a key almost nothing
    assert on_scale.mean() > 0.9
    assert np.abs(decode(payload["heads"]["lift"]) / exact - 1)[on_scale].max() < 0.024


def test_canvas_of_every_step_can_be_rebuilt(trace):
    payload = build_payload(trace, "run")
    tokens, states = np.array(payload["tokens"]), np.array(payload["states"])
    width = trace.arrays["tokens"].shape[1]
    assert payload["keys"] == max(width, trace.arrays["commit_position"].max() + 1)
    for step in range(payload["steps"]):
        for t, position, token, state in payload["changes"]:
            if t == step:
                tokens[position], states[position] = token, state
        assert np.array_equal(tokens[:width], trace.arrays["tokens"][step])
        assert np.array_equal(states[:width], trace.arrays["states"][step])
    assert [c[:3] for c in payload["commits"]] == [
        list(c)
        for c in zip(*(trace.arrays[f"commit_{n}"].tolist() for n in ("step", "position", "token")), strict=True)
    ]


def test_tokens_have_their_texts_and_regions_their_spans(mdm):
    payload = build_payload(mdm, "run")
    first = [payload["pieces"][str(token)] for token in dict.fromkeys(payload["tokens"])][: len(UNSAFE_TEXTS)]
    assert first == list(UNSAFE_TEXTS)
    assert payload["regions"][:2] == [
        {"name": "document", "spans": [[1, 13]]},
        {"name": "evidence", "spans": [[9, 11]]},
    ]
    assert payload["special_ids"]


def test_tokens_without_texts_are_numbers(mdm):
    payload = build_payload(replace(mdm, meta={"rows": "all"}), "run")
    assert all(piece == f"<{token}>" for token, piece in payload["pieces"].items())
    assert payload["special_ids"] == []


def test_heads_are_left_out_first_then_layers_with_a_note(mdm):
    complete = build_payload(mdm, "run")
    assert complete["notes"] == []
    size = len(json.dumps(complete))
    sizes = range(size, 0, -size // 40)
    contents = []
    for limit in sizes:
        try:
            payload = build_payload(mdm, "run", max_bytes=limit)
        except UserError:
            break
        assert len(json.dumps(payload)) <= limit
        contents.append((payload["heads"] is not None, len(payload["layers"])))
        assert bool(payload["notes"]) == (contents[-1] != (True, 8))
    assert list(dict.fromkeys(contents))[:3] == [(True, 8), (False, 8), (False, 4)]
    assert "single heads and all but 4 of 8 layers (0, 2, 4, 6)" in next(
        build_payload(mdm, "run", max_bytes=m)["notes"][0]
        for m, s in zip(sizes, contents, strict=False)
        if s == (False, 4)
    )


def test_limit_that_is_too_small_is_refused(mdm):
    with pytest.raises(UserError, match=r"cannot show '<b>mdm</b>' in 100 B: one of its layers alone takes .* KiB"):
        build_payload(mdm, "run", max_bytes=100)


def test_four_samples_and_the_page_stay_within_8_mb():
    assert 4 * MAX_BYTES + len(render_page(Report("", [], [], []))) < 8_000_000


@given(
    hnp.arrays(
        np.float64,
        hnp.array_shapes(min_dims=3, max_dims=3, max_side=5),
        elements=st.one_of(st.floats(1e-4, 1e3), st.sampled_from([np.nan, 0.0])),
    )
)
def test_codes_are_within_half_a_level(values):
    encoded = encode(values)
    back = decode(encoded)
    assert np.array_equal(np.isnan(back), np.isnan(values))
    low = np.array(encoded["low"])[None, :, None]
    inside = np.isfinite(values) & (values >= low)
    error = np.abs(back / np.where(inside, values, 1) - 1)
    assert (error <= np.maximum(max_error(encoded), 5.1e-4)[None, :, None])[inside].all()
    assert np.allclose(back[np.isfinite(values) & (values < low)], np.broadcast_to(low, values.shape)[values < low])


@given(hnp.arrays(st.sampled_from([np.uint8, np.uint16, np.uint32]), hnp.array_shapes(max_dims=3)))
def test_packing_is_lossless(codes):
    assert np.array_equal(unpack(json.loads(json.dumps(pack(codes)))), codes)
