"""Depth: do shallow layers attend to structure and deep layers to content?

token_classes(run)         # a row per layer and token class: its share of attention, also under uniform attention
structure(run)             # a row per layer, for structure and for content
find_crossing(table)       # the layer from which on content leads
predicting_rows(run)       # a row per layer and region: what the predicting rows attend to
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from jaxtyping import Bool

from floatscope.analysis.statistics import estimate
from floatscope.analysis.trace_view import TraceView, per_sample
from floatscope.errors import UserError
from floatscope.models.token_classes import CLASSES, STRUCTURE


@per_sample
def token_classes(view: TraceView) -> pd.DataFrame:
    """The attention on each token class, mean over steps: a row per layer and class.

    `share` of the received attention, `base` the same under uniform attention, their `ratio`; `contribution` the share
    of all contributions, `contribution_ratio` that over `base`.
    """
    return _share_table(view, "class", {name: view.token_classes == index for index, name in enumerate(CLASSES)})


@per_sample
def structure(view: TraceView) -> pd.DataFrame:
    """The attention on `structure` (every token class except content) and on `content`: a row per layer and set.

    The columns are those of `token_classes`.
    """
    is_structure = np.isin(view.token_classes, [CLASSES.index(name) for name in STRUCTURE])
    on_canvas = view.token_classes >= 0
    return _share_table(view, "set", {"structure": is_structure, "content": on_canvas & ~is_structure})


def find_crossing(table: pd.DataFrame) -> int | None:
    """Return the first layer from which on, up to the last, content has the larger ratio, or None.

    `table` is one of `structure`.
    """
    means = (
        estimate(table, "ratio", by=["layer", "set"]).pivot(index="layer", columns="set", values="mean").sort_index()
    )
    not_leading = means.index[~(means["content"] > means["structure"])]
    leading = means.index if not_leading.empty else means.index[means.index > not_leading[-1]]
    return None if leading.empty else int(leading[0])


@per_sample
def predicting_rows(view: TraceView) -> pd.DataFrame:
    """What the predicting rows attend to: a row per layer and region.

    `mass` is what an average predicting row of the answer gives a region (mean over heads and commits; of all commits
    with `commits="all"`), `base` the same under uniform attention, their `ratio`. If documents and gold are known,
    `other documents` are the documents that are not gold.
    """
    trace = view.trace
    if "row_regions" not in trace.arrays or not trace.coords.get("region"):
        raise UserError(f"the trace of '{view.sample}' has no regions; trace samples with passages, or give regions=")
    mass = trace.arrays["row_regions"][view.commits].astype(np.float64).mean((0, 2))  # [layer, region]
    base, names = view.uniform_region_mass, list(trace.coords["region"])
    documents = [i for i, name in enumerate(names) if name.startswith("document ")]
    if documents and "gold" in names:
        gold = names.index("gold")
        mass, base = (np.column_stack([x, x[:, documents].sum(1) - x[:, gold]]) for x in (mass, base))
        names.append("other documents")
    table = pd.DataFrame(
        {
            "sample": view.sample,
            "layer": np.repeat(view.layers, len(names)),
            "depth": np.repeat(view.depth, len(names)),
            "region": np.tile(np.array(names), len(view.layers)),
            "mass": mass.ravel(),
            "base": base.ravel(),
        }
    )
    table["ratio"] = (table["mass"] / table["base"]).where(table["base"] > 0)
    return table


def _share_table(view: TraceView, column: str, sets: Mapping[str, Bool[np.ndarray, "step key"]]) -> pd.DataFrame:
    """A row per set of keys and layer."""
    members = np.stack(list(sets.values()), -1).astype(np.float64)  # [step, key, set]
    values = (np.nan_to_num(view.received), np.nan_to_num(view.uniform), view.contribution_share)
    share, base, contribution = ((x @ members).mean(0).T.ravel() for x in values)
    table = pd.DataFrame(
        {
            "sample": view.sample,
            "layer": np.tile(view.layers, len(sets)),
            "depth": np.tile(view.depth, len(sets)),
            column: np.repeat(list(sets), len(view.layers)),
            "share": share,
            "base": base,
            "contribution": contribution,
        }
    )
    for ratio, name in (("ratio", "share"), ("contribution_ratio", "contribution")):
        table[ratio] = (table[name] / table["base"]).where(table["base"] > 0)
    return table
