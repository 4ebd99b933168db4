"""Anchors: how much attention they take, how many there are, which tokens they are, how concentrated attention is.

    absorption(run)        # a row per layer and set of keys: the share of attention that they receive
    anchors(run)           # a row per layer: anchors of the head mean and of single heads, per step
    anchor_classes(run)    # a row per token class: its share among anchors and its share in the canvas
    anchor_tokens(run)     # the same per token
    concentration(run)     # a row per layer: entropies, Gini, shares of the largest keys
    sinks(run)             # the share of (layer, head) with a sink at the first key, and at any key
    eps_sweep(run)         # the share of keys that are not anchors, as eps grows

Analyses of single heads read the steps whose forward had all rows: with a cache, the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from floatscope.analysis.detectors import check_eps, check_k, z_threshold
from floatscope.analysis.tokens import require_pieces, starts_with_bos
from floatscope.analysis.trace_view import TraceView, per_sample
from floatscope.errors import UserError
from floatscope.models.token_classes import CLASSES
from floatscope.schema import HEAD_STATS, ORDERS, QUANTITIES, RANKS, TOP_STATS

EPS = tuple(np.arange(0, 10.5, 0.5))
KEY_SETS = ("first", "top", "top 5", "anchors")
KeyMask = Bool[np.ndarray, "step layer key"]


@per_sample
def absorption(view: TraceView, per_step: bool = False, sets: Sequence[str] = KEY_SETS) -> pd.DataFrame:
    """How much of a layer's attention a few keys take, compared with uniform attention: a row per layer and set.

    Sets: the `first` key (`first_is_bos` says whether it is a bos), the `top` key by lift, the `top 5`, and the
    `anchors` that the detector finds. `percent` of all attention (mean over heads, rows and steps), `uniform` the same
    under uniform attention, `lift` their ratio, `contribution` the percent of all contributions, where each probability
    is multiplied by the norm that its value adds to the residual stream. With `per_step` there is a row per step too.
    """
    tables = []
    for name in sets:
        keys = _SELECT[name](view)
        percent = 100 * np.nansum(np.where(keys, view.received, 0), -1)  # [step, layer]
        uniform = 100 * np.nansum(np.where(keys, view.uniform, 0), -1)
        contribution = 100 * np.where(keys, view.contribution_share, 0).sum(-1)
        steps = np.arange(view.steps)
        if not per_step:
            percent, uniform, contribution = (x.mean(0, keepdims=True) for x in (percent, uniform, contribution))
            steps = steps[:1]
        tables.append(
            pd.DataFrame(
                {
                    "sample": view.sample,
                    "step": np.repeat(steps, len(view.layers)),
                    "layer": np.tile(view.layers, len(steps)),
                    "depth": np.tile(view.depth, len(steps)),
                    "set": name,
                    "first_is_bos": starts_with_bos(view.trace),
                    "percent": percent.ravel(),
                    "uniform": uniform.ravel(),
                    "contribution": contribution.ravel(),
                }
            )
        )
    table = pd.concat(tables, ignore_index=True)
    table["lift"] = (table["percent"] / table["uniform"]).where(table["uniform"] > 0)
    return table if per_step else table.drop(columns="step")


def detectable_absorption(view: TraceView) -> pd.DataFrame:
    """Return `absorption`, without the set of anchors where the detector cannot fire: the other sets do not need it."""
    try:
        return absorption(view)
    except UserError:
        return absorption(view, sets=KEY_SETS[:-1])


@per_sample
def anchors(view: TraceView) -> pd.DataFrame:
    """Anchors per step, a row per layer.

    `anchors` on the mean over heads, `share` of all keys; `per_head` counts the anchors of a head among its 16 keys of
    largest lift and is NaN for detectors that need more keys than those.
    """
    per_head = head_anchors(view)
    return pd.DataFrame(
        {
            "sample": view.sample,
            "layer": view.layers,
            "depth": view.depth,
            "anchors": view.anchors.sum(-1).mean(0),
            "share": (view.anchors.sum(-1) / view.keys[:, None]).mean(0),
            "per_head": np.nan if per_head is None else per_head.sum(-1)[view.has_all_rows].mean((0, 2)),
        }
    )


@per_sample
def anchor_classes(view: TraceView) -> pd.DataFrame:
    """The classes of anchors over all steps and layers: `share` among anchors, `base` in the canvas, their `ratio`."""
    on_canvas = view.token_classes >= 0
    rows = []
    layers = view.anchors.sum(1)  # [step, key]: in how many layers the key is an anchor
    for index, name in enumerate(CLASSES):
        in_class = on_canvas & (view.token_classes == index)
        share = layers[in_class].sum() / max(1, layers[on_canvas].sum()) if layers.any() else np.nan
        rows.append((view.sample, name, share, in_class.sum() / on_canvas.sum()))
    table = pd.DataFrame(rows, columns=["sample", "class", "share", "base"])
    table["ratio"] = (table["share"] / table["base"]).where(table["base"] > 0)
    return table


@per_sample
def anchor_tokens(view: TraceView) -> pd.DataFrame:
    """The tokens that are an anchor at least once: `share` among anchors, `base` in the canvas."""
    pieces = require_pieces(view.trace)
    tokens, layers = view.trace.tokens, view.anchors.sum(1)
    on_canvas = tokens >= 0
    ids, index = np.unique(tokens[on_canvas], return_inverse=True)
    as_anchor, occurrences = np.bincount(index, layers[on_canvas]), np.bincount(index)
    is_anchor = as_anchor > 0
    return pd.DataFrame(
        {
            "sample": view.sample,
            "token": [pieces[int(i)] for i in ids[is_anchor]],
            "share": as_anchor[is_anchor] / as_anchor.sum(),
            "base": occurrences[is_anchor] / occurrences.sum(),
        }
    )


@per_sample
def concentration(view: TraceView) -> pd.DataFrame:
    """How concentrated attention is, a row per layer, mean over steps.

    `row_entropy` and `gini` are means over heads. `column_entropy` and the shares of the largest key and of the five
    largest, `top_1` and `top_5`, are of the mean over heads.
    """
    stats = view.trace.require("head_stats")[view.has_all_rows]
    received = np.where(np.isnan(view.received), 0, view.received).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(received > 0, received * np.log(received), 0).sum(-1)
        column_entropy = entropy / np.log(np.maximum(view.keys, 2))[:, None]
    top_5 = -np.partition(-received, min(4, received.shape[-1] - 1), -1)[..., :5]
    return pd.DataFrame(
        {
            "sample": view.sample,
            "layer": view.layers,
            "depth": view.depth,
            "row_entropy": stats[..., HEAD_STATS.index("entropy")].mean((0, 2)),
            "gini": stats[..., HEAD_STATS.index("gini")].mean((0, 2)),
            "column_entropy": column_entropy.mean(0),
            "top_1": top_5.max(-1).mean(0),
            "top_5": top_5.sum(-1).mean(0),
        }
    )


@per_sample
def sinks(view: TraceView, eps: float = 0.3) -> pd.DataFrame:
    """The share of (layer, head), mean over steps, in which the average row that sees a key gives it more than eps.

    `first` is for the first key; `anywhere` is for the first key and the 16 keys of largest lift.
    """
    first, largest = _visible_means(view)
    first, anywhere = first[view.has_all_rows], np.maximum(first, largest)[view.has_all_rows]
    return pd.DataFrame(
        {
            "sample": [view.sample],
            "first": [float((first > eps).mean())],
            "anywhere": [float((anywhere > eps).mean())],
        }
    )


@per_sample
def eps_sweep(view: TraceView) -> pd.DataFrame:
    """The share of keys that are not anchors by rulli(eps, scale="lift"), mean over steps and layers: a row per eps."""
    lift = view.lift[np.isfinite(view.lift).any(-1)]  # [cell, key]: the steps and layers with eligible keys
    n = np.isfinite(lift).sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = lift - (np.nansum(lift, -1, keepdims=True) - lift) / (n - 1)
    shares = [float(np.mean(1 - (excess > eps).sum(-1) / n[:, 0])) for eps in EPS]
    return pd.DataFrame({"sample": view.sample, "eps": EPS, "share": shares})


def head_anchors(view: TraceView) -> Bool[np.ndarray, "step layer head rank"] | None:
    """Return which of a head's 16 keys of largest lift are anchors; None for a detector that needs more keys."""
    lift, moments = _top_stat(view, "lift"), view.trace.require("moments")[:, :, :, QUANTITIES.index("lift_all")]
    n, total, squares = (moments[..., ORDERS.index(order), None].astype(np.float64) for order in ORDERS)
    max_keys = int(n.max(initial=0))
    n = np.where(n > 1, n, np.nan)  # a single key cannot be compared
    name, arguments = view.detector.name, view.detector.arguments
    if arguments.get("scale", "lift") != "lift":
        return None
    if name == "zscore":
        check_k(arguments["k"], max_keys)
        mean = total / n
        return lift > z_threshold(arguments["k"], mean, np.sqrt(np.maximum(0, squares / n - mean**2)))
    if name == "rulli":
        check_eps(arguments["eps"], "lift", int(view.keys.max(initial=0)))
        return lift > (total - lift) / (n - 1) + arguments["eps"]
    if name == "topk":
        if arguments["k"] > RANKS:
            raise UserError(
                f"a trace stores {RANKS} keys of each head, so topk(k={arguments['k']}) cannot be counted; use a k of "
                f"at most {RANKS}"
            )
        return np.isfinite(lift) & (np.arange(RANKS) < arguments["k"])
    return None


