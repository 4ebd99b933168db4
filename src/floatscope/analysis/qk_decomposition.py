"""QK decomposition: is a key an anchor because queries point towards it or because it is long? How large is its value?

    qk(run)                     # a row per layer and head: how anchors differ from other keys, and why
    attribution(run)            # a row per sample and layer: the share of the advantage due to angle and norm
    norms(run)                  # a row per layer and set: norms of keys, values and stream, over those of other keys
    key_zscores(view, step=4)   # [layer, quantity, key]: how far each key of one canvas stands out

The anchors of a head are found among its 16 keys of largest lift, at the steps whose forward had all rows.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from floatscope.analysis.anchor_tables import head_anchors
from floatscope.analysis.detectors import Detector
from floatscope.analysis.trace_view import Source, TraceView, per_sample
from floatscope.errors import UserError
from floatscope.schema import KEY_STATS, ORDERS, QUANTITIES, TOP_STATS

COMPARED_STATS = ("qk", "cos", "norm")
NORMS = ("key_norm", "value_norm", "output_norm", "residual")
MIN_NET_ADVANTAGE = 0.1
"""An advantage above this is attributed; it is relative to the sum of the absolute advantages of the heads."""
Cells = Float[np.ndarray, "step layer head"]


@per_sample
def qk(view: TraceView) -> pd.DataFrame:
    """How the anchors of a head differ from its other keys, mean over the steps with anchors: a row per layer and head.

    `qk`, `cos` and `norm` (of |q||k|) are the mean over anchors minus the mean over the other eligible keys; `…_z` is
    the same in standard deviations of the others. `angle_lost` is what the mean score of the anchors loses if they
    point in the mean direction of the others, `norm_lost` if they have the mean length of the others.
    """
    is_anchor = head_anchors(view)
    if is_anchor is None:
        raise UserError(f"{view.detector} does not work on single heads; use zscore, rulli or topk on the scale 'lift'")
    heads = HeadStats(view, is_anchor[view.has_all_rows])
    columns = {"anchors": heads.count.mean(0)}
    for name in COMPARED_STATS:
        advantage, std = heads.advantage(name)
        columns[name] = _mean_over_steps(advantage)
        with np.errstate(divide="ignore", invalid="ignore"):
            columns[f"{name}_z"] = _mean_over_steps(np.where(std > 0, advantage / std, np.nan))
    columns["angle_lost"] = _mean_over_steps(heads.mean("qk") - heads.score_at_mean_direction)
    columns["norm_lost"] = _mean_over_steps(heads.mean("qk") - heads.score_at_mean_length)
    layers, n = heads.count.shape[1:]
    return pd.DataFrame(
        {
            "sample": view.sample,
            "layer": np.repeat(view.layers, n),
            "depth": np.repeat(view.depth, n),
            "head": np.tile(np.arange(n), layers),
            **{name: values.ravel() for name, values in columns.items()},
        }
    )


def attribution(source: Source, detector: str | Detector = "zscore") -> pd.DataFrame:
    """The shares of the anchors' score advantage that are lost without their `angle` and without their `norm`.

    There is a row per sample and layer; losses and advantage are sums over the heads with anchors.

    A share above 1 is an overshoot: the anchor then scores below the other keys. A negative share is a gain: the anchor
    would score higher. The shares need not add up to 1. A score is a length times a cosine, so with lengths l and
    cosines c of the anchor (a) and of the other keys (o)

        advantage = l_a c_a − l_o c_o,   angle_lost = l_a (c_a − c_o),   norm_lost = (l_a − l_o) c_a

    and the two losses exceed the advantage by the interaction (l_a − l_o)(c_a − c_o). A long anchor (l_a = 2, l_o = 1)
    that queries point to (c_a = 0.5, c_o = −0.5) has the advantage 1 + 0.5 = 1.5. Rotated to c_o it scores −1 and loses
    2.0, a share of 1.33; scaled to l_o it loses 0.5, a share of 0.33; the interaction is 1.0, a share of 0.67.

    Shares are NaN unless the advantage exceeds a tenth of the sum of the absolute advantages of the heads. Otherwise it
    is negative, or heads cancel each other and the shares are ratios to almost nothing.
    """
    return attribute_advantage(qk(source, detector))


def attribute_advantage(table: pd.DataFrame) -> pd.DataFrame:
    """Return `attribution` from a table of `qk`."""
    by_layer = table.assign(gross=table["qk"].abs()).groupby(["sample", "layer", "depth"], sort=False)
    sums = by_layer[["qk", "gross", "angle_lost", "norm_lost"]].sum()
    has_advantage = sums["qk"] > MIN_NET_ADVANTAGE * sums["gross"]
    shares = sums[["angle_lost", "norm_lost"]].div(sums["qk"].where(has_advantage), axis=0)
    return shares.set_axis(["angle", "norm"], axis=1).reset_index()


@per_sample
def norms(view: TraceView) -> pd.DataFrame:
    """The norms of key, value, W_O v and stream of the `first` key and of the `anchors`: a row per layer and set.

    Each is the mean norm over the median of the eligible keys that are neither, mean over the steps with such keys.
    Below 1 is a drain, above 1 a peak.
    """
    trace, steps = view.trace, view.has_all_rows
    stats = trace.require("key_stats")[steps].astype(np.float32)  # [step, layer, stat, key]
    residual = trace.require("residual")[steps]
    anchors, is_eligible = view.anchors[steps], np.isfinite(view.lift[steps])
    first = np.broadcast_to(np.arange(is_eligible.shape[-1]) == 0, is_eligible.shape)
    others = is_eligible & ~anchors & ~first
    columns: dict[str, dict[str, np.ndarray]] = {"first": {}, "anchors": {}}
    for name in NORMS:
        values = residual if name == "residual" else stats[:, :, KEY_STATS.index(name)]
        typical = _masked_median(values, others)
        for set_name, keys in (("first", first), ("anchors", anchors)):
            columns[set_name][name] = _mean_over_steps(_masked_mean(values, keys) / typical)
    tables = [
        pd.DataFrame({"sample": view.sample, "layer": view.layers, "depth": view.depth, "set": set_name, **values})
        for set_name, values in columns.items()
    ]
    return pd.concat(tables, ignore_index=True)


def key_zscores(view: TraceView, step: int) -> Float[np.ndarray, "layer quantity key"]:
    """Return z-scores over the eligible keys of a layer: of σ q·k, the cosine and |q||k|, each the mean over heads."""
    all_stats = view.trace.require("key_stats")
    if not 0 <= step < len(all_stats):
        raise UserError(f"'{view.sample}' has steps 0 to {len(all_stats) - 1}, got step {step}")
    stats = all_stats[step].astype(np.float64)[:, [KEY_STATS.index(name) for name in COMPARED_STATS]]
    is_eligible = np.isfinite(view.lift[step])[:, None] & np.isfinite(stats)
    n = np.maximum(1, is_eligible.sum(-1, keepdims=True))
    deviation = np.where(is_eligible, stats - np.where(is_eligible, stats, 0).sum(-1, keepdims=True) / n, np.nan)
    std = np.sqrt(np.nansum(deviation**2, -1, keepdims=True) / n)
    return np.divide(deviation, std, out=np.full(deviation.shape, np.nan), where=std > 0)


class HeadStats:
    """The anchors of every head and its other keys, from the stored top keys and moments."""

    def __init__(self, view: TraceView, is_anchor: Bool[np.ndarray, "step layer head rank"]) -> None:
        self.is_anchor, self.count = is_anchor, is_anchor.sum(-1)
        group = view.trace.coords["group"].index("all")
        self._top = view.trace.require("top")[:, :, :, group][view.has_all_rows]
        self._moments = view.trace.require("moments")[view.has_all_rows].astype(np.float64)
        self._score_at_mean_direction = view.trace.require("score_at_mean_direction")[view.has_all_rows]
        self._eligible_count = self._moments[..., QUANTITIES.index("qk"), ORDERS.index("n")]

    def top(self, stat: str) -> Float[np.ndarray, "step layer head rank"]:
        """Return a statistic of the 16 top keys."""
        return self._top[..., TOP_STATS.index(stat)].astype(np.float64)

    def mean(self, stat: str) -> Cells:
        """Return the mean over a head's anchors; NaN if it has none."""
        return _masked_mean(self.top(stat), self.is_anchor)

    def others(self, stat: str) -> tuple[Cells, Cells]:
        """Return mean and standard deviation over the eligible keys that are not anchors."""
        sums = self._moments[..., QUANTITIES.index(stat), :]
        own = np.where(self.is_anchor, self.top(stat), 0.0)
        n = self._eligible_count - self.count
        n = np.where(n > 0, n, np.nan)
        mean = (sums[..., ORDERS.index("sum")] - own.sum(-1)) / n
        square = (sums[..., ORDERS.index("sumsq")] - (own**2).sum(-1)) / n
        return mean, np.sqrt(np.maximum(0, square - mean**2))

    def advantage(self, stat: str) -> tuple[Cells, Cells]:
        """Return the mean over anchors minus the mean over the others, and the standard deviation of the others."""
        mean, std = self.others(stat)
        return self.mean(stat) - mean, std

    @property
    def score_at_mean_direction(self) -> Cells:
        """The mean score of the anchors if each pointed in the mean direction of the others. Anchors are the first of
        the ranks, so the trace stores it for any number of them."""
        last_rank = np.maximum(self.count - 1, 0)[..., None]
        score = np.take_along_axis(self._score_at_mean_direction, last_rank, -1)[..., 0]
        return np.where(self.count > 0, score, np.nan)

    @property
    def score_at_mean_length(self) -> Cells:
        """The mean score of the anchors if each had the mean length of the others."""
        mean_length, _ = self.others("key_norm")
        with np.errstate(divide="ignore", invalid="ignore"):
            return mean_length * _masked_mean(self.top("qk") / self.top("key_norm"), self.is_anchor)


def _masked_mean(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The mean over the last axis where the mask is True; NaN where it is nowhere."""
    n = mask.sum(-1)
    with np.errstate(invalid="ignore"):
        return np.where(n > 0, np.where(mask, values, 0).sum(-1) / np.maximum(n, 1), np.nan)


def _masked_median(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The same for the median; sorting puts NaN last and is much faster than numpy's nanmedian."""
    n = mask.sum(-1, keepdims=True)
    ordered = np.sort(np.where(mask, values, np.nan), -1)
    low, high = (np.take_along_axis(ordered, np.maximum(index, 0), -1)[..., 0] for index in ((n - 1) // 2, n // 2))
    median: np.ndarray = np.where(n[..., 0] > 0, (low + high) / 2, np.nan)
    return median


def _mean_over_steps(values: np.ndarray) -> np.ndarray:
    """The mean over the steps that have a value."""
    is_measured = np.isfinite(values)
    n = is_measured.sum(0)
    return np.where(n > 0, np.where(is_measured, values, 0).sum(0) / np.maximum(n, 1), np.nan)
