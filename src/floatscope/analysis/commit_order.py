"""The order of decoding: which positions are filled first, is it left to right, and does the top key predict them?

    table = commits(run)       # a row per commit: step, position, confidence, token class
    trajectory(table)          # a row per step and position: the share of samples that have filled it
    order(run)                 # a row per sample: Kendall's τ, ends first?, trivial tokens first?
    arness(run)                # a row per k: local and global AR-ness
    coupling(run)              # a row per layer and lag: is the top key where the next commit falls?

Commits are those of the answer, or all with `commits="all"`; of a position that was edited, the last one. Positions
are counted from 0 among the positions of these commits; with all commits, also the masks that were never filled count.
Logits may be shifted: a commit is where its token is, not the row that predicted it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from floatscope.analysis.tokens import classify_tokens
from floatscope.analysis.trace_view import TraceView, per_sample
from floatscope.errors import UserError
from floatscope.models.token_classes import CLASSES, STRUCTURE
from floatscope.traces import Trace

EARLY_SHARE = 0.25
"""The first quarter of the commits counts as early."""
LAGS = (0, 1)
NEAR = 4
KS = (1, 2, 4, 8)
_MEASURES: dict[str, Callable[[Float[np.ndarray, "..."]], np.ndarray]] = {
    "hit": lambda distance: distance == 0,
    "hit_4": lambda distance: distance <= NEAR,
    "distance": lambda distance: distance,
}


@per_sample
def commits(view: TraceView) -> pd.DataFrame:
    """The committed tokens: a row per commit.

    `commit` is its index in the trace, `position` its index among the `positions` to fill; `relative_position` and
    `relative_step` run from 0, the first, to 1, the last, of the positions to fill and of the steps that fill them;
    `confidence` is the sampler's and `class` the token class.
    """
    step, position, positions = _fill_order(view)
    steps = view.steps_with_commits
    return pd.DataFrame(
        {
            "sample": view.sample,
            "commit": view.commits,
            "step": step,
            "position": position,
            "positions": positions,
            "relative_position": position / max(1, positions - 1),
            "relative_step": np.searchsorted(steps, step) / max(1, len(steps) - 1),
            "confidence": view.trace.arrays["commit_confidence"][view.commits],
            "class": _commit_classes(view.trace)[view.commits],
        }
    )


def trajectory(table: pd.DataFrame) -> pd.DataFrame:
    """Return the `share` of samples that have filled a `position` by the end of a `step`, from a table of `commits`."""
    lengths = table.groupby("sample")["positions"].first()
    filled = table.pivot(index="sample", columns="position", values="step")
    filled_at = filled.reindex(lengths.index, columns=range(lengths.max())).to_numpy(float)  # NaN: never filled
    steps = np.arange(table["step"].max() + 1)
    position = np.arange(filled_at.shape[1])
    count = (filled_at <= steps[:, None, None]).sum(1)  # [step, position]
    share = count / (position < lengths.to_numpy()[:, None]).sum(0)
    return pd.DataFrame(
        {
            "step": np.repeat(steps, len(position)),
            "position": np.tile(position, len(steps)),
            "share": share.ravel(),
        }
    )


@per_sample
def order(view: TraceView) -> pd.DataFrame:
    """The order in which a canvas is filled: a row per sample.

    `kendall` is Kendall's τ of step and position; `u_shape` the mean relative step of the middle third of the positions
    minus that of the outer thirds, positive if the ends come first.

    `trivial` is the share of tokens that are not content, `trivial_first` the same among the first quarter of the
    commits, `trivial_ratio` the ratio of both. All commits of a step across the quarter count in part, because their
    order is not known.
    """
    table = commits(view)
    step, relative_step = table["step"].to_numpy(), table["relative_step"].to_numpy()
    is_middle = _is_middle(table["position"].to_numpy(), int(table["positions"].iloc[0]))
    has_both = 0 < is_middle.sum() < len(is_middle)
    is_trivial = np.isin(table["class"], STRUCTURE)
    share, first = is_trivial.mean(), np.average(is_trivial, weights=_early_weight(step))
    return pd.DataFrame(
        {
            "sample": [view.sample],
            "steps": len(view.steps_with_commits),
            "tokens_per_step": len(table) / len(view.steps_with_commits),
            "kendall": kendall(step, table["position"].to_numpy()),
            "u_shape": relative_step[is_middle].mean() - relative_step[~is_middle].mean() if has_both else np.nan,
            "trivial_first": first,
            "trivial": share,
            "trivial_ratio": first / share if share else np.nan,
        }
    )


def kendall(a: Int[np.ndarray, " n"], b: Int[np.ndarray, " n"]) -> float:
    """Return Kendall's τ-b: concordant minus discordant pairs, over the geometric mean of the pairs not tied in `a` and
    not tied in `b`; NaN if either is constant."""
    x, y = (np.sign(np.subtract.outer(values, values)) for values in (a, b))
    untied = float(np.abs(x).sum()) * float(np.abs(y).sum())
    return float((x * y).sum() / np.sqrt(untied)) if untied else float("nan")


@per_sample
def arness(view: TraceView, ks: Sequence[int] = KS) -> pd.DataFrame:
    """How autoregressive the order is: a row per k.

    `local` is the share of commits that end a chain of k + 1 consecutive positions committed one after the other, among
    the commits with k before them; `global` is the share of commits that fill one of the k leftmost masks.

    The commits of one step are taken one by one from the left, each filling its mask before the next: a step that fills
    the leftmost masks at once is as autoregressive as several steps that do.
    """
    if wrong := [k for k in ks if not isinstance(k, Integral) or k < 1]:
        raise UserError(f"k of AR-ness must be a whole number of at least 1, got {wrong[0]!r}")
    step, position, _ = _fill_order(view)
    path = position[np.lexsort((position, step))]
    n = len(path)
    chain = np.zeros(n, int)  # how many consecutive positions lead up to a commit
    for i in range(1, n):
        chain[i] = chain[i - 1] + 1 if path[i] == path[i - 1] + 1 else 0
    masks_to_left = path - np.tril(path < path[:, None]).sum(1)  # when the position is filled
    return pd.DataFrame(
        {
            "sample": view.sample,
            "k": list(ks),
            "local": [(chain[k:] >= k).mean() if n > k else np.nan for k in ks],
            "global": [(masks_to_left < k).mean() for k in ks],
        }
    )


@per_sample
def coupling(view: TraceView) -> pd.DataFrame:
    """How far the top key is from the nearest commit of its own step (lag 0) or of the next step (lag 1).

    There is a row per layer and lag. Only the steps count whose top key is an anchor and a masked position: `steps` is
    their number. `hit` is at the commit, `hit_4` within 4 positions, `distance` the mean distance. `…_chance` is the
    expected value for a mask drawn uniformly at these steps. All are NaN without such a step.
    """
    _fill_order(view)  # refuses a trace without an order
    return pd.concat([_coupling_at_lag(view, lag) for lag in LAGS], ignore_index=True)


def _fill_order(view: TraceView) -> tuple[Int[np.ndarray, " commit"], Int[np.ndarray, " commit"], int]:
    """The step and the position of each commit, and the number of positions to fill."""
    trace = view.trace
    if trace.meta.get("state") == "final":
        raise UserError(
            f"the trace of '{view.sample}' is of the finished text only, so it has no order; trace a decoding, step by"
            " step"
        )
    step, position = (trace.arrays[name][view.commits] for name in ("commit_step", "commit_position"))
    to_fill = position if view.counted == "answer" else np.append(np.flatnonzero(view.is_masked.any(0)), position)
    to_fill = np.unique(to_fill)
    return step, np.searchsorted(to_fill, position), len(to_fill)


def _commit_classes(trace: Trace) -> np.ndarray:
    """The class of each committed token. An empty position stands before them, since none of them begins a text."""
    tokens = np.append(-1, trace.arrays["commit_token"])[None]
    row = Trace(trace.sample, {"tokens": tokens}, {"tokens": ("step", "key")}, {}, trace.meta)
    return np.array(CLASSES)[classify_tokens(row)[0, 1:]]


def _is_middle(position: Int[np.ndarray, " commit"], positions: int) -> Bool[np.ndarray, " commit"]:
    """Whether the centre of a position lies in the middle third of all positions."""
    centre = 3 * (2 * position + 1)  # in sixths of a position: odd, so never on the border
    return (centre > 2 * positions) & (centre < 4 * positions)


def _early_weight(step: Int[np.ndarray, " commit"]) -> Float[np.ndarray, " commit"]:
    """How much of each commit is early: all, nothing, or the same part of each commit in the step across the border."""
    in_order = np.sort(step)
    before, until = (np.searchsorted(in_order, step, side) for side in ("left", "right"))
    return ((EARLY_SHARE * len(step) - before) / (until - before)).clip(0, 1)


def _coupling_at_lag(view: TraceView, lag: int) -> pd.DataFrame:
    distance, path = _commit_distance(view, lag), view.anchor_path
    on_mask = (path >= 0) & np.take_along_axis(view.is_masked, path.clip(0), 1)
    at_top = np.where(on_mask, np.take_along_axis(distance, path.clip(0), 1), np.nan)  # [step, layer]
    is_measured = np.isfinite(at_top)
    steps = is_measured.sum(0)
    table = {"sample": view.sample, "layer": view.layers, "depth": view.depth, "lag": lag, "steps": steps}
    chance = {}
    with np.errstate(invalid="ignore"):  # 0 / 0 without such steps
        for name, measure in _MEASURES.items():
            table[name] = np.where(is_measured, measure(at_top), 0).sum(0) / steps
            expected = np.where(view.is_masked, measure(distance), 0).sum(1) / view.is_masked.sum(1)  # [step]
            chance[f"{name}_chance"] = np.where(is_measured, expected[:, None], 0).sum(0) / steps
    return pd.DataFrame(table | chance)


def _commit_distance(view: TraceView, lag: int) -> Float[np.ndarray, "step key"]:
    """From each key to the nearest commit of the step `lag` later; NaN where that step has none that counts."""
    arrays, key = view.trace.arrays, np.arange(view.is_masked.shape[1])
    commit_step, commit_position = (arrays[name][view.commits] for name in ("commit_step", "commit_position"))
    distance = np.full((view.steps, len(key)), np.nan)
    for step in range(view.steps):
        position = commit_position[commit_step == step + lag]
        if len(position):
            distance[step] = np.abs(key[:, None] - position).min(1)
    return distance
