"""Floating: does an anchor stay where it is while a canvas is denoised, and is it at the same place in every text?

    tops(look)                 # a row per step and layer: the key of largest lift
    floating_index(tops)       # a row per sample and layer: within, across
    drift(look)                # a row per layer: displacement, changes, variances, Jaccard, frontier
    lifetimes(look)            # a row per layer: static, flash, vanishing, moving; split
    over_layers(look)          # a row per step: the same path, followed from layer to layer
    heads(look)                # a row per layer and head: the movement of a single head's top key
    mean_map(looks, layer)     # a picture of many samples, on relative axes

Everything is on lift, over the rows of the whole forward or prefix. An untrained bidirectional model floats too: only
the difference from the control means anything.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from floatscope.analysis.kept import kept
from floatscope.analysis.look import TraceView, argmax
from floatscope.schema import MIN_VISIBLE_ROWS

STATIC = 0.9
"""A run of this share of the steps is static."""
LIVES = ("static", "flash", "vanishing", "moving")
FRONTIERS = ("leftmost mask", "rightmost mask", "last commit", "block end")
THIRDS = ("shallow", "middle", "deep")


def tops(look: TraceView) -> pd.DataFrame:
    steps, layers = look.path.shape
    return pd.DataFrame(
        {
            "sample": look.sample,
            "step": np.repeat(np.arange(steps), layers),
            "layer": np.tile(look.layers, steps),
            "depth": np.tile(look.depth, steps),
            "top": look.path.ravel(),
        }
    )


def floating_index(tops: pd.DataFrame) -> pd.DataFrame:
    """`within` = 1 − share of a sample's steps whose top key is that sample's modal one; `across` the same with the
    modal key of the layer over all samples. A mode that is tied is the smaller key."""
    there = tops[tops["top"] >= 0]
    everywhere = there.groupby("layer")["top"].agg(_mode)
    own = there.groupby(["sample", "layer"], sort=False)["top"].transform(_mode)
    table = there.assign(within=there["top"] != own, across=there["top"] != there["layer"].map(everywhere))
    index = table.groupby(["sample", "layer", "depth"], sort=False)[["within", "across"]].mean().reset_index()
    return index.assign(third=[third(depth) for depth in index["depth"]])


def third(depth: float) -> str:
    return THIRDS[min(2, int(depth * 3))]


def drift(look: TraceView) -> pd.DataFrame:
    """How the top key and the set of anchors move over the steps, among the keys that are eligible at all of them.

    The centroid is that of the anchors, weighted by lift; steps without anchors have none.
    """
    path = np.where(look.path >= 0, look.path, np.nan)  # [step, layer]
    size = float(look.keys.max())
    centroid = _centroid(look)
    table = {
        "sample": look.sample,
        "layer": look.layers,
        "depth": look.depth,
        "displacement": np.nansum(np.abs(np.diff(path, axis=0)), 0),
        "changes": (np.abs(np.diff(path, axis=0)) > 0).sum(0),
        "slope": [_slope(path[:, layer]) for layer in range(path.shape[1])],
        "spatial_variance": _spatial(look),
        "temporal_variance": _variance(centroid),
        "temporal_variance_relative": _variance(centroid / size),
        "jaccard_next": _jaccard(look.lasting[:-1], look.lasting[1:]),
        "jaccard_first": _jaccard(look.lasting[:1], look.lasting[1:]),
    }
    for name, front in frontiers(look).items():
        table[name] = [_correlation(path[:, layer], front) for layer in range(path.shape[1])]
    return pd.DataFrame(table)


def frontiers(look: TraceView) -> dict[str, Float[np.ndarray, " step"]]:
    """Where the canvas is being filled, step by step; NaN where there is no such place."""
    arrays, masked = look.trace.arrays, look.masked
    key = np.arange(masked.shape[1])
    has = masked.any(1)
    last = np.full(look.steps, np.nan)
    for step, position in zip(arrays["commit_step"], arrays["commit_position"], strict=True):
        if step + 1 < look.steps:  # what was written at a step is seen from the next on
            last[step + 1 :] = position
    block = arrays["block"][:, 1].astype(float)
    return {
        "leftmost mask": np.where(has, np.where(masked, key, len(key)).min(1), np.nan),
        "rightmost mask": np.where(has, np.where(masked, key, -1).max(1), np.nan),
        "last commit": last,
        "block end": np.where(block >= 0, block, np.nan),
    }


def lifetimes(look: TraceView) -> pd.DataFrame:
    """Runs of steps in which a key stays an anchor, per sample and layer: how many of each class, how long on average.

    Static: at least 90 % of the steps. Flash: one step. Vanishing: it ends before the last step, and the next has no
    anchor. Moving: the rest. `split` is the share of steps at which masked and unmasked rows have different top keys,
    both of them anchors.
    """
    rows = []
    split = _split(look)
    for layer, number in enumerate(look.layers):
        found = look.anchors[:, layer]  # [step, key]
        runs = list(_runs(found))
        kinds = [_life(start, stop, found) for start, stop in runs]
        rows.append(
            {
                "sample": look.sample,
                "layer": int(number),
                "depth": float(look.depth[layer]),
                **{kind: kinds.count(kind) for kind in LIVES},
                "runs": len(runs),
                "length": np.mean([stop - start for start, stop in runs]) if runs else np.nan,
                "split": split[layer],
            }
        )
    return pd.DataFrame(rows)


def over_layers(look: TraceView) -> pd.DataFrame:
    """The top key followed through the layers of one step; `places` is how many different keys it visits."""
    hops = np.diff(np.where(look.path >= 0, look.path, np.nan), axis=1)  # to and from a layer without one: NaN
    return pd.DataFrame(
        {
            "sample": look.sample,
            "step": np.arange(look.steps),
            "displacement": np.nansum(np.abs(hops), 1),
            "changes": (np.abs(hops) > 0).sum(1),
            "places": [len(set(row) - {-1}) for row in look.path.tolist()],
            "jaccard_next": _jaccard(*(np.moveaxis(a, 1, 0) for a in (look.anchors[:, :-1], look.anchors[:, 1:]))),
        }
    )


def heads(look: TraceView) -> pd.DataFrame:
    """The top key of single heads: `within` and its changes, over the steps whose forward had all rows; NaN where there
    is but one of them, as with a cache."""
    group = look.trace.coords["group"].index("all")
    path = kept(look.trace, "top_key")[look.whole][:, :, :, group, 0]  # [step, layer, head]
    steps, layers, count = path.shape
    usual = np.array([_most(path[:, layer, head]) for layer in range(layers) for head in range(count)])
    enough = steps > 1
    return pd.DataFrame(
        {
            "sample": look.sample,
            "layer": np.repeat(look.layers, count),
            "depth": np.repeat(look.depth, count),
            "head": np.tile(np.arange(count), layers),
            "within": 1 - usual / steps if enough else np.nan,
            "changes": (np.diff(path, axis=0) != 0).sum(0).ravel() if enough else np.nan,
        }
    )


def mean_map(
    looks: Iterable[TraceView], layer: int, steps: int = 16, keys: int = 64
) -> Float[np.ndarray, "relative_step relative_key"]:
    """The mean share of a layer's attention that falls on each relative place at each relative step; rows sum to 1."""
    total, count = np.zeros((steps, keys)), 0
    for look in looks:
        received = look.trace.received(layer)
        for step in range(steps):
            own = min(look.steps - 1, step * look.steps // steps)
            n = int(look.keys[own])
            place = np.arange(n) * keys // n
            total[step] += np.bincount(place, received[own, :n], minlength=keys)
        count += 1
    return total / max(1, count)


def map_distance(a: Float[np.ndarray, "step key"], b: Float[np.ndarray, "step key"]) -> float:
    """How differently two tasks spread attention: the mean over steps of the total variation, 0 to 1."""
    return float(np.abs(a - b).sum(-1).mean() / 2)


def _mode(values: pd.Series) -> int:
    keys, count = np.unique(values.to_numpy(), return_counts=True)
    return int(keys[count.argmax()])


def _most(values: Int[np.ndarray, " step"]) -> int:
    """How often the most frequent one occurs."""
    return int(np.unique(values, return_counts=True)[1].max())


def _centroid(look: TraceView) -> Float[np.ndarray, "step layer"]:
    weight = np.where(look.lasting, np.nan_to_num(look.lift), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        centroid: np.ndarray = (weight * np.arange(weight.shape[-1])).sum(-1) / weight.sum(-1)
    return centroid


def _spatial(look: TraceView) -> Float[np.ndarray, " layer"]:
    """Variance over keys of the mean lift over steps."""
    there = np.isfinite(look.lift)
    mean = np.nansum(look.lift, 0) / np.where(there.any(0), there.sum(0), np.nan)  # [layer, key]
    return _variance(mean.T)


def _variance(values: Float[np.ndarray, "along layer"]) -> Float[np.ndarray, " layer"]:
    """Of what there is; NaN where there is nothing."""
    n = np.isfinite(values).sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.nansum(values, 0) / n
        return np.where(n > 0, np.nansum((values - mean) ** 2, 0) / n, np.nan)


def _jaccard(
    a: Bool[np.ndarray, "#step layer key"], b: Bool[np.ndarray, "#step layer key"]
) -> Float[np.ndarray, " layer"]:
    """Mean over steps of |both| / |either|; steps at which neither has an anchor are left out."""
    either = (a | b).sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        each = (a & b).sum(-1) / either
    n = (either > 0).sum(0)
    return np.where(n > 0, np.nansum(each, 0) / np.maximum(n, 1), np.nan)


def _slope(path: Float[np.ndarray, " step"]) -> float:
    there = np.isfinite(path)
    if there.sum() < 2:
        return float("nan")
    return float(np.polyfit(np.flatnonzero(there), path[there], 1)[0])


def _correlation(path: Float[np.ndarray, " step"], front: Float[np.ndarray, " step"]) -> float:
    """Pearson; NaN where either stands still."""
    there = np.isfinite(path) & np.isfinite(front)
    a, b = path[there], front[there]
    if len(a) < 3 or a.std() == 0 or b.std() == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def _runs(found: Bool[np.ndarray, "step key"]) -> Iterable[tuple[int, int]]:
    """[start, stop) of every maximal run of steps, key by key."""
    edge = np.zeros((1, found.shape[1]), bool)
    change = np.diff(np.concatenate([edge, found, edge]).astype(np.int8), axis=0)
    starts, stops = (np.argwhere(sign == change.T)[:, 1] for sign in (1, -1))
    return zip(starts.tolist(), stops.tolist(), strict=True)


def _life(start: int, stop: int, found: Bool[np.ndarray, "step key"]) -> str:
    steps = len(found)
    if stop - start >= STATIC * steps:
        return "static"
    if stop - start == 1:
        return "flash"
    return "vanishing" if stop < steps and not found[stop].any() else "moving"


def _split(look: TraceView) -> Float[np.ndarray, " layer"]:
    """Unmasked rows are all rows less the masked ones; steps without either are left out."""
    trace = look.trace
    n, masked = trace.arrays["queries"], look.masked.sum(1)
    both = (masked > 0) & (masked < n)
    if not both.any() or trace.meta.get("rows") == "cache":
        return np.full(len(look.layers), np.nan)
    n, masked = n[both, None, None], masked[both, None, None]
    at, number = trace.arrays["layer_visibility"], trace.coords["group"].index
    every, mine = (kept(trace, "seen")[both][:, at, number(group)] for group in ("all", "masked"))
    enough = every - mine >= (n - masked).clip(1, MIN_VISIBLE_ROWS)
    others = look.received[both] * n - trace.by_layer("masked")[both] * masked
    even = look.uniform[both] * n - trace.uniform("masked")[both] * masked
    with np.errstate(divide="ignore", invalid="ignore"):
        unmasked = np.where(enough, others / even, np.nan)
    a, b = argmax(trace.by_layer("masked", "lift", eligible=True)[both]), argmax(unmasked)  # [step, layer]
    anchors = look.anchors[both]
    is_anchor = [np.take_along_axis(anchors, np.maximum(top, 0)[..., None], -1)[..., 0] for top in (a, b)]
    share: np.ndarray = ((a != b) & is_anchor[0] & is_anchor[1]).mean(0)
    return share
