"""The definitions of docs/analysis.md once more: loops over whole attention matrices, to be read beside the text.

Nothing here knows what a trace is. A step's attention is that of all its rows: of a growing text its whole prefix.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

import numpy as np
from hand import BOS, END, LINE, MASK, PIECES, SPACE, World, gini

from floatscope.schema import State

CLASSES = ("bos", "mask", "special", "template", "newline", "punctuation", "content")


# §2 received attention


@functools.cache
def matrix(world: World, t: int, layer: int, head: int | None = None) -> np.ndarray:
    """A[query, key] of one head, or the mean of the heads."""
    each = world.attention[t][layer]
    return sum(each) / len(each) if head is None else each[head]


@functools.cache
def eligible(world: World, t: int, layer: int, rows: tuple[int, ...] | None = None) -> list[int]:
    """Keys that at least 16 rows see, or all rows of a smaller group."""
    see = world.visible[t][layer]
    rows = range(len(see)) if rows is None else rows
    return [j for j in range(len(see)) if sum(see[i, j] for i in rows) >= min(16, len(rows))]


def mean_scale(A: np.ndarray, rows: Sequence[int], j: int) -> float:
    return sum(A[i, j] for i in rows) / len(rows)


@functools.cache
def even(world: World, t: int, layer: int, rows: Sequence[int], j: int) -> float:
    """The mean scale, were every row uniform over the keys it may see."""
    see = world.visible[t][layer]
    return sum(see[i, j] / see[i].sum() for i in rows) / len(rows)


@functools.cache
def on_scale(
    world: World, t: int, layer: int, scale: str, head: int | None = None, rows: tuple[int, ...] | None = None
) -> dict[int, float]:
    """Eligible key → received attention."""
    A, see = matrix(world, t, layer, head), world.visible[t][layer]
    rows = range(len(see)) if rows is None else rows
    found = {}
    for j in eligible(world, t, layer, rows):
        r = mean_scale(A, rows, j)
        found[j] = {
            "mean": r,
            "sum": len(see) * r,
            "percent": 100 * r,
            "visible": r * len(rows) / sum(see[i, j] for i in rows),
            "lift": r / even(world, t, layer, rows, j),
        }[scale]
    return found


def top(values: dict[int, float]) -> int:
    return min(values, key=lambda j: (-values[j], j))


# §2 detectors


def zscore(values: dict[int, float], k: float) -> set[int]:
    mean = fmean(values.values())
    std = math.sqrt(fmean((x - mean) ** 2 for x in values.values()))
    return {j for j, x in values.items() if x > mean + k * std}


def rulli(values: dict[int, float], eps: float) -> set[int]:
    return {j for j, x in values.items() if x > fmean(y for i, y in values.items() if i != j) + eps}


def largest(values: dict[int, float], k: int) -> set[int]:
    return set(sorted(values, key=lambda j: (-values[j], j))[:k])


def soft(world: World, t: int, k: float, alpha: float) -> dict[int, float]:
    """The weight of each key; m is summed over layers, heads and queries, and one for all layers."""
    keys = set.intersection(*(set(eligible(world, t, layer)) for layer in range(world.layers)))
    m = {j: float(sum(A[:, :, j].sum() for A in world.attention[t])) for j in keys}
    mean = fmean(m.values())
    std = math.sqrt(fmean((x - mean) ** 2 for x in m.values()))
    return {j: 1 / (1 + math.exp(min(700, -alpha * (x - (mean + k * std))))) for j, x in m.items()}


def anchors(world: World, t: int, layer: int, name: str, head: int | None = None, **given: object) -> set[int]:
    """By the detector, of the head mean or of one head."""
    if name == "zscore":
        return zscore(on_scale(world, t, layer, given["scale"], head), given["k"])
    if name == "rulli":
        return rulli(on_scale(world, t, layer, given["scale"], head), given["eps"])
    if name == "gu":
        return {j for j, x in on_scale(world, t, layer, "visible", head).items() if x > given["eps"]}
    if name == "topk":
        return largest(on_scale(world, t, layer, "lift", head), given["k"])
    if name == "soft":
        return {j for j, weight in soft(world, t, given["k"], given["alpha"]).items() if weight > 0.5}
    A = matrix(world, t, layer)
    mass = {j: mean_scale(A, range(len(A)), j) for j in range(len(A))}
    return {top(mass)} if masked(world, 0) else {0}


# §2 tables


def absorption(world: World, t: int, layer: int, keys: Iterable[int]) -> tuple[float, float]:
    """In percent; and the same under uniform attention."""
    A = matrix(world, t, layer)
    rows = range(len(A))
    return (
        100 * sum(mean_scale(A, rows, j) for j in keys),
        100 * sum(even(world, t, layer, rows, j) for j in keys),
    )


def absorption_sets(world: World, t: int, layer: int, found: set[int]) -> dict[str, set[int]]:
    lift = on_scale(world, t, layer, "lift")
    return {"first": {0}, "top": {top(lift)}, "top 5": largest(lift, 5), "anchors": found}


def class_of(world: World, t: int, j: int) -> str:
    token = int(world.tokens[t][j])
    if token == BOS and j == 0:
        return "bos"
    if token == MASK:
        return "mask"
    if token in (BOS, END):
        return "special"
    if j in world.regions.get("template", ()):
        return "template"
    if token in (LINE, SPACE):
        return "newline"
    return "content" if any(c.isalpha() for c in PIECES[token]) else "punctuation"


def frequencies(things: Iterable[object]) -> dict[object, float]:
    counted = Counter(things)
    return {thing: count / counted.total() for thing, count in counted.items()}


def concentration(world: World, t: int, layer: int) -> dict[str, float]:
    A, see = world.attention[t][layer], world.visible[t][layer]
    rows = range(len(see))
    entropies = []
    for head in A:
        each = []
        for i in rows:
            if see[i].sum() > 1:
                each.append(-sum(p * math.log(p) for p in head[i] if p > 0) / math.log(see[i].sum()))
        entropies.append(fmean(each))
    mean = matrix(world, t, layer)
    r = sorted((mean_scale(mean, rows, j) for j in rows), reverse=True)
    return {
        "row_entropy": fmean(entropies),
        "gini": fmean(gini(list(on_scale(world, t, layer, "lift", h).values())) for h in range(world.heads)),
        "column_entropy": -sum(x * math.log(x) for x in r if x > 0) / math.log(len(r)),
        "top_1": r[0],
        "top_5": sum(r[:5]),
    }


def sink_rates(world: World, eps: float, steps: Sequence[int]) -> tuple[float, float]:
    """Share of (layer, head), over the steps: a sink at key 0, and at any eligible key (or key 0)."""
    first, anywhere = [], []
    for t in steps:
        for layer in range(world.layers):
            for head in range(world.heads):
                A, see = world.attention[t][layer][head], world.visible[t][layer]
                visible = {j: A[:, j].sum() / see[:, j].sum() for j in {0, *eligible(world, t, layer)}}
                first.append(visible[0] > eps)
                anywhere.append(max(visible.values()) > eps)
    return fmean(first), fmean(anywhere)


def not_anchors(world: World, eps: float) -> float:
    """Share of eligible keys that are no anchors by rulli on lift, over steps and layers."""
    shares = []
    for t in range(world.steps):
        for layer in range(world.layers):
            lift = on_scale(world, t, layer, "lift")
            shares.append(1 - len(rulli(lift, eps)) / len(lift))
    return fmean(shares)


# §3


def always(world: World, layer: int) -> set[int]:
    """Keys that can be ranked at every step."""
    return set.intersection(*(set(eligible(world, t, layer)) for t in range(world.steps)))


def path(world: World, layer: int) -> list[int]:
    each = [on_scale(world, t, layer, "lift") for t in range(world.steps)]
    return [top({j: x for j, x in lift.items() if j in always(world, layer)}) for lift in each]


def mode(values: Iterable[int]) -> int:
    counted = Counter(values)
    return min(counted, key=lambda j: (-counted[j], j))


def off(values: Sequence[int], place: int) -> float:
    """1 − the share that is there."""
    return 1 - sum(v == place for v in values) / len(values)


def slope(values: Sequence[float]) -> float:
    """Least squares on 0, 1, 2, …"""
    if len(values) < 2:
        return math.nan
    t, p = fmean(range(len(values))), fmean(values)
    up = sum((i - t) * (v - p) for i, v in enumerate(values))
    return up / sum((i - t) ** 2 for i in range(len(values)))


def variance(values: Sequence[float]) -> float:
    return fmean((v - fmean(values)) ** 2 for v in values) if values else math.nan


def spatial_variance(world: World, layer: int) -> float:
    """Of the mean over steps of a key's lift, over the keys."""
    seen: dict[int, list[float]] = {}
    for t in range(world.steps):
        for j, x in on_scale(world, t, layer, "lift").items():
            seen.setdefault(j, []).append(x)
    return variance([fmean(x) for x in seen.values()])


