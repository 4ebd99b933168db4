"""Sections about single heads: which retrieve the evidence, which are dormant, where masked rows look."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from floatscope.analysis.detectors import Detector
from floatscope.analysis.heads import dormant_share
from floatscope.analysis.retrieval_heads import STRONG, THRESHOLD, head_correlation, head_map
from floatscope.errors import UserError
from floatscope.reports.charts import Chart, Map, Section, Table
from floatscope.reports.report_runs import ReportRun
from floatscope.reports.sections.chart_builders import (
    LIFT,
    Row,
    build_lines,
    build_section,
    format_number,
    map_values,
    runs_with,
)

SCORES = {
    "wu_set": "share of evidence tokens copied",
    "wu_count": "copies per evidence token",
    "mass": "attention on the evidence",
}
MASKED_ROW_TARGETS = {"prompt": "the prompt", "masks": "masks", "committed": "committed tokens"}


def build_retrieval_section(runs: Sequence[ReportRun], detector: Detector) -> Section:
    """Which heads copy the answer from the evidence."""
    measured = runs_with(runs, "retrieval")
    charts: list[Chart] = [build_head_map(run, measured) for run in measured]
    charts += [
        build_lines(runs, "Attention on the evidence", LIFT, "retrieval", "ratio", None, 1.0, log=True),
        build_lines(runs, "Heads that copy", "share of heads, mean over samples", "retrieval", "active"),
    ]
    rows: list[Row] = [[run.label, score, *_count_retrieval_heads(run, score)] for run in measured for score in SCORES]
    columns = ["model", "score", "best head", f"heads > {THRESHOLD}", f"heads > {STRONG}", f"untrained > {THRESHOLD}"]
    charts.append(Table(columns, rows, "Retrieval heads"))
    if correlations := _correlate_head_maps(measured):
        charts.append(Table(["models", *SCORES], correlations, "Correlation of the maps over heads"))
    return build_section(
        "retrieval",
        "Which heads retrieve the evidence?",
        "A retrieval head attends to the token that is committed: the largest key of the predicting row lies in the"
        " evidence and holds the committed token. In an MDM, the row is that of the step that commits the token.",
        f"wu_set: share of the distinct evidence tokens that a head copied. wu_count: copies divided by the number of"
        f" evidence tokens, in samples whose answer is at least partly right. mass: attention of the predicting rows on"
        f" the evidence. A head above {THRESHOLD} is a retrieval head.",
        runs,
        charts,
        "retrieval",
    )


def build_head_map(run: ReportRun, runs: Sequence[ReportRun], score: str = "wu_set") -> Map:
    """A score of every head, layers × heads. The maps of `runs` share one colour scale."""
    highest = max(float(head_map(each.table("retrieval"), score).max(axis=None)) for each in runs)
    scores = head_map(run.table("retrieval"), score)
    x, y = ([float(name) for name in names] for names in (scores.columns, scores.index))
    return Map(f"{run.label}: {SCORES[score]}", "head", "layer", map_values(scores, 3), x, y, unit=score,
               model=run.label, bounds=(0.0, max(highest, 1e-3)))  # fmt: skip


def _count_retrieval_heads(run: ReportRun, score: str) -> Row:
    """The best head, the shares of heads above the thresholds, and the share in the control."""
    scores = head_map(run.table("retrieval"), score)
    controls = [head_map(table, score) for table in run.control_tables("retrieval")]
    shares = [f"{(scores > threshold).mean(axis=None):.2f}" for threshold in (THRESHOLD, STRONG)]
    control_shares = [(control > THRESHOLD).mean(axis=None) for control in controls]
    layer, head = scores.stack().idxmax() if scores.notna().any(axis=None) else ("–", "–")
    best = f"{scores.max(axis=None):.2f} (layer {layer}, head {head})"
    return [best, *shares, f"{sum(control_shares) / len(control_shares):.2f}" if control_shares else ""]


def _correlate_head_maps(runs: Sequence[ReportRun]) -> list[Row]:
    """The correlation of each pair of models; models with different numbers of layers or heads have none."""
    rows: list[Row] = []
    for a, b in combinations(runs, 2):
        try:
            values = [head_correlation(a.table("retrieval"), b.table("retrieval"), score) for score in SCORES]
        except UserError:
            continue
        rows.append([f"{a.label}, {b.label}", *map(format_number, values)])
    return rows


def build_activity_section(runs: Sequence[ReportRun], detector: Detector) -> Section:
    """Which heads are dormant, and where masked rows look."""
    charts: list[Chart] = [
        build_lines(
            runs, "Attention of heads on their anchors", "share, mean over heads", "head_activity", "anchor_mass"
        ),
        build_lines(runs, "Row entropy of heads", "row entropy (1 = uniform)", "head_activity", "entropy"),
    ]
    charts += [
        build_lines(runs, f"Attention of masked rows on {name}", LIFT, "masked_rows", "ratio", {"set": target}, 1.0)
        for target, name in MASKED_ROW_TARGETS.items()
    ]
    rows: list[Row] = []
    for run in runs_with(runs, "head_activity"):
        controls = [dormant_share(table) for table in run.control_tables("head_activity")]
        control = format_number(sum(controls) / len(controls)) if controls else ""
        rows.append([run.label, format_number(dormant_share(run.table("head_activity"))), control])
    charts.append(Table(["model", "dormant heads", "untrained"], rows, "Dormant heads, share of all heads"))
    return build_section(
        "heads",
        "Active and dormant heads",
        "A dormant head puts most of its attention on its anchors and adds little. Masked rows can attend to the"
        " prompt, to each other, or to committed tokens.",
        f"Anchors: {detector} among the 16 keys of largest lift of a head. Dormant: more than half of the attention on"
        f" anchors, and an output norm below half the mean of the layer; both thresholds are our choice. Masked rows:"
        f" mean over heads and steps, relative to uniform attention.",
        runs,
        charts,
        "head_activity",
    )
