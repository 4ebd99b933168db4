"""Retrieval heads: which heads copy the answer from the evidence?

    table = retrieval(run)                 # a row per sample, layer and head
    head_map(table)                        # layer × head, mean over the samples
    layer_profile(table, "wu_count")       # a row per layer: mean, max, shares of heads above .1 and above .5
    head_correlation(table, other)         # Pearson's correlation of the maps of two models

A copy event: the largest key of a commit's predicting row lies in the evidence and holds the committed token. The row
is that of the step which commits the position, so each of several commits in a step is an event of its own. Commits are
those of the answer, or all with `commits="all"`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool

from floatscope.analysis.trace_view import TraceView, per_sample
from floatscope.errors import UserError, unknown_choice
from floatscope.tasks.scores import normalise

EVIDENCE = "evidence"
"""The region of the answer inside the passages."""
THRESHOLD = 0.1
"""A head above this is a retrieval head."""
STRONG = 0.5
MIN_RECALL = 0.5
"""`wu_count` needs a prediction with more than this share of the words of a right answer."""


@per_sample
def retrieval(view: TraceView) -> pd.DataFrame:
    """How often each head copies from the evidence: a row per layer and head. A sample without evidence is refused.

    `copies` is the number of copy events; `wu_set` the share of the evidence's distinct tokens that were copied;
    `wu_count` the events over the positions of the evidence, NaN unless the answer was recalled; `active` is 1 with an
    event and 0 without. `mass` is what an average predicting row gives the evidence, `base` the same under uniform
    attention, `ratio` of both.
    """
    trace, arrays = view.trace, view.trace.arrays
    if EVIDENCE not in trace.coords.get("region", ()) or not _is_evidence(view).any():
        raise UserError(
            f"the trace of '{view.sample}' has no evidence; give a passage of the sample its \"evidence\","
            " [start, stop] characters of the answer in its text, and trace it again"
        )
    events, is_evidence = _copy_events(view), _is_evidence(view)
    evidence_tokens = arrays["tokens"][-1, is_evidence]
    copies = events.sum(0)  # [layer, head]
    committed = arrays["commit_token"][view.commits]
    commits_token = (np.unique(evidence_tokens)[:, None] == committed).astype(int)  # [token, commit]
    is_copied = np.tensordot(commits_token, events, 1) > 0  # [token, layer, head]
    region = trace.coords["region"].index(EVIDENCE)
    mass = trace.require("row_regions")[view.commits][..., region].astype(np.float64).mean(0)
    layers, heads = copies.shape
    base = np.repeat(view.uniform_region_mass[:, region], heads)
    return pd.DataFrame(
        {
            "sample": view.sample,
            "layer": np.repeat(view.layers, heads),
            "depth": np.repeat(view.depth, heads),
            "head": np.tile(np.arange(heads), layers),
            "copies": copies.ravel(),
            "wu_set": is_copied.mean(0).ravel(),
            "wu_count": copies.ravel() / len(evidence_tokens) if _is_recalled(trace.meta) else np.nan,
            "active": (copies > 0).astype(float).ravel(),
            "mass": mass.ravel(),
            "base": base,
            "ratio": np.divide(mass.ravel(), base, out=np.full(len(base), np.nan), where=base > 0),
        }
    )


def head_map(table: pd.DataFrame, score: str = "wu_set") -> pd.DataFrame:
    """Return a score as layers × heads, mean over the samples that have it; of `active`, how often a head is active."""
    if score not in table.columns:
        raise unknown_choice("score", score, table.columns)
    return table.groupby(["layer", "head"])[score].mean().unstack("head")


def layer_profile(table: pd.DataFrame, score: str = "wu_set") -> pd.DataFrame:
    """Return mean and max over the heads of each layer, and the shares of `retrieving` and of `strong` heads."""
    scores = head_map(table, score)
    heads = scores.notna().sum(axis=1).where(lambda n: n > 0)
    return pd.DataFrame(
        {
            "layer": scores.index,
            "depth": table.groupby("layer")["depth"].first().to_numpy(),
            "mean": scores.mean(axis=1).to_numpy(),
            "max": scores.max(axis=1).to_numpy(),
            "retrieving": ((scores > THRESHOLD).sum(axis=1) / heads).to_numpy(),
            "strong": ((scores > STRONG).sum(axis=1) / heads).to_numpy(),
        }
    )


def head_correlation(a: pd.DataFrame, b: pd.DataFrame, score: str = "wu_set") -> float:
    """Return Pearson's correlation over the heads of two models of one shape; NaN if all heads of one are equal."""
    maps = [head_map(table, score) for table in (a, b)]
    if maps[0].shape != maps[1].shape:
        shapes = " and ".join("{} layers of {} heads".format(*scores.shape) for scores in maps)
        raise UserError(f"the two have {shapes}; only maps of one shape can be correlated head by head")
    x, y = (scores.to_numpy(float).ravel() for scores in maps)
    has_both = np.isfinite(x) & np.isfinite(y)
    x, y = x[has_both], y[has_both]
    if not len(x) or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def _is_evidence(view: TraceView) -> Bool[np.ndarray, " key"]:
    trace = view.trace
    return trace.arrays["region_member"][:, trace.coords["region"].index(EVIDENCE)]


def _copy_events(view: TraceView) -> Bool[np.ndarray, "commit layer head"]:
    arrays = view.trace.arrays
    key = view.trace.require("row_key")[view.commits][..., 0]
    step, token = (arrays[name][view.commits][:, None, None] for name in ("commit_step", "commit_token"))
    return (key >= 0) & _is_evidence(view)[key] & (arrays["tokens"][step, key] == token)


def _is_recalled(meta: Mapping[str, Any]) -> bool:
    """Whether ROUGE-1 recall of the best right answer, over normalised words, is enough; False without an answer."""
    words = Counter(normalise(meta.get("prediction") or "").split())
    golds = [Counter(normalise(answer).split()) for answer in meta.get("answers") or ()]
    return max(((gold & words).total() / gold.total() for gold in golds if gold), default=0.0) > MIN_RECALL
