"""Depth: do shallow layers look at structure and deep ones at content?

classes(look)              # a row per layer and token class: its share of attention beside the even one
structure(look)            # a row per layer: structure and content, each over what uniform attention would give
crossing(table)            # the layer from which content is ahead
answer_rows(look)          # a row per layer and region: where the rows that decide the answer look
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from jaxtyping import Bool

from floatscope.analysis.estimate import estimate
from floatscope.analysis.look import TraceView
from floatscope.analysis.tokens import CLASSES, STRUCTURE
from floatscope.errors import UserError


def classes(look: TraceView) -> pd.DataFrame:
    """`share` of the received attention, mean over steps; `base` the same under uniform attention; `ratio` of both.
    `moved` is the share of what the attention moves, `moved_ratio` that over `base`."""
    return _shares(look, "class", {name: look.classes == number for number, name in enumerate(CLASSES)})


def structure(look: TraceView) -> pd.DataFrame:
    structural = np.isin(look.classes, [CLASSES.index(name) for name in STRUCTURE])
    there = look.classes >= 0
    return _shares(look, "set", {"structure": structural, "content": there & ~structural})


def crossing(table: pd.DataFrame) -> int | None:
    """The first layer from which on, up to the last, content has the larger ratio; None if there is no such layer."""
    means = (
        estimate(table, "ratio", by=["layer", "set"]).pivot(index="layer", columns="set", values="mean").sort_index()
    )
    behind = means.index[~(means["content"] > means["structure"])]
    after = means.index if behind.empty else means.index[means.index > behind[-1]]
    return None if after.empty else int(after[0])


def answer_rows(look: TraceView) -> pd.DataFrame:
    """`mass` an average predicting row puts on a region (mean over heads and commits), `base` what uniform attention
    would put there, `ratio` of both. Where documents and gold ones are known, `other documents` are those that are not
    gold."""
    trace = look.trace
    if "row_regions" not in trace.arrays or not trace.coords.get("region"):
        raise UserError(f"the trace of '{look.sample}' has no regions; trace samples with passages, or give regions=")
    if not len(trace.arrays["row_regions"]):
        raise UserError(f"the trace of '{look.sample}' has no commits, so no row in it decides an answer")
    mass = trace.arrays["row_regions"].astype(np.float64).mean((0, 2))  # [layer, region]
    base, names = look.evenly, list(trace.coords["region"])
    documents = [i for i, name in enumerate(names) if name.startswith("document ")]
    if documents and "gold" in names:
        gold = names.index("gold")
        mass, base = (np.column_stack([x, x[:, documents].sum(1) - x[:, gold]]) for x in (mass, base))
        names.append("other documents")
    table = pd.DataFrame(
        {
            "sample": look.sample,
            "layer": np.repeat(look.layers, len(names)),
            "depth": np.repeat(look.depth, len(names)),
            "region": np.tile(np.array(names), len(look.layers)),
            "mass": mass.ravel(),
            "base": base.ravel(),
        }
    )
    table["ratio"] = (table["mass"] / table["base"]).where(table["base"] > 0)
    return table


def _shares(look: TraceView, column: str, sets: Mapping[str, Bool[np.ndarray, "step key"]]) -> pd.DataFrame:
    """A row per set and layer."""
    chosen = np.stack(list(sets.values()), -1).astype(np.float64)  # [step, key, set]
    received = (np.nan_to_num(look.received), np.nan_to_num(look.uniform), look.moved)
    share, base, moved = ((r @ chosen).mean(0).T.ravel() for r in received)
    table = pd.DataFrame(
        {
            "sample": look.sample,
            "layer": np.tile(look.layers, len(sets)),
            "depth": np.tile(look.depth, len(sets)),
            column: np.repeat(list(sets), len(look.layers)),
            "share": share,
            "base": base,
            "moved": moved,
        }
    )
    for ratio, name in (("ratio", "share"), ("moved_ratio", "moved")):
        table[ratio] = (table[name] / table["base"]).where(table["base"] > 0)
    return table
