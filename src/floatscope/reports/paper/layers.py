"""Figures by layer: how much attention a few keys absorb, and which heads retrieve the evidence."""

from __future__ import annotations

from collections.abc import Sequence

from floatscope.analysis.detectors import Detector
from floatscope.analysis.retrieval_heads import THRESHOLD
from floatscope.reports.charts import Chart, Map, Section
from floatscope.reports.paper.runs import format_notes, sort_charts
from floatscope.reports.report_runs import ReportRun
from floatscope.reports.sections import anchors, heads
from floatscope.reports.sections.chart_builders import LIFT, build_lines, build_section, runs_with


def build_absorption_section(runs: Sequence[ReportRun], detector: Detector) -> Section:
    """The first key, the top key and the anchors, in percent and as lift."""
    where = {"set": "anchors"}
    with_anchors = [run for run in runs_with(runs, "absorption") if not run.table("absorption", where).empty]
    charts: list[Chart] = list(anchors.build_absorption_section(runs, detector).charts)
    if with_anchors:
        title = f"Attention on the anchors, {detector}"
        charts.append(build_lines(with_anchors, title, LIFT, "absorption", "lift", where, reference=1.0, log=True))
        charts.append(build_lines(with_anchors, title, anchors.PERCENT, "absorption", "percent", where))
    if detector.name == "af_absorption":
        rule = (
            "**Here, the anchors follow the same rule as in the script.** The first and the top key, chosen alike for"
            " every model, are shown beside them, because two rules on one axis compare the rules."
        )
    else:
        rule = (
            "**Here**, one rule applies to every model, because two rules on one axis compare the rules. Use --detector"
            " af_absorption to redraw the rule of the script."
        )
    return build_section(
        "absorption",
        "Absorption across layers",
        "How much of a layer's attention goes to one key: the first key, the top key, and the anchors. A sink takes"
        " much at the first key. A floating anchor takes less, at another position."
        + format_notes(
            "**In the paper's script**, the threshold for an anchor never fires, so the script takes the single largest"
            f" key of a masked diffusion model and the first key of an autoregressive model. {rule}",
            "**In the paper**, absorption is in percent. **Here**, lift and the untrained control are shown beside it,"
            " because a causal mask gives the first key a large share before any training.",
        ),
        "Attention that each key receives from all rows, mean over heads and steps. The top key has the largest lift"
        f" among keys that at least 16 rows see. Anchors: {detector}. Lift is the percentage divided by the percentage"
        " under uniform attention with the same mask.",
        runs,
        sort_charts(charts),
        "absorption",
    )


def build_retrieval_heads_section(runs: Sequence[ReportRun], detector: Detector) -> Section:
    """Maps of two scores of every head, and the number of heads above the threshold."""
    measured = runs_with(runs, "retrieval")
    charts: list[Chart] = [
        heads.build_head_map(run, measured, score) for score in ("wu_set", "mass") for run in measured
    ]
    charts += [chart for chart in heads.build_retrieval_section(runs, detector).charts if not isinstance(chart, Map)]
    return build_section(
        "retrieval-heads",
        "Retrieval heads",
        "Rows are layers, columns are heads: how much of the evidence a head copies into the answer, and how much"
        f" attention it gives to the evidence. The table counts the heads above {THRESHOLD}."
        + format_notes(
            "**In the paper**, the formula of the head map is not given, and no script draws it. **Here**, two scores"
            " are shown, because the picture does not determine the formula: wu_set counts copies, as in the first work"
            " on retrieval heads; mass, the attention on the evidence, is probably closest to the paper's score.",
        ),
        "wu_set: share of the distinct evidence tokens that a head copied; a copy is a token whose predicting row has"
        " its largest key in the evidence, at that token. mass: attention of the predicting rows on the evidence. In an"
        " MDM, a row is taken at the step that commits its token. Maps of the same score share one colour scale.",
        runs,
        sort_charts(charts),
        "retrieval",
    )
