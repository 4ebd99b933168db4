"""The definitions of docs/analysis.md as loops over whole attention matrices, to be read next to the text.

Nothing here uses traces. The attention of a step is that of all its rows: of a growing text, the whole prefix.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

import numpy as np
from dense_decodings import BOS, END, LINE, MASK, PIECES, SPACE, Decoding, gini

from floatscope.schema import State

CLASSES = ("bos", "mask", "special", "template", "newline", "punctuation", "content")


# §2 received attention


@functools.cache
def attention_matrix(decoding: Decoding, t: int, layer: int, head: int | None = None) -> np.ndarray:
    """A[query, key] of one head, or the mean of the heads."""
    heads = decoding.attention[t][layer]
    return sum(heads) / len(heads) if head is None else heads[head]


@functools.cache
def eligible(decoding: Decoding, t: int, layer: int, rows: tuple[int, ...] | None = None) -> list[int]:
    """Keys that at least 16 rows see, or all rows of a smaller group."""
    mask = decoding.visible[t][layer]
    rows = range(len(mask)) if rows is None else rows
    return [j for j in range(len(mask)) if sum(mask[i, j] for i in rows) >= min(16, len(rows))]


def mean_received(A: np.ndarray, rows: Sequence[int], j: int) -> float:
    """Received attention on the scale "mean"."""
    return sum(A[i, j] for i in rows) / len(rows)


@functools.cache
def uniform_received(decoding: Decoding, t: int, layer: int, rows: Sequence[int], j: int) -> float:
    """The scale "mean" if every row attends uniformly to the keys that it may see."""
    mask = decoding.visible[t][layer]
    return sum(mask[i, j] / mask[i].sum() for i in rows) / len(rows)


@functools.cache
def scaled_received(
    decoding: Decoding, t: int, layer: int, scale: str, head: int | None = None, rows: tuple[int, ...] | None = None
) -> dict[int, float]:
    """Eligible key → received attention."""
    A, mask = attention_matrix(decoding, t, layer, head), decoding.visible[t][layer]
    rows = range(len(mask)) if rows is None else rows
    values = {}
    for j in eligible(decoding, t, layer, rows):
        r = mean_received(A, rows, j)
        values[j] = {
            "mean": r,
            "sum": len(mask) * r,
            "percent": 100 * r,
            "visible": r * len(rows) / sum(mask[i, j] for i in rows),
            "lift": r / uniform_received(decoding, t, layer, rows, j),
        }[scale]
    return values


def top(values: dict[int, float]) -> int:
    """The first key of the largest value."""
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


def soft(decoding: Decoding, t: int, k: float, alpha: float) -> dict[int, float]:
    """The weight of each key; m is the sum over layers, heads and queries."""
    keys = set.intersection(*(set(eligible(decoding, t, layer)) for layer in range(decoding.layers)))
    m = {j: float(sum(A[:, :, j].sum() for A in decoding.attention[t])) for j in keys}
    mean = fmean(m.values())
    std = math.sqrt(fmean((x - mean) ** 2 for x in m.values()))
    return {j: 1 / (1 + math.exp(min(700, -alpha * (x - (mean + k * std))))) for j, x in m.items()}


def anchors(
    decoding: Decoding, t: int, layer: int, name: str, head: int | None = None, **arguments: object
) -> set[int]:
    """The anchors of the head mean or of one head."""
    if name == "zscore":
        return zscore(scaled_received(decoding, t, layer, arguments["scale"], head), arguments["k"])
    if name == "rulli":
        return rulli(scaled_received(decoding, t, layer, arguments["scale"], head), arguments["eps"])
    if name == "gu":
        return {j for j, x in scaled_received(decoding, t, layer, "visible", head).items() if x > arguments["eps"]}
    if name == "topk":
        return largest(scaled_received(decoding, t, layer, "lift", head), arguments["k"])
    if name == "soft":
        return {j for j, weight in soft(decoding, t, arguments["k"], arguments["alpha"]).items() if weight > 0.5}
    A = attention_matrix(decoding, t, layer)
    mass = {j: mean_received(A, range(len(A)), j) for j in range(len(A))}
    return {top(mass)} if masked(decoding, 0) else {0}


# §2 tables


def absorption(decoding: Decoding, t: int, layer: int, keys: Iterable[int]) -> tuple[float, float]:
    """In percent, and the same under uniform attention."""
    A = attention_matrix(decoding, t, layer)
    rows = range(len(A))
    return (
        100 * sum(mean_received(A, rows, j) for j in keys),
        100 * sum(uniform_received(decoding, t, layer, rows, j) for j in keys),
    )


def absorption_sets(decoding: Decoding, t: int, layer: int, anchor_keys: set[int]) -> dict[str, set[int]]:
    lift = scaled_received(decoding, t, layer, "lift")
    return {"first": {0}, "top": {top(lift)}, "top 5": largest(lift, 5), "anchors": anchor_keys}


def class_of(decoding: Decoding, t: int, j: int) -> str:
    token = int(decoding.tokens[t][j])
    if token == BOS and j == 0:
        return "bos"
    if token == MASK:
        return "mask"
    if token in (BOS, END):
        return "special"
    if j in decoding.regions.get("template", ()):
        return "template"
    if token in (LINE, SPACE):
        return "newline"
    return "content" if any(c.isalpha() for c in PIECES[token]) else "punctuation"


def frequencies(things: Iterable[object]) -> dict[object, float]:
    counted = Counter(things)
    return {thing: count / counted.total() for thing, count in counted.items()}


def concentration(decoding: Decoding, t: int, layer: int) -> dict[str, float]:
    A, mask = decoding.attention[t][layer], decoding.visible[t][layer]
    rows = range(len(mask))
    entropies = []
    for head in A:
        row_entropies = []
        for i in rows:
            if mask[i].sum() > 1:
                row_entropies.append(-sum(p * math.log(p) for p in head[i] if p > 0) / math.log(mask[i].sum()))
        entropies.append(fmean(row_entropies))
    mean = attention_matrix(decoding, t, layer)
    r = sorted((mean_received(mean, rows, j) for j in rows), reverse=True)
    return {
        "row_entropy": fmean(entropies),
        "gini": fmean(
            gini(list(scaled_received(decoding, t, layer, "lift", h).values())) for h in range(decoding.heads)
        ),
        "column_entropy": -sum(x * math.log(x) for x in r if x > 0) / math.log(len(r)),
        "top_1": r[0],
        "top_5": sum(r[:5]),
    }


def sink_rates(decoding: Decoding, eps: float, steps: Sequence[int]) -> tuple[float, float]:
    """The share of (layer, head) over the steps with a sink at key 0, and with a sink at key 0 or an eligible key."""
    first, anywhere = [], []
    for t in steps:
        for layer in range(decoding.layers):
            for head in range(decoding.heads):
                A, mask = decoding.attention[t][layer][head], decoding.visible[t][layer]
                visible = {j: A[:, j].sum() / mask[:, j].sum() for j in {0, *eligible(decoding, t, layer)}}
                first.append(visible[0] > eps)
                anywhere.append(max(visible.values()) > eps)
    return fmean(first), fmean(anywhere)


def share_without_anchors(decoding: Decoding, eps: float) -> float:
    """The share of eligible keys that are not anchors by rulli on lift, over steps and layers."""
    shares = []
    for t in range(decoding.steps):
        for layer in range(decoding.layers):
            lift = scaled_received(decoding, t, layer, "lift")
            shares.append(1 - len(rulli(lift, eps)) / len(lift))
    return fmean(shares)


# §3


def always_eligible(decoding: Decoding, layer: int) -> set[int]:
    """Keys that are eligible at every step."""
    return set.intersection(*(set(eligible(decoding, t, layer)) for t in range(decoding.steps)))


def top_path(decoding: Decoding, layer: int) -> list[int]:
    lifts = [scaled_received(decoding, t, layer, "lift") for t in range(decoding.steps)]
    return [top({j: x for j, x in lift.items() if j in always_eligible(decoding, layer)}) for lift in lifts]


def mode(values: Iterable[int]) -> int:
    counted = Counter(values)
    return min(counted, key=lambda j: (-counted[j], j))


def share_elsewhere(values: Sequence[int], place: int) -> float:
    """1 − the share of values at this position."""
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


def spatial_variance(decoding: Decoding, layer: int) -> float:
    """Of the mean over steps of a key's lift, over the keys."""
    seen: dict[int, list[float]] = {}
    for t in range(decoding.steps):
        for j, x in scaled_received(decoding, t, layer, "lift").items():
            seen.setdefault(j, []).append(x)
    return variance([fmean(x) for x in seen.values()])