def centroids(world: World, layer: int, found: Sequence[set[int]]) -> list[float]:
    """Of the anchors, weighted by lift, at the steps that have some."""
    each = []
    for t, keys in enumerate(found):
        lift = on_scale(world, t, layer, "lift")
        if keys:
            each.append(sum(lift[j] * j for j in keys) / sum(lift[j] for j in keys))
    return each


def jaccard(pairs: Iterable[tuple[set[int], set[int]]]) -> float:
    """Mean over the pairs of which one at least has an anchor."""
    each = [len(a & b) / len(a | b) for a, b in pairs if a | b]
    return fmean(each) if each else math.nan


def pearson(a: Sequence[float], b: Sequence[float]) -> float:
    """Over the steps at which there is both."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if not math.isnan(y)]
    if len(pairs) < 3:
        return math.nan
    x, y = zip(*pairs, strict=True)
    spread = math.sqrt(variance(x) * variance(y))
    both = fmean((p - fmean(x)) * (q - fmean(y)) for p, q in pairs)
    return both / spread if spread else math.nan


def masked(world: World, t: int) -> list[int]:
    return [j for j, state in enumerate(world.states[t]) if state == State.MASKED]


def frontiers(world: World) -> dict[str, list[float]]:
    """On the canvas the step's forward saw: what a step writes stands there from the next on."""
    found: dict[str, list[float]] = {"leftmost mask": [], "rightmost mask": [], "last commit": [], "block end": []}
    for t in range(world.steps):
        masks, before = masked(world, t), [position for step, position, _, _ in world.commits if step < t]
        found["leftmost mask"].append(min(masks, default=math.nan))
        found["rightmost mask"].append(max(masks, default=math.nan))
        found["last commit"].append(before[-1] if before else math.nan)
        found["block end"].append(world.blocks[t][1] if world.blocks else math.nan)
    return found


