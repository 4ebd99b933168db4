"""Depth: do shallow layers look at structure and deep ones at content?

classes(look)              # a row per layer and token class: its share of attention beside the even one
structure(look)            # a row per layer: structure and content, each over what uniform attention would give
crossing(table)            # the layer from which content is ahead
answer_rows(look)          # a row per layer and region: where the rows that decide the answer look
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Float

from floatscope.analysis.estimate import estimate
from floatscope.analysis.look import Look
from floatscope.analysis.tokens import CLASSES, STRUCTURE
from floatscope.errors import UserError


def classes(look: Look) -> pd.DataFrame:
    """`share` of the received attention, mean over steps; `base` the same under uniform attention; `ratio` of both."""
    table = pd.concat(
        [_share(look, name, look.classes == number) for number, name in enumerate(CLASSES)], ignore_index=True
    )
    return table.rename(columns={"set": "class"})


def structure(look: Look) -> pd.DataFrame:
    structural = np.isin(look.classes, [CLASSES.index(name) for name in STRUCTURE])
    there = look.classes >= 0
    return pd.concat(
        [_share(look, "structure", structural), _share(look, "content", there & ~structural)], ignore_index=True
    )


def crossing(table: pd.DataFrame) -> int | None:
    """The first layer from which on, up to the last, content has the larger ratio; None if there is no such layer."""
    means = (
        estimate(table, "ratio", by=["layer", "set"]).pivot(index="layer", columns="set", values="mean").sort_index()
    )
    behind = means.index[~(means["content"] > means["structure"])]
    after = means.index if behind.empty else means.index[means.index > behind[-1]]
    return None if after.empty else int(after[0])


def answer_rows(look: Look) -> pd.DataFrame:
    """`mass` an average predicting row puts on a region (mean over heads and commits), `base` the region's share of the
    keys of its canvas, `ratio` of both."""
    trace = look.trace
    if "row_regions" not in trace.arrays or not trace.coords.get("region"):
        raise UserError(f"the trace of '{look.sample}' has no regions; trace samples with passages, or give regions=")
    mass = trace.arrays["row_regions"].astype(np.float64).mean((0, 2))  # [layer, region]
    member = trace.arrays["region_member"]
    base = member.mean(0)
    names = trace.coords["region"]
    table = pd.DataFrame(
        {
            "sample": look.sample,
            "layer": np.repeat(look.layers, len(names)),
            "depth": np.repeat(look.depth, len(names)),
            "region": np.tile(np.array(names), len(look.layers)),
            "mass": mass.ravel(),
            "base": np.tile(base, len(look.layers)),
        }
    )
    table["ratio"] = (table["mass"] / table["base"]).where(table["base"] > 0)
    return table


def _share(look: Look, name: str, chosen: np.ndarray) -> pd.DataFrame:
    share, base = (_mass(values, chosen) for values in (look.received, look.uniform))
    table = pd.DataFrame(
        {"sample": look.sample, "layer": look.layers, "depth": look.depth, "set": name, "share": share, "base": base}
    )
    table["ratio"] = (table["share"] / table["base"]).where(table["base"] > 0)
    return table


def _mass(values: Float[np.ndarray, "step layer key"], chosen: np.ndarray) -> Float[np.ndarray, " layer"]:
    mass: np.ndarray = np.nansum(np.where(chosen[:, None], values, 0.0), -1).mean(0)
    return mass
