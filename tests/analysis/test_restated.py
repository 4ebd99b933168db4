"""Every table of every analysis equals its slow restatement, on random attention under every kind of mask."""

from __future__ import annotations

import functools
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import slow
from hand import KINDS, PIECES, anything, trace_of

from floatscope.analysis import TraceView, absorption, anchors, depth, detect, floating, floating_index
from floatscope.analysis.detectors import detector, soft_weights

pytestmark = pytest.mark.filterwarnings("error")
worlds = pytest.mark.parametrize(("seed", "kind"), [(seed, kind) for kind in KINDS for seed in range(4)])
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
    world = anything(seed, kind)
    return world, trace_of(world, f"{kind}-{seed}")


@functools.cache
def found(seed: int, kind: str, by: str) -> list[list[set[int]]]:
    """The anchors of each layer at each step, slowly."""
    world, chosen = case(seed, kind)[0], detector(by)
    return [
        [slow.anchors(world, t, layer, chosen.name, **chosen.given) for t in range(world.steps)]
        for layer in range(world.layers)
    ]


def watched(seed: int, kind: str) -> list[int]:
    """Steps whose forward shows all rows, which single heads need."""
    return [0] if kind == "cached" else list(range(case(seed, kind)[0].steps))


def depths(layers: int) -> list[float]:
    return [layer / max(1, layers - 1) for layer in range(layers)]


def same(table: pd.DataFrame, wanted: list[dict], by: list[str], near: dict = NEAR) -> None:
    """The same rows, in whatever order."""
    columns = list(wanted[0])
    expected = pd.DataFrame(wanted).sort_values(by, ignore_index=True)
    pd.testing.assert_frame_equal(table[columns].sort_values(by, ignore_index=True), expected, **near)
    assert len(table) == len(wanted)


def test_the_random_decodings_have_something_to_find():
    """Anchors that stay, leave and come under each mask, canvases that grow, keys too few rows see, one layer only."""
    cases = [(seed, kind) for kind in KINDS for seed in range(4)]
    kinds = {life for c in cases for layer in found(*c, "zscore(k=1.7, scale='lift')") for life, _ in slow.lives(layer)}
    assert kinds >= {"static", "flash", "moving"}
    assert {case(*c)[0].layers for c in cases} == {1, 2, 3}
    assert any(len(slow.eligible(case(*c)[0], 0, 0)) < len(case(*c)[0].states[0]) for c in cases)


@worlds
def test_detectors(seed, kind):
    world, trace = case(seed, kind)
    for by in DETECTORS:
        flags = detect(trace, by)
        assert flags.shape == (world.steps, world.layers, max(map(len, world.states)))
        for layer, steps in enumerate(found(seed, kind, by)):
            for t, keys in enumerate(steps):
                assert set(np.flatnonzero(flags[t, layer])) == keys, (by, layer, t)


@worlds
def test_soft_weights(seed, kind):
    world, trace = case(seed, kind)
    weights = soft_weights(trace, 1.0, 0.7)
    for t in range(world.steps):
        wanted = slow.soft(world, t, 1.0, 0.7)
        np.testing.assert_allclose(weights[t, list(wanted)], list(wanted.values()), rtol=1e-4, atol=1e-6)
        assert (np.delete(weights[t], list(wanted)) == 0).all()


@worlds
@pytest.mark.parametrize("by", ["topk(k=2)", "rulli(eps=1)", "gu(eps=0.15)"])
def test_absorption(seed, kind, by):
    world, trace = case(seed, kind)
    each, means = [], []
    for layer in range(world.layers):
        at = {"sample": trace.sample, "layer": layer, "depth": depths(world.layers)[layer]}
        sets = [slow.absorption_sets(world, t, layer, found(seed, kind, by)[layer][t]) for t in range(world.steps)]
        for name in sets[0]:
            both = [slow.absorption(world, t, layer, keys[name]) for t, keys in enumerate(sets)]
            for t, (percent, uniform) in enumerate(both):
                lift = percent / uniform if uniform else np.nan
                each.append({**at, "step": t, "set": name, "percent": percent, "uniform": uniform, "lift": lift})
            percent, uniform = np.mean(both, 0)
            lift = percent / uniform if uniform else np.nan
            means.append({**at, "set": name, "percent": percent, "uniform": uniform, "lift": lift})
    same(absorption([trace], by, per_step=True), each, ["layer", "step", "set"])
    same(absorption([trace], by), means, ["layer", "set"])


@worlds
@pytest.mark.parametrize("by", ["topk(k=2)", "rulli(eps=1)", "zscore(k=1)", "gu(eps=0.15)", "rulli(eps=2,scale='sum')"])
def test_counts(seed, kind, by):
    world, trace = case(seed, kind)
    chosen = detector(by)
    wanted = []
    for layer in range(world.layers):
        keys = found(seed, kind, by)[layer]
        per_head = np.nan  # what needs more of a head than its top keys
        if chosen.given.get("scale") == "lift" or chosen.name == "topk":
            per_head = np.mean(
                [
                    len(slow.anchors(world, t, layer, chosen.name, head, **chosen.given))
                    for t in watched(seed, kind)
                    for head in range(world.heads)
                ]
            )
        wanted.append(
            {
                "sample": trace.sample,
                "layer": layer,
                "depth": depths(world.layers)[layer],
                "anchors": np.mean([len(k) for k in keys]),
                "share": np.mean([len(k) / len(world.states[t]) for t, k in enumerate(keys)]),
                "per_head": per_head,
            }
        )
    same(anchors.counts(TraceView(trace, by)), wanted, ["layer"])


