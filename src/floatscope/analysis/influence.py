"""Influence: do the keys that are attended to move what is written?

influence(look)            # a row per layer: the rank correlation of influence with attention, and with contribution
influence_map(trace)       # [step, key]: each key's share of the influence on the tokens a step commits
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Float

from floatscope.analysis.kept import kept
from floatscope.analysis.look import TraceView
from floatscope.errors import UserError
from floatscope.traces import Trace

FEWEST = 3
"""Keys a rank correlation is taken over, at least."""


def influence(look: TraceView) -> pd.DataFrame:
    """Spearman's rank correlation over the keys of a step, mean over steps, of the influence (mean over the commits of
    the step) with what the predicting rows give a key (`received`), what they take from it (`contribution`; NaN if the
    trace lacks it), each over the keys they see, and with the lift of all rows over its eligible keys (`received_all`).
    """
    trace = look.trace
    moved = np.broadcast_to(_by_step(trace)[:, None], look.lift.shape)
    sees = trace.uniform("predicting") > 0
    contribution = np.full_like(moved, np.nan)
    if "contribution" in trace.arrays:
        contribution = kept(trace, "contribution")[:, :, trace.coords["group"].index("predicting")]
    against = {
        "received": np.where(sees, trace.by_layer("predicting"), np.nan),
        "received_all": look.lift,
        "contribution": np.where(sees, contribution, np.nan),
    }
    columns = {name: _mean(rank_correlation(moved, given)) for name, given in against.items()}
    return pd.DataFrame({"sample": look.sample, "layer": look.layers, "depth": look.depth, **columns})


def influence_map(trace: Trace) -> Float[np.ndarray, "step key"]:
    """Mean over the commits of a step, as shares that sum to 1; NaN beyond the canvas and at steps without a commit."""
    moved = _by_step(trace)
    total = np.nansum(moved, -1, keepdims=True)
    return moved / np.where(total > 0, total, np.nan)


def rank_correlation(
    a: Float[np.ndarray, "*axes key"], b: Float[np.ndarray, "*axes key"]
) -> Float[np.ndarray, "*axes"]:
    """Spearman's, over the keys both have; NaN for fewer than three, and where either is the same at all of them."""
    there = np.isfinite(a) & np.isfinite(b)
    n = there.sum(-1, keepdims=True)
    x, y = (np.where(there, ranks(np.where(there, values, np.nan)) - (n + 1) / 2, 0.0) for values in (a, b))
    spread = np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
    defined = (n[..., 0] >= FEWEST) & (spread > 0)
    return np.where(defined, (x * y).sum(-1) / np.where(defined, spread, 1.0), np.nan)


def ranks(values: Float[np.ndarray, "*axes key"]) -> Float[np.ndarray, "*axes key"]:
    """From 1, the smallest; those that are equal share the mean of theirs. NaN has none."""
    order = np.argsort(values, -1)  # NaN last
    ordered, at = np.take_along_axis(values, order, -1), np.arange(1, values.shape[-1] + 1)
    differs = ordered[..., 1:] != ordered[..., :-1]
    edge = np.ones((*differs.shape[:-1], 1), bool)
    first = np.maximum.accumulate(np.where(np.concatenate([edge, differs], -1), at, 0), -1)
    last = np.where(np.concatenate([differs, edge], -1), at, at[-1])
    last = np.flip(np.minimum.accumulate(np.flip(last, -1), -1), -1)
    out = np.empty(values.shape)
    np.put_along_axis(out, order, (first + last) / 2, -1)
    return np.where(np.isnan(values), np.nan, out)


def _by_step(trace: Trace) -> Float[np.ndarray, "step key"]:
    """Mean over the commits of each step; NaN where there is none."""
    if "influence" not in trace.arrays:
        raise UserError(
            f"the trace of '{trace.sample}' has no influence; trace it with --influence, fs.Watch(influence=True)"
        )
    values, step = trace.arrays["influence"].astype(np.float64), trace.arrays["commit_step"]
    total = np.zeros((len(trace.arrays["keys"]), values.shape[1]))
    np.add.at(total, step, values)
    commits = np.bincount(step, minlength=len(total))[:, None]
    return np.where(commits > 0, total / commits.clip(1), np.nan)


def _mean(values: Float[np.ndarray, "step layer"]) -> Float[np.ndarray, " layer"]:
    """Over the steps at which it is defined."""
    n = np.isfinite(values).sum(0)
    return np.where(n > 0, np.nansum(values, 0) / n.clip(1), np.nan)
