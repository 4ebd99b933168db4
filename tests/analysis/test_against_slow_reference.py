"""Every table equals its slow reference, on random attention under every kind of mask."""

from __future__ import annotations

import functools
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import slow_reference as slow
from dense_decodings import END, KINDS, PIECES, WITH_END, Decoding, build_trace, random_answer

from floatscope.analysis import TraceView, absorption, anchor_movement, anchor_tables, depth, detect
from floatscope.analysis.detectors import parse_detector, soft_weights
from pairs import every_pair

pytestmark = pytest.mark.filterwarnings("error")
CASES = {"seed": range(4), "kind": KINDS}
COMMITS = ("answer", "all")
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
    """A decoding whose answer ends before its last commits, and its trace."""
    decoding = random_answer(seed, kind)
    return decoding, build_trace(decoding, f"{kind}-{seed}", special=WITH_END)


def count_steps(decoding: Decoding, commits: str) -> list[int]:
    return slow.count_steps(decoding, commits, [END])


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
    assert any(len(slow.eligible(case(*c)[0], 0)) < len(case(*c)[0].states[0]) for c in cases)
    paths = [path for c in cases for path in [slow.anchor_path(case(*c)[0], 0)]]
    assert any(-1 in path for path in paths)
    assert any(len(set(path) - {-1}) > 1 for path in paths)
    steps = [[len(count_steps(case(*c)[0], commits)) for commits in ("answer", "all")] for c in cases]
    assert any(answer < every for answer, every in steps)
    splits = [
        slow.split(case(*c)[0], 0, dict(enumerate(anchor_sets(*c, "topk(k=3)")[0]))) for c in cases if c[1] != "cached"
    ]
    assert max(splits) > 0


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


@every_pair(**CASES, by=["topk(k=2)", "rulli(eps=1)", "gu(eps=0.15)"])
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


@every_pair(**CASES, by=["topk(k=2)", "rulli(eps=1)", "zscore(k=1)", "gu(eps=0.15)", "rulli(eps=2,scale='sum')"])
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


@every_pair(**CASES, by=["topk(k=3)", "rulli(eps=1)"])
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


@every_pair(**CASES, eps=[0.05, 0.12, 0.3])
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


@every_pair(**CASES, commits=COMMITS, by=["topk(k=2)", "rulli(eps=1)", "rulli(eps=4)"])
def test_drift(seed, kind, by, commits):
    decoding, trace = case(seed, kind)
    steps = count_steps(decoding, commits)
    expected = []
    size = max(len(state) for state in decoding.states)
    for layer in range(decoding.layers):
        path = [slow.anchor_path(decoding, layer)[t] for t in steps]
        keys = {t: anchor_sets(seed, kind, by)[layer][t] for t in steps}
        sets = list(keys.values())
        centroids = slow.centroids(decoding, layer, keys)
        hops = [(a, b) for a, b in pairwise(path) if a >= 0 and b >= 0]
        expected.append(
            {
                "sample": trace.sample,
                "layer": layer,
                "depth": depths(decoding.layers)[layer],
                "displacement": float(sum(abs(b - a) for a, b in hops)),
                "changes": sum(a != b for a, b in hops),
                "slope": slow.slope(steps, path),
                "spatial_variance": slow.spatial_variance(decoding, layer, steps),
                "temporal_variance": slow.variance(centroids),
                "temporal_variance_relative": slow.variance(centroids) / size**2,
                "jaccard_next": slow.jaccard(pairwise(sets)),
                "jaccard_first": slow.jaccard((sets[0], later) for later in sets[1:]),
                **{
                    name: slow.pearson(path, [frontier[t] for t in steps])
                    for name, frontier in slow.frontiers(decoding).items()
                },
            }
        )
    assert_same_rows(
        anchor_movement.drift(trace, by, commits=commits), expected, ["layer"], {**NEAR, "rtol": 1e-4, "atol": 1e-5}
    )