@worlds
@pytest.mark.parametrize("by", ["topk(k=3)", "rulli(eps=1)"])
def test_identity_and_strings(seed, kind, by):
    world, trace = case(seed, kind)
    cells = [(t, j) for layer in found(seed, kind, by) for t, keys in enumerate(layer) for j in keys]
    canvases = [(t, j) for t in range(world.steps) for j in range(len(world.tokens[t]))]
    among = slow.frequencies(slow.class_of(world, t, j) for t, j in cells)
    base = slow.frequencies(slow.class_of(world, t, j) for t, j in canvases)
    wanted = []
    for name in slow.CLASSES:
        share = among.get(name, 0.0) if cells else np.nan
        ratio = share / base[name] if name in base else np.nan
        wanted.append(
            {"sample": trace.sample, "class": name, "share": share, "base": base.get(name, 0.0), "ratio": ratio}
        )
    same(anchors.identity(TraceView(trace, by)), wanted, ["class"])
    tokens = slow.frequencies(int(world.tokens[t][j]) for t, j in cells)
    there = slow.frequencies(int(world.tokens[t][j]) for t, j in canvases)
    told = anchors.strings(TraceView(trace, by)).set_index("token")
    assert set(told.index) == {PIECES[i] for i in tokens}
    for i, share in tokens.items():
        assert told.loc[PIECES[i], "share"] == pytest.approx(share)
        assert told.loc[PIECES[i], "base"] == pytest.approx(there[i])


@worlds
def test_concentration(seed, kind):
    world, trace = case(seed, kind)
    wanted = []
    for layer in range(world.layers):
        each = pd.DataFrame([slow.concentration(world, t, layer) for t in range(world.steps)])
        heads = each.loc[watched(seed, kind), ["row_entropy", "gini"]].mean()
        columns = each[["column_entropy", "top_1", "top_5"]].mean()
        wanted.append({"layer": layer, "depth": depths(world.layers)[layer], **heads, **columns})
    same(anchors.concentration(TraceView(trace)), wanted, ["layer"])


@worlds
@pytest.mark.parametrize("eps", [0.05, 0.12, 0.3])
def test_sinks(seed, kind, eps):
    world, trace = case(seed, kind)
    first, anywhere = slow.sink_rates(world, eps, watched(seed, kind))
    same(
        anchors.sinks(TraceView(trace), eps),
        [{"sample": trace.sample, "first": first, "anywhere": anywhere}],
        ["sample"],
    )


@worlds
def test_sweep(seed, kind):
    world, trace = case(seed, kind)
    table = anchors.sweep(TraceView(trace))
    assert table["eps"].tolist() == [k / 2 for k in range(21)]
    for eps, share in zip(table["eps"], table["share"], strict=True):
        assert share == pytest.approx(slow.not_anchors(world, eps), abs=1e-6), eps


@worlds
def test_tops(seed, kind):
    world, trace = case(seed, kind)
    wanted = [
        {"sample": trace.sample, "step": t, "layer": layer, "depth": depths(world.layers)[layer], "top": j}
        for layer in range(world.layers)
        for t, j in enumerate(slow.path(world, layer))
    ]
    same(floating.tops(TraceView(trace)), wanted, ["layer", "step"])


