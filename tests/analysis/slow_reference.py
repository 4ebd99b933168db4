"""The definitions of docs/analysis.md as loops over whole attention matrices, to be read next to the text.

Nothing here uses traces. The attention of a step is that of all its rows: of a growing text, the whole prefix. `steps`
are the steps that count; without them, all.
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
ANCHOR_LIFT = 2
BINS = 20


# Commits that count


def count_commits(decoding: Decoding, commits: str = "answer", ends: Sequence[int] = ()) -> list[int]:
    """The indices of all commits, or of those to the left of every end-of-text token."""
    indices = []
    for index, (_, position, _, _) in enumerate(decoding.commits):
        is_left_of_ends = all(position < end for _, end, _, token in decoding.commits if token in ends)
        if commits == "all" or is_left_of_ends:
            indices.append(index)
    return indices


def count_steps(decoding: Decoding, commits: str = "answer", ends: Sequence[int] = ()) -> list[int]:
    """The steps with a commit that counts; every step of a decoding without commits."""
    if not decoding.commits:
        return list(range(decoding.steps))
    return sorted({decoding.commits[index][0] for index in count_commits(decoding, commits, ends)})


def group_rows(decoding: Decoding, t: int, group: str) -> tuple[int, ...]:
    """The rows of a query group at a step."""
    states = decoding.states[t]
    if group == "predicting":
        return tuple(sorted({row for step, _, row, _ in decoding.commits if step == t}))
    if group == "masked":
        return tuple(i for i, state in enumerate(states) if state == State.MASKED)
    if group == "unmasked":
        return tuple(i for i, state in enumerate(states) if state != State.MASKED)
    return tuple(range(len(states)))


# §2 received attention


@functools.cache
def attention_matrix(decoding: Decoding, t: int, layer: int, head: int | None = None) -> np.ndarray:
    """A[query, key] of one head, or the mean of the heads."""
    heads = decoding.attention[t][layer]
    return sum(heads) / len(heads) if head is None else heads[head]


@functools.cache
def eligible_at_step(decoding: Decoding, t: int, layer: int, group: str = "all") -> set[int]:
    """Keys that at least 16 rows see, or all rows of a smaller group. Of single heads a trace stores these."""
    mask, rows = decoding.visible[t][layer], group_rows(decoding, t, group)
    return {j for j in range(len(mask)) if rows and sum(mask[i, j] for i in rows) >= min(16, len(rows))}


@functools.cache
def eligible(decoding: Decoding, layer: int, group: str = "all") -> set[int]:
    """Keys that are eligible at every step that has rows of the group."""
    each = [
        eligible_at_step(decoding, t, layer, group) for t in range(decoding.steps) if group_rows(decoding, t, group)
    ]
    return set.intersection(*each) if each else set()


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
    decoding: Decoding, t: int, layer: int, scale: str, head: int | None = None, group: str = "all"
) -> dict[int, float]:
    """Eligible key → received attention; of a single head, the keys that are eligible at this step."""
    A, mask = attention_matrix(decoding, t, layer, head), decoding.visible[t][layer]
    rows = group_rows(decoding, t, group)
    keys = eligible(decoding, layer, group) if head is None else eligible_at_step(decoding, t, layer, group)
    values = {}
    for j in sorted(keys) if rows else ():
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
    keys = set.intersection(*(eligible(decoding, layer) for layer in range(decoding.layers)))
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
                visible = {j: A[:, j].sum() / mask[:, j].sum() for j in {0, *eligible_at_step(decoding, t, layer)}}
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


def anchor_path(decoding: Decoding, layer: int, group: str = "all", head: int | None = None) -> list[int]:
    """The top key of each step if its lift is at least 2, else −1."""
    path = []
    for t in range(decoding.steps):
        lift = scaled_received(decoding, t, layer, "lift", head, group)
        path.append(top(lift) if lift and lift[top(lift)] >= ANCHOR_LIFT else -1)
    return path


def leader(decoding: Decoding, t: int, layer: int, group: str) -> tuple[float, float]:
    """The largest lift, and by which part it exceeds the second largest."""
    ranked = sorted(scaled_received(decoding, t, layer, "lift", group=group).values(), reverse=True)
    return ranked[0] if ranked else math.nan, ranked[0] / ranked[1] - 1 if len(ranked) > 1 else math.nan


def moved(a: dict[int, float], b: dict[int, float]) -> dict[int, float]:
    """Key → half of the difference of two distributions, each over the keys of both."""
    keys = a.keys() & b.keys()
    share_a, share_b = ({j: values[j] / sum(values[i] for i in keys) for j in keys} for values in (a, b))
    return {j: abs(share_a[j] - share_b[j]) / 2 for j in keys}


@functools.cache
def all_received(decoding: Decoding, t: int, layer: int, group: str = "all") -> dict[int, float]:
    """Key → received attention, of all keys of the step; empty without rows."""
    A, rows = attention_matrix(decoding, t, layer), group_rows(decoding, t, group)
    return {j: mean_received(A, rows, j) for j in range(len(A))} if rows else {}


def excess_moved(decoding: Decoding, t: int, u: int, layer: int, group: str) -> float:
    """Half of the differences of the attention above uniform, over the keys of both steps."""
    total = 0.0
    for j in all_received(decoding, t, layer, group).keys() & all_received(decoding, u, layer, group).keys():
        excess = []
        for step in (t, u):
            uniform = uniform_received(decoding, step, layer, group_rows(decoding, step, group), j)
            excess.append(max(0.0, all_received(decoding, step, layer, group)[j] - uniform))
        total += abs(excess[0] - excess[1]) / 2
    return total


def mode(values: Iterable[int]) -> int:
    counted = Counter(values)
    return min(counted, key=lambda j: (-counted[j], j))


def share_elsewhere(values: Sequence[int], place: int) -> float:
    """1 − the share of values at this position."""
    return 1 - sum(v == place for v in values) / len(values)


def slope(steps: Sequence[int], values: Sequence[int]) -> float:
    """Least squares over the steps with an anchor."""
    pairs = [(t, v) for t, v in zip(steps, values, strict=True) if v >= 0]
    if len(pairs) < 2:
        return math.nan
    mean_t, mean_v = fmean(t for t, _ in pairs), fmean(v for _, v in pairs)
    return sum((t - mean_t) * (v - mean_v) for t, v in pairs) / sum((t - mean_t) ** 2 for t, _ in pairs)


def variance(values: Sequence[float]) -> float:
    return fmean((v - fmean(values)) ** 2 for v in values) if values else math.nan


def spatial_variance(decoding: Decoding, layer: int, steps: Sequence[int]) -> float:
    """Of the mean over steps of a key's lift, over the keys."""
    seen: dict[int, list[float]] = {}
    for t in steps:
        for j, x in scaled_received(decoding, t, layer, "lift").items():
            seen.setdefault(j, []).append(x)
    return variance([fmean(x) for x in seen.values()])


