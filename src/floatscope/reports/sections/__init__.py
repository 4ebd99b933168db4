"""The sections of a report: each analysis with its charts, what it shows, and how it was computed.

    build_sections(runs, parse_detector("zscore"))       # list of Section, one per question
    build_summary(runs)                                  # the sentences at the top

If no run has the tables of a section, the section says why.
"""

from __future__ import annotations

from collections.abc import Sequence

from floatscope.analysis.detectors import Detector
from floatscope.reports.charts import Section
from floatscope.reports.report_runs import ReportRun
from floatscope.reports.sections.anchors import (
    build_absorption_section,
    build_anchors_section,
    build_contribution_section,
    build_qk_section,
)
from floatscope.reports.sections.decoding import build_canvas_section, build_floating_section, build_order_section
from floatscope.reports.sections.heads import build_activity_section, build_retrieval_section
from floatscope.reports.sections.regions import (
    build_depth_section,
    build_flow_section,
    build_influence_section,
    build_predicting_rows_section,
)
from floatscope.reports.sections.summary import build_models_section
from floatscope.reports.sections.summary import build_summary as build_summary

SECTIONS = (
    build_absorption_section,
    build_anchors_section,
    build_floating_section,
    build_canvas_section,
    build_depth_section,
    build_predicting_rows_section,
    build_retrieval_section,
    build_flow_section,
    build_qk_section,
    build_contribution_section,
    build_activity_section,
    build_order_section,
)


def build_sections(runs: Sequence[ReportRun], detector: Detector) -> list[Section]:
    """All sections; the comparison only for runs that share samples, influence only for runs that traced it."""
    shared = set.intersection(*(set(run.run.finished) for run in runs))
    first = [build_models_section] if len(runs) > 1 and shared else []
    last = [build_influence_section] if any(run.has_table("influence") for run in runs) else []
    return [build(runs, detector) for build in (*first, *SECTIONS, *last)]
