"""How information flows between the regions of a canvas."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from floatscope.analysis.detectors import Detector
from floatscope.reports.charts import Chart, Map, Section
from floatscope.reports.compared import Category, Compared
from floatscope.reports.sections.parts import dots, having, lines, region_order, section

UNIFORM = "over that of uniform attention"
DISTANCE = "largest distance of two regions"


def flow(runs: Sequence[Compared], detector: Detector) -> Section:
    those = having(runs, "flow")
    names = list(
        dict.fromkeys(name for run in having(runs, "importance") for name in run.table("importance")["key_region"])
    )
    reached: list[Category] = [(name, "importance", "token_ratio", {"key_region": name}) for name in names]
    pooled: list[Category] = [(name, "importance", "pooled_ratio", {"key_region": name}) for name in names]
    charts: list[Chart] = [*maps_of_regions(those)]
    charts += [
        dots(runs, "What reaches the last layer, token by token", UNIFORM, reached, 1.0, "uniform"),
        dots(runs, "What reaches the last layer, region by region", UNIFORM, pooled, 1.0, "uniform"),
        lines(runs, "Does a rollout still know its row, token by token?", DISTANCE, "rank_one", "token"),
        lines(runs, "Does a rollout still know its row, region by region?", DISTANCE, "rank_one", "pooled"),
    ]
    return section(
        "flow",
        "From region to region",
        "Rows are regions that look, columns what they look at. A rollout follows attention through all layers: what of"
        " the canvas reaches each place. Long products of such matrices forget their row; where the distance nears 0 a"
        " rollout says the same of every region, and so nothing of any.",
        "Mass over that of uniform attention, mean over heads, layers and steps; grey where a region cannot see the"
        " other. Two rollouts of ½·attention + ½·identity: by tokens, pooled to regions at the end; and pooled first,"
        " region by region, which gives other numbers. Distance: total variation, 0 alike, 1 apart.",
        runs,
        charts,
        "flow",
    )


def maps_of_regions(runs: Sequence[Compared]) -> list[Map]:
    """What each region's rows give each region, over the even share, mean over layers; one scale of colours for all."""
    ratios = []
    for run in runs:
        ratio = run.table("flow").groupby(["region", "key_region"])["ratio"].mean().unstack("key_region")
        names = sorted(ratio.index, key=region_order)
        ratios.append(ratio.reindex(names, columns=names))
    bounds = (0.1, max(10.0, *(float(ratio.max(axis=None)) for ratio in ratios))) if ratios else (0.1, 10.0)
    return [
        Map(f"{run.label}: who looks where", "key region", "region", rounded(ratio), list(ratio.columns),
            list(ratio.index), [], "over the even share", run.label, log=True, bounds=bounds)
        for run, ratio in zip(runs, ratios, strict=True)
    ]  # fmt: skip


def rounded(table: pd.DataFrame) -> list[list[float | int | None]]:
    return [[None if v != v else round(float(v), 2) for v in row] for row in table.to_numpy()]
