"""What the explorer is given says what the trace says, within its budget."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from made_report import NASTY

from floatscope.errors import UserError
from floatscope.reports.charts import Report
from floatscope.reports.explorer import BUDGET, RANKS, coded, decoded, pack, payload, unpack
from floatscope.reports.page import page


@pytest.fixture(params=["mdm", "arm"])
def trace(request):
    return request.getfixturevalue(request.param)


def rounding(told: dict) -> np.ndarray:
    """The largest relative error of each layer: half a step of its scale."""
    ratio = np.array(told["high"]) / np.array(told["low"])
    return ratio ** (0.5 / told["most"]) - 1 + 1e-6


def test_lift_is_the_traces_within_half_a_step_of_the_scale(trace):
    told = payload(trace, "run")
    lift = decoded(told["lift"])
    for i, layer in enumerate(told["layers"]):
        exact = trace.received(layer, scale="lift", eligible=True)
        assert np.array_equal(np.isnan(lift[:, i]), np.isnan(exact))
        error = np.abs(lift[:, i] / exact - 1)
        assert np.nanmax(error) <= rounding(told["lift"])[i] < 0.012


def test_anchors_are_the_traces_top_keys(trace):
    told = payload(trace, "run")
    anchors = unpack(told["anchors"]).astype(int) - 1
    for i, layer in enumerate(told["layers"]):
        assert np.array_equal(anchors[:, i], trace.top_key(layer))


def test_percentages_follow_from_lift_and_uniform(trace):
    told = payload(trace, "run")
    percent = decoded(told["lift"]) * decoded(told["uniform"])[:, told["masks"]]
    exact = trace.by_layer(scale="percent", eligible=True)
    there = np.isfinite(exact)
    assert np.allclose(percent[there], exact[there], rtol=0.012)


def test_top_keys_of_heads(trace):
    told = payload(trace, "run")
    group = trace.coords["group"].index("all")
    keys = unpack(told["heads"]["keys"]).astype(int) - 1
    assert told["heads"]["count"] == trace.arrays["top_key"].shape[2]
    assert np.array_equal(keys, trace.arrays["top_key"][:, :, :, group, :RANKS])
    exact = trace.arrays["top"][:, :, :, group, :RANKS, 0]
    told_apart = (
        exact >= np.array(told["heads"]["lift"]["low"])[:, None, None]
    )  # one row may look at a key hardly at all
    assert told_apart.mean() > 0.9
    assert np.abs(decoded(told["heads"]["lift"]) / exact - 1)[told_apart].max() < 0.024


def test_the_canvas_of_every_step_can_be_rebuilt(trace):
    told = payload(trace, "run")
    tokens, states = np.array(told["tokens"]), np.array(told["states"])
    width = trace.arrays["tokens"].shape[1]
    assert told["keys"] == max(width, trace.arrays["commit_position"].max() + 1)
    for step in range(told["steps"]):
        for t, position, token, state in told["changes"]:
            if t == step:
                tokens[position], states[position] = token, state
        assert np.array_equal(tokens[:width], trace.arrays["tokens"][step])
        assert np.array_equal(states[:width], trace.arrays["states"][step])
    assert [c[:3] for c in told["commits"]] == [
        list(c)
        for c in zip(*(trace.arrays[f"commit_{n}"].tolist() for n in ("step", "position", "token")), strict=True)
    ]


def test_tokens_have_their_names_and_regions_their_spans(mdm):
    told = payload(mdm, "run")
    first = [told["pieces"][str(token)] for token in dict.fromkeys(told["tokens"])][: len(NASTY)]
    assert first == list(NASTY)
    assert told["regions"][:2] == [{"name": "document", "spans": [[1, 13]]}, {"name": "evidence", "spans": [[9, 11]]}]
    assert told["special"]


def test_without_names_tokens_are_numbers(mdm):
    told = payload(replace(mdm, meta={"rows": "all"}), "run")
    assert all(piece == f"<{token}>" for token, piece in told["pieces"].items())
    assert told["special"] == []


def test_heads_are_left_out_first_then_layers_and_it_is_said(mdm):
    whole = payload(mdm, "run")
    assert whole["dropped"] == []
    size = len(json.dumps(whole))
    sizes = range(size, 0, -size // 40)
    seen = []
    for most in sizes:
        try:
            told = payload(mdm, "run", max_bytes=most)
        except UserError:
            break
        assert len(json.dumps(told)) <= most
        seen.append((told["heads"] is not None, len(told["layers"])))
        assert bool(told["dropped"]) == (seen[-1] != (True, 8))
    assert list(dict.fromkeys(seen))[:3] == [(True, 8), (False, 8), (False, 4)]
    assert "single heads and all but 4 of 8 layers (0, 2, 4, 6)" in next(
        payload(mdm, "run", max_bytes=m)["dropped"][0] for m, s in zip(sizes, seen, strict=False) if s == (False, 4)
    )


def test_a_budget_that_holds_nothing_is_refused(mdm):
    with pytest.raises(UserError, match=r"cannot show '<b>mdm</b>' in 100 B: one of its layers alone takes .* KiB"):
        payload(mdm, "run", max_bytes=100)


def test_four_samples_and_the_page_itself_stay_within_8_mb():
    assert 4 * BUDGET + len(page(Report("", [], [], []))) < 8_000_000


@given(
    hnp.arrays(
        np.float64,
        hnp.array_shapes(min_dims=3, max_dims=3, max_side=5),
        elements=st.one_of(st.floats(1e-4, 1e3), st.sampled_from([np.nan, 0.0])),
    )
)
def test_codes_are_within_half_a_step_whatever_the_values(values):
    told = coded(values)
    back = decoded(told)
    assert np.array_equal(np.isnan(back), np.isnan(values))
    low = np.array(told["low"])[None, :, None]
    inside = np.isfinite(values) & (values >= low)
    error = np.abs(back / np.where(inside, values, 1) - 1)
    assert (error <= np.maximum(rounding(told), 5.1e-4)[None, :, None])[inside].all()
    assert np.allclose(back[np.isfinite(values) & (values < low)], np.broadcast_to(low, values.shape)[values < low])


@given(hnp.arrays(st.sampled_from([np.uint8, np.uint16, np.uint32]), hnp.array_shapes(max_dims=3)))
def test_packing_loses_nothing(codes):
    assert np.array_equal(unpack(json.loads(json.dumps(pack(codes)))), codes)