@pytest.mark.parametrize("kind", KINDS)
def test_floating_index(kind):
    """Of three texts of different lengths, with the layers they have in common."""
    texts = [case(seed, kind) for seed in range(3)]
    table = floating_index(pd.concat([floating.tops(TraceView(trace)) for _, trace in texts]))
    paths = {layer: [] for layer in range(3)}
    for world, _ in texts:
        for layer in range(world.layers):
            paths[layer].append(slow.path(world, layer))
    wanted = []
    for world, trace in texts:
        for layer in range(world.layers):
            own = slow.path(world, layer)
            everywhere = slow.mode(j for path in paths[layer] for j in path)
            third = ("shallow", "middle", "deep")[min(2, 3 * layer // max(1, world.layers - 1))]
            wanted.append(
                {
                    "sample": trace.sample,
                    "layer": layer,
                    "depth": depths(world.layers)[layer],
                    "within": slow.off(own, slow.mode(own)),
                    "across": slow.off(own, everywhere),
                    "third": third,
                }
            )
    same(table, wanted, ["sample", "layer"])


@worlds
@pytest.mark.parametrize("by", ["topk(k=2)", "rulli(eps=1)", "rulli(eps=4)"])
def test_drift(seed, kind, by):
    world, trace = case(seed, kind)
    wanted = []
    size = max(len(state) for state in world.states)
    for layer in range(world.layers):
        path = slow.path(world, layer)
        keys = [anchors & slow.always(world, layer) for anchors in found(seed, kind, by)[layer]]
        centroids = slow.centroids(world, layer, keys)
        wanted.append(
            {
                "sample": trace.sample,
                "layer": layer,
                "depth": depths(world.layers)[layer],
                "displacement": float(sum(abs(b - a) for a, b in pairwise(path))),
                "changes": sum(a != b for a, b in pairwise(path)),
                "slope": slow.slope(path),
                "spatial_variance": slow.spatial_variance(world, layer),
                "temporal_variance": slow.variance(centroids),
                "temporal_variance_relative": slow.variance(centroids) / size**2,
                "jaccard_next": slow.jaccard(pairwise(keys)),
                "jaccard_first": slow.jaccard((keys[0], later) for later in keys[1:]),
                **{name: slow.pearson(path, front) for name, front in slow.frontiers(world).items()},
            }
        )
    same(floating.drift(TraceView(trace, by)), wanted, ["layer"], {**NEAR, "rtol": 1e-4, "atol": 1e-5})


@worlds
@pytest.mark.parametrize("by", ["topk(k=3)", "rulli(eps=1)", "rulli(eps=3)"])
def test_lifetimes(seed, kind, by):
    world, trace = case(seed, kind)
    wanted = []
    for layer in range(world.layers):
        keys = found(seed, kind, by)[layer]
        runs = slow.lives(keys)
        wanted.append(
            {
                "sample": trace.sample,
                "layer": layer,
                "depth": depths(world.layers)[layer],
                **{kind: sum(life == kind for life, _ in runs) for kind in ("static", "flash", "vanishing", "moving")},
                "runs": len(runs),
                "length": np.mean([length for _, length in runs]) if runs else np.nan,
                "split": slow.split(world, layer, keys),
            }
        )
    same(floating.lifetimes(TraceView(trace, by)), wanted, ["layer"])


@worlds
def test_over_layers(seed, kind):
    world, trace = case(seed, kind)
    wanted = []
    for t, path in enumerate(zip(*(slow.path(world, layer) for layer in range(world.layers)), strict=True)):
        hops = list(pairwise(path))
        displacement, changes = sum(abs(b - a) for a, b in hops), sum(a != b for a, b in hops)
        wanted.append(
            {
                "sample": trace.sample,
                "step": t,
                "displacement": displacement,
                "changes": changes,
                "places": len(set(path)),
            }
        )
    same(floating.over_layers(TraceView(trace)), wanted, ["step"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("steps", "keys"), [(16, 64), (4, 7)])
def test_mean_map_and_its_distance(kind, steps, keys):
    maps = []
    for seeds in ((0, 1, 2), (3, 4)):
        texts = [case(seed, kind) for seed in seeds]
        table = floating.mean_map((TraceView(trace) for _, trace in texts), 0, steps, keys)
        np.testing.assert_allclose(
            table, slow.mean_map([world for world, _ in texts], 0, steps, keys), rtol=1e-5, atol=1e-7
        )
        np.testing.assert_allclose(table.sum(1), 1, rtol=1e-5)
        maps.append(table)
    each = [sum(abs(a - b) for a, b in zip(*rows, strict=True)) / 2 for rows in zip(*maps, strict=True)]
    assert floating.map_distance(*maps) == pytest.approx(np.mean(each))
    assert floating.map_distance(maps[0], maps[0]) == 0


@worlds
def test_classes_and_structure_by_layer(seed, kind):
    world, trace = case(seed, kind)
    of_classes, of_two = [], []
    for layer in range(world.layers):
        at = {"sample": trace.sample, "layer": layer, "depth": depths(world.layers)[layer]}
        for name in slow.CLASSES:
            share, base = slow.attention_on(world, layer, [name])
            ratio = share / base if base else np.nan
            of_classes.append({**at, "class": name, "share": share, "base": base, "ratio": ratio})
        for name, members in (("structure", slow.CLASSES[:-1]), ("content", slow.CLASSES[-1:])):
            share, base = slow.attention_on(world, layer, members)
            of_two.append({**at, "set": name, "share": share, "base": base, "ratio": share / base})
    same(depth.classes(TraceView(trace)), of_classes, ["layer", "class"])
    same(depth.structure(TraceView(trace)), of_two, ["layer", "set"])


@worlds
def test_answer_rows(seed, kind):
    world, trace = case(seed, kind)
    wanted = []
    for layer in range(world.layers):
        for region, keys in world.regions.items():
            mass, base = slow.answer_mass(world, layer, region), slow.answer_even(world, layer, keys)
            wanted.append(
                {
                    "sample": trace.sample,
                    "layer": layer,
                    "depth": depths(world.layers)[layer],
                    "region": region,
                    "mass": mass,
                    "base": base,
                    "ratio": mass / base if base else np.nan,
                }
            )
    same(depth.answer_rows(TraceView(trace)), wanted, ["layer", "region"], {**NEAR, "rtol": 2e-3, "atol": 1e-4})
