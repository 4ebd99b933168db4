"""In which order a canvas is filled, and whether attention leads it."""

from __future__ import annotations

from collections.abc import Sequence

from floatscope.analysis.detectors import Detector
from floatscope.analysis.order import trajectory
from floatscope.reports.charts import Chart, Map, Section, Table
from floatscope.reports.compared import Category, Compared
from floatscope.reports.sections.parts import Cells, cell, dots, having, lines, section

TIMES: list[Category] = [("Kendall's τ", "order", "kendall", {}), ("U-shape", "order", "u_shape", {})]


def order(runs: Sequence[Compared], detector: Detector) -> Section:
    those = having(runs, "commits")
    charts: list[Chart] = [map_of_filling(run) for run in those]
    charts += [
        dots(runs, "Filled from the left, from the ends", "0 = neither", TIMES, 0.0, "neither"),
        lines(runs, "Local AR-ness", "share of commits", "arness", "local", along="k", x_label="k before it, in a row"),
        lines(
            runs, "Global AR-ness", "share of commits", "arness", "global", along="k", x_label="among the k first masks"
        ),
    ]
    numbers: list[Cells] = [
        [run.label, *(cell(run.number("order", value)) for value in ("tokens_per_step", "trivial", "trivial_first"))]
        for run in having(runs, "order")
    ]
    tokens = ["model", "tokens per step", "trivial tokens", "among the first quarter"]
    charts.append(Table(tokens, numbers, "What a step writes"))
    rows: list[Cells] = []
    for run in (run for run in having(runs, "coupling") if run.table("coupling")["hit_chance"].notna().any()):
        for lag, when in ((0, "its own step"), (1, "the step after")):
            where = {"lag": lag}
            hit, chance = (run.number("coupling", value, where) for value in ("hit_4", "hit_4_chance"))
            away, drawn = (run.number("coupling", value, where) for value in ("distance", "distance_chance"))
            rows.append([run.label, when, cell(hit), chance.own.said(), away.own.said(1), drawn.own.said(1)])
    columns = [
        "model",
        "commits of",
        "within 4 of the top key",
        "of a mask by chance",
        "distance",
        "from a mask by chance",
    ]
    charts.append(Table(columns, rows, "How far the top key is from what is written next"))
    return section(
        "order",
        "In which order the canvas is filled",
        "From left to right, from the ends, or the easy tokens first? Each map shows by when each position is filled:"
        " a diagonal from the upper left is left to right. If attention leads the order, the top key lies nearer to"
        " what is written next than a mask drawn at random.",
        "Positions are those to be filled. τ is 1 from left to right. U-shape: mean time of the middle third less that"
        " of the outer thirds. Trivial: tokens that are no content. Local AR-ness at k: commits that end a run of k +"
        " 1 neighbours; global: that fill one of the k first masks. The commits of one step are taken from the left,"
        " so that a step which fills everything counts as left to right. The top key may be anywhere, a mask only in"
        " the answer; of models without masks nothing is shown.",
        runs,
        charts,
        "order",
    )


def map_of_filling(run: Compared) -> Map:
    """Steps down, positions across: the share of samples that have filled it by the end of the step."""
    share = trajectory(run.table("commits")).pivot(index="step", columns="position", values="share")
    values = [[None if v != v else round(float(v), 3) for v in row] for row in share.to_numpy()]
    x, y = ([float(name) for name in names] for names in (share.columns, share.index))
    return Map(f"{run.label}: filled by when", "position", "step", values, x, y, unit="share of samples",
               model=run.label, bounds=(0.0, 1.0))  # fmt: skip
