"""Every table equals its slow reference, on random attention under every kind of mask."""

from __future__ import annotations

import functools
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import slow_reference as slow
from dense_decodings import KINDS, PIECES, build_trace, random_decoding

from floatscope.analysis import TraceView, absorption, anchor_movement, anchor_tables, depth, detect
from floatscope.analysis.anchor_movement import floating_index
from floatscope.analysis.detectors import parse_detector, soft_weights

pytestmark = pytest.mark.filterwarnings("error")
decodings = pytest.mark.parametrize(("seed", "kind"), [(seed, kind) for kind in KINDS for seed in range(4)])
SCALES = ("mean", "sum", "percent", "visible", "lift")
EPS = {"mean": 0.05, "sum": 1.5, "percent": 5.0, "visible": 0.08, "lift": 1.2}
DETECTORS = (
    *(f"zscore(k={k}, scale='{scale}')" for scale in SCALES for k in (1, 1.7)),
    *(f"rulli(eps={EPS[scale]}, scale='{scale}')" for scale in SCALES),
    "rulli(eps=0.4)",
    "gu(eps=0.1)",
    "gu(eps=0.2)",
    "topk(k=1)",
    "topk",
    "topk(k=50)",
    "soft(k=1, alpha=2)",
    "soft",
    "af_absorption",
)
NEAR = {"rtol": 2e-5, "atol": 1e-6, "check_dtype": False}


@functools.cache
def case(seed: int, kind: str):
    decoding = random_decoding(seed, kind)
    return decoding, build_trace(decoding, f"{kind}-{seed}")


@functools.cache
def anchor_sets(seed: int, kind: str, by: str) -> list[list[set[int]]]:
    """The anchors of each layer at each step, by the slow reference."""
    decoding, detector = case(seed, kind)[0], parse_detector(by)
    return [
        [slow.anchors(decoding, t, layer, detector.name, **detector.arguments) for t in range(decoding.steps)]
        for layer in range(decoding.layers)
    ]


def steps_with_all_rows(seed: int, kind: str) -> list[int]:
    """The steps whose forward has all rows, which analyses of single heads read."""
    return [0] if kind == "cached" else list(range(case(seed, kind)[0].steps))


def depths(layers: int) -> list[float]:
    return [layer / max(1, layers - 1) for layer in range(layers)]


def assert_same_rows(table: pd.DataFrame, expected: list[dict], by: list[str], near: dict = NEAR) -> None:
    """The same rows in any order."""
    columns = list(expected[0])
    rows = pd.DataFrame(expected).sort_values(by, ignore_index=True)
    pd.testing.assert_frame_equal(table[columns].sort_values(by, ignore_index=True), rows, **near)
    assert len(table) == len(expected)


def test_the_random_decodings_cover_the_cases():
    """Anchors that stay, leave and come; keys that too few rows see; one, two and three layers."""
    cases = [(seed, kind) for kind in KINDS for seed in range(4)]
    kinds = {
        life
        for c in cases
        for layer in anchor_sets(*c, "zscore(k=1.7, scale='lift')")
        for life, _ in slow.lifetimes(layer)
    }
    assert kinds >= {"static", "flash", "moving"}
    assert {case(*c)[0].layers for c in cases} == {1, 2, 3}
    assert any(len(slow.eligible(case(*c)[0], 0, 0)) < len(case(*c)[0].states[0]) for c in cases)


@decodings
def test_detectors(seed, kind):
    decoding, trace = case(seed, kind)
    for by in DETECTORS:
        flags = detect(trace, by)
        assert flags.shape == (decoding.steps, decoding.layers, max(map(len, decoding.states)))
        for layer, steps in enumerate(anchor_sets(seed, kind, by)):
            for t, keys in enumerate(steps):
                assert set(np.flatnonzero(flags[t, layer])) == keys, (by, layer, t)


@decodings
def test_soft_weights(seed, kind):
    decoding, trace = case(seed, kind)
    weights = soft_weights(trace, 1.0, 0.7)
    for t in range(decoding.steps):
        expected = slow.soft(decoding, t, 1.0, 0.7)
        np.testing.assert_allclose(weights[t, list(expected)], list(expected.values()), rtol=1e-4, atol=1e-6)
        assert (np.delete(weights[t], list(expected)) == 0).all()


