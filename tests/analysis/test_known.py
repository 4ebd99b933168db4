"""Decodings whose answers are known beforehand: sinks, anchors that move, flash, vanish, split, and nothing at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hand import BOS, COMMA, LINE, STOP, WORDS, World, canvas, causal, full, growing, trace_of

from floatscope.analysis import TraceView, absorption, anchors, depth, detect, floating, floating_index
from floatscope.analysis.tokens import CLASSES
from floatscope.traces import Trace

pytestmark = pytest.mark.filterwarnings("error")
N, STEPS, LAYERS, HEADS = 40, 10, 2, 3
DETECTORS = ("zscore", "rulli", "rulli(eps=0.01)", "gu", "zscore(k=1)")
LIVES = ["static", "flash", "vanishing", "moving"]


def drawn(key: int | None, mass: float = 0.5, see: np.ndarray | None = None) -> np.ndarray:
    """Every row that sees `key` and others gives it `mass` and spreads the rest evenly; None: uniform rows."""
    see = full(N) if see is None else see
    A = see / see.sum(1, keepdims=True)
    for i in range(len(see)) if key is not None else ():
        others = see[i].sum() - 1
        if see[i, key] and others:
            A[i] = (1 - mass) / others * see[i]
            A[i, key] = mass
    return A


def steps_of(rows: list[np.ndarray]) -> np.ndarray:
    """One matrix per step, the same in all layers and heads."""
    return np.stack([np.broadcast_to(A, (LAYERS, HEADS, *A.shape)) for A in rows])


def anchored(path: list[int | None], mass: float = 0.5, sample: str = "hand", **more: object) -> Trace:
    """Full attention; one anchor at each step."""
    return trace_of(canvas(steps_of([drawn(key, mass) for key in path]), **{"prompt": 30, **more}), sample)


def each_layer(table: pd.DataFrame, column: str) -> list[float]:
    assert table["layer"].tolist() == list(range(LAYERS))
    return table[column].tolist()


# A fixed sink


@pytest.mark.parametrize("key", [0, 7])
def test_a_sink_under_full_attention(key):
    trace = anchored([key] * STEPS)
    look = TraceView(trace)
    assert (look.top == key).all()
    assert (look.anchors == (np.arange(N) == key)).all()
    np.testing.assert_allclose(look.lift[..., key], 20, rtol=1e-6)
    np.testing.assert_allclose(np.delete(look.lift, key, -1), 0.5 / 39 * 40, rtol=1e-5)
    table = absorption([trace]).set_index(["set", "layer"])
    for layer in range(LAYERS):
        for name in ("top", "anchors"):
            assert table.loc[(name, layer), ["percent", "uniform", "lift"]].tolist() == pytest.approx([50, 2.5, 20])
        first = [50, 2.5, 20] if key == 0 else [50 / 39, 2.5, 20 / 39]
        assert table.loc[("first", layer), ["percent", "uniform", "lift"]].tolist() == pytest.approx(first)
        five = 50 + 4 * 50 / 39
        assert table.loc[("top 5", layer), ["percent", "uniform", "lift"]].tolist() == pytest.approx(
            [five, 12.5, five / 12.5]
        )


@pytest.mark.parametrize("kind", ["canvas", "grown", "cached"])
def test_a_sink_under_a_causal_mask(kind):
    """Row 0 gives the first key all it has, the others half."""
    A = drawn(0, see=causal(N))
    if kind == "canvas":
        world = canvas(steps_of([A] * STEPS), 30, causal(N))
    else:
        world = growing(np.broadcast_to(A, (LAYERS, HEADS, N, N)), N - STEPS + 1, cached=kind == "cached")
    trace = trace_of(world)
    look = TraceView(trace)
    assert (look.top == 0).all()
    assert (look.anchors == (np.arange(N) == 0)).all()
    table = absorption([trace], per_step=True).set_index(["set", "layer", "step"])
    for t in range(STEPS):
        n = len(world.states[t])
        harmonic = sum(1 / i for i in range(1, n + 1))
        percent, uniform = 100 * (1 + (n - 1) / 2) / n, 100 * harmonic / n
        for name in ("first", "top", "anchors"):
            row = table.loc[(name, 1, t)]
            assert row[["percent", "uniform"]].tolist() == pytest.approx([percent, uniform])
            assert row["lift"] == pytest.approx((n + 1) / 2 / harmonic)


@pytest.mark.parametrize("kind", ["full", "causal", "cached"])
def test_a_sink_does_not_float(kind):
    key = 0
    if kind == "full":
        trace = anchored([key] * STEPS)
    elif kind == "causal":
        trace = trace_of(canvas(steps_of([drawn(key, see=causal(N))] * STEPS), 30, causal(N)))
    else:
        whole = np.broadcast_to(drawn(key, see=causal(N)), (LAYERS, HEADS, N, N))
        trace = trace_of(growing(whole, N - STEPS + 1))
    look = TraceView(trace)
    index = floating_index(floating.tops(look))
    assert each_layer(index, "within") == each_layer(index, "across") == [0, 0]
    lives = floating.lifetimes(look)
    assert lives[[*LIVES, "runs", "length"]].to_numpy().tolist() == [[1, 0, 0, 0, 1, STEPS]] * LAYERS
    drift = floating.drift(look)
    for column, value in {"displacement": 0, "changes": 0, "temporal_variance": 0, "jaccard_next": 1}.items():
        assert each_layer(drift, column) == [value, value], column
    assert each_layer(drift, "jaccard_first") == [1, 1]
    assert each_layer(drift, "slope") == pytest.approx([0, 0], abs=1e-12)
    assert drift[list(floating.FRONTIERS)].isna().all(axis=None)  # what stands still is correlated with nothing
    over = floating.over_layers(look)
    assert over[["displacement", "changes", "places"]].to_numpy().tolist() == [[0, 0, 1]] * STEPS


def test_only_one_layer_has_the_sink():
    A = steps_of([drawn(None)] * STEPS)
    A[:, 1] = drawn(7)
    look = TraceView(trace_of(canvas(A, 30)))
    assert anchors.counts(look)[["anchors", "share", "per_head"]].to_numpy().tolist() == [[0, 0, 0], [1, 1 / N, 1]]
    over = floating.over_layers(look)
    assert (over["displacement"] == 7).all()  # the first of equal keys is the top of the layer without one
    assert (over["places"] == 2).all()


def test_a_head_is_counted_by_itself():
    A = steps_of([drawn(None)] * STEPS)
    A[:, 0, 0], A[:, 0, 1], A[:, 1, 2] = drawn(3), drawn(5), drawn(7)
    for by in ("zscore", "rulli"):
        counts = anchors.counts(TraceView(trace_of(canvas(A, 30)), by))
        assert each_layer(counts, "per_head") == pytest.approx([2 / 3, 1 / 3])


# Anchors that move


@pytest.mark.parametrize("direction", [1, -1])
def test_an_anchor_that_follows_the_mask(direction):
    """It sits on the outermost mask, which is filled at every step, from the left or from the right."""
    path = list(range(30, 40))[::direction]
    trace = anchored(path, when=range(10)[::direction])
    look = TraceView(trace)
    assert look.top.T.tolist() == [path] * LAYERS
    index = floating_index(floating.tops(look))
    assert each_layer(index, "within") == pytest.approx([0.9, 0.9])
    drift = floating.drift(look)
    assert each_layer(drift, "displacement") == each_layer(drift, "changes") == [9, 9]
    assert each_layer(drift, "slope") == pytest.approx([direction] * 2)
    assert each_layer(drift, "temporal_variance") == pytest.approx([8.25, 8.25])  # of 0 … 9
    assert each_layer(drift, "temporal_variance_relative") == pytest.approx([8.25 / N**2] * 2)
    spread = (20 - 20 / 39) / 10  # a tenth of the time an anchor, or never
    assert each_layer(drift, "spatial_variance") == pytest.approx([spread**2 * 3 / 16] * 2, rel=1e-5)
    assert each_layer(drift, "jaccard_next") == each_layer(drift, "jaccard_first") == [0, 0]
    followed, other = ("leftmost mask", "rightmost mask")[::direction]
    assert each_layer(drift, followed) == pytest.approx([1, 1])
    assert np.isnan(each_layer(drift, other)).all()
    assert each_layer(drift, "last commit") == pytest.approx([1, 1])
    lives = floating.lifetimes(look)
    assert lives[[*LIVES, "runs", "length", "split"]].to_numpy().tolist() == [[0, 10, 0, 0, 10, 1, 0]] * LAYERS


def test_an_anchor_at_the_end_of_the_block():
    drift = floating.drift(TraceView(anchored([34] * 5 + [39] * 5, when=range(10), block=5)))
    assert each_layer(drift, "block end") == pytest.approx([1, 1])
    assert each_layer(drift, "changes") == [1, 1]
    assert each_layer(drift, "displacement") == [5, 5]


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ([None, None, 7, *[None] * 7], "flash"),
        ([7, *[None] * 9], "flash"),
        ([*[None] * 9, 7], "flash"),
        ([None, 7, 7, 7, 7, *[None] * 5], "vanishing"),
        ([*[7] * 8, None, None], "vanishing"),
        ([*[7] * 9, None], "static"),
        ([None, *[7] * 9], "static"),
        ([None, None, *[7] * 8], "moving"),  # still there at the end
    ],
)
def test_the_life_of_one_anchor(path, wanted):
    lives = floating.lifetimes(TraceView(anchored(path)))
    for kind in LIVES:
        assert each_layer(lives, kind) == [int(kind == wanted)] * LAYERS
    assert each_layer(lives, "length") == [path.count(7)] * LAYERS


def test_an_anchor_that_is_followed_by_another_moves():
    lives = floating.lifetimes(TraceView(anchored([7] * 4 + [9] * 6)))
    assert lives[[*LIVES, "runs", "length"]].to_numpy().tolist() == [[0, 0, 0, 2, 2, 5]] * LAYERS
    index = floating_index(floating.tops(TraceView(anchored([7] * 4 + [9] * 6))))
    assert each_layer(index, "within") == pytest.approx([0.4, 0.4])


def test_an_anchor_that_comes_back_has_two_runs():
    lives = floating.lifetimes(TraceView(anchored([7] * 3 + [None] * 3 + [7] * 4)))
    assert lives[[*LIVES, "runs", "length"]].to_numpy().tolist() == [[0, 0, 1, 1, 2, 3.5]] * LAYERS


@pytest.mark.parametrize(("steps", "length"), [(10, 9), (20, 18), (30, 27), (70, 63), (110, 99), (130, 117)])
def test_ninety_percent_is_enough(steps, length):
    """Also where 0.9 · steps, rounded, is more than it."""
    for run, kind in ((length, "static"), (length - 1, "vanishing")):
        world = canvas(np.stack([drawn(7 if t < run else None)[None, None] for t in range(steps)]), 30)
        assert floating.lifetimes(TraceView(trace_of(world)))[kind].tolist() == [1]


def test_a_split_anchor():
    """Half of the rows are masked and look at key 3, the others at key 12; after the last commit there is one kind."""
    A = drawn(12, 0.8)
    A[20:] = drawn(3, 0.8)[20:]
    world = canvas(steps_of([A] * 4), 20, when=[2] * 20)  # none masked at the last step
    look = TraceView(trace_of(world))
    assert [set(np.flatnonzero(found)) for found in look.anchors[:, 0]] == [{3, 12}] * 4
    assert each_layer(floating.lifetimes(look), "split") == [1, 1]


def test_rows_that_look_at_one_place_are_not_split():
    assert each_layer(floating.lifetimes(TraceView(anchored([3] * 4))), "split") == [0, 0]


def test_two_tops_of_which_one_is_no_anchor_are_not_split():
    A = drawn(12, 0.8)
    A[20:] = drawn(None)[20:]
    A[20:, 3] += 0.001
    A[20:] /= A[20:].sum(1, keepdims=True)
    look = TraceView(trace_of(canvas(steps_of([A] * 4), 20, when=[3] * 20)))
    assert [set(np.flatnonzero(found)) for found in look.anchors[:, 0]] == [{12}] * 4
    assert each_layer(floating.lifetimes(look), "split") == [0, 0]


# Nothing


@pytest.mark.parametrize("kind", ["full", "causal", "cached"])
def test_uniform_attention_has_no_anchors(kind):
    see = full(N) if kind == "full" else causal(N)
    if kind == "cached":
        world = growing(np.broadcast_to(drawn(None, see=see), (LAYERS, HEADS, N, N)), N - 9)
    else:
        world = canvas(steps_of([drawn(None, see=see)] * STEPS), 30, see)
    trace = trace_of(world)
    for by in DETECTORS:
        assert not detect(trace, by).any(), by
        look = TraceView(trace, by)
        counts = anchors.counts(look)
        assert (counts[["anchors", "share"]] == 0).all(axis=None)
        assert by == "gu" or (counts["per_head"] == 0).all()
        lives = floating.lifetimes(look)
        assert (lives[[*LIVES, "runs"]] == 0).all(axis=None)
        assert lives["length"].isna().all()
        drift = floating.drift(look)
        assert drift[["temporal_variance", "jaccard_next", "jaccard_first"]].isna().all(axis=None)
        assert drift["spatial_variance"].to_numpy() == pytest.approx(0, abs=1e-10)
        identity = anchors.identity(look)
        assert identity[["share", "ratio"]].isna().all(axis=None)
        assert identity["base"].sum() == pytest.approx(1)
        assert anchors.strings(look).empty
    look = TraceView(trace)
    lift = look.lift[np.isfinite(look.lift)]
    assert lift.size
    np.testing.assert_allclose(lift, 1, rtol=1e-6)
    table = absorption([trace])
    assert (table.loc[table["set"] == "anchors", "percent"] == 0).all()
    assert table.loc[table["set"] == "anchors", "lift"].isna().all()
    np.testing.assert_allclose(table.loc[table["set"] != "anchors", "lift"], 1, rtol=1e-6)
    sweep = anchors.sweep(look)
    assert (sweep.loc[sweep["eps"] > 0, "share"] == 1).all()
    assert anchors.sinks(look)[["first", "anywhere"]].to_numpy().tolist() == [[0, 0]]
    spread = anchors.concentration(look)
    np.testing.assert_allclose(spread["row_entropy"], 1, rtol=1e-6)
    np.testing.assert_allclose(spread["gini"], 0, atol=1e-6)
    np.testing.assert_allclose(depth.classes(look)["ratio"].dropna(), 1, rtol=1e-6)
    np.testing.assert_allclose(depth.structure(look)["ratio"], 1, rtol=1e-6)
    if kind == "full":
        assert not detect(trace, "soft").any()
        np.testing.assert_allclose(spread["column_entropy"], 1, rtol=1e-6)
        np.testing.assert_allclose(spread[["top_1", "top_5"]], [[1 / N, 5 / N]] * LAYERS, rtol=1e-6)


def test_without_lift_a_causal_mask_alone_looks_like_a_sink():
    """Of 512 uniform rows the first key receives 5.9 standard deviations more than the mean: convention 9."""
    see = causal(512)
    trace = trace_of(World([drawn(None, see=see)[None, None]], [see[None]], [np.ones(512)], [np.full(512, BOS)]))
    everywhere = trace.received(scale="mean")[0]
    assert (everywhere[0] - everywhere.mean()) / everywhere.std() == pytest.approx(5.9, abs=0.05)
    assert detect(trace, "zscore(scale='mean')")[0, 0, 0]
    assert detect(trace, "soft")[0, 0, 0]
    assert not detect(trace, "zscore").any()


@pytest.mark.parametrize(("more", "wanted"), [(5e-5, 0), (0.01, 1)])
def test_rounding_is_no_anchor_and_little_more_attention_is(more, wanted):
    """However alike the other keys are: a z-score knows no size."""
    A = drawn(None)
    A[:, 7] *= 1 + more
    look = TraceView(trace_of(canvas(steps_of([A / A.sum(1, keepdims=True)]), 30)))
    assert anchors.counts(look)[["anchors", "per_head"]].to_numpy().tolist() == [[wanted, wanted]] * LAYERS
    assert detect(look.trace, "soft").any() == wanted


# Several texts


def test_two_texts_with_their_anchors_at_different_places():
    traces = [anchored([key] * STEPS, sample=name) for name, key in {"one": 9, "two": 5, "three": 9}.items()]
    index = floating_index(pd.concat([floating.tops(TraceView(trace)) for trace in traces]))
    assert (index["within"] == 0).all()
    assert index.groupby("sample")["across"].mean().to_dict() == {"one": 0, "two": 1, "three": 0}
    assert index["third"].tolist() == ["shallow", "deep"] * 3


def test_of_two_places_as_frequent_the_earlier_is_the_mode():
    traces = [anchored([key] * STEPS, sample=name) for name, key in {"one": 9, "two": 5}.items()]
    index = floating_index(pd.concat([floating.tops(TraceView(trace)) for trace in traces]))
    assert index.groupby("sample")["across"].mean().to_dict() == {"one": 1, "two": 0}


def test_a_text_floats_within_and_all_texts_alike_across():
    traces = [anchored([3, 3, 3, 8], sample=name) for name in "ab"]
    index = floating_index(pd.concat([floating.tops(TraceView(trace)) for trace in traces]))
    assert (index["within"] == 0.25).all()
    assert (index["across"] == 0.25).all()


def test_maps_of_two_tasks():
    first = floating.mean_map([TraceView(anchored([0] * STEPS, 1.0))], 0, keys=40)
    last = floating.mean_map([TraceView(anchored([39] * STEPS, 1.0))], 0, keys=40)
    assert (first[:, 0] == 1).all()
    assert (last[:, 39] == 1).all()
    assert floating.map_distance(first, last) == 1
    both = floating.mean_map([TraceView(anchored([key] * STEPS, 1.0)) for key in (0, 39)], 0, keys=40)
    assert floating.map_distance(first, both) == 0.5


# What anchors are


def test_the_class_of_an_anchor_and_how_common_it_is():
    """Four of 40 tokens are punctuation, ten are masks at first and none at the end."""
    tokens = np.array([BOS, *np.resize(list(WORDS), N - 1)])
    tokens[[3, 12, 20, 25]], tokens[8] = [STOP, STOP, STOP, COMMA], LINE
    look = TraceView(anchored([3, 12, 20, 3], tokens=tokens, when=[0] * 5 + [1] * 5))
    table = anchors.identity(look).set_index("class")
    masks = (10 + 5) / (4 * N)
    assert table["share"].to_dict() == {**dict.fromkeys(table.index, 0.0), "punctuation": 1.0}
    base = {"bos": 1 / N, "mask": masks, "special": 0, "template": 0, "newline": 1 / N, "punctuation": 4 / N}
    base["content"] = 1 - sum(base.values())
    assert table["base"].to_dict() == pytest.approx(base)
    assert table.loc["punctuation", "ratio"] == pytest.approx(N / 4)
    assert table.loc[["special", "template"], "ratio"].isna().all()
    strings = anchors.strings(look)
    assert strings[["token", "share", "base"]].to_numpy().tolist() == [[" .", 1, 3 / N]]


def test_a_bos_inside_the_text_is_special_and_template_words_are_template():
    tokens = np.array([BOS, *np.resize(list(WORDS), N - 1)])
    tokens[4], tokens[5], tokens[6] = BOS, STOP, LINE
    world = canvas(steps_of([drawn(4)]), 30, tokens=tokens, regions={"template": [0, 4, 5, 6, 7, 35]})
    classes = TraceView(trace_of(world)).classes[0]
    named = [CLASSES[c] for c in classes]
    assert named[:9] == [
        "bos", "content", "content", "content", "special", "template", "template", "template", "content"
    ]  # fmt: skip
    assert named[30:] == ["mask"] * 10


# Sinks, the sweep, concentration


def test_sinks_by_their_rule():
    """One head has a sink at the first key, one elsewhere, one a weak one, one none."""
    A = np.stack([[[drawn(0), drawn(7)], [drawn(0, 0.2), drawn(None)]]] * STEPS)
    look = TraceView(trace_of(canvas(A, 30)))
    assert anchors.sinks(look)[["first", "anywhere"]].to_numpy().tolist() == [[0.25, 0.5]]
    assert anchors.sinks(look, eps=0.1)[["first", "anywhere"]].to_numpy().tolist() == [[0.5, 0.75]]
    assert anchors.sinks(look, eps=0.6)[["first", "anywhere"]].to_numpy().tolist() == [[0, 0]]
    assert not detect(look.trace, "gu").any()  # of the mean over heads none has enough
    assert detect(look.trace, "gu(eps=0.2)")[:, 0, [0, 7]].all()


def test_the_first_key_under_a_window_is_judged_by_the_rows_that_see_it():
    """It gets .5 of the six rows that may see it, 7.5 % of all attention."""
    at = np.arange(N)
    see = (at[:, None] - at >= 0) & (at[:, None] - at <= 5)
    look = TraceView(trace_of(canvas(steps_of([drawn(0, see=see)]), 30, see)))
    assert anchors.sinks(look, eps=0.5)["first"].tolist() == [1]  # row 0 gives it all: 3.5 of 6
    assert anchors.sinks(look, eps=0.6)["first"].tolist() == [0]


def test_the_sweep_drops_an_anchor_where_eps_passes_it():
    mass = 0.2
    above = mass * N - (1 - mass) * N / (N - 1)  # 7.18
    table = anchors.sweep(TraceView(anchored([7] * 3, mass)))
    assert table["eps"].tolist() == [k / 2 for k in range(21)]
    assert table["share"].tolist() == pytest.approx([1 - 1 / N if eps < above else 1 for eps in table["eps"]])


def test_one_key_that_takes_everything():
    spread = anchors.concentration(TraceView(anchored([7] * 3, 1.0)))
    for column, value in {
        "row_entropy": 0, "gini": (N - 1) / N, "column_entropy": 0, "top_1": 1, "top_5": 1
    }.items():  # fmt: skip
        assert each_layer(spread, column) == pytest.approx([value, value], abs=1e-6), column


# Depth


def looking_at(names: list[str]) -> World:
    """Layer by layer all rows look evenly at structure (10 of 40 tokens) or at content."""
    tokens = np.array([BOS, *np.resize(list(WORDS), N - 1)])
    tokens[1:10] = [STOP, LINE, COMMA] * 3
    at = {"structure": range(10), "content": range(10, N), "all": range(N)}
    A = np.zeros((1, len(names), HEADS, N, N))
    for layer, name in enumerate(names):
        A[:, layer, :, :, list(at[name])] = 1 / len(at[name])
    return canvas(A, N, tokens=tokens, when=[])


@pytest.mark.parametrize(
    ("names", "crossing"),
    [
        (["structure", "structure", "content"], 2),
        (["structure", "content", "structure", "content", "content"], 3),
        (["content", "content"], 0),
        (["structure", "structure"], None),
        (["content", "structure"], None),
        (["all", "all"], None),
        (["structure", "all", "content"], 2),
    ],
)
def test_content_overtakes_structure(names, crossing):
    look = TraceView(trace_of(looking_at(names)))
    table = depth.structure(look)
    for layer, name in enumerate(names):
        shares = table[table["layer"] == layer].set_index("set")["share"]
        ratios = table[table["layer"] == layer].set_index("set")["ratio"]
        wanted = {"structure": (1, 0), "content": (0, 1), "all": (0.25, 0.75)}[name]
        assert (shares["structure"], shares["content"]) == pytest.approx(wanted, abs=1e-6)
        assert (ratios["structure"], ratios["content"]) == pytest.approx((wanted[0] * 4, wanted[1] / 0.75), abs=1e-5)
    assert depth.crossing(table) == crossing


def test_crossing_is_that_of_the_mean_over_texts():
    texts = {"a": ["structure", "content"], "b": ["structure", "content"], "c": ["content", "content"]}
    tables = [depth.structure(TraceView(trace_of(looking_at(names), sample))) for sample, names in texts.items()]
    assert depth.crossing(pd.concat(tables)) == 1


def test_other_documents_are_those_that_are_not_gold():
    """The one row that decides gives 1/8 to each token from 10 on: two of the first document, six of the second."""
    A = drawn(None)
    A[39] = np.isin(np.arange(N), range(10, 18)) / 8
    regions = {"document 1": range(8, 12), "document 2": range(12, 20), "gold": range(8, 12), "question": range(5)}
    table = depth.answer_rows(TraceView(trace_of(canvas(steps_of([A]), 39, regions=regions)))).set_index(
        ["region", "layer"]
    )
    wanted = {"gold": (2 / 8, 4 / N), "other documents": (6 / 8, 8 / N), "question": (0, 5 / N)}
    for region, (mass, base) in wanted.items():
        assert table.loc[(region, 1), ["mass", "base", "ratio"]].tolist() == pytest.approx([mass, base, mass / base])


def test_answer_rows_look_at_gold_and_the_others_do_not():
    """Five masks are filled, one a step; the rows that decide them give gold .6, at two of its three tokens."""
    steps = []
    for t in range(5):
        A = drawn(None)
        A[35 + t] = 0.4 / 38
        A[35 + t, [11, 12]] = 0.3
        steps.append(A)
    regions = {"gold": [10, 11, 12], "question": range(20, 30)}
    look = TraceView(trace_of(canvas(steps_of(steps), 35, regions=regions)))
    table = depth.answer_rows(look).set_index(["region", "layer"])
    for layer in range(LAYERS):
        mass = 0.6 + 0.4 / 38
        wanted = [mass, 3 / N, mass * N / 3]
        assert table.loc[("gold", layer), ["mass", "base", "ratio"]].tolist() == pytest.approx(wanted, rel=1e-3)
        assert table.loc[("question", layer), "mass"] == pytest.approx(10 * 0.4 / 38, rel=1e-3)


def test_each_head_has_a_path_of_its_own():
    A = steps_of([drawn(None)] * STEPS)
    for t in range(STEPS):
        A[t, 0, 0], A[t, 0, 1], A[t, 1, 2] = drawn(3), drawn(10 + t), drawn(5 if t % 2 else 8)
    table = floating.heads(TraceView(trace_of(canvas(A, 30)))).set_index(["layer", "head"])
    assert table.loc[(0, 0), ["within", "changes"]].tolist() == [0, 0]
    assert table.loc[(0, 1), ["within", "changes"]].tolist() == pytest.approx([1 - 1 / STEPS, STEPS - 1])
    assert table.loc[(1, 2), ["within", "changes"]].tolist() == pytest.approx([1 - (STEPS + 1) // 2 / STEPS, STEPS - 1])


def test_layers_that_share_an_anchor_and_layers_that_do_not():
    A = steps_of([drawn(4)] * STEPS)
    A[1, 1] = drawn(9)
    over = floating.over_layers(TraceView(trace_of(canvas(A, 30))))
    assert over["jaccard_next"].tolist() == [1, 0, *[1] * (STEPS - 2)]


def test_the_first_key_may_be_a_bos_or_not():
    trace = anchored([0] * STEPS)
    first = int(trace.arrays["tokens"][0, 0])
    for special, wanted in (({"bos": first}, True), ({"bos": first + 1}, False), ({}, False)):
        told = replace(trace, meta={**trace.meta, "special": special})
        assert (absorption([told])["bos"] == wanted).all()
