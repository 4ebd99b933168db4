"""How much a few keys absorb."""

from __future__ import annotations

from collections.abc import Sequence

from floatscope.analysis.detectors import Detector
from floatscope.reports.charts import Chart, Section, Table
from floatscope.reports.compared import Compared
from floatscope.reports.sections.parts import LIFT, Cells, having, lines, section


def absorption(runs: Sequence[Compared], detector: Detector) -> Section:
    charts: list[Chart] = []
    for name, what in (("first", "the first key"), ("top", "the top key, wherever it is")):
        where = {"set": name}
        charts.append(lines(runs, f"Attention on {what}", LIFT, "absorption", "lift", where, reference=1.0, log=True))
        charts.append(
            lines(runs, f"Attention on {what}", "percent of the layer's attention", "absorption", "percent", where)
        )
    rows: list[Cells] = []
    for run in having(runs, "absorption"):
        for name in run.table("absorption")["set"].unique():
            percent, even, lift = (run.number("absorption", v, {"set": name}) for v in ("percent", "uniform", "lift"))
            control = "" if lift.control is None else lift.control.said()
            rows.append([run.label, name, percent.own.said(), f"{even.own.mean:.2f}", lift.own.said(), control])
    columns = ["model", "keys", "percent", "uniform", "lift", "lift, untrained"]
    charts.append(Table(columns, rows, "Mean over layers and steps"))
    return section(
        "absorption",
        "How much a few keys absorb",
        "A sink takes the same large share everywhere; an anchor that floats takes a smaller one, and not at the first"
        " key. Percentages of models with different masks cannot be compared: under a causal mask early keys are seen"
        " by more rows. Lift can. The top key is the one of largest lift, which need not have the largest percentage.",
        f"Received attention of all rows, mean over heads and steps. The top key is that of largest lift among keys"
        f" seen by at least 16 rows. Anchors: {detector}. Lift is percent over the percent of uniform attention under"
        f" the same mask.",
        runs,
        charts,
        "absorption",
    )
