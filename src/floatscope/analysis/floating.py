"""Floating: how much attention moves from step to step, and does the same key stay in the lead?

    floating(run)              # a row per sample, layer and query group: attention moved, within, across
    top_keys(run)              # a row per step, layer and query group: the leading key, and what moves to the next step

There are two questions, and their answers can differ. *Attention moved* is the total variation distance between the
received attention of two consecutive steps: 0 if nothing moves and 1 if everything does. A fixed sink and attention
that is nearly uniform both have about 0. *Within* and *across* say how often another key than the usual one leads; they
count a step only if its leader is an anchor, because the leader of nearly uniform attention is a matter of chance.

Both are computed for all rows and for the predicting rows. A new predicting row is read at each step, so its attention
moves over the content while a sink stays where it is: `moved_modal` is the part on the modal top key.

Steps are those that write the answer; a step pair counts if both do. Keys are those that are eligible at every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from floatscope.analysis.detectors import Detector
from floatscope.analysis.trace_view import Source, TraceView, per_sample

QUERY_GROUPS = ("all", "predicting")
THIRDS = ("shallow", "middle", "deep")
_MEANS = ("moved", "excess_moved", "moved_modal", "modal_share", "lift", "lead")


def floating(source: Source, detector: str | Detector = "zscore", *, commits: str = "answer") -> pd.DataFrame:
    """How much attention moves, and how often the lead changes: a row per sample, layer and query group.

    `group` is all or predicting. The mean over steps of `moved` (the attention moved to the next step) and of
    `excess_moved` (the same of the attention above uniform, (lift − 1)₊); `moved_overall` from the first step to the
    last. `moved` is the sum of `moved_modal`, on the modal top key, and `moved_rest`; `modal_share` is the attention on
    that key.

    `within` is 1 − the share of the steps whose top key is the modal top key of the sample and layer; `across` is the
    same with the modal key of the layer over all samples. Both count the steps with an anchor, a top key of lift 2 or
    more; `anchor_steps` is their share, and both are NaN if it is 0. `lift` is that of the top key and `lead` how far
    it is ahead of the second key: 0.1 is 10 % more. `third` is the third of the model that the layer is in.

        fs.analysis.floating(run).groupby(["group", "layer"])["moved"].mean()
    """
    return floating_index(top_keys(source, detector, commits=commits))


def floating_index(table: pd.DataFrame) -> pd.DataFrame:
    """Return `floating` from a table of `top_keys`. Of tied modes the smaller key counts."""
    cell = ["sample", "group", "layer", "depth"]
    grouped = table.groupby(cell, sort=False)
    index = grouped[list(_MEANS)].mean()
    index["moved_overall"] = grouped["moved_from_first"].agg(lambda values: values.iloc[-1])
    index["moved_rest"] = index["moved"] - index["moved_modal"]
    has_anchor = table["top_key"] >= 0
    index["anchor_steps"] = has_anchor.groupby([table[name] for name in cell], sort=False).mean()
    anchored = table[has_anchor]
    of_layer = anchored.groupby(["group", "layer"])["top_key"].agg(_mode).rename("usual")
    moves = anchored.join(of_layer, on=["group", "layer"])
    moves = moves.assign(within=moves["top_key"] != moves["modal_key"], across=moves["top_key"] != moves["usual"])
    index = index.join(moves.groupby(cell, sort=False)[["within", "across"]].mean())
    index = index.reset_index()
    return index.assign(third=[depth_third(depth) for depth in index["depth"]])


def depth_third(depth: float) -> str:
    """Return the third of the model that a relative depth is in: shallow, middle or deep."""
    return THIRDS[min(2, int(depth * 3))]


@per_sample
def top_keys(view: TraceView) -> pd.DataFrame:
    """The leading key and the attention that moves: a row per query group, layer and step with a commit that counts.

    `top_key` is the eligible key of largest lift, −1 if that is below 2; `modal_key` the most frequent `top_key` of the
    layer, −1 without any; `lift` and `lead` are those of the leader, whether it is an anchor or not.

    `moved` and `excess_moved` go to the next step, and are NaN unless it also has such a commit; `moved_modal` is the
    part on the modal key, `modal_share` the attention on it, and `moved_from_first` goes from the first such step to
    this one.
    """
    return pd.concat([_group_rows(view, group) for group in QUERY_GROUPS], ignore_index=True)


def attention_moved(
    a: Float[np.ndarray, "*#axes key"], b: Float[np.ndarray, "*#axes key"], present: Bool[np.ndarray, "*#axes key"]
) -> Float[np.ndarray, "*#axes key"]:
    """Return half of |a − b| for each key, of distributions over the keys that are `present`: its sum is the total
    variation distance. NaN where either is empty."""
    shares = []
    for values in (a, b):
        mass = np.where(present, np.nan_to_num(values), 0.0)
        total = mass.sum(-1, keepdims=True)
        shares.append(mass / np.where(total > 0, total, np.nan))
    return np.abs(shares[0] - shares[1]) / 2


def _group_rows(view: TraceView, group: str) -> pd.DataFrame:
    trace, steps = view.trace, view.steps_with_commits
    received, uniform = trace.received(group=group)[steps], trace.uniform(group)[steps]
    path = trace.anchor_path(group=group)[steps]  # [step, layer]
    lift, lead = _measure_leader(trace.received(group=group, scale="lift", eligible=True)[steps])
    present = (np.arange(received.shape[-1]) < view.keys[steps, None])[:, None]  # [step, 1, key]
    modal = np.array([_mode(keys[keys >= 0]) for keys in path.T])  # [layer]

    def next_step(values: Float[np.ndarray, "pair layer"]) -> Float[np.ndarray, "step layer"]:
        is_pair = np.diff(steps) == 1
        return np.concatenate([np.where(is_pair[:, None], values, np.nan), np.full((1, path.shape[1]), np.nan)])

    moved = attention_moved(received[:-1], received[1:], present[:-1] & present[1:])
    overall = attention_moved(received[:1], received, present[:1] & present).sum(-1)
    excess = np.maximum(received - uniform, 0)  # NaN if the step was not measured
    excess_moved = np.where(present[:-1] & present[1:], np.abs(np.diff(excess, axis=0)), 0.0).sum(-1) / 2
    columns = {
        "top_key": path,
        "modal_key": np.broadcast_to(modal, path.shape),
        "lift": lift,
        "lead": lead,
        "moved": next_step(moved.sum(-1)),
        "excess_moved": next_step(excess_moved),
        "moved_modal": next_step(_at_key(moved, modal)),
        "modal_share": _at_key(received, modal),
        "moved_from_first": overall,
    }
    return pd.DataFrame(
        {
            "sample": view.sample,
            "group": group,
            "step": np.repeat(steps, len(view.layers)),
            "layer": np.tile(view.layers, len(steps)),
            "depth": np.tile(view.depth, len(steps)),
            **{name: values.ravel() for name, values in columns.items()},
        }
    )


def _measure_leader(
    lift: Float[np.ndarray, "step layer key"],
) -> tuple[Float[np.ndarray, "step layer"], Float[np.ndarray, "step layer"]]:
    """The largest lift, and how far it exceeds the second largest; NaN without that many eligible keys."""
    missing = np.full((*lift.shape[:2], max(0, 2 - lift.shape[-1])), -np.inf)
    ranked = np.concatenate([np.where(np.isnan(lift), -np.inf, lift), missing], -1)
    second, first = np.moveaxis(np.partition(ranked, -2, -1)[..., -2:], -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        lead = np.where(second > 0, first / second - 1, np.nan)
    return np.where(np.isfinite(first), first, np.nan), lead


def _at_key(
    values: Float[np.ndarray, "step layer key"], key: Int[np.ndarray, " layer"]
) -> Float[np.ndarray, "step layer"]:
    """The value at one key of each layer; 0 where the layer has none, NaN where nothing was measured."""
    index = np.broadcast_to(key.clip(0)[None, :, None], (*values.shape[:2], 1))
    at_key = np.take_along_axis(values, index, -1)[..., 0]
    return np.where((key >= 0) | np.isnan(at_key), at_key, 0.0)


def _mode(values: pd.Series | Int[np.ndarray, " n"] | Sequence[int]) -> int:
    """The most frequent value, the smallest of equally frequent ones; −1 of no values."""
    keys, counts = np.unique(np.asarray(values), return_counts=True)
    return int(keys[counts.argmax()]) if len(keys) else -1
