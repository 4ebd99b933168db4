"""Heads: which of them do little but look at their anchors, and where the rows that wait for a token look.

    activity(look)           # a row per layer and head: mass on its anchors, row entropy, size of its output
    dormant(table)           # share of heads with much mass on anchors and little output
    directed(look)           # a row per layer and set: what masked rows give to prompt, masks and committed keys
    directed_heads(look)     # the same per head; needs keep="heads"

`activity` reads the steps whose forward had all rows; of a model with a cache, the first.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from floatscope.analysis.anchors import head_anchors
from floatscope.analysis.kept import kept
from floatscope.analysis.look import TraceView
from floatscope.errors import UserError
from floatscope.schema import HEAD_STATS, TOP_STATS, State

SETS = {"prompt": State.PROMPT, "masks": State.MASKED, "committed": State.COMMITTED}


def activity(look: TraceView) -> pd.DataFrame:
    """`anchor_mass` is the share of a head's attention on its own anchors, counted among its 16 keys of largest lift,
    and empty for detectors that need more than those; `first` that of the first key; `output` the norm of the head's
    output over the mean of its layer. Mean over steps."""
    stats = kept(look.trace, "head_stats")[look.whole]  # [step, layer, head, head_stat]
    first, entropy, norm = (stats[..., HEAD_STATS.index(stat)] for stat in ("first", "entropy", "output_norm"))
    with np.errstate(divide="ignore", invalid="ignore"):
        output = norm / norm.mean(-1, keepdims=True)
    mass = _on_anchors(look)
    count = stats.shape[2]
    return pd.DataFrame(
        {
            "sample": look.sample,
            "layer": np.repeat(look.layers, count),
            "depth": np.repeat(look.depth, count),
            "head": np.tile(np.arange(count), len(look.layers)),
            "anchor_mass": np.nan if mass is None else mass.mean(0).ravel(),
            "first": first.mean(0).ravel(),
            "entropy": entropy.mean(0).ravel(),
            "output": output.mean(0).ravel(),
        }
    )


def dormant(table: pd.DataFrame, mass: float = 0.5, output: float = 0.5) -> float:
    """Of the heads in a table of `activity`, each the mean over its samples, the share that puts more than `mass` on
    its anchors and whose output is smaller than `output` of its layer's mean. Both cut-offs are ours."""
    heads = table.groupby(["layer", "head"])[["anchor_mass", "output"]].mean().dropna()
    return float(((heads["anchor_mass"] > mass) & (heads["output"] < output)).mean())


def directed(look: TraceView) -> pd.DataFrame:
    """`mass` an average masked row gives to the keys that are prompt, masks or committed at its step, `base` the same
    under uniform attention, `ratio` of both. Mean over heads and over the steps that have masked rows; a step without
    such keys counts 0."""
    steps, chosen = _sets(look)
    mass = _shares(look.trace.by_layer("masked")[steps], chosen)  # [layer, set]
    return _directed(look, mass[:, None], chosen, steps).drop(columns="head")


def directed_heads(look: TraceView) -> pd.DataFrame:
    steps, chosen = _sets(look)
    received, group = kept(look.trace, "received_heads"), look.trace.coords["group"].index("masked")
    each = [  # step by step: all of it at once may be larger than the memory
        received[t, :, :, group, : look.keys[t]] @ keys[: look.keys[t]]
        for t, keys in zip(np.flatnonzero(steps), chosen, strict=True)
    ]
    return _directed(look, np.mean(each, 0), chosen, steps)


def _on_anchors(look: TraceView) -> Float[np.ndarray, "step layer head"] | None:
    """The mean-scale mass of a key is its lift · uniform."""
    found = head_anchors(look)
    if found is None:
        return None
    group, at = look.trace.coords["group"].index("all"), look.trace.arrays["layer_visibility"]
    keys = kept(look.trace, "top_key")[:, :, :, group][look.whole]  # [step, layer, head, rank]
    uniform = kept(look.trace, "uniform")[:, at, group][look.whole]  # [step, layer, key]
    lift = kept(look.trace, "top")[:, :, :, group, :, TOP_STATS.index("lift")][look.whole]
    even = np.take_along_axis(uniform, keys.clip(0).reshape(*keys.shape[:2], -1), -1).reshape(keys.shape)
    return np.where(found[look.whole], lift * even, 0.0).sum(-1)


def _sets(look: TraceView) -> tuple[Bool[np.ndarray, " step"], Float[np.ndarray, "masked_step key set"]]:
    """The steps that have masked rows, and which keys are in each set at those."""
    steps = np.asarray(look.masked.any(1))
    if not steps.any():
        raise UserError(
            f"the trace of '{look.sample}' has no masked rows, so there is nothing to direct at prompt or masks; only"
            " masked models have them"
        )
    states = look.trace.arrays["states"][steps]
    return steps, np.stack([states == state for state in SETS.values()], -1).astype(np.float32)


def _shares(
    given: Float[np.ndarray, "masked_step layer key"], chosen: Float[np.ndarray, "masked_step key set"]
) -> Float[np.ndarray, "layer set"]:
    """What each set gets, mean over steps; NaN where nothing was measured."""
    known = np.isfinite(given).any((0, -1))
    return np.where(known[:, None], (np.nan_to_num(given) @ chosen).mean(0), np.nan)


def _directed(
    look: TraceView,
    mass: Float[np.ndarray, "layer head set"],
    chosen: Float[np.ndarray, "masked_step key set"],
    steps: Bool[np.ndarray, " step"],
) -> pd.DataFrame:
    layers, heads, sets = mass.shape
    base = _shares(look.trace.uniform("masked")[steps], chosen)
    table = pd.DataFrame(
        {
            "sample": look.sample,
            "layer": np.repeat(look.layers, heads * sets),
            "depth": np.repeat(look.depth, heads * sets),
            "head": np.tile(np.repeat(np.arange(heads), sets), layers),
            "set": np.tile(list(SETS), layers * heads),
            "mass": mass.ravel(),
            "base": np.repeat(base, heads, 0).ravel(),
        }
    )
    table["ratio"] = (table["mass"] / table["base"]).where(table["base"] > 0)
    return table
