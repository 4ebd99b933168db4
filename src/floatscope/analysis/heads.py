"""Heads: which heads do little except attend to their anchors, and what masked rows attend to.

    head_activity(run)       # a row per layer and head: attention on its anchors, row entropy, size of its output
    dormant_share(table)     # the share of heads with much attention on anchors and little output
    masked_rows(run)         # a row per layer and set: what masked rows give to prompt, masks and committed keys

`head_activity` reads the steps whose forward had all rows: with a cache, the first.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Float

from floatscope.analysis.anchor_tables import head_anchors
from floatscope.analysis.trace_view import TraceView, per_sample
from floatscope.errors import UserError
from floatscope.schema import HEAD_STATS, TOP_STATS, UNDECIDED, State

KEY_STATES = {"prompt": (State.PROMPT,), "masks": UNDECIDED, "committed": (State.COMMITTED,)}


@per_sample
def head_activity(view: TraceView) -> pd.DataFrame:
    """The attention and the output of each head, mean over steps: a row per layer and head.

    `anchor_mass` is the share of a head's attention on its own anchors, counted among its 16 keys of largest lift, and
    NaN for detectors that need more keys than those; `first` is that of the first key; `output` is the norm of the
    head's output over the mean of its layer.
    """
    stats = view.trace.require("head_stats")[view.has_all_rows]  # [step, layer, head, head_stat]
    first, entropy, norm = (stats[..., HEAD_STATS.index(stat)] for stat in ("first", "entropy", "output_norm"))
    with np.errstate(divide="ignore", invalid="ignore"):
        output = norm / norm.mean(-1, keepdims=True)
    mass = _anchor_mass(view)
    heads = stats.shape[2]
    return pd.DataFrame(
        {
            "sample": view.sample,
            "layer": np.repeat(view.layers, heads),
            "depth": np.repeat(view.depth, heads),
            "head": np.tile(np.arange(heads), len(view.layers)),
            "anchor_mass": np.nan if mass is None else mass.mean(0).ravel(),
            "first": first.mean(0).ravel(),
            "entropy": entropy.mean(0).ravel(),
            "output": output.mean(0).ravel(),
        }
    )


def dormant_share(table: pd.DataFrame, mass: float = 0.5, output: float = 0.5) -> float:
    """Return the share of dormant heads in a table of `head_activity`; a head is the mean over its samples.

    A dormant head puts more than `mass` on its anchors, and its output is smaller than `output` of its layer's mean.
    Both cut-offs are ours.
    """
    heads = table.groupby(["layer", "head"])[["anchor_mass", "output"]].mean().dropna()
    return float(((heads["anchor_mass"] > mass) & (heads["output"] < output)).mean())


@per_sample
def masked_rows(view: TraceView) -> pd.DataFrame:
    """What masked rows attend to: a row per layer and set of keys, `prompt`, `masks` or `committed`.

    `mass` is what an average masked row gives to the keys in that state at its step, `base` the same under uniform
    attention, their `ratio`. Mean over heads and over the steps with masked rows; a step without such keys counts 0.
    Positions of noise count as masks.
    """
    has_masks = view.trace.count_rows("masked") > 0  # [step]
    if not has_masks.any():
        raise UserError(f"the trace of '{view.sample}' has no masked rows; only masked diffusion models have them")
    states = view.trace.arrays["states"][has_masks]
    members = np.stack([np.isin(states, of) for of in KEY_STATES.values()], -1).astype(np.float32)
    mass = _set_shares(view.trace.received(group="masked")[has_masks], members)
    base = _set_shares(view.trace.uniform("masked")[has_masks], members)
    table = pd.DataFrame(
        {
            "sample": view.sample,
            "layer": np.repeat(view.layers, len(KEY_STATES)),
            "depth": np.repeat(view.depth, len(KEY_STATES)),
            "set": np.tile(list(KEY_STATES), len(view.layers)),
            "mass": mass.ravel(),
            "base": base.ravel(),
        }
    )
    table["ratio"] = (table["mass"] / table["base"]).where(table["base"] > 0)
    return table


def _anchor_mass(view: TraceView) -> Float[np.ndarray, "step layer head"] | None:
    """The attention on the anchors of each head; the attention on a key is its lift · uniform."""
    is_anchor = head_anchors(view)
    if is_anchor is None:
        return None
    trace, steps = view.trace, view.has_all_rows
    group, visibility = trace.coords["group"].index("all"), trace.arrays["layer_visibility"]
    keys = trace.require("top_key")[:, :, :, group][steps]  # [step, layer, head, rank]
    uniform = trace.require("uniform")[:, visibility, group][steps]  # [step, layer, key]
    lift = trace.require("top")[:, :, :, group, :, TOP_STATS.index("lift")][steps]
    uniform_of_top = np.take_along_axis(uniform, keys.clip(0).reshape(*keys.shape[:2], -1), -1).reshape(keys.shape)
    return np.where(is_anchor[steps], lift * uniform_of_top, 0.0).sum(-1)


def _set_shares(
    received: Float[np.ndarray, "masked_step layer key"], members: Float[np.ndarray, "masked_step key set"]
) -> Float[np.ndarray, "layer set"]:
    """What each set of keys receives, mean over steps; NaN where nothing was measured."""
    is_measured = np.isfinite(received).any((0, -1))
    return np.where(is_measured[:, None], (np.nan_to_num(received) @ members).mean(0), np.nan)