def centroids(decoding: Decoding, layer: int, anchor_sets: dict[int, set[int]]) -> list[float]:
    """Of the anchors of each step, weighted by lift, at the steps that have some."""
    values = []
    for t, keys in anchor_sets.items():
        lift = scaled_received(decoding, t, layer, "lift")
        if keys:
            values.append(sum(lift[j] * j for j in keys) / sum(lift[j] for j in keys))
    return values


def jaccard(pairs: Iterable[tuple[set[int], set[int]]]) -> float:
    """Mean over the pairs of which one at least has an anchor."""
    values = [len(a & b) / len(a | b) for a, b in pairs if a | b]
    return fmean(values) if values else math.nan


def pearson(path: Sequence[int], frontier: Sequence[float]) -> float:
    """Over the steps with an anchor and a frontier."""
    pairs = [(x, y) for x, y in zip(path, frontier, strict=True) if x >= 0 and not math.isnan(y)]
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


def split(decoding: Decoding, layer: int, anchor_sets: dict[int, set[int]]) -> float:
    """The share of the steps with masked and unmasked rows at which their top keys differ and both are anchors."""
    values = []
    for t, keys in anchor_sets.items():
        if group_rows(decoding, t, "masked") and group_rows(decoding, t, "unmasked"):
            lifts = [scaled_received(decoding, t, layer, "lift", group=group) for group in ("masked", "unmasked")]
            a, b = (top(lift) if lift else -1 for lift in lifts)
            values.append(a != b and a in keys and b in keys)
    return fmean(values) if values else math.nan


def position_profile(decoding: Decoding, layer: int, steps: Sequence[int]) -> list[float]:
    """The share of the attention on the prompt that each twentieth of it receives."""
    prompt = [j for j, state in enumerate(decoding.states[0]) if state == State.PROMPT]
    mass = [0.0] * BINS
    for t in steps:
        received = all_received(decoding, t, layer)
        for place, j in enumerate(prompt):
            own = next(b for b in range(BINS) if place * BINS < (b + 1) * len(prompt))
            mass[own] += received[j] / len(steps)
    return [x / sum(mass) for x in mass]


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


def predicting_mass(decoding: Decoding, layer: int, region: str, indices: Sequence[int]) -> float:
    """What an average predicting row gives a region, mean over heads and over the commits that count."""
    values = []
    for t, _, row, _ in (decoding.commits[index] for index in indices):
        A = attention_matrix(decoding, t, layer)
        values.append(sum(A[row, j] for j in decoding.regions[region] if j < len(A)))
    return fmean(values)


def uniform_predicting_mass(decoding: Decoding, layer: int, keys: Sequence[int], indices: Sequence[int]) -> float:
    """What the predicting rows would give these keys under uniform attention, mean over the commits that count. A trace
    has the mean over the predicting rows of a step."""
    values = []
    for t in (decoding.commits[index][0] for index in indices):
        rows, mask = group_rows(decoding, t, "predicting"), decoding.visible[t][layer]
        values.append(fmean(sum(mask[row, j] for j in keys if j < len(mask)) / mask[row].sum() for row in rows))
    return fmean(values)