@decodings
@pytest.mark.parametrize("by", ["topk(k=2)", "rulli(eps=1)", "gu(eps=0.15)"])
def test_absorption(seed, kind, by):
    decoding, trace = case(seed, kind)
    each, means = [], []
    for layer in range(decoding.layers):
        at = {"sample": trace.sample, "layer": layer, "depth": depths(decoding.layers)[layer]}
        sets = [
            slow.absorption_sets(decoding, t, layer, anchor_sets(seed, kind, by)[layer][t])
            for t in range(decoding.steps)
        ]
        for name in sets[0]:
            both = [slow.absorption(decoding, t, layer, keys[name]) for t, keys in enumerate(sets)]
            for t, (percent, uniform) in enumerate(both):
                lift = percent / uniform if uniform else np.nan
                each.append({**at, "step": t, "set": name, "percent": percent, "uniform": uniform, "lift": lift})
            percent, uniform = np.mean(both, 0)
            lift = percent / uniform if uniform else np.nan
            means.append({**at, "set": name, "percent": percent, "uniform": uniform, "lift": lift})
    assert_same_rows(absorption([trace], by, per_step=True), each, ["layer", "step", "set"])
    assert_same_rows(absorption([trace], by), means, ["layer", "set"])


@decodings
@pytest.mark.parametrize("by", ["topk(k=2)", "rulli(eps=1)", "zscore(k=1)", "gu(eps=0.15)", "rulli(eps=2,scale='sum')"])
def test_anchors(seed, kind, by):
    decoding, trace = case(seed, kind)
    detector = parse_detector(by)
    expected = []
    for layer in range(decoding.layers):
        keys = anchor_sets(seed, kind, by)[layer]
        per_head = np.nan  # for detectors that need more than the top keys of a head
        if detector.arguments.get("scale") == "lift" or detector.name == "topk":
            per_head = np.mean(
                [
                    len(slow.anchors(decoding, t, layer, detector.name, head, **detector.arguments))
                    for t in steps_with_all_rows(seed, kind)
                    for head in range(decoding.heads)
                ]
            )
        expected.append(
            {
                "sample": trace.sample,
                "layer": layer,
                "depth": depths(decoding.layers)[layer],
                "anchors": np.mean([len(k) for k in keys]),
                "share": np.mean([len(k) / len(decoding.states[t]) for t, k in enumerate(keys)]),
                "per_head": per_head,
            }
        )
    assert_same_rows(anchor_tables.anchors(TraceView(trace, by)), expected, ["layer"])


@decodings
@pytest.mark.parametrize("by", ["topk(k=3)", "rulli(eps=1)"])
def test_anchor_classes_and_tokens(seed, kind, by):
    decoding, trace = case(seed, kind)
    cells = [(t, j) for layer in anchor_sets(seed, kind, by) for t, keys in enumerate(layer) for j in keys]
    canvases = [(t, j) for t in range(decoding.steps) for j in range(len(decoding.tokens[t]))]
    among = slow.frequencies(slow.class_of(decoding, t, j) for t, j in cells)
    base = slow.frequencies(slow.class_of(decoding, t, j) for t, j in canvases)
    expected = []
    for name in slow.CLASSES:
        share = among.get(name, 0.0) if cells else np.nan
        ratio = share / base[name] if name in base else np.nan
        expected.append(
            {"sample": trace.sample, "class": name, "share": share, "base": base.get(name, 0.0), "ratio": ratio}
        )
    assert_same_rows(anchor_tables.anchor_classes(TraceView(trace, by)), expected, ["class"])
    tokens = slow.frequencies(int(decoding.tokens[t][j]) for t, j in cells)
    base = slow.frequencies(int(decoding.tokens[t][j]) for t, j in canvases)
    table = anchor_tables.anchor_tokens(TraceView(trace, by)).set_index("token")
    assert set(table.index) == {PIECES[i] for i in tokens}
    for i, share in tokens.items():
        assert table.loc[PIECES[i], "share"] == pytest.approx(share)
        assert table.loc[PIECES[i], "base"] == pytest.approx(base[i])


