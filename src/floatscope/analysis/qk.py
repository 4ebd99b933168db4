"""What makes an anchor: that queries point its way, or that its key is long? And how large is what it carries?

    qk(look)              # a row per layer and head: how anchors differ from other keys, and what makes it so
    attribution(table)    # a row per sample and layer: the share of the advantage that angle and norm account for
    norms(look)           # a row per layer and set: norms of keys, values and the stream, over those of other keys
    key_z(look, step=4)   # [layer, quantity, key]: how far each key of one canvas stands out, for a picture

A head's anchors are looked for among its 16 keys of largest lift, at steps whose forward had all rows.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from floatscope.analysis.anchors import head_anchors
from floatscope.analysis.kept import kept
from floatscope.analysis.look import TraceView
from floatscope.errors import UserError
from floatscope.schema import KEY_STATS, ORDERS, QUANTITIES, TOP_STATS

COMPARED = ("qk", "cos", "norm")
NORMS = ("key_norm", "value_norm", "output_norm", "residual")
Cells = Float[np.ndarray, "step layer head"]


def qk(look: TraceView) -> pd.DataFrame:
    """Means over the steps that have anchors. `qk`, `cos` and `norm` (of |q||k|): mean over anchors minus mean over the
    other eligible keys; `…_z` the same in standard deviations of the others. `angle_lost` is what the mean score of the
    anchors loses when they point where the others do on average, `norm_lost` when they are as long as those."""
    found = head_anchors(look)
    if found is None:
        raise UserError(f"{look.detector} does not judge single heads; use zscore, rulli or topk on the scale 'lift'")
    heads = Heads(look, found[look.whole])
    columns = {"anchors": heads.count.mean(0)}
    for name in COMPARED:
        advantage, std = heads.advantage(name)
        columns[name] = _over_steps(advantage)
        with np.errstate(divide="ignore", invalid="ignore"):
            columns[f"{name}_z"] = _over_steps(np.where(std > 0, advantage / std, np.nan))
    columns["angle_lost"] = _over_steps(heads.mean("qk") - heads.turned)
    columns["norm_lost"] = _over_steps(heads.mean("qk") - heads.shortened)
    layers, n = heads.count.shape[1:]
    return pd.DataFrame(
        {
            "sample": look.sample,
            "layer": np.repeat(look.layers, n),
            "depth": np.repeat(look.depth, n),
            "head": np.tile(np.arange(n), layers),
            **{name: values.ravel() for name, values in columns.items()},
        }
    )


def attribution(table: pd.DataFrame) -> pd.DataFrame:
    """`angle` and `norm`: shares of the advantage in qk that are lost without them, summed over the heads that have
    anchors; undefined where anchors have no advantage. They need not add up to 1."""
    sums = table.groupby(["sample", "layer", "depth"], sort=False)[["qk", "angle_lost", "norm_lost"]].sum()
    shares = sums[["angle_lost", "norm_lost"]].div(sums["qk"].where(sums["qk"] > 0), axis=0)
    return shares.set_axis(["angle", "norm"], axis=1).reset_index()


def norms(look: TraceView) -> pd.DataFrame:
    """Of the `first` key and of the `anchors` of the head mean: mean norm over the median of the eligible keys that are
    neither, mean over the steps that have them. Below 1 a drain, above 1 a peak."""
    trace, at = look.trace, look.whole
    stats = kept(trace, "key_stats")[at].astype(np.float32)  # [step, layer, stat, key]
    residual = kept(trace, "residual")[at]
    anchors, eligible = look.anchors[at], np.isfinite(look.lift[at])
    first = np.broadcast_to(np.arange(eligible.shape[-1]) == 0, eligible.shape)
    others = eligible & ~anchors & ~first
    rows: dict[str, dict[str, np.ndarray]] = {"first": {}, "anchors": {}}
    for name in NORMS:
        values = residual if name == "residual" else stats[:, :, KEY_STATS.index(name)]
        typical = _median(values, others)
        for where, chosen in (("first", first), ("anchors", anchors)):
            rows[where][name] = _over_steps(_mean(values, chosen) / typical)
    parts = [
        pd.DataFrame({"sample": look.sample, "layer": look.layers, "depth": look.depth, "set": where, **columns})
        for where, columns in rows.items()
    ]
    return pd.concat(parts, ignore_index=True)


def key_z(look: TraceView, step: int) -> Float[np.ndarray, "layer quantity key"]:
    """Mean over heads of σ q·k, of the cosine and of |q||k|, as z-scores over the eligible keys of a layer."""
    every = kept(look.trace, "key_stats")
    if not 0 <= step < len(every):
        raise UserError(f"'{look.sample}' has steps 0 to {len(every) - 1}, got step {step}")
    stats = every[step].astype(np.float64)[:, [KEY_STATS.index(name) for name in COMPARED]]
    eligible = np.isfinite(look.lift[step])[:, None] & np.isfinite(stats)
    n = np.maximum(1, eligible.sum(-1, keepdims=True))
    away = np.where(eligible, stats - np.where(eligible, stats, 0).sum(-1, keepdims=True) / n, np.nan)
    std = np.sqrt(np.nansum(away**2, -1, keepdims=True) / n)
    return np.divide(away, std, out=np.full(away.shape, np.nan), where=std > 0)


class Heads:
    """The anchors of every head and the keys that are none, from top keys and moments."""

    def __init__(self, look: TraceView, found: Bool[np.ndarray, "step layer head rank"]) -> None:
        self.found, self.count = found, found.sum(-1)
        group = look.trace.coords["group"].index("all")
        self._top = kept(look.trace, "top")[:, :, :, group][look.whole]
        self._moments = kept(look.trace, "moments")[look.whole].astype(np.float64)
        self._turned = kept(look.trace, "turned")[look.whole]
        self._of_all = self._moments[..., QUANTITIES.index("qk"), ORDERS.index("n")]

    def each(self, stat: str) -> Float[np.ndarray, "step layer head rank"]:
        return self._top[..., TOP_STATS.index(stat)].astype(np.float64)

    def mean(self, stat: str) -> Cells:
        """Over a head's anchors; NaN where it has none."""
        return _mean(self.each(stat), self.found)

    def others(self, stat: str) -> tuple[Cells, Cells]:
        """Mean and standard deviation over the eligible keys that are no anchors."""
        sums = self._moments[..., QUANTITIES.index(stat), :]
        own = np.where(self.found, self.each(stat), 0.0)
        n = self._of_all - self.count
        n = np.where(n > 0, n, np.nan)
        mean = (sums[..., ORDERS.index("sum")] - own.sum(-1)) / n
        square = (sums[..., ORDERS.index("sumsq")] - (own**2).sum(-1)) / n
        return mean, np.sqrt(np.maximum(0, square - mean**2))

    def advantage(self, stat: str) -> tuple[Cells, Cells]:
        mean, std = self.others(stat)
        return self.mean(stat) - mean, std

    @property
    def turned(self) -> Cells:
        """Mean score of the anchors if each pointed where the others do on average: anchors are the first of the ranks,
        so the trace holds it for any number of them."""
        last = np.take_along_axis(self._turned, np.maximum(self.count - 1, 0)[..., None], -1)[..., 0]
        return np.where(self.count > 0, last, np.nan)

    @property
    def shortened(self) -> Cells:
        """Mean score of the anchors if each were as long as the others are on average."""
        typical, _ = self.others("key_norm")
        with np.errstate(divide="ignore", invalid="ignore"):
            return typical * _mean(self.each("qk") / self.each("key_norm"), self.found)


def _mean(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Over the last axis, of what is chosen; NaN where nothing is."""
    n = chosen.sum(-1)
    with np.errstate(invalid="ignore"):
        return np.where(n > 0, np.where(chosen, values, 0).sum(-1) / np.maximum(n, 1), np.nan)


def _median(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The same of the middle; sorting puts NaN last, and is many times as fast as numpy's nanmedian."""
    n = chosen.sum(-1, keepdims=True)
    ordered = np.sort(np.where(chosen, values, np.nan), -1)
    low, high = (np.take_along_axis(ordered, np.maximum(at, 0), -1)[..., 0] for at in ((n - 1) // 2, n // 2))
    middle: np.ndarray = np.where(n[..., 0] > 0, (low + high) / 2, np.nan)
    return middle


def _over_steps(values: np.ndarray) -> np.ndarray:
    """Mean over the steps that have a value."""
    there = np.isfinite(values)
    n = there.sum(0)
    return np.where(n > 0, np.where(there, values, 0).sum(0) / np.maximum(n, 1), np.nan)
