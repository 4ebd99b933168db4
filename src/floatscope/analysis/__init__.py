"""From traces to tables: every analysis takes a run, traces or one trace and returns a table with a row per sample.

fs.analyse(run)                                  # every table in one pass
fs.analysis.floating(run)                        # one table
fs.analysis.absorption(run, detector="topk(k=5)")
fs.analysis.estimate(table, "lift", by=["layer", "set"])     # mean with its 95 % interval
fs.analysis.difference(table, control, "lift")               # paired difference
"""

from floatscope.analysis.anchor_movement import drift, head_floating, layer_drift, lifetimes
from floatscope.analysis.anchor_tables import (
    absorption,
    anchor_classes,
    anchor_tokens,
    anchors,
    concentration,
    eps_sweep,
    sinks,
)
from floatscope.analysis.commit_order import arness, commits, coupling, order, trajectory
from floatscope.analysis.depth import find_crossing, predicting_rows, structure, token_classes
from floatscope.analysis.detectors import Detector, detect, parse_detector
from floatscope.analysis.evaluations import Evaluation, open_evaluation
from floatscope.analysis.experiments import effects
from floatscope.analysis.expert_choice import experts
from floatscope.analysis.floating import floating, top_keys
from floatscope.analysis.heads import dormant_share, head_activity, masked_rows
from floatscope.analysis.influence_correlation import influence
from floatscope.analysis.position_profile import position_profile
from floatscope.analysis.qk_decomposition import attribution, key_zscores, norms, qk
from floatscope.analysis.region_flow import flow, region_importance, rollout, rollout_distance
from floatscope.analysis.retrieval_heads import head_correlation, head_map, layer_profile, retrieval
from floatscope.analysis.run_tables import RunTables, analyse
from floatscope.analysis.sample_table import samples
from floatscope.analysis.statistics import bootstrap, difference, estimate, holm
from floatscope.analysis.stress_tests import position_gap, stress_curve
from floatscope.analysis.trace_view import TraceView, trace_views

__all__ = [
    "Detector",
    "Evaluation",
    "RunTables",
    "TraceView",
    "absorption",
    "analyse",
    "anchor_classes",
    "anchor_tokens",
    "anchors",
    "arness",
    "attribution",
    "bootstrap",
    "commits",
    "concentration",
    "coupling",
    "detect",
    "difference",
    "dormant_share",
    "drift",
    "effects",
    "eps_sweep",
    "estimate",
    "experts",
    "find_crossing",
    "floating",
    "flow",
    "head_activity",
    "head_correlation",
    "head_floating",
    "head_map",
    "holm",
    "influence",
    "key_zscores",
    "layer_drift",
    "layer_profile",
    "lifetimes",
    "masked_rows",
    "norms",
    "open_evaluation",
    "order",
    "parse_detector",
    "position_gap",
    "position_profile",
    "predicting_rows",
    "qk",
    "region_importance",
    "retrieval",
    "rollout",
    "rollout_distance",
    "samples",
    "sinks",
    "stress_curve",
    "structure",
    "token_classes",
    "top_keys",
    "trace_views",
    "trajectory",
]


def __dir__() -> list[str]:
    return __all__
