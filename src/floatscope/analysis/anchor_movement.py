"""The movement of anchors over steps, over layers and in single heads.

    drift(run)                 # a row per layer: displacement, changes, variances, Jaccard index, frontiers
    lifetimes(run)             # a row per layer: static, flash, vanishing and moving anchors; split
    layer_drift(run)           # a row per step: the movement of the top key, and of attention, from layer to layer
    head_floating(run)         # a row per layer and head: the movement of a single head's top key

All values are lifts, over the rows of the whole forward or prefix, at the steps that write the answer. The top key
counts where it is an anchor, with a lift of at least 2. `analysis.floating` has the indices of floating.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from floatscope.analysis.floating import attention_moved
from floatscope.analysis.trace_view import TraceView, argmax_key, per_sample
from floatscope.schema import MIN_ANCHOR_LIFT, MIN_VISIBLE_ROWS, TOP_STATS, RowSource

STATIC_SHARE = 0.9
"""An anchor that stays for this share of the steps is static."""
LIFETIME_CLASSES = ("static", "flash", "vanishing", "moving")
FRONTIERS = ("leftmost mask", "rightmost mask", "last commit", "block end")


@per_sample
def drift(view: TraceView) -> pd.DataFrame:
    """How the top key and the anchors move over the steps: a row per layer.

    `displacement`, `changes` and `slope` of the top key; `spatial_variance` of the lift over keys; `temporal_variance`
    of the anchors' centroid, weighted by lift, over the steps with anchors; `jaccard_next` of the anchors of
    consecutive steps, `jaccard_first` with those of the first step; the correlation of the top key with each frontier.
    """
    steps = view.steps_with_commits
    path = _path(view)
    anchors = view.anchors[steps]
    size = float(view.keys.max())
    centroid = _centroid(view)
    table = {
        "sample": view.sample,
        "layer": view.layers,
        "depth": view.depth,
        "displacement": np.nansum(np.abs(np.diff(path, axis=0)), 0),
        "changes": (np.abs(np.diff(path, axis=0)) > 0).sum(0),
        "slope": [_slope(steps, path[:, layer]) for layer in range(path.shape[1])],
        "spatial_variance": _spatial_variance(view),
        "temporal_variance": _variance(centroid),
        "temporal_variance_relative": _variance(centroid / size),
        "jaccard_next": _jaccard(anchors[:-1], anchors[1:]),
        "jaccard_first": _jaccard(anchors[:1], anchors[1:]),
    }
    for name, frontier in frontiers(view).items():
        table[name] = [_correlation(path[:, layer], frontier[steps]) for layer in range(path.shape[1])]
    return pd.DataFrame(table)


def frontiers(view: TraceView) -> dict[str, Float[np.ndarray, " step"]]:
    """Return where the canvas is being filled at each step; NaN where there is no such place."""
    arrays, is_masked = view.trace.arrays, view.is_masked
    key = np.arange(is_masked.shape[1])
    has_masks = is_masked.any(1)
    last = np.full(view.steps, np.nan)
    for step, position in zip(arrays["commit_step"], arrays["commit_position"], strict=True):
        if step + 1 < view.steps:  # a commit is visible from the next step on
            last[step + 1 :] = position
    block = arrays["block"][:, 1].astype(float)
    return {
        "leftmost mask": np.where(has_masks, np.where(is_masked, key, len(key)).min(1), np.nan),
        "rightmost mask": np.where(has_masks, np.where(is_masked, key, -1).max(1), np.nan),
        "last commit": last,
        "block end": np.where(block >= 0, block, np.nan),
    }


@per_sample
def lifetimes(view: TraceView) -> pd.DataFrame:
    """The spans of steps in which a key stays an anchor: a row per layer, with the number of each class.

    `static`: at least 90 % of the steps. `flash`: one step. `vanishing`: it ends before the last step, and the next
    step has no anchor. `moving`: the rest. `spans` counts all, `mean_length` is in steps. `split` is the share of steps
    at which masked and unmasked rows have different top keys, both of them anchors.
    """
    rows = []
    split = _split_share(view)
    for layer, number in enumerate(view.layers):
        is_anchor = view.anchors[view.steps_with_commits, layer]  # [step, key]
        spans = list(_find_spans(is_anchor))
        classes = [_classify_lifetime(start, stop, is_anchor) for start, stop in spans]
        rows.append(
            {
                "sample": view.sample,
                "layer": int(number),
                "depth": float(view.depth[layer]),
                **{name: classes.count(name) for name in LIFETIME_CLASSES},
                "spans": len(spans),
                "mean_length": np.mean([stop - start for start, stop in spans]) if spans else np.nan,
                "split": split[layer],
            }
        )
    return pd.DataFrame(rows)


@per_sample
def layer_drift(view: TraceView) -> pd.DataFrame:
    """The top key and the attention followed through the layers: a row per step with a commit that counts.

    `pairs` counts the neighbouring layers that both have an anchor; `changes` of them have different top keys, and
    `displacement` is the sum of their distances. `distinct_keys` counts the keys that lead, `jaccard_next` compares the
    anchors of neighbouring layers, and `moved` is the mean attention moved from a layer to the next.
    """
    steps = view.steps_with_commits
    path = _path(view)
    hops = np.diff(path, axis=1)  # NaN next to a layer without an anchor
    anchors, received = view.anchors[steps], view.received[steps]
    layers_first = (np.moveaxis(a, 1, 0) for a in (anchors[:, :-1], anchors[:, 1:]))
    present = (np.arange(received.shape[-1]) < view.keys[steps, None])[:, None]
    moved = attention_moved(received[:, :-1], received[:, 1:], present).sum(-1)  # [step, layer pair]
    return pd.DataFrame(
        {
            "sample": view.sample,
            "step": steps,
            "displacement": np.nansum(np.abs(hops), 1),
            "changes": (np.abs(hops) > 0).sum(1),
            "pairs": np.isfinite(hops).sum(1),
            "distinct_keys": [len(set(row[np.isfinite(row)])) for row in path],
            "jaccard_next": _jaccard(*layers_first),
            "moved": moved.mean(1) if moved.shape[1] else np.nan,
        }
    )


@per_sample
def head_floating(view: TraceView) -> pd.DataFrame:
    """The movement of a single head's top key: a row per layer and head, with `within` and the number of `changes`.

    It reads the steps with a commit that counts whose forward had all rows and whose top key is an anchor; NaN if there
    are fewer than two, as with a cache.
    """
    group, lift = view.trace.coords["group"].index("all"), TOP_STATS.index("lift")
    steps = view.steps_with_commits[view.has_all_rows[view.steps_with_commits]]
    keys = view.trace.require("top_key")[steps][:, :, :, group, 0]  # [step, layer, head]
    lifts = view.trace.require("top")[steps][:, :, :, group, 0, lift]
    paths = np.where(lifts >= MIN_ANCHOR_LIFT, keys, -1).reshape(len(steps), -1).T  # [layer and head, step]
    counted = [path[path >= 0] for path in paths]
    layers, heads = keys.shape[1:]
    return pd.DataFrame(
        {
            "sample": view.sample,
            "layer": np.repeat(view.layers, heads),
            "depth": np.repeat(view.depth, heads),
            "head": np.tile(np.arange(heads), layers),
            "within": [1 - _mode_count(path) / len(path) if len(path) > 1 else np.nan for path in counted],
            "changes": [float((np.diff(path) != 0).sum()) if len(path) > 1 else np.nan for path in counted],
        }
    )


def _path(view: TraceView) -> Float[np.ndarray, "step layer"]:
    """The top key at the steps that count; NaN where it is not an anchor."""
    path = view.anchor_path[view.steps_with_commits]
    return np.where(path >= 0, path, np.nan)


def _mode_count(values: Int[np.ndarray, " step"]) -> int:
    """How often the most frequent value occurs."""
    return int(np.unique(values, return_counts=True)[1].max())


def _centroid(view: TraceView) -> Float[np.ndarray, "step layer"]:
    steps = view.steps_with_commits
    weight = np.where(view.anchors[steps], np.nan_to_num(view.lift[steps]), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        centroid: np.ndarray = (weight * np.arange(weight.shape[-1])).sum(-1) / weight.sum(-1)
    return centroid


def _spatial_variance(view: TraceView) -> Float[np.ndarray, " layer"]:
    """The variance over keys of the mean lift over steps."""
    lift = view.lift[view.steps_with_commits]
    is_eligible = np.isfinite(lift)
    mean = np.nansum(lift, 0) / np.where(is_eligible.any(0), is_eligible.sum(0), np.nan)  # [layer, key]
    return _variance(mean.T)


def _variance(values: Float[np.ndarray, "along layer"]) -> Float[np.ndarray, " layer"]:
    """The variance of the finite values; NaN if there are none."""
    n = np.isfinite(values).sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.nansum(values, 0) / n
        return np.where(n > 0, np.nansum((values - mean) ** 2, 0) / n, np.nan)


def _jaccard(
    a: Bool[np.ndarray, "#step layer key"], b: Bool[np.ndarray, "#step layer key"]
) -> Float[np.ndarray, " layer"]:
    """The mean over steps of |a ∩ b| / |a ∪ b|, without the steps at which both are empty."""
    union = (a | b).sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        index = (a & b).sum(-1) / union
    n = (union > 0).sum(0)
    return np.where(n > 0, np.nansum(index, 0) / np.maximum(n, 1), np.nan)


def _slope(steps: Int[np.ndarray, " step"], path: Float[np.ndarray, " step"]) -> float:
    is_measured = np.isfinite(path)
    if is_measured.sum() < 2:
        return float("nan")
    return float(np.polyfit(steps[is_measured], path[is_measured], 1)[0])


def _correlation(path: Float[np.ndarray, " step"], frontier: Float[np.ndarray, " step"]) -> float:
    """Pearson's correlation; NaN if either is constant."""
    is_measured = np.isfinite(path) & np.isfinite(frontier)
    a, b = path[is_measured], frontier[is_measured]
    if len(a) < 3 or a.std() == 0 or b.std() == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def _find_spans(is_anchor: Bool[np.ndarray, "step key"]) -> Iterable[tuple[int, int]]:
    """[start, stop) of every maximal span of steps, key by key."""
    edge = np.zeros((1, is_anchor.shape[1]), bool)
    change = np.diff(np.concatenate([edge, is_anchor, edge]).astype(np.int8), axis=0)
    starts, stops = (np.argwhere(sign == change.T)[:, 1] for sign in (1, -1))
    return zip(starts.tolist(), stops.tolist(), strict=True)


