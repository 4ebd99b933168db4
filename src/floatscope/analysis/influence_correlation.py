"""Influence: do the keys that receive attention change what is written?

influence(run)             # a row per layer: the rank correlation of influence with attention and contribution
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Float

from floatscope.analysis.trace_view import TraceView, per_sample
from floatscope.errors import UserError

MIN_KEYS = 3
"""A rank correlation needs at least this number of keys."""


@per_sample
def influence(view: TraceView) -> pd.DataFrame:
    """Spearman's correlation of influence and attention over the keys of a step, mean over steps: a row per layer.

    The influence of a key is the mean over the commits of the step that count. It is correlated with the attention that
    the key receives from the predicting rows (`received`) and with its contribution to them (`contribution`; NaN if the
    trace does not store it), both over the keys these rows see, and with the lift of all rows over eligible keys
    (`received_all`).
    """
    trace = view.trace
    values = np.broadcast_to(_step_influence(view)[:, None], view.lift.shape)
    is_visible = trace.uniform("predicting") > 0
    contribution = np.full_like(values, np.nan)
    if "contribution" in trace.arrays:
        contribution = trace.require("contribution")[:, :, trace.coords["group"].index("predicting")]
    compared = {
        "received": np.where(is_visible, trace.received(group="predicting"), np.nan),
        "received_all": view.lift,
        "contribution": np.where(is_visible, contribution, np.nan),
    }
    columns = {name: _mean_over_steps(rank_correlation(values, other)) for name, other in compared.items()}
    return pd.DataFrame({"sample": view.sample, "layer": view.layers, "depth": view.depth, **columns})


def rank_correlation(
    a: Float[np.ndarray, "*axes key"], b: Float[np.ndarray, "*axes key"]
) -> Float[np.ndarray, "*axes"]:
    """Return Spearman's correlation over the keys that have both values; NaN for fewer than three or a constant."""
    has_both = np.isfinite(a) & np.isfinite(b)
    n = has_both.sum(-1, keepdims=True)
    x, y = (np.where(has_both, ranks(np.where(has_both, values, np.nan)) - (n + 1) / 2, 0.0) for values in (a, b))
    spread = np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
    is_defined = (n[..., 0] >= MIN_KEYS) & (spread > 0)
    return np.where(is_defined, (x * y).sum(-1) / np.where(is_defined, spread, 1.0), np.nan)


def ranks(values: Float[np.ndarray, "*axes key"]) -> Float[np.ndarray, "*axes key"]:
    """Return ranks along the last axis: 1 for the smallest, the mean rank for equal values, NaN for NaN."""
    order = np.argsort(values, -1)  # NaN last
    ordered, position = np.take_along_axis(values, order, -1), np.arange(1, values.shape[-1] + 1)
    differs = ordered[..., 1:] != ordered[..., :-1]
    edge = np.ones((*differs.shape[:-1], 1), bool)
    first = np.maximum.accumulate(np.where(np.concatenate([edge, differs], -1), position, 0), -1)
    last = np.where(np.concatenate([differs, edge], -1), position, position[-1])
    last = np.flip(np.minimum.accumulate(np.flip(last, -1), -1), -1)
    out = np.empty(values.shape)
    np.put_along_axis(out, order, (first + last) / 2, -1)
    return np.where(np.isnan(values), np.nan, out)


def _step_influence(view: TraceView) -> Float[np.ndarray, "step key"]:
    """The mean over the commits of each step that count; NaN where there is none."""
    trace = view.trace
    if "influence" not in trace.arrays:
        raise UserError(
            f"the trace of '{trace.sample}' has no influence; trace it with --influence, or fs.Watch(influence=True)"
        )
    values = trace.arrays["influence"][view.commits].astype(np.float64)
    step = trace.arrays["commit_step"][view.commits]
    total = np.zeros((len(trace.arrays["keys"]), values.shape[1]))
    np.add.at(total, step, values)
    commits = np.bincount(step, minlength=len(total))[:, None]
    return np.where(commits > 0, total / commits.clip(1), np.nan)


def _mean_over_steps(values: Float[np.ndarray, "step layer"]) -> Float[np.ndarray, " layer"]:
    """The mean over the steps at which the value is defined."""
    n = np.isfinite(values).sum(0)
    return np.where(n > 0, np.nansum(values, 0) / n.clip(1), np.nan)
