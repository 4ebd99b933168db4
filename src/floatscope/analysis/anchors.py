"""Anchors: how many there are, what they are, how concentrated attention is, how many heads have a sink.

    counts(look)          # a row per layer: anchors of the head mean and of a head, per step
    identity(look)        # a row per token class: its share among anchors beside its share in the canvas
    strings(look)         # the same by token
    concentration(look)   # a row per layer: entropies, Gini, shares of the top keys
    sinks(look)           # share of (layer, head) with a sink at the first key, and anywhere
    sweep(look)           # share of keys that are no anchors, as eps grows

What is said of single heads is of the steps whose forward had all rows; of a model with a cache, of the first.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from floatscope.analysis.detectors import Detector, refuse_eps, refuse_k, z_threshold
from floatscope.analysis.kept import kept
from floatscope.analysis.look import TraceView
from floatscope.analysis.tokens import CLASSES, pieces_of
from floatscope.errors import UserError
from floatscope.schema import HEAD_STATS, ORDERS, QUANTITIES, RANKS, TOP_STATS

EPS = tuple(np.arange(0, 10.5, 0.5))


def counts(look: TraceView) -> pd.DataFrame:
    """Anchors per step; `per_head` counts in each head among its 16 keys of largest lift, and is empty for detectors
    that need more than those."""
    per_head = head_anchors(look)
    return pd.DataFrame(
        {
            "sample": look.sample,
            "layer": look.layers,
            "depth": look.depth,
            "anchors": look.anchors.sum(-1).mean(0),
            "share": (look.anchors.sum(-1) / look.keys[:, None]).mean(0),
            "per_head": np.nan if per_head is None else per_head.sum(-1)[look.whole].mean((0, 2)),
        }
    )


def identity(look: TraceView) -> pd.DataFrame:
    """Over all steps and layers; `ratio` 1 is as often as the class stands in the canvas."""
    there = look.classes >= 0
    rows = []
    found = look.anchors.sum(1)  # [step, key]: in how many layers
    for number, name in enumerate(CLASSES):
        mine = there & (look.classes == number)
        share = found[mine].sum() / max(1, found[there].sum()) if found.any() else np.nan
        rows.append((look.sample, name, share, mine.sum() / there.sum()))
    table = pd.DataFrame(rows, columns=["sample", "class", "share", "base"])
    table["ratio"] = (table["share"] / table["base"]).where(table["base"] > 0)
    return table


def strings(look: TraceView) -> pd.DataFrame:
    """How often each token is an anchor; of tokens that are one at least once."""
    pieces = pieces_of(look.trace)
    tokens, found = look.trace.arrays["tokens"], look.anchors.sum(1)
    there = tokens >= 0
    ids, at = np.unique(tokens[there], return_inverse=True)
    hits, seen = np.bincount(at, found[there]), np.bincount(at)
    keep = hits > 0
    return pd.DataFrame(
        {
            "sample": look.sample,
            "token": [pieces[int(i)] for i in ids[keep]],
            "share": hits[keep] / hits.sum(),
            "base": seen[keep] / seen.sum(),
        }
    )


def concentration(look: TraceView) -> pd.DataFrame:
    """Row entropy and Gini are means over heads; the others are of the mean over heads. Mean over steps."""
    stats = kept(look.trace, "head_stats")[look.whole]
    received = np.where(np.isnan(look.received), 0, look.received).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(received > 0, received * np.log(received), 0).sum(-1)
        column = entropy / np.log(np.maximum(look.keys, 2))[:, None]
    five = -np.partition(-received, min(4, received.shape[-1] - 1), -1)[..., :5]
    return pd.DataFrame(
        {
            "sample": look.sample,
            "layer": look.layers,
            "depth": look.depth,
            "row_entropy": stats[..., HEAD_STATS.index("entropy")].mean((0, 2)),
            "gini": stats[..., HEAD_STATS.index("gini")].mean((0, 2)),
            "column_entropy": column.mean(0),
            "top_1": five.max(-1).mean(0),
            "top_5": five.sum(-1).mean(0),
        }
    )


def sinks(look: TraceView, eps: float = 0.3) -> pd.DataFrame:
    """Share of (layer, head), mean over steps, in which the average row that sees a key gives it more than eps.

    `anywhere` looks at the first key and at the 16 of largest lift.
    """
    first, best = _visible(look)
    first, anywhere = first[look.whole], np.maximum(first, best)[look.whole]
    return pd.DataFrame(
        {
            "sample": [look.sample],
            "first": [float((first > eps).mean())],
            "anywhere": [float((anywhere > eps).mean())],
        }
    )


def sweep(look: TraceView) -> pd.DataFrame:
    """Share of keys that are no anchors by rulli(eps, scale="lift"), mean over steps and layers."""
    lift = look.lift[np.isfinite(look.lift).any(-1)]  # [cell, key]: of the steps and layers that have keys to judge
    n = np.isfinite(lift).sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        above = lift - (np.nansum(lift, -1, keepdims=True) - lift) / (n - 1)
    left = [float(np.mean(1 - (above > eps).sum(-1) / n[:, 0])) for eps in EPS]
    return pd.DataFrame({"sample": look.sample, "eps": EPS, "share": left})


def head_anchors(look: TraceView) -> Bool[np.ndarray, "step layer head rank"] | None:
    """Which of a head's 16 keys of largest lift are anchors by the detector."""
    lift, moments = _top(look, "lift"), kept(look.trace, "moments")[:, :, :, QUANTITIES.index("lift_all")]
    n, total, squares = (moments[..., ORDERS.index(order), None].astype(np.float64) for order in ORDERS)
    most = int(n.max(initial=0))
    n = np.where(n > 1, n, np.nan)  # a key alone cannot be compared
    by: Detector = look.detector
    if by.given.get("scale", "lift") != "lift":
        return None
    if by.name == "zscore":
        refuse_k(by.given["k"], most)
        mean = total / n
        return lift > z_threshold(by.given["k"], mean, np.sqrt(np.maximum(0, squares / n - mean**2)))
    if by.name == "rulli":
        refuse_eps(by.given["eps"], "lift", int(look.keys.max(initial=0)))
        return lift > (total - lift) / (n - 1) + by.given["eps"]
    if by.name == "topk":
        if by.given["k"] > RANKS:
            raise UserError(f"a trace keeps {RANKS} keys of each head, so topk(k={by.given['k']}) cannot be counted")
        return np.isfinite(lift) & (np.arange(RANKS) < by.given["k"])
    return None


