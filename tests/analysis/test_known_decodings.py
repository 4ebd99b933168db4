"""Decodings with known results: sinks, anchors that move, flash, vanish and split, and uniform attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from dense_decodings import BOS, COMMA, LINE, STOP, WORDS, Decoding, build_trace, canvas, causal, full, growing

from floatscope.analysis import TraceView, absorption, anchor_movement, anchor_tables, depth, detect
from floatscope.analysis.floating import floating
from floatscope.analysis.tokens import CLASSES
from floatscope.traces import Trace

pytestmark = pytest.mark.filterwarnings("error")
N, STEPS, LAYERS, HEADS = 40, 10, 2, 3
DETECTORS = ("zscore", "rulli", "rulli(eps=0.01)", "gu", "zscore(k=1)")
LIFETIMES = ["static", "flash", "vanishing", "moving"]


def attend_to(key: int | None, mass: float = 0.5, mask: np.ndarray | None = None) -> np.ndarray:
    """Every row that sees `key` and others gives it `mass` and spreads the rest evenly; None is uniform attention."""
    mask = full(N) if mask is None else mask
    A = mask / mask.sum(1, keepdims=True)
    for i in range(len(mask)) if key is not None else ():
        others = mask[i].sum() - 1
        if mask[i, key] and others:
            A[i] = (1 - mass) / others * mask[i]
            A[i, key] = mass
    return A


def repeat_over_heads(rows: list[np.ndarray]) -> np.ndarray:
    """One matrix per step, the same in all layers and heads."""
    return np.stack([np.broadcast_to(A, (LAYERS, HEADS, *A.shape)) for A in rows])


def trace_with_anchors(path: list[int | None], mass: float = 0.5, sample: str = "hand", **more: object) -> Trace:
    """Full attention with one anchor at each step."""
    return build_trace(
        canvas(repeat_over_heads([attend_to(key, mass) for key in path]), **{"prompt": 30, **more}), sample
    )


def layer_values(table: pd.DataFrame, column: str) -> list[float]:
    assert table["layer"].tolist() == list(range(LAYERS))
    return table[column].tolist()


def index_of(view: TraceView) -> pd.DataFrame:
    """The floating index of all rows; `test_floating.py` has that of the predicting rows."""
    table = floating(view)
    return table[table["group"] == "all"]


# A fixed sink


@pytest.mark.parametrize("key", [0, 7])
def test_a_sink_under_full_attention(key):
    trace = trace_with_anchors([key] * STEPS)
    view = TraceView(trace)
    assert (view.top_key == key).all()
    assert (view.anchors == (np.arange(N) == key)).all()
    np.testing.assert_allclose(view.lift[..., key], 20, rtol=1e-6)
    np.testing.assert_allclose(np.delete(view.lift, key, -1), 0.5 / 39 * 40, rtol=1e-5)
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
    A = attend_to(0, mask=causal(N))
    if kind == "canvas":
        decoding = canvas(repeat_over_heads([A] * STEPS), 30, causal(N))
    else:
        decoding = growing(np.broadcast_to(A, (LAYERS, HEADS, N, N)), N - STEPS + 1, cached=kind == "cached")
    trace = build_trace(decoding)
    view = TraceView(trace)
    assert (view.top_key == 0).all()
    assert (view.anchors == (np.arange(N) == 0)).all()
    table = absorption([trace], per_step=True).set_index(["set", "layer", "step"])
    for t in range(STEPS):
        n = len(decoding.states[t])
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
        trace = trace_with_anchors([key] * STEPS)
    elif kind == "causal":
        trace = build_trace(canvas(repeat_over_heads([attend_to(key, mask=causal(N))] * STEPS), 30, causal(N)))
    else:
        whole = np.broadcast_to(attend_to(key, mask=causal(N)), (LAYERS, HEADS, N, N))
        trace = build_trace(growing(whole, N - STEPS + 1))
    view = TraceView(trace)
    index = index_of(view)
    assert layer_values(index, "within") == layer_values(index, "across") == [0, 0]
    table = anchor_movement.lifetimes(view)
    assert table[[*LIFETIMES, "spans", "mean_length"]].to_numpy().tolist() == [[1, 0, 0, 0, 1, STEPS]] * LAYERS
    drift = anchor_movement.drift(view)
    for column, value in {"displacement": 0, "changes": 0, "temporal_variance": 0, "jaccard_next": 1}.items():
        assert layer_values(drift, column) == [value, value], column
    assert layer_values(drift, "jaccard_first") == [1, 1]
    assert layer_values(drift, "slope") == pytest.approx([0, 0], abs=1e-12)
    assert drift[list(anchor_movement.FRONTIERS)].isna().all(axis=None)  # a constant has no correlation
    over = anchor_movement.layer_drift(view)
    assert over[["displacement", "changes", "pairs", "distinct_keys"]].to_numpy().tolist() == [[0, 0, 1, 1]] * STEPS
    assert over["moved"].to_numpy() == pytest.approx(0, abs=1e-6)


def test_a_sink_in_one_layer_only():
    A = repeat_over_heads([attend_to(None)] * STEPS)
    A[:, 1] = attend_to(7)
    view = TraceView(build_trace(canvas(A, 30)))
    counts = anchor_tables.anchors(view)[["anchors", "share", "per_head"]].to_numpy()
    assert counts == pytest.approx(np.array([[0, 0, 0], [1, 1 / N, 1]]), rel=1e-12)
    over = anchor_movement.layer_drift(view)
    columns = ["displacement", "changes", "pairs", "distinct_keys"]  # the layer without an anchor has no top key
    assert over[columns].to_numpy().tolist() == [[0, 0, 0, 1]] * STEPS
    assert over["moved"].to_numpy() == pytest.approx(0.5 - 1 / N, rel=1e-5)


def test_anchors_of_single_heads_are_counted():
    A = repeat_over_heads([attend_to(None)] * STEPS)
    A[:, 0, 0], A[:, 0, 1], A[:, 1, 2] = attend_to(3), attend_to(5), attend_to(7)
    for by in ("zscore", "rulli"):
        counts = anchor_tables.anchors(TraceView(build_trace(canvas(A, 30)), by))
        assert layer_values(counts, "per_head") == pytest.approx([2 / 3, 1 / 3])


# Anchors that move


@pytest.mark.parametrize("direction", [1, -1])
def test_an_anchor_that_follows_the_mask(direction):
    """It is the outermost mask, which is filled at every step, from the left or from the right."""
    path = list(range(30, 40))[::direction]
    trace = trace_with_anchors(path, when=range(10)[::direction])
    view = TraceView(trace)
    assert view.top_key.T.tolist() == [path] * LAYERS
    index = index_of(view)
    assert layer_values(index, "within") == pytest.approx([0.9, 0.9])
    drift = anchor_movement.drift(view)
    assert layer_values(drift, "displacement") == layer_values(drift, "changes") == [9, 9]
    assert layer_values(drift, "slope") == pytest.approx([direction] * 2)
    assert layer_values(drift, "temporal_variance") == pytest.approx([8.25, 8.25])  # of 0 … 9
    assert layer_values(drift, "temporal_variance_relative") == pytest.approx([8.25 / N**2] * 2)
    spread = (20 - 20 / 39) / 10  # a tenth of the time an anchor, or never
    assert layer_values(drift, "spatial_variance") == pytest.approx([spread**2 * 3 / 16] * 2, rel=1e-5)
    assert layer_values(drift, "jaccard_next") == layer_values(drift, "jaccard_first") == [0, 0]
    followed, other = ("leftmost mask", "rightmost mask")[::direction]
    assert layer_values(drift, followed) == pytest.approx([1, 1])
    assert np.isnan(layer_values(drift, other)).all()
    assert layer_values(drift, "last commit") == pytest.approx([1, 1])
    table = anchor_movement.lifetimes(view)
    assert (
        table[[*LIFETIMES, "spans", "mean_length", "split"]].to_numpy().tolist() == [[0, 10, 0, 0, 10, 1, 0]] * LAYERS
    )


def test_an_anchor_at_the_end_of_the_block():
    drift = anchor_movement.drift(TraceView(trace_with_anchors([34] * 5 + [39] * 5, when=range(10), block=5)))
    assert layer_values(drift, "block end") == pytest.approx([1, 1])
    assert layer_values(drift, "changes") == [1, 1]
    assert layer_values(drift, "displacement") == [5, 5]


@pytest.mark.parametrize(
    ("path", "expected"),
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
def test_the_lifetime_of_one_anchor(path, expected):
    table = anchor_movement.lifetimes(TraceView(trace_with_anchors(path)))
    for kind in LIFETIMES:
        assert layer_values(table, kind) == [int(kind == expected)] * LAYERS
    assert layer_values(table, "mean_length") == [path.count(7)] * LAYERS


def test_an_anchor_followed_by_another_is_moving():
    table = anchor_movement.lifetimes(TraceView(trace_with_anchors([7] * 4 + [9] * 6)))
    assert table[[*LIFETIMES, "spans", "mean_length"]].to_numpy().tolist() == [[0, 0, 0, 2, 2, 5]] * LAYERS
    index = index_of(TraceView(trace_with_anchors([7] * 4 + [9] * 6)))
    assert layer_values(index, "within") == pytest.approx([0.4, 0.4])


def test_an_anchor_that_returns_has_two_spans():
    table = anchor_movement.lifetimes(TraceView(trace_with_anchors([7] * 3 + [None] * 3 + [7] * 4)))
    assert table[[*LIFETIMES, "spans", "mean_length"]].to_numpy().tolist() == [[0, 0, 1, 1, 2, 3.5]] * LAYERS


@pytest.mark.parametrize(("steps", "length"), [(10, 9), (20, 18), (30, 27), (70, 63), (110, 99), (130, 117)])
def test_an_anchor_at_ninety_percent_of_the_steps_is_static(steps, length):
    """Also where 0.9 · steps in floating point is larger."""
    for run, kind in ((length, "static"), (length - 1, "vanishing")):
        decoding = canvas(np.stack([attend_to(7 if t < run else None)[None, None] for t in range(steps)]), 30)
        decoding = replace(decoding, commits=())  # every step counts
        assert anchor_movement.lifetimes(TraceView(build_trace(decoding)))[kind].tolist() == [1]


def test_a_split_anchor():
    """Half of the rows are masked and attend to key 3, the others to key 12; no row is masked after the last commit."""
    A = attend_to(12, 0.8)
    A[20:] = attend_to(3, 0.8)[20:]
    decoding = canvas(repeat_over_heads([A] * 4), 20, when=[2] * 20)  # none masked at the last step
    view = TraceView(build_trace(replace(decoding, commits=())))  # every step counts
    assert [set(np.flatnonzero(found)) for found in view.anchors[:, 0]] == [{3, 12}] * 4
    assert layer_values(anchor_movement.lifetimes(view), "split") == [1, 1]


def test_rows_with_one_top_key_are_not_split():
    assert layer_values(anchor_movement.lifetimes(TraceView(trace_with_anchors([3] * 4))), "split") == [0, 0]


def test_different_top_keys_that_are_not_both_anchors_are_not_split():
    A = attend_to(12, 0.8)
    A[20:] = attend_to(None)[20:]
    A[20:, 3] += 0.001
    A[20:] /= A[20:].sum(1, keepdims=True)
    decoding = replace(canvas(repeat_over_heads([A] * 4), 20, when=[3] * 20), commits=())
    view = TraceView(build_trace(decoding))
    assert [set(np.flatnonzero(found)) for found in view.anchors[:, 0]] == [{12}] * 4
    assert layer_values(anchor_movement.lifetimes(view), "split") == [0, 0]


# Uniform attention


@pytest.mark.parametrize("kind", ["full", "causal", "cached"])
def test_uniform_attention_has_no_anchors(kind):
    mask = full(N) if kind == "full" else causal(N)
    if kind == "cached":
        decoding = growing(np.broadcast_to(attend_to(None, mask=mask), (LAYERS, HEADS, N, N)), N - 9)
    else:
        decoding = canvas(repeat_over_heads([attend_to(None, mask=mask)] * STEPS), 30, mask)
    trace = build_trace(decoding)
    for by in DETECTORS:
        assert not detect(trace, by).any(), by
        view = TraceView(trace, by)
        counts = anchor_tables.anchors(view)
        assert (counts[["anchors", "share"]] == 0).all(axis=None)
        assert by == "gu" or (counts["per_head"] == 0).all()
        table = anchor_movement.lifetimes(view)
        assert (table[[*LIFETIMES, "spans"]] == 0).all(axis=None)
        assert table["mean_length"].isna().all()
        drift = anchor_movement.drift(view)
        assert drift[["temporal_variance", "jaccard_next", "jaccard_first"]].isna().all(axis=None)
        assert drift["spatial_variance"].to_numpy() == pytest.approx(0, abs=1e-10)
        identity = anchor_tables.anchor_classes(view)
        assert identity[["share", "ratio"]].isna().all(axis=None)
        assert identity["base"].sum() == pytest.approx(1)
        assert anchor_tables.anchor_tokens(view).empty
    view = TraceView(trace)
    lift = view.lift[np.isfinite(view.lift)]
    assert lift.size
    np.testing.assert_allclose(lift, 1, rtol=1e-6)
    table = absorption([trace])
    assert (table.loc[table["set"] == "anchors", "percent"] == 0).all()
    assert table.loc[table["set"] == "anchors", "lift"].isna().all()
    np.testing.assert_allclose(table.loc[table["set"] != "anchors", "lift"], 1, rtol=1e-6)
    sweep = anchor_tables.eps_sweep(view)
    assert (sweep.loc[sweep["eps"] > 0, "share"] == 1).all()
    assert anchor_tables.sinks(view)[["first", "anywhere"]].to_numpy().tolist() == [[0, 0]]
    spread = anchor_tables.concentration(view)
    np.testing.assert_allclose(spread["row_entropy"], 1, rtol=1e-6)
    np.testing.assert_allclose(spread["gini"], 0, atol=1e-6)
    np.testing.assert_allclose(depth.token_classes(view)["ratio"].dropna(), 1, rtol=1e-6)
    np.testing.assert_allclose(depth.structure(view)["ratio"], 1, rtol=1e-6)
    if kind == "full":
        assert not detect(trace, "soft").any()
        np.testing.assert_allclose(spread["column_entropy"], 1, rtol=1e-6)
        np.testing.assert_allclose(spread[["top_1", "top_5"]], [[1 / N, 5 / N]] * LAYERS, rtol=1e-6)


def test_without_lift_a_causal_mask_looks_like_a_sink():
    """Under 512 uniform rows the first key receives 5.9 standard deviations more than the mean."""
    mask = causal(512)
    trace = build_trace(
        Decoding([attend_to(None, mask=mask)[None, None]], [mask[None]], [np.ones(512)], [np.full(512, BOS)])
    )
    received = trace.received(0)[0]
    assert (received[0] - received.mean()) / received.std() == pytest.approx(5.9, abs=0.05)
    assert detect(trace, "zscore(scale='mean')")[0, 0, 0]
    assert detect(trace, "soft")[0, 0, 0]
    assert not detect(trace, "zscore").any()


@pytest.mark.parametrize(("more", "expected"), [(5e-5, 0), (0.01, 1)])
def test_rounding_is_not_an_anchor_but_one_percent_more_attention_is(more, expected):
    """A z-score does not depend on the size of the difference."""
    A = attend_to(None)
    A[:, 7] *= 1 + more
    view = TraceView(build_trace(canvas(repeat_over_heads([A / A.sum(1, keepdims=True)]), 30)))
    assert anchor_tables.anchors(view)[["anchors", "per_head"]].to_numpy().tolist() == [[expected, expected]] * LAYERS
    assert detect(view.trace, "soft").any() == expected


# Token classes of anchors


def test_the_class_of_anchors_and_its_base_rate():
    """Four of 40 tokens are punctuation, ten are masks at first and none at the end."""
    tokens = np.array([BOS, *np.resize(list(WORDS), N - 1)])
    tokens[[3, 12, 20, 25]], tokens[8] = [STOP, STOP, STOP, COMMA], LINE
    view = TraceView(trace_with_anchors([3, 12, 20, 3], tokens=tokens, when=[0] * 5 + [1] * 5))
    table = anchor_tables.anchor_classes(view).set_index("class")
    masks = (10 + 5) / (4 * N)
    assert table["share"].to_dict() == {**dict.fromkeys(table.index, 0.0), "punctuation": 1.0}
    base = {"bos": 1 / N, "mask": masks, "special": 0, "template": 0, "newline": 1 / N, "punctuation": 4 / N}
    base["content"] = 1 - sum(base.values())
    assert table["base"].to_dict() == pytest.approx(base)
    assert table.loc["punctuation", "ratio"] == pytest.approx(N / 4)
    assert table.loc[["special", "template"], "ratio"].isna().all()
    tokens_table = anchor_tables.anchor_tokens(view)
    assert tokens_table[["token", "share", "base"]].to_numpy().tolist() == [[" .", 1, 3 / N]]


def test_a_bos_inside_the_text_is_special_and_template_words_are_template():
    tokens = np.array([BOS, *np.resize(list(WORDS), N - 1)])
    tokens[4], tokens[5], tokens[6] = BOS, STOP, LINE
    decoding = canvas(repeat_over_heads([attend_to(4)]), 30, tokens=tokens, regions={"template": [0, 4, 5, 6, 7, 35]})
    classes = TraceView(build_trace(decoding)).token_classes[0]
    named = [CLASSES[c] for c in classes]
    assert named[:9] == [
        "bos", "content", "content", "content", "special", "template", "template", "template", "content"
    ]  # fmt: skip
    assert named[30:] == ["mask"] * 10


# Sinks, the eps sweep, concentration


def test_sinks_of_single_heads():
    """One head has a sink at the first key, one at another key, one a weak sink, one none."""
    A = np.stack([[[attend_to(0), attend_to(7)], [attend_to(0, 0.2), attend_to(None)]]] * STEPS)
    view = TraceView(build_trace(canvas(A, 30)))
    assert anchor_tables.sinks(view)[["first", "anywhere"]].to_numpy().tolist() == [[0.25, 0.5]]
    assert anchor_tables.sinks(view, eps=0.1)[["first", "anywhere"]].to_numpy().tolist() == [[0.5, 0.75]]
    assert anchor_tables.sinks(view, eps=0.6)[["first", "anywhere"]].to_numpy().tolist() == [[0, 0]]
    assert not detect(view.trace, "gu").any()  # on the mean over heads no key is above eps
    assert detect(view.trace, "gu(eps=0.2)")[:, 0, [0, 7]].all()


def test_a_sink_under_a_window_counts_the_rows_that_see_it():
    """The first key gets .5 from each of the six rows that may see it, 7.5 % of all attention."""
    position = np.arange(N)
    distance = position[:, None] - position
    mask = (distance >= 0) & (distance <= 5)
    view = TraceView(build_trace(canvas(repeat_over_heads([attend_to(0, mask=mask)]), 30, mask)))
    assert anchor_tables.sinks(view, eps=0.5)["first"].tolist() == [1]  # row 0 gives it all: 3.5 of 6
    assert anchor_tables.sinks(view, eps=0.6)["first"].tolist() == [0]


def test_the_sweep_loses_an_anchor_when_eps_exceeds_its_lift():
    mass = 0.2
    above = mass * N - (1 - mass) * N / (N - 1)  # 7.18
    table = anchor_tables.eps_sweep(TraceView(trace_with_anchors([7] * 3, mass)))
    assert table["eps"].tolist() == [k / 2 for k in range(21)]
    assert table["share"].tolist() == pytest.approx([1 - 1 / N if eps < above else 1 for eps in table["eps"]])


def test_concentration_of_one_key_that_takes_everything():
    spread = anchor_tables.concentration(TraceView(trace_with_anchors([7] * 3, 1.0)))
    for column, value in {
        "row_entropy": 0, "gini": (N - 1) / N, "column_entropy": 0, "top_1": 1, "top_5": 1
    }.items():  # fmt: skip
        assert layer_values(spread, column) == pytest.approx([value, value], abs=1e-6), column


# Depth


def attend_to_classes(names: list[str]) -> Decoding:
    """All rows of a layer attend evenly to structure (10 of 40 tokens), to content, or to everything."""
    tokens = np.array([BOS, *np.resize(list(WORDS), N - 1)])
    tokens[1:10] = [STOP, LINE, COMMA] * 3
    keys = {"structure": range(10), "content": range(10, N), "all": range(N)}
    A = np.zeros((1, len(names), HEADS, N, N))
    for layer, name in enumerate(names):
        A[:, layer, :, :, list(keys[name])] = 1 / len(keys[name])
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
    view = TraceView(build_trace(attend_to_classes(names)))
    table = depth.structure(view)
    for layer, name in enumerate(names):
        shares = table[table["layer"] == layer].set_index("set")["share"]
        ratios = table[table["layer"] == layer].set_index("set")["ratio"]
        expected = {"structure": (1, 0), "content": (0, 1), "all": (0.25, 0.75)}[name]
        assert (shares["structure"], shares["content"]) == pytest.approx(expected, abs=1e-6)
        assert (ratios["structure"], ratios["content"]) == pytest.approx(
            (expected[0] * 4, expected[1] / 0.75), abs=1e-5
        )
    assert depth.find_crossing(table) == crossing


def test_the_crossing_is_that_of_the_mean_over_texts():
    texts = {"a": ["structure", "content"], "b": ["structure", "content"], "c": ["content", "content"]}
    tables = [
        depth.structure(TraceView(build_trace(attend_to_classes(names), sample))) for sample, names in texts.items()
    ]
    assert depth.find_crossing(pd.concat(tables)) == 1


def test_other_documents_are_the_documents_that_are_not_gold():
    """The predicting row gives 1/8 to each token from 10 on: two of the first document, six of the second."""
    A = attend_to(None)
    A[39] = np.isin(np.arange(N), range(10, 18)) / 8
    regions = {"document 1": range(8, 12), "document 2": range(12, 20), "gold": range(8, 12), "question": range(5)}
    table = depth.predicting_rows(
        TraceView(build_trace(canvas(repeat_over_heads([A]), 39, regions=regions)))
    ).set_index(["region", "layer"])
    expected = {"gold": (2 / 8, 4 / N), "other documents": (6 / 8, 8 / N), "question": (0, 5 / N)}
    for region, (mass, base) in expected.items():
        assert table.loc[(region, 1), ["mass", "base", "ratio"]].tolist() == pytest.approx([mass, base, mass / base])


def test_predicting_rows_attend_to_gold_and_other_rows_do_not():
    """Five masks are filled, one per step; their predicting rows give .6 to two of the three gold tokens."""
    steps = []
    for t in range(5):
        A = attend_to(None)
        A[35 + t] = 0.4 / 38
        A[35 + t, [11, 12]] = 0.3
        steps.append(A)
    regions = {"gold": [10, 11, 12], "question": range(20, 30)}
    view = TraceView(build_trace(canvas(repeat_over_heads(steps), 35, regions=regions)))
    table = depth.predicting_rows(view).set_index(["region", "layer"])
    for layer in range(LAYERS):
        mass = 0.6 + 0.4 / 38
        expected = [mass, 3 / N, mass * N / 3]
        assert table.loc[("gold", layer), ["mass", "base", "ratio"]].tolist() == pytest.approx(expected, rel=1e-3)
        assert table.loc[("question", layer), "mass"] == pytest.approx(10 * 0.4 / 38, rel=1e-3)


def test_every_head_has_its_own_top_key():
    A = repeat_over_heads([attend_to(None)] * STEPS)
    for t in range(STEPS):
        A[t, 0, 0], A[t, 0, 1], A[t, 1, 2] = attend_to(3), attend_to(10 + t), attend_to(5 if t % 2 else 8)
    table = anchor_movement.head_floating(TraceView(build_trace(canvas(A, 30)))).set_index(["layer", "head"])
    assert table.loc[(0, 0), ["within", "changes"]].tolist() == [0, 0]
    assert table.loc[(0, 1), ["within", "changes"]].tolist() == pytest.approx([1 - 1 / STEPS, STEPS - 1])
    assert table.loc[(1, 2), ["within", "changes"]].tolist() == pytest.approx([1 - (STEPS + 1) // 2 / STEPS, STEPS - 1])
    without = [(0, 2), (1, 0), (1, 1)]  # uniform attention has no anchor
    assert table.loc[without, ["within", "changes"]].isna().all(axis=None)


def test_a_head_is_compared_at_the_steps_at_which_it_has_an_anchor():
    """Keys 3, –, 3, –, 5, –, …: three anchors of which two are the same, and one change. A single one is not enough."""
    A = repeat_over_heads([attend_to(None)] * STEPS)
    A[0, 0, 0], A[2, 0, 0], A[4, 0, 0], A[4, 1, 0] = attend_to(3), attend_to(3), attend_to(5), attend_to(5)
    table = anchor_movement.head_floating(build_trace(canvas(A, 30))).set_index(["layer", "head"])
    assert table.loc[(0, 0), ["within", "changes"]].tolist() == pytest.approx([1 / 3, 1])
    assert table.loc[(1, 0), ["within", "changes"]].isna().all()


def test_layers_that_share_an_anchor_and_layers_that_do_not():
    A = repeat_over_heads([attend_to(4)] * STEPS)
    A[1, 1] = attend_to(9)
    over = anchor_movement.layer_drift(TraceView(build_trace(canvas(A, 30))))
    assert over["jaccard_next"].tolist() == [1, 0, *[1] * (STEPS - 2)]
    assert over["changes"].tolist() == [0, 1, *[0] * (STEPS - 2)]
    assert over["displacement"].tolist() == [0, 5, *[0] * (STEPS - 2)]
    assert (over["pairs"] == 1).all()
    moved = 0.5 - 0.5 / 39
    assert over["moved"].tolist() == pytest.approx([0, moved, *[0] * (STEPS - 2)], rel=1e-5, abs=1e-6)


def test_the_table_says_whether_the_first_key_is_a_bos():
    trace = trace_with_anchors([0] * STEPS)
    first = int(trace.arrays["tokens"][0, 0])
    for special, expected in (({"bos": first}, True), ({"bos": first + 1}, False), ({}, False)):
        changed = replace(trace, meta={**trace.meta, "special": special})
        assert (absorption(changed)["first_is_bos"] == expected).all()