def _select_top_5(view: TraceView) -> KeyMask:
    ranked = np.where(np.isnan(view.lift), -np.inf, view.lift)
    is_top = np.zeros(ranked.shape, bool)
    for _ in range(5):  # the next largest, the first of equal ones; sorting all keys takes twenty times as long
        np.put_along_axis(is_top, np.where(is_top, -np.inf, ranked).argmax(-1)[..., None], True, -1)
    return is_top & np.isfinite(view.lift)


_SELECT: dict[str, Callable[[TraceView], KeyMask]] = {
    "first": lambda view: np.broadcast_to(np.arange(view.lift.shape[-1]) == 0, view.lift.shape),
    "top": lambda view: np.arange(view.lift.shape[-1]) == view.top_key[..., None],
    "top 5": _select_top_5,
    "anchors": lambda view: view.anchors,
}


def _visible_means(
    view: TraceView,
) -> tuple[Float[np.ndarray, "step layer head"], Float[np.ndarray, "step layer head"]]:
    """What the average row that sees the first key gives it, and the most it gives to one of the 16 keys.

    It is the mean over all rows · n / visible rows; the mean of one of the 16 keys is lift · uniform.
    """
    trace, group = view.trace, view.trace.coords["group"].index("all")
    keys = trace.require("top_key")[:, :, :, group]  # [step, layer, head, rank]
    visibility = trace.arrays["layer_visibility"]
    uniform, visible_rows = (trace.require(name)[:, visibility, group] for name in ("uniform", "visible_rows"))
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = trace.arrays["queries"][:, None, None] / visible_rows  # [step, layer, key]
    first = trace.require("head_stats")[..., HEAD_STATS.index("first")] * scale[..., :1]
    uniform_of_top = np.take_along_axis((uniform * scale)[:, :, None], np.maximum(keys, 0), -1)
    return first, np.nanmax(np.where(keys >= 0, _top_stat(view, "lift") * uniform_of_top, 0.0), -1)


def _top_stat(view: TraceView, stat: str) -> Float[np.ndarray, "step layer head rank"]:
    group = view.trace.coords["group"].index("all")
    values: np.ndarray = view.trace.require("top")[:, :, :, group, :, TOP_STATS.index(stat)]
    return values
