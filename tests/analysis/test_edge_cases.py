"""What cannot be computed is refused with a sentence; what is absent is NaN or 0, without a warning."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from dense_decodings import KINDS, Decoding, attend, build_trace, canvas, causal, full, random_decoding

import floatscope as fs
from floatscope.analysis import TraceView, absorption, anchor_movement, anchor_tables, depth, detect
from floatscope.analysis.floating import floating_index
from floatscope.analysis.run_tables import ANALYSES, analyse
from floatscope.errors import UserError
from floatscope.traces import Trace

pytestmark = pytest.mark.filterwarnings("error")


def trace_onto(key: int, n: int, mass: float = 1.0, steps: int = 1, mask: np.ndarray | None = None) -> Trace:
    """Every row that sees `key` gives it `mass` and spreads the rest evenly over the other keys."""
    mask = full(n) if mask is None else mask
    A = np.where(mask, (1 - mass) / (mask.sum(1, keepdims=True) - 1).clip(1), 0.0)
    A[mask[:, key], key] = mass
    A /= A.sum(1, keepdims=True).clip(1e-9)
    A[A.sum(1) == 0] = (mask / mask.sum(1, keepdims=True))[A.sum(1) == 0]
    return build_trace(canvas(np.stack([A[None, None]] * steps), n - 1, mask))


def drop_arrays(trace: Trace, *names: str) -> Trace:
    return replace(trace, arrays={n: a for n, a in trace.arrays.items() if n not in names})


# Detectors that cannot fire


@pytest.mark.parametrize(("n", "k"), [(10, 3), (5, 2), (2, 1), (4, 3)])
def test_an_unreachable_z_score_is_refused(n, k):
    with pytest.raises(UserError, match=rf"zscore\(k={k}\) cannot fire on {n} keys, .* √{n - 1} = "):
        detect(trace_onto(0, n), f"zscore(k={k})")
    with pytest.raises(UserError, match="cannot fire"):
        detect(trace_onto(0, n), f"soft(k={k})")


def test_eleven_keys_are_enough_for_k_three():
    assert np.flatnonzero(detect(trace_onto(4, 11), "zscore")[0, 0]).tolist() == [4]
    assert np.flatnonzero(detect(trace_onto(4, 11), "soft(k=3)")[0, 0]).tolist() == [4]


@pytest.mark.parametrize(("scale", "most"), [("mean", 1), ("visible", 1), ("percent", 100), ("sum", 20), ("lift", 20)])
def test_an_unreachable_eps_is_refused_and_a_smaller_one_is_not(scale, most):
    trace = trace_onto(4, 20)
    with pytest.raises(UserError, match=rf"rulli\(eps={most}\) cannot fire on the scale '{scale}', .* exceeds {most};"):
        detect(trace, f"rulli(eps={most}, scale='{scale}')")
    assert np.flatnonzero(detect(trace, f"rulli(eps={0.99 * most}, scale='{scale}')")[0, 0]).tolist() == [4]


def test_the_eps_the_paper_prints_is_refused_on_the_mean_scale():
    with pytest.raises(UserError, match="use a smaller eps"):
        detect(trace_onto(4, 40), "rulli(eps=3, scale='mean')")


def test_under_a_causal_mask_a_lift_may_exceed_the_number_of_eligible_keys():
    """Of 20 keys the first five are seen by 16 rows. The fifth gets all of their attention: a lift of 10.6."""
    trace = trace_onto(4, 20, mask=causal(20))
    assert np.isfinite(trace.received(scale="lift", eligible=True)).sum() == 5
    assert trace.received(scale="lift")[0, 0, 4] == pytest.approx(16 / sum(1 / n for n in range(5, 21)), rel=1e-5)
    view = TraceView(trace, "rulli(eps=6)")
    assert np.flatnonzero(view.anchors[0, 0]).tolist() == [4]
    assert anchor_tables.anchors(view)["per_head"].tolist() == [1]


@pytest.mark.parametrize("eps", [1, 1.5])
def test_gu_with_an_eps_of_one_is_refused(eps):
    with pytest.raises(UserError, match="cannot fire: no row gives a key more than 1"):
        detect(trace_onto(4, 20), f"gu(eps={eps})")


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("zscores", r"unknown detector 'zscores' \(did you mean 'zscore'\?\); allowed: zscore, rulli, gu, topk, soft"),
        ("zscore(kk=3)", r"unknown argument of detector 'zscore' 'kk' \(did you mean 'k'\?\); allowed: k, scale"),
        ("rulli(esp=3)", r"unknown argument of detector 'rulli' 'esp' \(did you mean 'eps'\?\)"),
        ("zscore(scale='lifts')", r"unknown scale 'lifts' \(did you mean 'lift'\?\)"),
        ("zscore(scale=3)", "unknown scale '3'"),
        ("gu(scale='lift')", "unknown argument of detector 'gu' 'scale'"),
        ("zscore(k='three')", "takes a number for k, got 'three'"),
        ("topk(k=2.5)", "takes a whole number for k, got 2.5"),
        ("topk(k=0)", "topk takes a k above 0, got 0"),
        ("af_absorption(k=1)", "takes no arguments"),
        ("zscore(3)", "cannot read"),
        ("", "cannot read"),
    ],
)
def test_invalid_detectors_are_named(by, message):
    with pytest.raises(UserError, match=message):
        detect(trace_onto(4, 20), by)


def test_sixteen_keys_of_a_head_are_stored():
    with pytest.raises(UserError, match=r"stores 16 keys of each head, so topk\(k=17\) cannot be counted"):
        anchor_tables.anchors(TraceView(trace_onto(4, 40), "topk(k=17)"))


def test_a_single_eligible_key_is_not_compared():
    """One of 16 causal keys is seen by 16 rows."""
    trace = trace_onto(0, 16, 0.5, mask=causal(16))
    assert not detect(trace, "rulli(eps=1)").any()
    assert anchor_tables.eps_sweep(TraceView(trace))["share"].tolist() == [1] * 21
    assert detect(trace, "topk(k=3)").sum() == 1


# Traces without some arrays


@pytest.mark.parametrize(
    "table", [anchor_tables.anchor_classes, anchor_tables.anchor_tokens, depth.token_classes, depth.structure]
)
def test_a_trace_without_token_texts_is_refused(table):
    with pytest.raises(UserError, match="trace of 'hand' does not store the text of its tokens"):
        table(TraceView(replace(trace_onto(4, 20), meta={"rows": "all"})))


def test_a_trace_without_regions_is_refused():
    with pytest.raises(UserError, match="trace of 'hand' has no regions"):
        depth.predicting_rows(TraceView(trace_onto(4, 20)))
    with pytest.raises(UserError, match="has no regions"):
        depth.predicting_rows(TraceView(drop_arrays(build_trace(random_decoding(0, "full")), "row_regions")))


NEEDED_BY = {
    "received": ("absorption", "anchors", "top_keys", "drift", "concentration", "token_classes", "position_profile"),
    "uniform": ("absorption", "anchors", "sinks", "token_classes", "top_keys"),
    "eligible": ("absorption", "anchors", "top_keys", "eps_sweep"),
    "visible_rows": ("sinks", "lifetimes"),
    "top_key": ("sinks", "head_floating"),
    "top": ("anchors", "sinks", "head_floating"),
    "moments": ("anchors",),
    "head_stats": ("concentration", "sinks", "head_activity"),
    "score_at_mean_direction": ("qk",),
    "key_stats": ("norms",),
    "residual": ("norms",),
    "regions": ("flow", "rollout", "rollout_distance", "region_importance"),
    "rollout": ("rollout", "rollout_distance", "region_importance"),
    "row_key": ("retrieval",),
}


@pytest.mark.parametrize("name", NEEDED_BY)
def test_a_field_that_is_not_stored_is_named(name):
    decoding = random_decoding(0, "full")
    half = decoding.attention[0].shape[-1] // 2
    regions = {"document 1": range(half), "answer": range(half, 2 * half + 1), "evidence": [1, 2]}
    trace = drop_arrays(build_trace(replace(decoding, regions=regions)), name)
    for table in NEEDED_BY[name]:
        with pytest.raises(UserError, match=f"trace of 'hand' does not store '{name}'"):
            ANALYSES[table](TraceView(trace, "rulli(eps=1)"))
    tables = analyse([trace], "rulli(eps=1)")
    assert set(NEEDED_BY[name]) <= set(tables.missing)
    assert not set(tables.tables) & set(tables.missing)


def test_tables_do_not_need_fields_that_they_do_not_read():
    trace = build_trace(random_decoding(0, "full"))
    reduced = analyse(
        [drop_arrays(trace, "row_key", "row_mass", "rollout", "residual", "regions")], "rulli(eps=1)"
    ).tables
    affected = {"retrieval", "flow", "rollout", "rollout_distance", "region_importance", "norms"}
    for name, table in analyse([trace], "rulli(eps=1)").tables.items():
        if name not in affected:
            pd.testing.assert_frame_equal(table, reduced[name])


def test_the_soft_detector_needs_the_number_of_heads():
    with pytest.raises(UserError, match="does not store 'head_stats'"):
        detect(drop_arrays(trace_onto(4, 20), "head_stats"), "soft")


def test_an_analysis_without_traces_is_refused():
    with pytest.raises(UserError, match="no finished trace"):
        absorption([])
    assert analyse([]).tables == {}


# Small and empty traces: NaN or 0 without warnings


@pytest.mark.parametrize("by", ["zscore", "rulli", "gu", "topk", "soft", "af_absorption"])
def test_one_step_one_layer_one_head(by):
    """An anchor of the only step is static."""
    trace = trace_onto(4, 20, 0.9)
    tables = analyse([trace], by).tables
    drift = tables["drift"].iloc[0]
    assert drift[["displacement", "changes"]].tolist() == [0, 0]
    assert drift[["slope", "jaccard_next", "jaccard_first", *anchor_movement.FRONTIERS]].isna().all()
    assert tables["top_keys"]["top_key"].tolist() == [4, 4]  # of all rows and of the predicting row
    floating = tables["floating"]
    assert floating[["within", "across", "depth", "third"]].to_numpy().tolist() == [[0, 0, 0, "shallow"]] * 2
    assert floating[["moved", "excess_moved"]].isna().all(axis=None)
    lifetimes = tables["lifetimes"].iloc[0]
    assert lifetimes["static"] == lifetimes["spans"] == (5 if by == "topk" else 1)
    layer_drift = tables["layer_drift"][["displacement", "changes", "pairs", "distinct_keys"]]
    assert layer_drift.to_numpy().tolist() == [[0, 0, 0, 1]]
    assert tables["layer_drift"]["moved"].isna().all()


@pytest.mark.parametrize("by", ["zscore", "rulli(eps=0.1)", "gu", "soft"])
def test_a_trace_without_anchors(by):
    tables = analyse([build_trace(canvas(np.full((3, 2, 2, 20, 20), 1 / 20), 15))], by).tables
    assert (tables["anchors"][["anchors", "share"]] == 0).all(axis=None)
    assert tables["anchor_classes"]["share"].isna().all()
    assert tables["anchor_tokens"].empty
    drift = tables["drift"]
    undefined = ["temporal_variance", "temporal_variance_relative", "jaccard_next", "jaccard_first", "slope"]
    assert drift[[*undefined, *anchor_movement.FRONTIERS]].isna().all(axis=None)
    assert (drift[["displacement", "changes"]] == 0).all(axis=None)
    lifetimes = tables["lifetimes"]
    assert (lifetimes[["static", "flash", "vanishing", "moving", "spans", "split"]] == 0).all(axis=None)
    assert lifetimes["mean_length"].isna().all()


def erase_groups(trace: Trace, steps: list[int], layers: list[int], groups: tuple[str, ...]) -> Trace:
    """The trace as if these groups had no rows at these steps and layers."""
    arrays = {name: array.copy() for name, array in trace.arrays.items()}
    for group in groups:
        g = trace.coords["group"].index(group)
        index = np.ix_(steps, layers)
        arrays["received"][index[0], index[1], g] = np.nan
        arrays["top"][index[0], index[1], :, g] = np.nan
        arrays["top_key"][index[0], index[1], :, g] = -1
        arrays["moments"][index[0], index[1], :, trace.coords["quantity"].index(f"lift_{group}")] = [0, 0, 0]
    return replace(trace, arrays=arrays)


def decode_with_random_anchors(layers: int) -> Decoding:
    """Five steps; every step and layer has an anchor."""
    rng = np.random.default_rng(0)
    scores = rng.normal(0, 0.5, (5, layers, 2, 20, 20))
    for t in range(5):
        for layer in range(layers):
            scores[t, layer, :, :, rng.integers(20)] += 2
    return canvas(attend(scores), 15)


@pytest.mark.parametrize("by", ["topk(k=2)", "rulli(eps=1)", "zscore(k=1)"])
def test_a_step_without_measurements_has_no_top_key_and_no_anchors(by):
    trace = erase_groups(build_trace(decode_with_random_anchors(2)), [2], [0, 1], ("all",))
    view = TraceView(trace, by)
    assert (view.top_key[2] == -1).all()
    assert not view.anchors[2].any()
    path = np.delete(view.anchor_path, 2, 0)
    assert (path >= 0).all()
    tables = analyse([trace], by).tables
    index = tables["floating"][tables["floating"]["group"] == "all"]
    assert len(index) == 2
    for layer in range(2):
        counts = np.unique(path[:, layer], return_counts=True)[1]
        assert index.loc[layer, "within"] == pytest.approx(1 - counts.max() / 4)
        assert index.loc[layer, "anchor_steps"] == pytest.approx(4 / 5)
        hops = ((path[0], path[1]), (path[2], path[3]))
        assert tables["drift"].loc[layer, "changes"] == sum(a[layer] != b[layer] for a, b in hops)
        assert tables["drift"].loc[layer, "displacement"] == sum(abs(a[layer] - b[layer]) for a, b in hops)
    columns = ["displacement", "changes", "pairs", "distinct_keys"]
    assert tables["layer_drift"].loc[2, columns].tolist() == [0, 0, 0, 0]


def test_a_layer_without_measurements():
    trace = erase_groups(build_trace(decode_with_random_anchors(3)), list(range(5)), [1], ("all",))
    tables = analyse([trace], "rulli(eps=1)").tables
    index = tables["floating"].set_index(["group", "layer"]).loc["all"]
    assert index["anchor_steps"].tolist() == [1, 0, 1]
    undefined = ["moved", "excess_moved", "moved_overall", "moved_modal", "modal_share", "lift", "lead", "within"]
    assert index.loc[1, undefined].isna().all()
    assert index.loc[[0, 2], undefined].notna().all(axis=None)
    drift = tables["drift"].loc[1]
    assert drift[["displacement", "changes"]].tolist() == [0, 0]
    assert drift[["slope", "spatial_variance", "temporal_variance", *anchor_movement.FRONTIERS]].isna().all()
    path = trace.anchor_path()
    assert (path[:, [0, 2]] >= 0).all()
    assert tables["layer_drift"]["distinct_keys"].tolist() == [len({*row[[0, 2]]}) for row in path]
    assert (tables["layer_drift"][["displacement", "changes", "pairs"]] == 0).all(axis=None)


@pytest.mark.parametrize("group", ["masked", "committed", "predicting"])
def test_a_query_group_without_rows(group):
    """The split and the table of masked rows read masked rows; floating reads predicting rows."""
    decoding = random_decoding(1, "full")
    trace = erase_groups(build_trace(decoding), list(range(decoding.steps)), list(range(decoding.layers)), (group,))
    tables, complete = (analyse([t], "rulli(eps=1)").tables for t in (trace, build_trace(decoding)))
    for name in tables:
        columns = [c for c in tables[name].columns if c != "split"]
        if name == "masked_rows" and group == "masked":
            assert tables[name][["mass", "ratio"]].isna().all(axis=None)
            continue
        if name in ("top_keys", "floating") and group == "predicting":
            own, table = (tables[name], complete[name])
            erased = own[own["group"] == group]
            assert erased[["moved", "excess_moved", "lift", "lead"]].isna().all(axis=None)
            is_other = table["group"] == "all"
            pd.testing.assert_frame_equal(own[is_other], table[is_other])
            continue
        pd.testing.assert_frame_equal(tables[name][columns], complete[name][columns])
    unmasked = build_trace(canvas(np.full((2, 1, 1, 20, 20), 1 / 20), 20, when=[]))
    assert anchor_movement.lifetimes(TraceView(unmasked))["split"].isna().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_without_commits(kind):
    """As under `fs.watch`, which does not know the commits."""
    decoding = replace(random_decoding(2, kind), commits=())
    tables = analyse([build_trace(decoding)], "rulli(eps=1)")
    assert tables["drift"]["last commit"].isna().all()
    for name in ("predicting_rows", "commits", "order", "arness", "coupling"):
        assert "has no commits" in tables.missing[name]


def test_the_floating_index_without_anchors():
    tops = pd.DataFrame({"sample": "a", "group": "all", "step": [0, 1], "layer": 0, "depth": 0.0, "top_key": -1})
    values = {"moved": [0.2, np.nan], "excess_moved": [0.1, np.nan], "moved_from_first": [0.0, 0.2], "lift": 1.5}
    tops = tops.assign(modal_key=-1, lead=0.1, moved_modal=[0.0, np.nan], modal_share=0.0, **values)
    row = floating_index(tops).iloc[0]
    assert row[["moved", "excess_moved", "moved_overall", "anchor_steps", "lift"]].tolist() == [0.2, 0.1, 0.2, 0, 1.5]
    assert row[["within", "across"]].isna().all()


def test_a_canvas_without_content_tokens():
    """The ratio of content is NaN, and no layer has a crossing."""
    tokens = np.full(20, 5)
    trace = build_trace(canvas(np.full((1, 2, 1, 20, 20), 1 / 20), 20, when=[], tokens=tokens))
    table = depth.structure(TraceView(trace))
    assert table.loc[table["set"] == "content", "ratio"].isna().all()
    assert depth.find_crossing(table) is None


def test_a_watched_forward(llada):
    """A trace of `fs.watch` has one step and no commits, token texts or regions."""
    ids = torch.arange(30)[None] % 60
    with fs.watch(llada) as watched, torch.no_grad():
        llada.module(input_ids=ids)
    tables = analyse(watched.traces)
    need_texts = {"anchor_classes", "anchor_tokens", "token_classes", "structure"}
    need_commits = {"commits", "order", "arness", "coupling"}
    need_regions = {"predicting_rows", "retrieval", "flow", "rollout", "rollout_distance", "region_importance"}
    assert set(tables.missing) == need_texts | need_commits | need_regions
    assert len(tables["drift"]) == 3


def test_a_sample_that_does_not_allow_a_table_is_left_out_and_counted():
    complete, bare = (build_trace(random_decoding(i, "full"), name) for i, name in enumerate(("complete", "bare")))
    tables = analyse([complete, drop_arrays(bare, "key_stats")], "rulli(eps=1)")
    assert set(tables["norms"]["sample"]) == {"complete"}
    assert set(tables["drift"]["sample"]) == {"complete", "bare"}
    assert tables.partial["norms"].startswith("1 of 2 samples, the first because the trace of 'bare' does not store")
    assert "norms" not in tables.missing