def lives(found: Sequence[set[int]]) -> list[tuple[str, int]]:
    """Class and length of every maximal run of steps in which a key stays an anchor."""
    steps, runs = len(found), []
    for j in sorted(set().union(*found)):
        t = 0
        while t < steps:
            if j not in found[t]:
                t += 1
                continue
            start = t
            while t < steps and j in found[t]:
                t += 1
            length = t - start
            if 10 * length >= 9 * steps:
                kind = "static"
            elif length == 1:
                kind = "flash"
            elif t < steps and not found[t]:
                kind = "vanishing"
            else:
                kind = "moving"
            runs.append((kind, length))
    return runs


def split(world: World, layer: int, found: Sequence[set[int]]) -> float:
    """Share of the steps with masked and unmasked rows at which their top keys differ and both are anchors."""
    each = []
    for t in range(world.steps):
        mine = tuple(masked(world, t))
        others = tuple(i for i in range(len(world.states[t])) if i not in mine)
        if mine and others:
            a, b = (top(on_scale(world, t, layer, "lift", rows=rows)) for rows in (mine, others))
            each.append(a != b and a in found[t] and b in found[t])
    return fmean(each) if each else math.nan


def mean_map(worlds: Sequence[World], layer: int, steps: int, keys: int) -> np.ndarray:
    """Relative step s of a text shows its step ⌊s·T/steps⌋, relative place k the keys with ⌊j·keys/n⌋ = k."""
    total = np.zeros((steps, keys))
    for world in worlds:
        for s in range(steps):
            t = s * world.steps // steps
            A = matrix(world, t, layer)
            for j in range(len(A)):
                total[s, j * keys // len(A)] += mean_scale(A, range(len(A)), j) / len(worlds)
    return total


# §4


def attention_on(world: World, layer: int, names: Sequence[str]) -> tuple[float, float]:
    """Mean over steps of the received attention on tokens of these classes; and the same under uniform attention."""
    share, base = [], []
    for t in range(world.steps):
        keys = [j for j in range(len(world.tokens[t])) if class_of(world, t, j) in names]
        percent, uniform = absorption(world, t, layer, keys)
        share.append(percent / 100)
        base.append(uniform / 100)
    return fmean(share), fmean(base)


def answer_mass(world: World, layer: int, region: str) -> float:
    """Of an average predicting row, over heads and commits."""
    each = []
    for t, _, row, _ in world.commits:
        A = matrix(world, t, layer)
        each.append(sum(A[row, j] for j in world.regions[region] if j < len(A)))
    return fmean(each)


def answer_even(world: World, layer: int, keys: Sequence[int]) -> float:
    """What the predicting rows would give these keys, were they uniform over the keys they may see."""
    each = []
    for t, _, row, _ in world.commits:
        see = world.visible[t][layer][row]
        each.append(sum(see[j] for j in keys if j < len(see)) / see.sum())
    return fmean(each)
