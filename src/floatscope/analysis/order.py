"""The order of decoding: which positions are filled first, how nearly from left to right, and does p* foretell them?

    table = commits(look)      # a row per commit: when, where, how sure, what kind of token
    trajectory(table)          # a row per step and position: the share of a run's samples that have filled it
    order(look)                # a row per sample: Kendall's τ, ends first?, trivial tokens first?
    arness(look)               # a row per k: local and global AR-ness
    coupling(look)             # a row per layer and lag: is the top key where the next commit falls?

Positions are those to be filled, counted from 0 among themselves: the masks of the first canvas, or what a model
without masks wrote. Logits may be shifted: a commit is where its token stands, not the row that decided it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from floatscope.analysis.look import TraceView
from floatscope.analysis.tokens import CLASSES, STRUCTURE, classes_of
from floatscope.errors import UserError
from floatscope.traces import Trace

EARLY = 0.25
"""The share of the commits that are the first."""
LAGS = (0, 1)
NEAR = 4
KS = (1, 2, 4, 8)
_NEARNESS: dict[str, Callable[[Float[np.ndarray, "..."]], np.ndarray]] = {
    "hit": lambda away: away == 0,
    "hit_4": lambda away: away <= NEAR,
    "distance": lambda away: away,
}


def commits(look: TraceView) -> pd.DataFrame:
    """`commit` is its number in the trace, `position` one of `positions` to be filled; `place` and `time` are position
    and step from 0, the first there is, to 1, the last."""
    step, position, positions = _filled(look)
    return pd.DataFrame(
        {
            "sample": look.sample,
            "commit": np.arange(len(step)),
            "step": step,
            "position": position,
            "positions": positions,
            "place": position / max(1, positions - 1),
            "time": step / max(1, look.steps - 1),
            "confidence": look.trace.arrays["commit_confidence"],
            "class": _classes(look.trace),
        }
    )


def trajectory(table: pd.DataFrame) -> pd.DataFrame:
    """`share` of the samples that have `position` and committed it by the end of `step`, from the commits of a run."""
    length = table.groupby("sample")["positions"].first()
    filled = table.pivot(index="sample", columns="position", values="step")
    when = filled.reindex(length.index, columns=range(length.max())).to_numpy(float)  # NaN: not filled, or not there
    steps = np.arange(table["step"].max() + 1)
    position = np.arange(when.shape[1])
    done = (when <= steps[:, None, None]).sum(1)  # [step, position]
    share = done / (position < length.to_numpy()[:, None]).sum(0)
    return pd.DataFrame(
        {
            "step": np.repeat(steps, len(position)),
            "position": np.tile(position, len(steps)),
            "share": share.ravel(),
        }
    )


def order(look: TraceView) -> pd.DataFrame:
    """`kendall` of step and position; `u_shape` the mean time of the middle third of the positions less that of the
    outer thirds, positive where the ends come first.

    `trivial` is the share of tokens that are not content, `trivial_first` the same among the first quarter committed,
    `trivial_ratio` of both. A step that lies across the quarter counts all its commits in part: which of them come
    first is not said.
    """
    table = commits(look)
    step, time = table["step"].to_numpy(), table["time"].to_numpy()
    middle = _is_middle(table["position"].to_numpy(), int(table["positions"].iloc[0]))
    trivial = np.isin(table["class"], STRUCTURE)
    share, first = trivial.mean(), np.average(trivial, weights=_early(step))
    return pd.DataFrame(
        {
            "sample": [look.sample],
            "steps": look.steps,
            "tokens_per_step": len(table) / look.steps,
            "kendall": kendall(step, table["position"].to_numpy()),
            "u_shape": time[middle].mean() - time[~middle].mean() if 0 < middle.sum() < len(middle) else np.nan,
            "trivial_first": first,
            "trivial": share,
            "trivial_ratio": first / share if share else np.nan,
        }
    )


def kendall(a: Int[np.ndarray, " n"], b: Int[np.ndarray, " n"]) -> float:
    """τ-b: pairs in the same order less those in opposite order, over the geometric mean of those not tied in `a` and
    not tied in `b`; NaN where either is constant."""
    x, y = (np.sign(np.subtract.outer(values, values)) for values in (a, b))
    untied = float(np.abs(x).sum()) * float(np.abs(y).sum())
    return float((x * y).sum() / np.sqrt(untied)) if untied else float("nan")


def arness(look: TraceView, ks: Sequence[int] = KS) -> pd.DataFrame:
    """`local` the share of commits that end a run of k + 1 positions committed one after the other, each next to the
    last, among the commits that have k before them; `global` the share that fill one of the k earliest masks.

    The commits of one step are taken one by one from the left, each filling its mask before the next: a step that fills
    the leftmost masks at once is as autoregressive as several that do.
    """
    if wrong := [k for k in ks if not isinstance(k, Integral) or k < 1]:
        raise UserError(f"k of AR-ness must be a whole number of at least 1, got {wrong[0]!r}")
    step, position, _ = _filled(look)
    path = position[np.lexsort((position, step))]
    n = len(path)
    run = np.zeros(n, int)  # how many before a commit lead up to it
    for i in range(1, n):
        run[i] = run[i - 1] + 1 if path[i] == path[i - 1] + 1 else 0
    masks_before = path - np.tril(path < path[:, None]).sum(1)  # to the left of it, at its turn
    return pd.DataFrame(
        {
            "sample": look.sample,
            "k": list(ks),
            "local": [(run[k:] >= k).mean() if n > k else np.nan for k in ks],
            "global": [(masks_before < k).mean() for k in ks],
        }
    )


def coupling(look: TraceView) -> pd.DataFrame:
    """How far the top key is from the nearest commit of its own step (lag 0) or the one after (lag 1): `hit` at it,
    `hit_4` within 4 positions, mean `distance`, over the steps that have both.

    `…_chance` is what a key drawn evenly from the masks the step saw is expected to give; without masks it is NaN.
    """
    _filled(look)
    return pd.concat([_coupled(look, lag) for lag in LAGS], ignore_index=True)


def _filled(look: TraceView) -> tuple[Int[np.ndarray, " commit"], Int[np.ndarray, " commit"], int]:
    """The step and the position of each commit, and how many positions there were to fill."""
    trace = look.trace
    step, position = trace.arrays["commit_step"], trace.arrays["commit_position"]
    if trace.meta.get("state") == "final" or not len(step):
        what = "is of the finished text alone" if len(step) else "has no commits"
        raise UserError(f"the trace of '{look.sample}' {what}, so it knows no order; trace a decoding, step by step")
    to_fill = np.union1d(np.flatnonzero(look.masked[0]), position)
    return step, np.searchsorted(to_fill, position), len(to_fill)


def _classes(trace: Trace) -> np.ndarray:
    """The class of each token committed; an empty place stands before them, for none of them begins a text."""
    tokens = np.append(-1, trace.arrays["commit_token"])[None]
    row = Trace(trace.sample, {"tokens": tokens}, {"tokens": ("step", "key")}, {}, trace.meta)
    return np.array(CLASSES)[classes_of(row)[0, 1:]]


def _is_middle(position: Int[np.ndarray, " commit"], positions: int) -> Bool[np.ndarray, " commit"]:
    """Whether the centre of a position lies in the middle third of the whole."""
    centre = 3 * (2 * position + 1)  # in sixths of a position: odd, so never on the border
    return (centre > 2 * positions) & (centre < 4 * positions)


def _early(step: Int[np.ndarray, " commit"]) -> Float[np.ndarray, " commit"]:
    """How much of each commit is among the first: all, none, or the same part of each in the step across the border."""
    in_order = np.sort(step)
    before, until = (np.searchsorted(in_order, step, side) for side in ("left", "right"))
    return ((EARLY * len(step) - before) / (until - before)).clip(0, 1)


def _coupled(look: TraceView, lag: int) -> pd.DataFrame:
    away = _away(look, lag)
    near = np.where(look.top >= 0, np.take_along_axis(away, look.top.clip(0), 1), np.nan)  # [step, layer]
    there = np.isfinite(near)
    table = {"sample": look.sample, "layer": look.layers, "depth": look.depth, "lag": lag}
    chance = {}
    with np.errstate(invalid="ignore"):  # 0 / 0 where there are no such steps, or no masks
        for name, of in _NEARNESS.items():
            table[name] = np.where(there, of(near), 0).sum(0) / there.sum(0)
            drawn = np.where(look.masked, of(away), 0).sum(1) / look.masked.sum(1)  # [step]
            chance[f"{name}_chance"] = np.where(there, drawn[:, None], 0).sum(0) / there.sum(0)
    return pd.DataFrame(table | chance)


def _away(look: TraceView, lag: int) -> Float[np.ndarray, "step key"]:
    """From each key to the nearest commit of the step `lag` later; NaN where that commits nothing."""
    arrays, key = look.trace.arrays, np.arange(look.masked.shape[1])
    away = np.full((look.steps, len(key)), np.nan)
    for step in range(look.steps):
        position = arrays["commit_position"][arrays["commit_step"] == step + lag]
        if len(position):
            away[step] = np.abs(key[:, None] - position).min(1)
    return away
