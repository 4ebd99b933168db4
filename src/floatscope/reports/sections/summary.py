"""The sentences at the top of a report, and the table that compares the models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from floatscope.analysis.claims import registry_line
from floatscope.analysis.detectors import Detector
from floatscope.analysis.statistics import note_small_n
from floatscope.reports.charts import Chart, Section, Table
from floatscope.reports.claim_tables import (
    PairResults,
    build_verdict_table,
    describe_verdict,
    format_value,
    judge_pairs,
)
from floatscope.reports.intervals import UNTRAINED, Interval
from floatscope.reports.report_runs import Category, ReportRun, Where
from floatscope.reports.sections.chart_builders import INTERVALS, Row, join_words, runs_with

ALL_ROWS, PREDICTING_ROWS = {"group": "all"}, {"group": "predicting"}
MAIN_RESULTS: list[Category] = [
    ("lift of the first key", "absorption", "lift", {"set": "first"}),
    ("lift of the top key", "absorption", "lift", {"set": "top"}),
    ("row entropy (1 = uniform)", "concentration", "row_entropy", {}),
    ("heads with a sink at the first key", "sinks", "first", {}),
    ("attention moved per step, all rows", "floating", "moved", ALL_ROWS),
    ("attention moved per step, predicting rows", "floating", "moved", PREDICTING_ROWS),
    ("leader changes within a text, all rows", "floating", "within", ALL_ROWS),
    ("leader changes within a text, predicting rows", "floating", "within", PREDICTING_ROWS),
    ("leader changes across texts, all rows", "floating", "across", ALL_ROWS),
    ("lead of the top key over the second, all rows", "floating", "lead", ALL_ROWS),
]
NOISE_LEVEL = "In brackets: the noise level of an untrained network, the same architecture with fresh weights."


def build_summary(runs: Sequence[ReportRun]) -> list[str]:
    """The main result in one sentence, then the results by question, each number beside that of its control."""
    pairs = judge_pairs(runs)
    sentences = [sentence for pair in pairs if (sentence := _state_main_result(pair))]
    if with_absorption := runs_with(runs, "absorption"):
        shares = join_words(_describe_first_key(run) for run in with_absorption)
        sentences.append(f"**Is there a sink?** In the layer where it takes most, the first key takes {shares}.")
    if with_floating := runs_with(runs, "floating"):
        sentences += _summarise_floating(with_floating)
    questions = (_summarise_heads, _summarise_flow, _summarise_qk, _summarise_order, _summarise_influence)
    sentences += [sentence for summarise in questions if (sentence := summarise(runs))]
    if any(run.controls for run in runs):
        sentences.append(NOISE_LEVEL)
    if without := [run.label for run in runs if not run.controls and not run.incomplete_controls]:
        sentences.append(
            f"No untrained control for {join_words(without)}: without it, effects of the architecture and of training"
            f" cannot be separated. Trace one with --untrained-controls 1."
        )
    if note := note_small_n([len(run.run.finished) for run in runs]):
        sentences.append(note)
    return sentences


def _state_main_result(pair: PairResults) -> str:
    """How much attention moves and how large the sink is, MDM against ARM, in one sentence."""
    moved, predicting, sink = (pair.result(id) for id in ("moved-all", "moved-predicting", "first-token-sink"))
    parts = []
    if moved and moved.tested.mean == moved.tested.mean:
        arm, mdm = (format_value(moved.claim, moved.values[role]) for role in ("arm", "mdm"))
        parts.append(f"**{mdm}** of all rows' attention moves per step, against {arm} ({describe_verdict(moved)})")
    if predicting and predicting.tested.mean == predicting.tested.mean:
        arm, mdm = (format_value(predicting.claim, predicting.values[role]) for role in ("arm", "mdm"))
        parts.append(f"**{mdm}** against {arm} in the predicting rows ({describe_verdict(predicting)})")
    if sink:
        arm, mdm = (format_value(sink.claim, sink.values[role]) for role in ("arm", "mdm"))
        parts.append(f"the first token takes **{mdm}** against {arm} in its peak layer ({describe_verdict(sink)})")
    return f"**{pair.mdm} against {pair.arm}:** {'; '.join(parts)}." if parts else ""


def _describe_first_key(run: ReportRun) -> str:
    """The share of the first key, in the layer where it is largest."""
    mean = run.table("absorption", {"set": "first"}).groupby("layer")["percent"].mean()
    layer = int(mean.idxmax())
    where = {"set": "first", "layer": layer}
    percent, lift = (run.estimate("absorption", value, where) for value in ("percent", "lift"))
    control = "" if lift.control is None else f", {UNTRAINED} {lift.control.mean:.1f}"
    share = f"**{percent.model.mean:.1f} %** of the attention"
    return f"{share} in {run.label} (layer {layer}, lift {lift.model.format(1)}{control})"


def _summarise_floating(runs: Sequence[ReportRun]) -> list[str]:
    """How much attention moves, and how often the lead changes: they are different questions."""
    moved, leader = [], []
    for where, rows in ((ALL_ROWS, "in all rows"), (PREDICTING_ROWS, "in the predicting rows")):
        moved.append(f"{rows} {join_words(_describe_floating(run, 'moved', where, 1) for run in runs)}")
        leader.append(f"{rows} {join_words(_describe_floating(run, 'within', where, 0) for run in runs)}")
    return [
        f"**How much attention moves** from one step to the next: {'; '.join(moved)}.",
        f"**How often the leading key changes** within a text, of the steps with an anchor: {'; '.join(leader)}."
        " A leader is an anchor if its lift is at least 2; without an anchor the leader is a matter of chance and does"
        " not count.",
    ]


def _describe_floating(run: ReportRun, column: str, where: Where, digits: int) -> str:
    share = run.estimate("floating", column, where)
    control = "" if share.control is None else f" ({UNTRAINED} {_percent(share.control.mean, digits)})"
    return f"**{_percent(share.model.mean, digits)}** in {run.label}{control}"


def _percent(mean: float, digits: int) -> str:
    return "no anchor" if mean != mean else f"{100 * mean:.{digits}f} %"


def _summarise_heads(runs: Sequence[ReportRun]) -> str:
    share = _list_values(runs, "retrieval", "active", percent=True)
    return share and (
        f"**Which heads retrieve the evidence?** The share of heads that copy from it within a text is {share}."
    )


def _summarise_flow(runs: Sequence[ReportRun]) -> str:
    lift = _list_values(runs, "predicting_rows", "ratio", {"region": "gold"})
    return lift and (
        f"**What does the answer attend to?** The lift of the gold passage from the predicting rows of the answer is"
        f" {lift}."
    )


def _summarise_qk(runs: Sequence[ReportRun]) -> str:
    angle, norm = (
        _list_values(runs, "attribution", name, percent=True, unit=" of their score advantage")
        for name in ("angle", "norm")
    )
    rotation = angle and f"Rotating anchors to the mean direction of the other keys removes {angle}."
    rescaling = norm and f"Rescaling anchors to the mean norm of the other keys removes {norm}."
    sentences = " ".join(sentence for sentence in (rotation, rescaling) if sentence)
    return sentences and f"**Angle or norm?** {sentences}"


def _summarise_order(runs: Sequence[ReportRun]) -> str:
    tau = _list_values(runs, "order", "kendall")
    return tau and f"**Left to right?** Kendall's τ of step and position in the answer (1 = left to right) is {tau}."


def _summarise_influence(runs: Sequence[ReportRun]) -> str:
    correlation = _list_values(runs, "influence", "received")
    return correlation and (
        "**Does attention match influence?** The rank correlation between the influence of a key and the attention of"
        f" the predicting rows is {correlation}."
    )


def _list_values(
    runs: Sequence[ReportRun], table: str, value: str, where: Where = None, percent: bool = False, unit: str = ""
) -> str:
    """The value of every run with the table, beside its control; empty if there is no such run.

    A run whose difference from its control includes zero is listed, and marked. `unit` follows the first value.
    """
    format_mean: Callable[[Interval], str] = lambda each: _format_mean(each.mean, percent)  # noqa: E731
    parts: list[str] = []
    for run in runs_with(runs, table):
        if run.table(table, where).empty:
            continue
        difference, estimate = run.difference_from_control(table, value, where), run.estimate(table, value, where)
        control = "" if estimate.control is None else f" ({UNTRAINED} {format_mean(estimate.control)}"
        if control:
            control += ", no clear difference)" if difference is None or not difference.excludes_zero else ")"
        parts.append(f"**{format_mean(estimate.model)}**{'' if parts else unit} in {run.label}{control}")
    return join_words(parts) if parts else ""


def _format_mean(mean: float, percent: bool) -> str:
    if mean != mean:
        return "–"
    return (f"{100 * mean:.0f} %" if percent else f"{mean:.2f}").replace("-", "−")


def build_models_section(runs: Sequence[ReportRun], detector: Detector) -> Section:
    """The main results of each model and its control, the differences between models, and the published claims."""
    rows: list[Row] = []
    for name, table, value, where in MAIN_RESULTS:
        if all(run.has_table(table) for run in runs):
            digits = 4 if value == "moved" else 2  # attention moved of all rows is below 1 %
            estimates = [run.estimate(table, value, where).format(digits) for run in runs]
            differences = [run.difference_from(runs[0], table, value, where).format(digits, True) for run in runs[1:]]
            rows.append([name, *estimates, *differences])
    labels = [run.label for run in runs]
    columns = ["", *labels, *(f"{label} − {labels[0]}" for label in labels[1:])]
    tables: list[Chart] = [Table(columns, rows)]
    text, method = "", ""
    if pairs := judge_pairs(runs):
        tables.append(build_verdict_table(pairs))
        text = (
            " Each published claim has a test that was fixed before the run: the claim says that the tested number is"
            " above zero. A verdict on a few samples of small models is about these models."
        )
        method = f" {registry_line()} Verdicts use Holm's correction over the claims of a pair."
    return Section(
        "models",
        "The models side by side",
        "All models follow the same rules. Differences are paired by sample. If the interval of a difference excludes"
        f" zero, other samples like these would likely show it again.{text}",
        f"Means over layers and steps. Anchors: {detector}. {INTERVALS}{method}",
        tables,
    )
