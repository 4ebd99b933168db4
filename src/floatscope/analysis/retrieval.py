"""Retrieval heads: which heads copy the answer out of the evidence?

    table = retrieval(look)            # a row per layer and head
    head_map(table)                    # layer × head, mean over the samples of a run
    profile(table, "wu_count")         # a row per layer: mean, max, shares of heads above .1 and above .5
    correlation(table, of_another)     # Pearson between the maps of two models

A copy event: the largest key of a commit's predicting row lies in the evidence and holds the very token committed. The
row is that of the step which commits the position, so of several commits in a step each is an event of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool

from floatscope.analysis.kept import kept
from floatscope.analysis.look import TraceView
from floatscope.errors import UserError, unknown_choice
from floatscope.tasks.score import normalise

EVIDENCE = "evidence"
"""The region that holds the answer inside the passages."""
THRESHOLD = 0.1
"""A head above this is a retrieval head."""
STRONG = 0.5
RECALL = 0.5
"""`wu_count` is of samples whose prediction has more than this share of the words of a right answer."""


def retrieval(look: TraceView) -> pd.DataFrame:
    """`copies` events; `wu_set` the share of the evidence's different tokens that were copied; `wu_count` events over
    the evidence's positions, NaN unless the answer was recalled; `active` 1 if there was an event, 0 if not.

    `mass` an average predicting row puts on the evidence, `base` what uniform attention would put there, `ratio` of
    both. A sample without evidence is refused.
    """
    trace, arrays = look.trace, look.trace.arrays
    if EVIDENCE not in trace.coords.get("region", ()) or not _evidence(look).any():
        raise UserError(
            f"the trace of '{look.sample}' has no evidence to retrieve; give a passage of the sample its \"evidence\","
            " [start, stop] characters of the answer in its text, and trace it again"
        )
    if not len(arrays["commit_token"]):
        raise UserError(
            f"the trace of '{look.sample}' has no commits, so no head in it copied anything; trace a decoding"
        )
    happened, inside = _events(look), _evidence(look)
    needle = arrays["tokens"][-1, inside]
    copies = happened.sum(0)  # [layer, head]
    of_token = (np.unique(needle)[:, None] == arrays["commit_token"]).astype(int)  # [token, commit]
    copied = np.tensordot(of_token, happened, 1) > 0  # [token, layer, head]
    at = trace.coords["region"].index(EVIDENCE)
    mass = kept(trace, "row_regions")[..., at].astype(np.float64).mean(0)
    layers, heads = copies.shape
    base = np.repeat(look.evenly[:, at], heads)
    return pd.DataFrame(
        {
            "sample": look.sample,
            "layer": np.repeat(look.layers, heads),
            "depth": np.repeat(look.depth, heads),
            "head": np.tile(np.arange(heads), layers),
            "copies": copies.ravel(),
            "wu_set": copied.mean(0).ravel(),
            "wu_count": copies.ravel() / len(needle) if _recalled(trace.meta) else np.nan,
            "active": (copies > 0).astype(float).ravel(),
            "mass": mass.ravel(),
            "base": base,
            "ratio": np.divide(mass.ravel(), base, out=np.full(len(base), np.nan), where=base > 0),
        }
    )


def head_map(table: pd.DataFrame, score: str = "wu_set") -> pd.DataFrame:
    """Layers down, heads across: the mean over the samples that have the score; of `active`, how often a head is."""
    if score not in table.columns:
        raise unknown_choice("score", score, table.columns)
    return table.groupby(["layer", "head"])[score].mean().unstack("head")


def profile(table: pd.DataFrame, score: str = "wu_set") -> pd.DataFrame:
    """Over the heads of a layer: mean, max, the share of `retrieving` ones above .1 and of `strong` ones above .5."""
    scores = head_map(table, score)
    there = scores.notna().sum(axis=1).where(lambda n: n > 0)
    return pd.DataFrame(
        {
            "layer": scores.index,
            "depth": table.groupby("layer")["depth"].first().to_numpy(),
            "mean": scores.mean(axis=1).to_numpy(),
            "max": scores.max(axis=1).to_numpy(),
            "retrieving": ((scores > THRESHOLD).sum(axis=1) / there).to_numpy(),
            "strong": ((scores > STRONG).sum(axis=1) / there).to_numpy(),
        }
    )


def correlation(a: pd.DataFrame, b: pd.DataFrame, score: str = "wu_set") -> float:
    """Pearson over the heads of two models of one shape; NaN where either scores all its heads alike."""
    maps = [head_map(table, score) for table in (a, b)]
    if maps[0].shape != maps[1].shape:
        shapes = " and ".join("{} layers of {} heads".format(*scores.shape) for scores in maps)
        raise UserError(f"the two have {shapes}; only maps of one shape can be correlated, head by head")
    x, y = (scores.to_numpy(float).ravel() for scores in maps)
    there = np.isfinite(x) & np.isfinite(y)
    x, y = x[there], y[there]
    if not len(x) or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def _evidence(look: TraceView) -> Bool[np.ndarray, " key"]:
    trace = look.trace
    return trace.arrays["region_member"][:, trace.coords["region"].index(EVIDENCE)]


def _events(look: TraceView) -> Bool[np.ndarray, "commit layer head"]:
    arrays = look.trace.arrays
    key = kept(look.trace, "row_key")[..., 0]
    step, token = (arrays[name][:, None, None] for name in ("commit_step", "commit_token"))
    return (key >= 0) & _evidence(look)[key] & (arrays["tokens"][step, key] == token)


def _recalled(meta: Mapping[str, Any]) -> bool:
    """ROUGE-1 recall of the best right answer, over normalised words; False where the trace knows no answer."""
    said = Counter(normalise(meta.get("prediction") or "").split())
    golds = [Counter(normalise(answer).split()) for answer in meta.get("answers") or ()]
    return max(((gold & said).total() / gold.total() for gold in golds if gold), default=0.0) > RECALL