@every_pair(**CASES, commits=COMMITS, by=["topk(k=3)", "rulli(eps=1)", "rulli(eps=3)"])
def test_lifetimes(seed, kind, by, commits):
    decoding, trace = case(seed, kind)
    expected = []
    for layer in range(decoding.layers):
        keys = {t: anchor_sets(seed, kind, by)[layer][t] for t in count_steps(decoding, commits)}
        spans = slow.lifetimes(list(keys.values()))
        expected.append(
            {
                "sample": trace.sample,
                "layer": layer,
                "depth": depths(decoding.layers)[layer],
                **{name: sum(life == name for life, _ in spans) for name in anchor_movement.LIFETIME_CLASSES},
                "spans": len(spans),
                "mean_length": np.mean([length for _, length in spans]) if spans else np.nan,
                "split": np.nan if kind == "cached" else slow.split(decoding, layer, keys),
            }
        )
    assert_same_rows(anchor_movement.lifetimes(trace, by, commits=commits), expected, ["layer"])


@every_pair(**CASES, commits=COMMITS, by=["topk(k=3)", "rulli(eps=1)"])
def test_layer_drift(seed, kind, by, commits):
    decoding, trace = case(seed, kind)
    expected = []
    for t in count_steps(decoding, commits):
        path = [slow.anchor_path(decoding, layer)[t] for layer in range(decoding.layers)]
        received = [slow.all_received(decoding, t, layer) for layer in range(decoding.layers)]
        hops = [(a, b) for a, b in pairwise(path) if a >= 0 and b >= 0]
        moved = [sum(slow.moved(a, b).values()) for a, b in pairwise(received)]
        expected.append(
            {
                "sample": trace.sample,
                "step": t,
                "displacement": sum(abs(b - a) for a, b in hops),
                "changes": sum(a != b for a, b in hops),
                "pairs": len(hops),
                "distinct_keys": len(set(path) - {-1}),
                "jaccard_next": slow.jaccard(pairwise(layer[t] for layer in anchor_sets(seed, kind, by))),
                "moved": np.mean(moved) if moved else np.nan,
            }
        )
    assert_same_rows(anchor_movement.layer_drift(trace, by, commits=commits), expected, ["step"])


@every_pair(**CASES, commits=COMMITS)
def test_head_floating(seed, kind, commits):
    """Of a cached text only the first step has all rows, which is not enough."""
    decoding, trace = case(seed, kind)
    steps = [t for t in count_steps(decoding, commits) if t in steps_with_all_rows(seed, kind)]
    expected = []
    for layer in range(decoding.layers):
        for head in range(decoding.heads):
            path = [slow.anchor_path(decoding, layer, head=head)[t] for t in steps]
            path = [j for j in path if j >= 0]
            is_enough = len(path) > 1
            expected.append(
                {
                    "sample": trace.sample,
                    "layer": layer,
                    "head": head,
                    "within": slow.share_elsewhere(path, slow.mode(path)) if is_enough else np.nan,
                    "changes": float(sum(a != b for a, b in pairwise(path))) if is_enough else np.nan,
                }
            )
    assert_same_rows(anchor_movement.head_floating(trace, commits=commits), expected, ["layer", "head"])


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


@every_pair(**CASES, commits=COMMITS)
def test_predicting_rows(seed, kind, commits):
    decoding, trace = case(seed, kind)
    indices = slow.count_commits(decoding, commits, [END])
    expected = []
    for layer in range(decoding.layers):
        for region, keys in decoding.regions.items():
            mass = slow.predicting_mass(decoding, layer, region, indices)
            base = slow.uniform_predicting_mass(decoding, layer, keys, indices)
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
        depth.predicting_rows(trace, commits=commits),
        expected,
        ["layer", "region"],
        {**NEAR, "rtol": 2e-3, "atol": 1e-4},
    )