def _classify_lifetime(start: int, stop: int, is_anchor: Bool[np.ndarray, "step key"]) -> str:
    steps = len(is_anchor)
    if stop - start >= STATIC_SHARE * steps:
        return "static"
    if stop - start == 1:
        return "flash"
    return "vanishing" if stop < steps and not is_anchor[stop].any() else "moving"


def _split_share(view: TraceView) -> Float[np.ndarray, " layer"]:
    """The attention of unmasked rows is that of all rows minus the masked ones; steps without either are left out."""
    trace = view.trace
    n, masked = trace.arrays["queries"], trace.count_rows("masked")
    has_both = (masked > 0) & (masked < n) & np.isin(np.arange(view.steps), view.steps_with_commits)
    if not has_both.any() or trace.meta.get("rows") == RowSource.CACHE:
        return np.full(len(view.layers), np.nan)
    is_eligible = _eligible_for_unmasked_rows(view)
    n, masked = n[has_both, None, None], masked[has_both, None, None]
    received = view.received[has_both] * n - trace.received(group="masked")[has_both] * masked
    uniform = view.uniform[has_both] * n - trace.uniform("masked")[has_both] * masked
    with np.errstate(divide="ignore", invalid="ignore"):
        unmasked_lift = np.where(is_eligible, received / uniform, np.nan)
    masked_lift = trace.received(group="masked", scale="lift", eligible=True)[has_both]
    a, b = argmax_key(masked_lift), argmax_key(unmasked_lift)  # [step, layer]
    anchors = view.anchors[has_both]
    is_anchor = [np.take_along_axis(anchors, np.maximum(top, 0)[..., None], -1)[..., 0] for top in (a, b)]
    share: np.ndarray = ((a != b) & is_anchor[0] & is_anchor[1]).mean(0)
    return share


def _eligible_for_unmasked_rows(view: TraceView) -> Bool[np.ndarray, "layer key"]:
    """The keys that enough unmasked rows see at every step with such rows, as in `Trace.received(eligible=True)`."""
    trace = view.trace
    visibility, group_index = trace.arrays["layer_visibility"], trace.coords["group"].index
    visible_rows, visible_masked = (
        trace.require("visible_rows")[:, visibility, group_index(group)] for group in ("all", "masked")
    )
    unmasked = (trace.arrays["queries"] - trace.count_rows("masked"))[:, None, None]
    is_eligible = visible_rows - visible_masked >= unmasked.clip(1, MIN_VISIBLE_ROWS)
    return (is_eligible | (unmasked == 0)).all(0)