def centroids(decoding: Decoding, layer: int, anchor_sets: Sequence[set[int]]) -> list[float]:
    """Of the anchors, weighted by lift, at the steps that have some."""
    values = []
    for t, keys in enumerate(anchor_sets):
        lift = scaled_received(decoding, t, layer, "lift")
        if keys:
            values.append(sum(lift[j] * j for j in keys) / sum(lift[j] for j in keys))
    return values


def jaccard(pairs: Iterable[tuple[set[int], set[int]]]) -> float:
    """Mean over the pairs of which one at least has an anchor."""
    values = [len(a & b) / len(a | b) for a, b in pairs if a | b]
    return fmean(values) if values else math.nan


def pearson(a: Sequence[float], b: Sequence[float]) -> float:
    """Over the steps at which there is both."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if not math.isnan(y)]
    if len(pairs) < 3:
        return math.nan
    x, y = zip(*pairs, strict=True)
    spread = math.sqrt(variance(x) * variance(y))
    both = fmean((p - fmean(x)) * (q - fmean(y)) for p, q in pairs)
    return both / spread if spread else math.nan


def masked(decoding: Decoding, t: int) -> list[int]:
    return [j for j, state in enumerate(decoding.states[t]) if state == State.MASKED]


def frontiers(decoding: Decoding) -> dict[str, list[float]]:
    """On the canvas that the forward of the step saw: a commit is visible from the next step on."""
    places: dict[str, list[float]] = {"leftmost mask": [], "rightmost mask": [], "last commit": [], "block end": []}
    for t in range(decoding.steps):
        masks, before = masked(decoding, t), [position for step, position, _, _ in decoding.commits if step < t]
        places["leftmost mask"].append(min(masks, default=math.nan))
        places["rightmost mask"].append(max(masks, default=math.nan))
        places["last commit"].append(before[-1] if before else math.nan)
        places["block end"].append(decoding.blocks[t][1] if decoding.blocks else math.nan)
    return places


def lifetimes(anchor_sets: Sequence[set[int]]) -> list[tuple[str, int]]:
    """Class and length of every maximal run of steps in which a key stays an anchor."""
    steps, spans = len(anchor_sets), []
    for j in sorted(set().union(*anchor_sets)):
        t = 0
        while t < steps:
            if j not in anchor_sets[t]:
                t += 1
                continue
            start = t
            while t < steps and j in anchor_sets[t]:
                t += 1
            length = t - start
            if 10 * length >= 9 * steps:
                kind = "static"
            elif length == 1:
                kind = "flash"
            elif t < steps and not anchor_sets[t]:
                kind = "vanishing"
            else:
                kind = "moving"
            spans.append((kind, length))
    return spans


def split(decoding: Decoding, layer: int, anchor_sets: Sequence[set[int]]) -> float:
    """The share of the steps with masked and unmasked rows at which their top keys differ and both are anchors."""
    values = []
    for t in range(decoding.steps):
        mine = tuple(masked(decoding, t))
        others = tuple(i for i in range(len(decoding.states[t])) if i not in mine)
        if mine and others:
            a, b = (top(scaled_received(decoding, t, layer, "lift", rows=rows)) for rows in (mine, others))
            values.append(a != b and a in anchor_sets[t] and b in anchor_sets[t])
    return fmean(values) if values else math.nan


# §4


def class_shares(decoding: Decoding, layer: int, names: Sequence[str]) -> tuple[float, float]:
    """The received attention on tokens of these classes, mean over steps, and the same under uniform attention."""
    share, base = [], []
    for t in range(decoding.steps):
        keys = [j for j in range(len(decoding.tokens[t])) if class_of(decoding, t, j) in names]
        percent, uniform = absorption(decoding, t, layer, keys)
        share.append(percent / 100)
        base.append(uniform / 100)
    return fmean(share), fmean(base)


def predicting_mass(decoding: Decoding, layer: int, region: str) -> float:
    """What an average predicting row gives a region, mean over heads and commits."""
    values = []
    for t, _, row, _ in decoding.commits:
        A = attention_matrix(decoding, t, layer)
        values.append(sum(A[row, j] for j in decoding.regions[region] if j < len(A)))
    return fmean(values)


def uniform_predicting_mass(decoding: Decoding, layer: int, keys: Sequence[int]) -> float:
    """What the predicting rows would give these keys under uniform attention."""
    values = []
    for t, _, row, _ in decoding.commits:
        mask = decoding.visible[t][layer][row]
        values.append(sum(mask[j] for j in keys if j < len(mask)) / mask.sum())
    return fmean(values)
