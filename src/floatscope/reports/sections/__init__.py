"""The sections of a report: each analysis with its charts, what it shows, how it was computed.

    sections(runs, detector("zscore"))       # list of Section, one per question
    summary(runs)                            # the sentences that stand first

A section whose tables no run has says why instead of showing nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from floatscope.analysis.detectors import Detector
from floatscope.reports.charts import Section
from floatscope.reports.compared import Compared
from floatscope.reports.sections.absorption import absorption
from floatscope.reports.sections.anchors import anchors
from floatscope.reports.sections.depth import depth, reading
from floatscope.reports.sections.floating import floating, maps
from floatscope.reports.sections.flow import flow
from floatscope.reports.sections.heads import activity, retrieval
from floatscope.reports.sections.influence import influence
from floatscope.reports.sections.models import between
from floatscope.reports.sections.order import order
from floatscope.reports.sections.qk import carried, qk
from floatscope.reports.sections.summary import summary as summary

QUESTIONS = (absorption, anchors, floating, maps, depth, reading, retrieval, flow, qk, carried, activity, order)


def sections(runs: Sequence[Compared], detector: Detector) -> list[Section]:
    """The models side by side where they share samples, influence where it was traced."""
    shared = set.intersection(*(set(run.run.done) for run in runs))
    first = [between] if len(runs) > 1 and shared else []
    last = [influence] if any(run.has("influence") for run in runs) else []
    return [make(runs, detector) for make in (*first, *QUESTIONS, *last)]