def _visible(look: TraceView) -> tuple[Float[np.ndarray, "step layer head"], Float[np.ndarray, "step layer head"]]:
    """What the first key gets from the average row that sees it, and the most a key of the 16 gets.

    It is the mean over all rows · n / seen, the mean of a key of the 16 being lift · uniform.
    """
    trace, group = look.trace, look.trace.coords["group"].index("all")
    keys = kept(trace, "top_key")[:, :, :, group]  # [step, layer, head, rank]
    at = trace.arrays["layer_visibility"]
    uniform, seen = (kept(trace, name)[:, at, group] for name in ("uniform", "seen"))  # [step, layer, key]
    with np.errstate(divide="ignore", invalid="ignore"):
        rows = trace.arrays["queries"][:, None, None] / seen
    first = kept(trace, "head_stats")[..., HEAD_STATS.index("first")] * rows[..., :1]
    own = np.take_along_axis((uniform * rows)[:, :, None], np.maximum(keys, 0), -1)
    return first, np.nanmax(np.where(keys >= 0, _top(look, "lift") * own, 0.0), -1)


def _top(look: TraceView, stat: str) -> Float[np.ndarray, "step layer head rank"]:
    group = look.trace.coords["group"].index("all")
    top: np.ndarray = kept(look.trace, "top")[:, :, :, group, :, TOP_STATS.index(stat)]
    return top
