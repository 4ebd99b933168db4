"""Every table of a run in one pass: each trace is read once, goes through every analysis, and is released.

tables = analyse("runs/mdm")
tables["absorption"]                  # a row per sample, layer and set
tables.missing["predicting_rows"]     # why a table is missing: "the trace of 'a' has no regions; …"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pandas as pd

from floatscope.analysis.anchor_movement import (
    drift,
    head_floating,
    layer_drift,
    lifetimes,
)
from floatscope.analysis.anchor_tables import (
    anchor_classes,
    anchor_tokens,
    anchors,
    concentration,
    detectable_absorption,
    eps_sweep,
    sinks,
)
from floatscope.analysis.commit_order import arness, commits, coupling, order
from floatscope.analysis.depth import predicting_rows, structure, token_classes
from floatscope.analysis.detectors import Detector
from floatscope.analysis.expert_choice import experts
from floatscope.analysis.floating import floating_index, top_keys
from floatscope.analysis.heads import head_activity, masked_rows
from floatscope.analysis.influence_correlation import influence
from floatscope.analysis.position_profile import position_profile
from floatscope.analysis.qk_decomposition import attribute_advantage, norms, qk
from floatscope.analysis.region_flow import flow, region_importance, rollout, rollout_distance
from floatscope.analysis.retrieval_heads import retrieval
from floatscope.analysis.sample_table import samples
from floatscope.analysis.trace_view import Source, TraceView, trace_views
from floatscope.errors import UserError, unknown_choice

ANALYSES: dict[str, Callable[[TraceView], pd.DataFrame]] = {
    "absorption": detectable_absorption,
    "anchors": anchors,
    "anchor_classes": anchor_classes,
    "anchor_tokens": anchor_tokens,
    "concentration": concentration,
    "sinks": sinks,
    "eps_sweep": eps_sweep,
    "top_keys": top_keys,
    "drift": drift,
    "lifetimes": lifetimes,
    "layer_drift": layer_drift,
    "head_floating": head_floating,
    "position_profile": position_profile,
    "token_classes": token_classes,
    "structure": structure,
    "predicting_rows": predicting_rows,
    "samples": samples,
    "retrieval": retrieval,
    "flow": flow,
    "rollout": rollout,
    "rollout_distance": rollout_distance,
    "region_importance": region_importance,
    "qk": qk,
    "norms": norms,
    "head_activity": head_activity,
    "masked_rows": masked_rows,
    "commits": commits,
    "order": order,
    "arness": arness,
    "coupling": coupling,
    "influence": influence,
    "experts": experts,
}
"""The tables computed trace by trace; `floating` and `attribution` are computed from `top_keys` and `qk`."""

APPLIES_TO: dict[str, Callable[[TraceView], bool]] = {
    "masked_rows": lambda view: bool(view.is_masked.any()),
    "influence": lambda view: "influence" in view.trace.arrays,
    "experts": lambda view: "expert_ids" in view.trace.arrays,
}
"""Tables of some traces only; elsewhere they do not count as missing."""


@dataclass(frozen=True, repr=False)
class RunTables:
    """The tables of a run: `tables["floating"]`, `"floating" in tables`, `list(tables)`."""

    tables: Mapping[str, pd.DataFrame]
    missing: Mapping[str, str]  # table → why it is missing
    partial: Mapping[str, str] = field(default_factory=dict)  # table → which samples it lacks, and why

    def __getitem__(self, name: str) -> pd.DataFrame:
        """A table by name; a `UserError` says why there is none."""
        if name in self.missing:
            raise UserError(f"there is no table '{name}': {self.missing[name]}")
        if name not in self.tables:
            raise unknown_choice("table", name, self.tables)
        return self.tables[name]

    def __iter__(self) -> Iterator[str]:
        """The names of the tables."""
        return iter(self.tables)

    def __contains__(self, name: object) -> bool:
        return name in self.tables

    def __len__(self) -> int:
        """The number of tables."""
        return len(self.tables)

    def __repr__(self) -> str:
        missing = f"; missing: {', '.join(self.missing)}" if self.missing else ""
        return f"RunTables({', '.join(self.tables)}{missing})"


def analyse(
    source: Source,
    detector: str | Detector = "zscore",
    on_progress: Callable[[str], None] | None = None,
    *,
    commits: str = "answer",
) -> RunTables:
    """Compute every table of a run, of traces or of one trace, in one pass.

    Args:
        source: a run, the path of a run folder, traces, or one trace.
        detector: which keys are anchors, such as "zscore(k=3)" or "topk(k=5)".
        on_progress: called with the id of each sample after its analysis.
        commits: "answer" or "all", which includes the end-of-text tokens after the answer: the commits that analyses of
            reading, retrieval, order and floating count.

    Returns:
        The tables. A table has the samples that allow it; `missing` and `partial` say what is left out, and why.

    Example:
        run = fs.trace(fs.load("twin:mdm"), fs.read_samples("twin:reading-5", limit=2), "runs/mdm", new_tokens=4)
        tables = fs.analyse(run).tables
        tables["floating"].groupby(["group", "layer"])["moved"].mean()
    """
    parts: dict[str, list[pd.DataFrame]] = {name: [] for name in ANALYSES}
    errors: dict[str, list[str]] = {name: [] for name in ANALYSES}
    for view in trace_views(source, detector, commits):
        for name, compute in ANALYSES.items():
            if name in APPLIES_TO and not APPLIES_TO[name](view):
                continue
            try:
                parts[name].append(compute(view))
            except UserError as error:
                errors[name].append(str(error))
        if on_progress is not None:
            on_progress(view.sample)
    tables = {name: pd.concat(rows, ignore_index=True) for name, rows in parts.items() if rows}
    missing = {name: reasons[0] for name, reasons in errors.items() if reasons and name not in tables}
    partial = {
        name: f"{len(reasons)} of {len(reasons) + len(parts[name])} samples, the first because {reasons[0]}"
        for name, reasons in errors.items()
        if reasons and name in tables
    }
    if "top_keys" in tables:
        tables["floating"] = floating_index(tables["top_keys"])
    if "qk" in tables:
        tables["attribution"] = attribute_advantage(tables["qk"])
    return RunTables(tables, missing, partial)
