"""Which heads read the evidence, which do little, and where masked rows look."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from floatscope.analysis.detectors import Detector
from floatscope.analysis.heads import SETS, dormant
from floatscope.analysis.retrieval import STRONG, THRESHOLD, correlation, head_map
from floatscope.errors import UserError
from floatscope.reports.charts import Chart, Map, Section, Table
from floatscope.reports.compared import Compared
from floatscope.reports.sections.parts import Cells, having, lines, section, share

SCORES = {
    "wu_set": "tokens of the evidence copied",
    "wu_count": "copies per token",
    "mass": "attention on the evidence",
}


def retrieval(runs: Sequence[Compared], detector: Detector) -> Section:
    those = having(runs, "retrieval")
    charts: list[Chart] = [map_of_heads(run, those) for run in those]
    charts += [
        lines(
            runs,
            "Attention on the evidence",
            "over that of uniform attention",
            "retrieval",
            "ratio",
            None,
            1.0,
            log=True,
        ),
        lines(runs, "Heads that copy", "share of heads, mean over samples", "retrieval", "active"),
    ]
    rows: list[Cells] = [[run.label, name, *_above(run, name)] for run in those for name in SCORES]
    columns = ["model", "score", "best head", f"heads > {THRESHOLD}", f"heads > {STRONG}", f"untrained > {THRESHOLD}"]
    charts.append(Table(columns, rows, "Retrieval heads"))
    if alike := _alike(those):
        charts.append(Table(["models", *SCORES], alike, "Correlation of the maps, head by head"))
    return section(
        "retrieval",
        "Which heads read the evidence?",
        "A retrieval head looks at the very token that is written: the largest key of the row that decides a token"
        " lies in the evidence and holds that token. In a masked model the row is that of the step which commits it.",
        f"wu_set: share of the evidence's different tokens that a head copied. wu_count: copies over its tokens, in"
        f" samples answered in part at least. Mass: attention of the deciding rows on the evidence. A head above"
        f" {THRESHOLD} is a retrieval head.",
        runs,
        charts,
        "retrieval",
    )


def map_of_heads(run: Compared, beside: Sequence[Compared], score: str = "wu_set") -> Map:
    """Layers down, heads across; one scale of colours for all maps side by side."""
    maps = [head_map(each.table("retrieval"), score) for each in beside]
    highest = max(float(each.max(axis=None)) for each in maps)
    own = head_map(run.table("retrieval"), score)
    values = [[None if v != v else round(float(v), 3) for v in row] for row in own.to_numpy()]
    x, y = ([float(name) for name in names] for names in (own.columns, own.index))
    title = f"{run.label}: {SCORES[score]}"
    return Map(title, "head", "layer", values, x, y, unit=score, model=run.label, bounds=(0.0, max(highest, 1e-3)))


def _above(run: Compared, score: str) -> Cells:
    scores = head_map(run.table("retrieval"), score)
    untrained = [head_map(table, score) for table in run.control_tables("retrieval")]
    shares = [f"{(scores > limit).mean(axis=None):.2f}" for limit in (THRESHOLD, STRONG)]
    control = [(each > THRESHOLD).mean(axis=None) for each in untrained]
    layer, head = scores.stack().idxmax() if scores.notna().any(axis=None) else ("–", "–")
    best = f"{scores.max(axis=None):.2f} (layer {layer}, head {head})"
    return [best, *shares, f"{sum(control) / len(control):.2f}" if control else ""]


def _alike(runs: Sequence[Compared]) -> list[Cells]:
    """Of models of one shape: of others there is no head to compare with."""
    rows: list[Cells] = []
    for a, b in combinations(runs, 2):
        try:
            found = [correlation(a.table("retrieval"), b.table("retrieval"), score) for score in SCORES]
        except UserError:
            continue
        rows.append([f"{a.label}, {b.label}", *("–" if r != r else f"{r:.2f}".replace("-", "−") for r in found)])
    return rows


def activity(runs: Sequence[Compared], detector: Detector) -> Section:
    charts: list[Chart] = [
        lines(runs, "Attention of a head on its anchors", "share, mean over heads", "activity", "anchor_mass"),
        lines(runs, "Spread of a head's rows", "row entropy (1 = uniform)", "activity", "entropy"),
    ]
    charts += [
        lines(runs, f"Masked rows look at: {name}", "over the even share", "directed", "ratio", {"set": name}, 1.0)
        for name in SETS
    ]
    rows: list[Cells] = []
    for run in having(runs, "activity"):
        control = [dormant(table) for table in run.control_tables("activity")]
        beside = share(sum(control) / len(control)) if control else ""
        rows.append([run.label, share(dormant(run.table("activity"))), beside])
    charts.append(Table(["model", "dormant heads", "untrained"], rows, "Dormant heads, share of all"))
    return section(
        "heads",
        "Heads that work, heads that wait",
        "A dormant head puts most of its attention on its anchors and adds little. Masked rows may look at the prompt,"
        " at each other, or at what was committed.",
        f"Anchors: {detector} among a head's 16 keys of largest lift. Dormant: more than half its attention on them"
        f" and an output less than half its layer's mean; the cut-offs are ours. Masked rows: mean over heads and"
        f" steps, over what uniform attention would give.",
        runs,
        charts,
        "activity",
    )
