"""Every table of a run in one pass: each trace is read once, looked at by every analysis, and let go.

measured = measure(open_run("runs/mdm"))
measured.tables["absorption"]              # a row per sample, layer and set
measured.lacking["answer_rows"]            # why a table is not there: "the trace of 'a' has no regions; …"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import pandas as pd

from floatscope.analysis import anchors, depth, floating, flow, heads, influence, order, qk, retrieval
from floatscope.analysis.absorption import of_detectable
from floatscope.analysis.asked import asked
from floatscope.analysis.detectors import Detector
from floatscope.analysis.look import TraceView, trace_views
from floatscope.errors import UserError
from floatscope.traces import Trace

ANALYSES: dict[str, Callable[[TraceView], pd.DataFrame]] = {
    "absorption": of_detectable,
    "anchors": anchors.counts,
    "identity": anchors.identity,
    "tokens": anchors.strings,
    "concentration": anchors.concentration,
    "sinks": anchors.sinks,
    "sweep": anchors.sweep,
    "tops": floating.tops,
    "drift": floating.drift,
    "lifetimes": floating.lifetimes,
    "over_layers": floating.over_layers,
    "heads": floating.heads,
    "classes": depth.classes,
    "structure": depth.structure,
    "answer_rows": depth.answer_rows,
    "asked": asked,
    "retrieval": retrieval.retrieval,
    "flow": flow.flow,
    "rollout": flow.rollout,
    "rank_one": flow.rank_one,
    "importance": flow.importance,
    "qk": qk.qk,
    "norms": qk.norms,
    "activity": heads.activity,
    "directed": heads.directed,
    "commits": order.commits,
    "order": order.order,
    "arness": order.arness,
    "coupling": order.coupling,
    "influence": influence.influence,
}
ONLY: dict[str, Callable[[TraceView], bool]] = {
    "directed": lambda look: bool(look.masked.any()),
    "influence": lambda look: "influence" in look.trace.arrays,
}
"""Tables that are of some traces only, and not missed in others."""


@dataclass(frozen=True)
class RunTables:
    tables: Mapping[str, pd.DataFrame]
    missing: Mapping[str, str]  # table → why it is not there
    partial: Mapping[str, str] = field(default_factory=dict)  # table → which samples are not in it, and why


def build_tables(
    traces: Iterable[Trace], detector: str | Detector = "zscore", told: Callable[[str], None] = lambda _: None
) -> RunTables:
    """`told` hears the name of each sample that is done. A table has the samples that can give it."""
    parts: dict[str, list[pd.DataFrame]] = {name: [] for name in ANALYSES}
    without: dict[str, list[str]] = {name: [] for name in ANALYSES}
    for look in trace_views(traces, detector):
        for name, analysis in ANALYSES.items():
            if name in ONLY and not ONLY[name](look):
                continue
            try:
                parts[name].append(analysis(look))
            except UserError as error:
                without[name].append(str(error))
        told(look.sample)
    tables = {name: pd.concat(found, ignore_index=True) for name, found in parts.items() if found}
    lacking = {name: why[0] for name, why in without.items() if why and name not in tables}
    partly = {
        name: f"{len(why)} of {len(why) + len(parts[name])} samples, the first because {why[0]}"
        for name, why in without.items()
        if why and name in tables
    }
    if "tops" in tables:
        tables["floating"] = floating.floating_index(tables["tops"])
    if "qk" in tables:
        tables["attribution"] = qk.attribution(tables["qk"])
    return RunTables(tables, lacking, partly)
