"""Experts of a mixture: are anchors routed to other experts than the other keys?

experts(run)               # a row per layer with experts: shares, entropies and distance, each with its shuffled null
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from floatscope.analysis.trace_view import TraceView, per_sample

SHUFFLES = 20
"""The null of a sample is a mean over this number of shuffles; its spread shows over samples."""


@per_sample
def experts(view: TraceView) -> pd.DataFrame:
    """How the experts of anchors differ from those of the other eligible keys, a row per layer with experts.

    A set of keys has a distribution over experts: the mean, over its keys and all steps, of each key's weights divided
    by their sum. `share` is the part of the anchors' distribution on their k largest experts, with k the experts of a
    token; `share_rest` is the part of the other keys' distribution on the same experts. `entropy` and `entropy_rest`
    are those of the two distributions in bits, and `distance` is half the sum of their absolute differences. In the
    columns `…_null` the anchors' positions are shuffled over those of all compared keys. The experts of a cached key
    are those of the step that computed its row.
    """
    ids, weights = _latest_choice(view)
    recorded = (ids >= 0).any((0, 2, 3))
    rows = []
    for layer in np.flatnonzero(recorded):
        is_compared = np.isfinite(view.lift[:, layer]) & (ids[:, layer, :, 0] >= 0)
        values = _compare(ids[:, layer], weights[:, layer], view.anchors[:, layer] & is_compared, is_compared)
        rows.append({"sample": view.sample, "layer": view.layers[layer], "depth": view.depth[layer], **values})
    return pd.DataFrame(rows)


def _latest_choice(
    view: TraceView,
) -> tuple[Int[np.ndarray, "step layer key rank"], Float[np.ndarray, "step layer key rank"]]:
    """Ids and weights with those of cached keys filled in; −1 and NaN beyond the canvas and in layers without."""
    ids = view.trace.require("expert_ids").astype(np.int64)
    weights = view.trace.require("expert_weights").astype(np.float64)
    on_canvas = np.arange(ids.shape[2]) < view.keys[:, None]  # [step, key]
    for step in range(1, len(ids)):
        is_cached = (ids[step, :, :, :1] < 0) & on_canvas[step, None, :, None]
        ids[step] = np.where(is_cached, ids[step - 1], ids[step])
        weights[step] = np.where(is_cached, weights[step - 1], weights[step])
    return ids, weights


def _compare(
    ids: np.ndarray, weights: np.ndarray, is_anchor: Bool[np.ndarray, "step key"], is_compared: np.ndarray
) -> dict[str, float]:
    """One layer: the values of the anchors, and their means over shuffled labels."""
    chosen = np.flatnonzero(is_compared.any(0))
    labels, allowed = is_anchor[:, chosen], is_compared[:, chosen]
    rng = np.random.default_rng(0)
    shuffled = [labels[:, rng.permutation(len(chosen))] & allowed for _ in range(SHUFFLES)]
    sets = np.stack([labels, *shuffled]).reshape(1 + SHUFFLES, -1)[:, allowed.ravel()].astype(np.float32)
    shares = _expert_shares(ids[:, chosen][allowed], weights[:, chosen][allowed])
    observed, *nulls = (_differences(set_, shares, ids.shape[-1]) for set_ in sets)
    mean_null = pd.DataFrame(nulls)[["share", "entropy", "distance"]].mean()  # a shuffle without anchors is NaN
    return {**observed, **{f"{name}_null": float(value) for name, value in mean_null.items()}}


def _expert_shares(ids: np.ndarray, weights: np.ndarray) -> Float[np.ndarray, "key expert"]:
    """Each key's weights over all experts, divided by their sum."""
    shares = np.zeros((len(ids), int(ids.max(initial=0)) + 1), np.float32)
    total = weights.sum(-1, keepdims=True)
    np.put_along_axis(shares, ids, weights / np.where(total > 0, total, 1), -1)
    return shares


def _differences(is_anchor: np.ndarray, shares: np.ndarray, k: int) -> dict[str, float]:
    names = ("share", "share_rest", "entropy", "entropy_rest", "distance")
    n, rest = is_anchor.sum(), (1 - is_anchor).sum()
    if not n or not rest:
        return dict.fromkeys(names, np.nan)
    anchors, others = is_anchor @ shares / n, (1 - is_anchor) @ shares / rest
    top = np.argsort(-anchors, kind="stable")[:k]
    top = top[anchors[top] > 0]
    distance = np.abs(anchors - others).sum() / 2
    values = (anchors[top].sum(), others[top].sum(), _entropy(anchors), _entropy(others), distance)
    return dict(zip(names, map(float, values), strict=True))


def _entropy(p: np.ndarray) -> float:
    return float(-(p[p > 0] * np.log2(p[p > 0])).sum())
