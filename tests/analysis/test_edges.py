"""What cannot be answered is refused with a sentence; what is not there is NaN or 0, without a warning."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hand import KINDS, anything, attend, canvas, causal, full, trace_of

import floatscope as fs
from floatscope.analysis import TraceView, absorption, anchors, depth, detect, floating, floating_index
from floatscope.analysis.measure import ANALYSES, build_tables
from floatscope.errors import UserError
from floatscope.traces import Trace

pytestmark = pytest.mark.filterwarnings("error")


def onto(key: int, n: int, mass: float = 1.0, steps: int = 1, see: np.ndarray | None = None) -> Trace:
    """Every row that sees it gives one key `mass` and the rest to the others, evenly."""
    see = full(n) if see is None else see
    A = np.where(see, (1 - mass) / (see.sum(1, keepdims=True) - 1).clip(1), 0.0)
    A[see[:, key], key] = mass
    A /= A.sum(1, keepdims=True).clip(1e-9)
    A[A.sum(1) == 0] = (see / see.sum(1, keepdims=True))[A.sum(1) == 0]
    return trace_of(canvas(np.stack([A[None, None]] * steps), n - 1, see))


def without(trace: Trace, *names: str) -> Trace:
    return replace(trace, arrays={n: a for n, a in trace.arrays.items() if n not in names})


# Detectors that cannot fire


@pytest.mark.parametrize(("n", "k"), [(10, 3), (5, 2), (2, 1), (4, 3)])
def test_a_z_score_no_key_can_reach_is_refused(n, k):
    with pytest.raises(UserError, match=rf"zscore\(k={k}\) cannot fire on {n} keys, .* √{n - 1} = "):
        detect(onto(0, n), f"zscore(k={k})")
    with pytest.raises(UserError, match="cannot fire"):
        detect(onto(0, n), f"soft(k={k})")


def test_eleven_keys_are_enough_for_three():
    assert np.flatnonzero(detect(onto(4, 11), "zscore")[0, 0]).tolist() == [4]
    assert np.flatnonzero(detect(onto(4, 11), "soft(k=3)")[0, 0]).tolist() == [4]


@pytest.mark.parametrize(("scale", "most"), [("mean", 1), ("visible", 1), ("percent", 100), ("sum", 20), ("lift", 20)])
def test_an_eps_no_key_can_pass_is_refused_and_a_smaller_one_is_not(scale, most):
    trace = onto(4, 20)
    with pytest.raises(UserError, match=rf"rulli\(eps={most}\) cannot fire on the scale '{scale}', .* exceeds {most};"):
        detect(trace, f"rulli(eps={most}, scale='{scale}')")
    assert np.flatnonzero(detect(trace, f"rulli(eps={0.99 * most}, scale='{scale}')")[0, 0]).tolist() == [4]


def test_the_eps_the_paper_prints_is_refused_on_the_mean_scale():
    with pytest.raises(UserError, match="use a smaller eps"):
        detect(onto(4, 40), "rulli(eps=3, scale='mean')")


def test_under_a_causal_mask_a_lift_may_exceed_the_number_of_eligible_keys():
    """Of 20 keys the first five are seen by 16 rows. The fifth gets all of those, 10.6 times what is even."""
    trace = onto(4, 20, see=causal(20))
    assert np.isfinite(trace.by_layer(scale="lift", eligible=True)).sum() == 5
    assert trace.by_layer(scale="lift")[0, 0, 4] == pytest.approx(16 / sum(1 / n for n in range(5, 21)), rel=1e-5)
    look = TraceView(trace, "rulli(eps=6)")
    assert np.flatnonzero(look.anchors[0, 0]).tolist() == [4]
    assert anchors.counts(look)["per_head"].tolist() == [1]


@pytest.mark.parametrize("eps", [1, 1.5])
def test_nobody_gives_more_than_all_it_has(eps):
    with pytest.raises(UserError, match="cannot fire: no row gives a key more than 1"):
        detect(onto(4, 20), f"gu(eps={eps})")


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
def test_mistakes_are_named(by, message):
    with pytest.raises(UserError, match=message):
        detect(onto(4, 20), by)


def test_a_head_keeps_sixteen_keys():
    with pytest.raises(UserError, match=r"keeps 16 keys of each head, so topk\(k=17\) cannot be counted"):
        anchors.counts(TraceView(onto(4, 40), "topk(k=17)"))


def test_a_key_alone_is_compared_with_nothing():
    """Of 16 causal keys one is seen by 16 rows."""
    trace = onto(0, 16, 0.5, see=causal(16))
    assert not detect(trace, "rulli(eps=1)").any()
    assert anchors.sweep(TraceView(trace))["share"].tolist() == [1] * 21
    assert detect(trace, "topk(k=3)").sum() == 1


# Traces that lack something


@pytest.mark.parametrize("table", [anchors.identity, anchors.strings, depth.classes, depth.structure])
def test_without_pieces(table):
    with pytest.raises(UserError, match="trace of 'hand' does not say what its tokens are"):
        table(TraceView(replace(onto(4, 20), meta={"rows": "all"})))


def test_without_regions():
    with pytest.raises(UserError, match="trace of 'hand' has no regions"):
        depth.answer_rows(TraceView(onto(4, 20)))
    with pytest.raises(UserError, match="has no regions"):
        depth.answer_rows(TraceView(without(trace_of(anything(0, "full")), "row_regions")))


def test_an_unknown_layer_is_named():
    with pytest.raises(UserError, match="layer 5 is not in the trace of 'hand', which holds layers 0 to 0"):
        floating.mean_map([TraceView(onto(4, 20))], layer=5)


NEEDS = {
    "received": ("absorption", "anchors", "tops", "drift", "concentration", "classes"),
    "uniform": ("absorption", "anchors", "sinks", "classes"),
    "eligible": ("absorption", "anchors", "tops", "sweep"),
    "seen": ("sinks", "lifetimes"),
    "top_key": ("sinks",),
    "top": ("anchors", "sinks"),
    "moments": ("anchors",),
    "head_stats": ("concentration", "sinks", "activity"),
    "turned": ("qk",),
    "key_stats": ("norms",),
    "residual": ("norms",),
    "regions": ("flow", "rollout", "rank_one", "importance"),
    "rollout": ("rollout", "rank_one", "importance"),
    "row_key": ("retrieval",),
}


@pytest.mark.parametrize("name", NEEDS)
def test_a_field_that_was_not_kept_is_named(name):
    world = anything(0, "full")
    half = world.attention[0].shape[-1] // 2
    regions = {"document 1": range(half), "answer": range(half, 2 * half + 1), "evidence": [1, 2]}
    trace = without(trace_of(replace(world, regions=regions)), name)
    for table in NEEDS[name]:
        with pytest.raises(UserError, match=f"trace of 'hand' does not keep '{name}'"):
            ANALYSES[table](TraceView(trace, "rulli(eps=1)"))
    measured = build_tables([trace], "rulli(eps=1)")
    assert set(NEEDS[name]) <= set(measured.missing)
    assert not set(measured.tables) & set(measured.missing)


def test_what_is_not_read_need_not_be_kept():
    trace = trace_of(anything(0, "full"))
    unread = build_tables(
        [without(trace, "row_key", "row_mass", "rollout", "residual", "regions")], "rulli(eps=1)"
    ).tables
    read = {"retrieval", "flow", "rollout", "rank_one", "importance", "norms"}
    for name, table in build_tables([trace], "rulli(eps=1)").tables.items():
        if name not in read:
            pd.testing.assert_frame_equal(table, unread[name])


def test_the_soft_detector_counts_heads():
    with pytest.raises(UserError, match="does not keep 'head_stats'"):
        detect(without(onto(4, 20), "head_stats"), "soft")


def test_no_traces_at_all():
    with pytest.raises(UserError, match="no finished trace"):
        absorption([])
    assert build_tables([]).tables == {}


# Small and empty ones: numbers where there are some, NaN or 0 elsewhere, no warnings


@pytest.mark.parametrize("by", ["zscore", "rulli", "gu", "topk", "soft", "af_absorption"])
def test_one_step_one_layer_one_head(by):
    """A run of one step is all the steps there are."""
    trace = onto(4, 20, 0.9)
    tables = build_tables([trace], by).tables
    drift = tables["drift"].iloc[0]
    assert drift[["displacement", "changes"]].tolist() == [0, 0]
    assert drift[["slope", "jaccard_next", "jaccard_first", *floating.FRONTIERS]].isna().all()
    assert tables["tops"]["top"].tolist() == [4]
    assert tables["floating"][["within", "across", "depth", "third"]].to_numpy().tolist() == [[0, 0, 0, "shallow"]]
    lives = tables["lifetimes"].iloc[0]
    assert lives["static"] == lives["runs"] == (5 if by == "topk" else 1)
    assert tables["over_layers"][["displacement", "changes", "places"]].to_numpy().tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("by", ["zscore", "rulli(eps=0.1)", "gu", "soft"])
def test_no_anchors_at_all(by):
    tables = build_tables([trace_of(canvas(np.full((3, 2, 2, 20, 20), 1 / 20), 15))], by).tables
    assert (tables["anchors"][["anchors", "share"]] == 0).all(axis=None)
    assert tables["identity"]["share"].isna().all()
    assert tables["tokens"].empty
    drift = tables["drift"]
    nowhere = ["temporal_variance", "temporal_variance_relative", "jaccard_next", "jaccard_first"]
    assert drift[nowhere].isna().all(axis=None)
    lives = tables["lifetimes"]
    assert (lives[["static", "flash", "vanishing", "moving", "runs", "split"]] == 0).all(axis=None)
    assert lives["length"].isna().all()


def unmeasured(trace: Trace, steps: list[int], layers: list[int], groups: tuple[str, ...]) -> Trace:
    """The same without what these groups gave at these steps to these layers."""
    arrays = {name: array.copy() for name, array in trace.arrays.items()}
    for group in groups:
        g = trace.coords["group"].index(group)
        at = np.ix_(steps, layers)
        arrays["received"][at[0], at[1], g] = np.nan
        arrays["top"][at[0], at[1], :, g] = np.nan
        arrays["top_key"][at[0], at[1], :, g] = -1
        arrays["moments"][at[0], at[1], :, trace.coords["quantity"].index(f"lift_{group}")] = [0, 0, 0]
    return replace(trace, arrays=arrays)


@pytest.mark.parametrize("by", ["topk(k=2)", "rulli(eps=1)", "zscore(k=1)"])
def test_a_step_at_which_nothing_was_measured(by):
    """It has no top and no anchors, and is no change."""
    world = canvas(attend(np.random.default_rng(0).normal(0, 2, (5, 2, 2, 20, 20))), 15)
    trace = unmeasured(trace_of(world), [2], [0, 1], ("all",))
    look = TraceView(trace, by)
    assert (look.top[2] == -1).all()
    assert not look.anchors[2].any()
    path = np.delete(look.top, 2, 0)
    tables = build_tables([trace], by).tables
    index = tables["floating"]
    assert len(index) == 2
    for layer in range(2):
        counts = np.unique(path[:, layer], return_counts=True)[1]
        assert index.loc[layer, "within"] == pytest.approx(1 - counts.max() / 4)
        hops = ((path[0], path[1]), (path[2], path[3]))
        assert tables["drift"].loc[layer, "changes"] == sum(a[layer] != b[layer] for a, b in hops)
        assert tables["drift"].loc[layer, "displacement"] == sum(abs(a[layer] - b[layer]) for a, b in hops)
    assert tables["over_layers"].loc[2, ["displacement", "changes", "places"]].tolist() == [0, 0, 0]


def test_a_layer_in_which_nothing_was_measured():
    world = canvas(attend(np.random.default_rng(0).normal(0, 2, (5, 3, 2, 20, 20))), 15)
    trace = unmeasured(trace_of(world), list(range(5)), [1], ("all",))
    tables = build_tables([trace], "rulli(eps=1)").tables
    assert tables["floating"]["layer"].tolist() == [0, 2]
    drift = tables["drift"].loc[1]
    assert drift[["displacement", "changes"]].tolist() == [0, 0]
    assert drift[["slope", "spatial_variance", "temporal_variance", *floating.FRONTIERS]].isna().all()
    tops = tables["tops"].set_index(["step", "layer"])["top"]
    assert tables["over_layers"]["places"].tolist() == [len({tops[t, 0], tops[t, 2]}) for t in range(5)]
    assert (tables["over_layers"][["displacement", "changes"]] == 0).all(axis=None)


@pytest.mark.parametrize("group", ["masked", "committed", "predicting"])
def test_a_group_without_rows(group):
    """What reads such rows does without them: the split, and where masked rows look."""
    world = anything(1, "full")
    trace = unmeasured(trace_of(world), list(range(world.steps)), list(range(world.layers)), (group,))
    tables, whole = (build_tables([t], "rulli(eps=1)").tables for t in (trace, trace_of(world)))
    for name in tables:
        columns = [c for c in tables[name].columns if c != "split"]
        if name == "directed" and group == "masked":
            assert tables[name][["mass", "ratio"]].isna().all(axis=None)
            continue
        pd.testing.assert_frame_equal(tables[name][columns], whole[name][columns])
    unmasked = trace_of(canvas(np.full((2, 1, 1, 20, 20), 1 / 20), 20, when=[]))
    assert floating.lifetimes(TraceView(unmasked))["split"].isna().all()


@pytest.mark.parametrize("kind", KINDS)
def test_no_commits(kind):
    """As under `fs.watch`, which knows none."""
    world = replace(anything(2, kind), commits=())
    measured = build_tables([trace_of(world)], "rulli(eps=1)")
    assert measured.tables["drift"]["last commit"].isna().all()
    for name in ("answer_rows", "commits", "order", "arness", "coupling"):
        assert "has no commits" in measured.missing[name]


def test_an_index_of_no_tops():
    tops = pd.DataFrame({"sample": "a", "step": [0, 1], "layer": 0, "depth": 0.0, "top": -1})
    index = floating_index(tops)
    assert index.empty
    assert {"sample", "layer", "depth", "within", "across", "third"} <= set(index.columns)


def test_structure_alone():
    """Without a content token its ratio is no number, and there is no layer from which it leads."""
    tokens = np.full(20, 5)
    trace = trace_of(canvas(np.full((1, 2, 1, 20, 20), 1 / 20), 20, when=[], tokens=tokens))
    table = depth.structure(TraceView(trace))
    assert table.loc[table["set"] == "content", "ratio"].isna().all()
    assert depth.crossing(table) is None


def test_a_watched_forward(llada):
    """A trace of `fs.watch`: one step, no commits, no pieces, no regions."""
    ids = torch.arange(30)[None] % 60
    with fs.watch(llada) as seen, torch.no_grad():
        llada.module(input_ids=ids)
    measured = build_tables(seen.traces)
    wordless, of_commits = {"identity", "tokens", "classes", "structure"}, {"commits", "order", "arness", "coupling"}
    of_regions = {"answer_rows", "retrieval", "flow", "rollout", "rank_one", "importance"}
    assert set(measured.missing) == wordless | of_commits | of_regions
    assert len(measured.tables["drift"]) == 3


def test_a_sample_that_cannot_give_a_table_is_left_out_and_counted():
    whole, bare = trace_of(anything(0, "full"), "whole"), trace_of(anything(1, "full"), "bare")
    measured = build_tables([whole, without(bare, "key_stats")], "rulli(eps=1)")
    assert set(measured.tables["norms"]["sample"]) == {"whole"}
    assert set(measured.tables["drift"]["sample"]) == {"whole", "bare"}
    assert measured.partial["norms"].startswith("1 of 2 samples, the first because the trace of 'bare' does not keep")
    assert "norms" not in measured.missing