@decodings
def test_concentration(seed, kind):
    decoding, trace = case(seed, kind)
    expected = []
    for layer in range(decoding.layers):
        each = pd.DataFrame([slow.concentration(decoding, t, layer) for t in range(decoding.steps)])
        heads = each.loc[steps_with_all_rows(seed, kind), ["row_entropy", "gini"]].mean()
        columns = each[["column_entropy", "top_1", "top_5"]].mean()
        expected.append({"layer": layer, "depth": depths(decoding.layers)[layer], **heads, **columns})
    assert_same_rows(anchor_tables.concentration(TraceView(trace)), expected, ["layer"])


@decodings
@pytest.mark.parametrize("eps", [0.05, 0.12, 0.3])
def test_sinks(seed, kind, eps):
    decoding, trace = case(seed, kind)
    first, anywhere = slow.sink_rates(decoding, eps, steps_with_all_rows(seed, kind))
    assert_same_rows(
        anchor_tables.sinks(TraceView(trace), eps=eps),
        [{"sample": trace.sample, "first": first, "anywhere": anywhere}],
        ["sample"],
    )


@decodings
def test_eps_sweep(seed, kind):
    decoding, trace = case(seed, kind)
    table = anchor_tables.eps_sweep(TraceView(trace))
    assert table["eps"].tolist() == [k / 2 for k in range(21)]
    for eps, share in zip(table["eps"], table["share"], strict=True):
        assert share == pytest.approx(slow.share_without_anchors(decoding, eps), abs=1e-6), eps


@decodings
def test_top_keys(seed, kind):
    decoding, trace = case(seed, kind)
    expected = [
        {"sample": trace.sample, "step": t, "layer": layer, "depth": depths(decoding.layers)[layer], "top_key": j}
        for layer in range(decoding.layers)
        for t, j in enumerate(slow.top_path(decoding, layer))
    ]
    assert_same_rows(anchor_movement.top_keys(TraceView(trace)), expected, ["layer", "step"])


