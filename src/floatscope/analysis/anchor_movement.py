"""Floating: does an anchor stay in place while a canvas is denoised, and is it at the same place in every text?

    floating(run)              # a row per sample and layer: within, across
    top_keys(run)              # a row per step and layer: the key of largest lift
    drift(run)                 # a row per layer: displacement, changes, variances, Jaccard index, frontiers
    lifetimes(run)             # a row per layer: static, flash, vanishing and moving anchors; split
    layer_drift(run)           # a row per step: the movement of the top key from layer to layer
    head_floating(run)         # a row per layer and head: the movement of a single head's top key

All values are lifts, over the rows of the whole forward or prefix. An untrained bidirectional model floats too: only
the difference from the control is meaningful.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from floatscope.analysis.detectors import Detector
from floatscope.analysis.trace_view import Source, TraceView, argmax_key, per_sample
from floatscope.schema import MIN_VISIBLE_ROWS

STATIC_SHARE = 0.9
"""An anchor that stays for this share of the steps is static."""
LIFETIME_CLASSES = ("static", "flash", "vanishing", "moving")
FRONTIERS = ("leftmost mask", "rightmost mask", "last commit", "block end")
THIRDS = ("shallow", "middle", "deep")


@per_sample
def top_keys(view: TraceView) -> pd.DataFrame:
    """The key of largest lift, `top_key`, among the keys that are eligible at every step: a row per step and layer.

    It is −1 where nothing was measured.
    """
    steps, layers = view.top_path.shape
    return pd.DataFrame(
        {
            "sample": view.sample,
            "step": np.repeat(np.arange(steps), layers),
            "layer": np.tile(view.layers, steps),
            "depth": np.tile(view.depth, steps),
            "top_key": view.top_path.ravel(),
        }
    )


def floating(source: Source, detector: str | Detector = "zscore") -> pd.DataFrame:
    """The floating index: a row per sample and layer.

    `within` is 1 − the share of the steps whose top key is the modal top key of the sample and layer: does the anchor
    move while one canvas is denoised? `across` is the same with the modal key of the layer over all samples: is it at
    the same place in every text? `third` is the third of the model that the layer is in. The index does not depend on
    the detector.

        fs.analysis.floating(run).groupby("layer")["within"].mean()
    """
    return floating_index(top_keys(source, detector))


def floating_index(table: pd.DataFrame) -> pd.DataFrame:
    """Return `floating` from a table of `top_keys`. Of tied modes the smaller key counts."""
    measured = table[table["top_key"] >= 0]
    layer_mode = measured.groupby("layer")["top_key"].agg(_mode)
    sample_mode = measured.groupby(["sample", "layer"], sort=False)["top_key"].transform(_mode)
    moves = measured.assign(
        within=measured["top_key"] != sample_mode, across=measured["top_key"] != measured["layer"].map(layer_mode)
    )
    index = moves.groupby(["sample", "layer", "depth"], sort=False)[["within", "across"]].mean().reset_index()
    return index.assign(third=[depth_third(depth) for depth in index["depth"]])


def depth_third(depth: float) -> str:
    """Return the third of the model that a relative depth is in: shallow, middle or deep."""
    return THIRDS[min(2, int(depth * 3))]


@per_sample
def drift(view: TraceView) -> pd.DataFrame:
    """How the top key and the anchors move over the steps, among the keys that are eligible at every step: a row per
    layer.

    `displacement`, `changes` and `slope` of the top key; `spatial_variance` of the lift over keys; `temporal_variance`
    of the anchors' centroid, weighted by lift, over the steps with anchors; `jaccard_next` of the anchors of
    consecutive steps, `jaccard_first` with those of the first step; the correlation of the top key with each frontier.
    """
    path = np.where(view.top_path >= 0, view.top_path, np.nan)  # [step, layer]
    size = float(view.keys.max())
    centroid = _centroid(view)
    table = {
        "sample": view.sample,
        "layer": view.layers,
        "depth": view.depth,
        "displacement": np.nansum(np.abs(np.diff(path, axis=0)), 0),
        "changes": (np.abs(np.diff(path, axis=0)) > 0).sum(0),
        "slope": [_slope(path[:, layer]) for layer in range(path.shape[1])],
        "spatial_variance": _spatial_variance(view),
        "temporal_variance": _variance(centroid),
        "temporal_variance_relative": _variance(centroid / size),
        "jaccard_next": _jaccard(view.persistent_anchors[:-1], view.persistent_anchors[1:]),
        "jaccard_first": _jaccard(view.persistent_anchors[:1], view.persistent_anchors[1:]),
    }
    for name, frontier in frontiers(view).items():
        table[name] = [_correlation(path[:, layer], frontier) for layer in range(path.shape[1])]
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
        is_anchor = view.anchors[:, layer]  # [step, key]
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
    """The top key followed through the layers of one step: a row per step.

    `distinct_keys` counts the keys that it visits, `jaccard_next` compares the anchors of neighbouring layers.
    """
    hops = np.diff(np.where(view.top_path >= 0, view.top_path, np.nan), axis=1)  # NaN next to a layer without a top key
    layers_first = (np.moveaxis(a, 1, 0) for a in (view.anchors[:, :-1], view.anchors[:, 1:]))
    return pd.DataFrame(
        {
            "sample": view.sample,
            "step": np.arange(view.steps),
            "displacement": np.nansum(np.abs(hops), 1),
            "changes": (np.abs(hops) > 0).sum(1),
            "distinct_keys": [len(set(row) - {-1}) for row in view.top_path.tolist()],
            "jaccard_next": _jaccard(*layers_first),
        }
    )


@per_sample
def head_floating(view: TraceView) -> pd.DataFrame:
    """The movement of a single head's top key: a row per layer and head, with `within` and the number of `changes`.

    It reads the steps whose forward had all rows, and is NaN if there is only one, as with a cache.
    """
    group = view.trace.coords["group"].index("all")
    path = view.trace.require("top_key")[view.has_all_rows][:, :, :, group, 0]  # [step, layer, head]
    steps, layers, heads = path.shape
    mode_counts = np.array([_mode_count(path[:, layer, head]) for layer in range(layers) for head in range(heads)])
    has_several = steps > 1
    return pd.DataFrame(
        {
            "sample": view.sample,
            "layer": np.repeat(view.layers, heads),
            "depth": np.repeat(view.depth, heads),
            "head": np.tile(np.arange(heads), layers),
            "within": 1 - mode_counts / steps if has_several else np.nan,
            "changes": (np.diff(path, axis=0) != 0).sum(0).ravel() if has_several else np.nan,
        }
    )


def _mode(values: pd.Series) -> int:
    keys, counts = np.unique(values.to_numpy(), return_counts=True)
    return int(keys[counts.argmax()])


def _mode_count(values: Int[np.ndarray, " step"]) -> int:
    """How often the most frequent value occurs."""
    return int(np.unique(values, return_counts=True)[1].max())


def _centroid(view: TraceView) -> Float[np.ndarray, "step layer"]:
    weight = np.where(view.persistent_anchors, np.nan_to_num(view.lift), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        centroid: np.ndarray = (weight * np.arange(weight.shape[-1])).sum(-1) / weight.sum(-1)
    return centroid


def _spatial_variance(view: TraceView) -> Float[np.ndarray, " layer"]:
    """The variance over keys of the mean lift over steps."""
    is_eligible = np.isfinite(view.lift)
    mean = np.nansum(view.lift, 0) / np.where(is_eligible.any(0), is_eligible.sum(0), np.nan)  # [layer, key]
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


def _slope(path: Float[np.ndarray, " step"]) -> float:
    is_measured = np.isfinite(path)
    if is_measured.sum() < 2:
        return float("nan")
    return float(np.polyfit(np.flatnonzero(is_measured), path[is_measured], 1)[0])


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
    n, masked = trace.arrays["queries"], view.is_masked.sum(1)
    has_both = (masked > 0) & (masked < n)
    if not has_both.any() or trace.meta.get("rows") == "cache":
        return np.full(len(view.layers), np.nan)
    n, masked = n[has_both, None, None], masked[has_both, None, None]
    visibility, group_index = trace.arrays["layer_visibility"], trace.coords["group"].index
    visible_rows, visible_masked = (
        trace.require("visible_rows")[has_both][:, visibility, group_index(group)] for group in ("all", "masked")
    )
    is_eligible = visible_rows - visible_masked >= (n - masked).clip(1, MIN_VISIBLE_ROWS)
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
