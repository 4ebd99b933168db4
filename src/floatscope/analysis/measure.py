"""Every table of a run in one pass: each trace is read once, looked at by every analysis, and let go.

measured = measure(open_run("runs/mdm"))
measured.tables["absorption"]              # a row per sample, layer and set
measured.lacking["answer_rows"]            # why a table is not there: "the trace of 'a' has no regions; …"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import pandas as pd

from floatscope.analysis import anchors, depth, floating, flow, heads, influence, order, qk, retrieval
from floatscope.analysis.absorption import of_detectable
from floatscope.analysis.asked import asked
from floatscope.analysis.detectors import Detector
from floatscope.analysis.look import Look, looks
from floatscope.errors import UserError
from floatscope.trace import Trace

ANALYSES: dict[str, Callable[[Look], pd.DataFrame]] = {
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
ONLY: dict[str, Callable[[Look], bool]] = {
    "directed": lambda look: bool(look.masked.any()),
    "influence": lambda look: "influence" in look.trace.arrays,
}
"""Tables that are of some traces only, and not missed in others."""


@dataclass(frozen=True)
class Measured:
    tables: Mapping[str, pd.DataFrame]
    lacking: Mapping[str, str]  # table → why it is not there


def measure(
    traces: Iterable[Trace], detector: str | Detector = "zscore", told: Callable[[str], None] = lambda _: None
) -> Measured:
    """`told` hears the name of each sample that is done. A table that one trace cannot give is given for none."""
    parts: dict[str, list[pd.DataFrame]] = {name: [] for name in ANALYSES}
    lacking: dict[str, str] = {}
    for look in looks(traces, detector):
        for name in [name for name in parts if name not in lacking]:
            if name in ONLY and not ONLY[name](look):
                continue
            try:
                parts[name].append(ANALYSES[name](look))
            except UserError as error:
                lacking[name] = str(error)
        told(look.sample)
    tables = {
        name: pd.concat(found, ignore_index=True) for name, found in parts.items() if found and name not in lacking
    }
    if "tops" in tables:
        tables["floating"] = floating.floating_index(tables["tops"])
    if "qk" in tables:
        tables["attribution"] = qk.attribution(tables["qk"])
    return Measured(tables, lacking)