@pytest.mark.parametrize("kind", KINDS)
def test_floating_index(kind):
    """Over three texts of different lengths and numbers of layers."""
    texts = [case(seed, kind) for seed in range(3)]
    table = floating_index(pd.concat([anchor_movement.top_keys(TraceView(trace)) for _, trace in texts]))
    paths = {layer: [] for layer in range(3)}
    for decoding, _ in texts:
        for layer in range(decoding.layers):
            paths[layer].append(slow.top_path(decoding, layer))
    expected = []
    for decoding, trace in texts:
        for layer in range(decoding.layers):
            own = slow.top_path(decoding, layer)
            layer_mode = slow.mode(j for path in paths[layer] for j in path)
            third = ("shallow", "middle", "deep")[min(2, 3 * layer // max(1, decoding.layers - 1))]
            expected.append(
                {
                    "sample": trace.sample,
                    "layer": layer,
                    "depth": depths(decoding.layers)[layer],
                    "within": slow.share_elsewhere(own, slow.mode(own)),
                    "across": slow.share_elsewhere(own, layer_mode),
                    "third": third,
                }
            )
    assert_same_rows(table, expected, ["sample", "layer"])


@decodings
@pytest.mark.parametrize("by", ["topk(k=2)", "rulli(eps=1)", "rulli(eps=4)"])
def test_drift(seed, kind, by):
    decoding, trace = case(seed, kind)
    expected = []
    size = max(len(state) for state in decoding.states)
    for layer in range(decoding.layers):
        path = slow.top_path(decoding, layer)
        keys = [anchors & slow.always_eligible(decoding, layer) for anchors in anchor_sets(seed, kind, by)[layer]]
        centroids = slow.centroids(decoding, layer, keys)
        expected.append(
            {
                "sample": trace.sample,
                "layer": layer,
                "depth": depths(decoding.layers)[layer],
                "displacement": float(sum(abs(b - a) for a, b in pairwise(path))),
                "changes": sum(a != b for a, b in pairwise(path)),
                "slope": slow.slope(path),
                "spatial_variance": slow.spatial_variance(decoding, layer),
                "temporal_variance": slow.variance(centroids),
                "temporal_variance_relative": slow.variance(centroids) / size**2,
                "jaccard_next": slow.jaccard(pairwise(keys)),
                "jaccard_first": slow.jaccard((keys[0], later) for later in keys[1:]),
                **{name: slow.pearson(path, front) for name, front in slow.frontiers(decoding).items()},
            }
        )
    assert_same_rows(
        anchor_movement.drift(TraceView(trace, by)), expected, ["layer"], {**NEAR, "rtol": 1e-4, "atol": 1e-5}
    )


@decodings
@pytest.mark.parametrize("by", ["topk(k=3)", "rulli(eps=1)", "rulli(eps=3)"])
def test_lifetimes(seed, kind, by):
    decoding, trace = case(seed, kind)
    expected = []
    for layer in range(decoding.layers):
        keys = anchor_sets(seed, kind, by)[layer]
        spans = slow.lifetimes(keys)
        expected.append(
            {
                "sample": trace.sample,
                "layer": layer,
                "depth": depths(decoding.layers)[layer],
                **{kind: sum(name == kind for name, _ in spans) for kind in ("static", "flash", "vanishing", "moving")},
                "spans": len(spans),
                "mean_length": np.mean([length for _, length in spans]) if spans else np.nan,
                "split": slow.split(decoding, layer, keys),
            }
        )
    assert_same_rows(anchor_movement.lifetimes(TraceView(trace, by)), expected, ["layer"])


@decodings
def test_layer_drift(seed, kind):
    decoding, trace = case(seed, kind)
    expected = []
    for t, path in enumerate(zip(*(slow.top_path(decoding, layer) for layer in range(decoding.layers)), strict=True)):
        hops = list(pairwise(path))
        displacement, changes = sum(abs(b - a) for a, b in hops), sum(a != b for a, b in hops)
        expected.append(
            {
                "sample": trace.sample,
                "step": t,
                "displacement": displacement,
                "changes": changes,
                "distinct_keys": len(set(path)),
            }
        )
    assert_same_rows(anchor_movement.layer_drift(TraceView(trace)), expected, ["step"])


@decodings
def test_token_classes_and_structure(seed, kind):
    decoding, trace = case(seed, kind)
    class_rows, structure_rows = [], []
    for layer in range(decoding.layers):
        at = {"sample": trace.sample, "layer": layer, "depth": depths(decoding.layers)[layer]}
        for name in slow.CLASSES:
            share, base = slow.class_shares(decoding, layer, [name])
            ratio = share / base if base else np.nan
            class_rows.append({**at, "class": name, "share": share, "base": base, "ratio": ratio})
        for name, members in (("structure", slow.CLASSES[:-1]), ("content", slow.CLASSES[-1:])):
            share, base = slow.class_shares(decoding, layer, members)
            structure_rows.append({**at, "set": name, "share": share, "base": base, "ratio": share / base})
    assert_same_rows(depth.token_classes(TraceView(trace)), class_rows, ["layer", "class"])
    assert_same_rows(depth.structure(TraceView(trace)), structure_rows, ["layer", "set"])


@decodings
def test_predicting_rows(seed, kind):
    decoding, trace = case(seed, kind)
    expected = []
    for layer in range(decoding.layers):
        for region, keys in decoding.regions.items():
            mass, base = (
                slow.predicting_mass(decoding, layer, region),
                slow.uniform_predicting_mass(decoding, layer, keys),
            )
            expected.append(
                {
                    "sample": trace.sample,
                    "layer": layer,
                    "depth": depths(decoding.layers)[layer],
                    "region": region,
                    "mass": mass,
                    "base": base,
                    "ratio": mass / base if base else np.nan,
                }
            )
    assert_same_rows(
        depth.predicting_rows(TraceView(trace)), expected, ["layer", "region"], {**NEAR, "rtol": 2e-3, "atol": 1e-4}
    )
