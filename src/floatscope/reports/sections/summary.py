"""The sentences at the top of a report, and the table that compares the models."""

from __future__ import annotations

from collections.abc import Sequence

from floatscope.analysis.detectors import Detector
from floatscope.reports.charts import Section, Table
from floatscope.reports.intervals import UNTRAINED
from floatscope.reports.report_runs import Category, ReportRun, Where
from floatscope.reports.sections.chart_builders import INTERVALS, Row, join_words, runs_with

MAIN_RESULTS: list[Category] = [
    ("lift of the first key", "absorption", "lift", {"set": "first"}),
    ("lift of the top key", "absorption", "lift", {"set": "top"}),
    ("row entropy (1 = uniform)", "concentration", "row_entropy", {}),
    ("heads with a sink at the first key", "sinks", "first", {}),
    ("floating within a text", "floating", "within", {}),
    ("floating across texts", "floating", "across", {}),
    ("Jaccard index of anchors, step to step", "drift", "jaccard_next", {}),
]


def build_summary(runs: Sequence[ReportRun]) -> list[str]:
    """The main results as sentences, by question, each number beside that of its control."""
    sentences = []
    if with_absorption := runs_with(runs, "absorption"):
        shares = join_words(_describe_first_key(run) for run in with_absorption)
        sentences.append(f"**Is there a sink?** In the layer where it takes most, the first key takes {shares}.")
    if with_floating := runs_with(runs, "floating"):
        within, across = (
            join_words(_describe_floating(run, column) for run in with_floating) for column in ("within", "across")
        )
        sentences.append(
            f"**Do anchors move?** Within a text, the top key of a layer is away from its modal position in {within}."
            f" Across texts, it is away from the modal position of the layer in {across}."
        )
        sentences += [sentence for run in with_floating if (sentence := _compare_floating(run))]
    questions = (_summarise_heads, _summarise_flow, _summarise_qk, _summarise_order, _summarise_influence)
    sentences += [sentence for summarise in questions if (sentence := summarise(runs))]
    if without := [run.label for run in runs if not run.controls and not run.incomplete_controls]:
        sentences.append(
            f"No untrained control for {join_words(without)}: without it, effects of the architecture and of training"
            f" cannot be separated. Trace one with --untrained-controls 1."
        )
    return sentences


def _describe_first_key(run: ReportRun) -> str:
    """The share of the first key, in the layer where it is largest."""
    mean = run.table("absorption", {"set": "first"}).groupby("layer")["percent"].mean()
    layer = int(mean.idxmax())
    where = {"set": "first", "layer": layer}
    percent, lift = (run.estimate("absorption", value, where) for value in ("percent", "lift"))
    control = "" if lift.control is None else f", {UNTRAINED} {lift.control.mean:.1f}"
    share = f"**{percent.model.mean:.1f} %** of the attention"
    return f"{share} in {run.label} (layer {layer}, lift {lift.model.format(1)}{control})"


def _describe_floating(run: ReportRun, column: str) -> str:
    share = run.estimate("floating", column)
    control = "" if share.control is None else f" ({UNTRAINED} {100 * share.control.mean:.0f} %)"
    return f"**{100 * share.model.mean:.0f} %** of the steps in {run.label}{control}"


def _compare_floating(run: ReportRun) -> str | None:
    """Whether the top key moves more within a text than in the control."""
    difference = run.difference_from_control("floating", "within")
    if difference is None:
        return None
    text = difference.format(2, sign=True)
    if not difference.excludes_zero:
        return (
            f"Within a text, it is inconclusive whether the top key of {run.label} moves more or less than that of its"
            f" control: {text}."
        )
    more = "more" if difference.mean > 0 else "less"
    return f"Within a text, the top key of {run.label} moves {more} than that of its control: {text}."


def _summarise_heads(runs: Sequence[ReportRun]) -> str:
    share = _list_differences(runs, "retrieval", "active", percent=True)
    return share and (
        f"**Which heads retrieve the evidence?** The share of heads that copy from it within a text is {share}."
    )


def _summarise_flow(runs: Sequence[ReportRun]) -> str:
    lift = _list_differences(runs, "flow", "ratio", {"region": "answer", "key_region": "question"})
    return lift and f"**What does the answer attend to?** The lift of the question from rows of the answer is {lift}."


def _summarise_qk(runs: Sequence[ReportRun]) -> str:
    angle, norm = (
        _list_differences(runs, "attribution", name, percent=True, unit=" of their score advantage")
        for name in ("angle", "norm")
    )
    rotation = angle and f"Rotating anchors to the mean direction of the other keys removes {angle}."
    rescaling = norm and f"Rescaling anchors to the mean norm of the other keys removes {norm}."
    sentences = " ".join(sentence for sentence in (rotation, rescaling) if sentence)
    return sentences and f"**Angle or norm?** {sentences}"


def _summarise_order(runs: Sequence[ReportRun]) -> str:
    tau = _list_differences(runs, "order", "kendall")
    return tau and f"**Left to right?** Kendall's τ of step and position (1 = left to right) is {tau}."


def _summarise_influence(runs: Sequence[ReportRun]) -> str:
    correlation = _list_differences(runs, "influence", "received")
    return correlation and (
        "**Does attention match influence?** The rank correlation between the influence of a key and the attention of"
        f" the predicting rows is {correlation}."
    )


def _list_differences(
    runs: Sequence[ReportRun], table: str, value: str, where: Where = None, percent: bool = False, unit: str = ""
) -> str:
    """The value of each run whose difference from its control excludes zero; empty if there is no such run.

    `unit` follows the first value.
    """
    parts: list[str] = []
    for run in runs_with(runs, table):
        difference, estimate = run.difference_from_control(table, value, where), run.estimate(table, value, where)
        if difference is not None and difference.excludes_zero and estimate.control is not None:
            model, control = (_format_mean(each.mean, percent) for each in (estimate.model, estimate.control))
            parts.append(f"**{model}**{'' if parts else unit} in {run.label} ({UNTRAINED} {control})")
    return join_words(parts) if parts else ""


def _format_mean(mean: float, percent: bool) -> str:
    return (f"{100 * mean:.0f} %" if percent else f"{mean:.2f}").replace("-", "−")


def build_models_section(runs: Sequence[ReportRun], detector: Detector) -> Section:
    """The main results of each model and its control, and the paired difference of each model from the first."""
    rows: list[Row] = []
    for name, table, value, where in MAIN_RESULTS:
        if all(run.has_table(table) for run in runs):
            estimates = [run.estimate(table, value, where).format() for run in runs]
            differences = [run.difference_from(runs[0], table, value, where).format(2, True) for run in runs[1:]]
            rows.append([name, *estimates, *differences])
    labels = [run.label for run in runs]
    columns = ["", *labels, *(f"{label} − {labels[0]}" for label in labels[1:])]
    return Section(
        "models",
        "The models side by side",
        "All models follow the same rules. Differences are paired by sample. If the interval of a difference excludes"
        " zero, other samples like these would likely show it again.",
        f"Means over layers and steps. Anchors: {detector}. {INTERVALS}",
        [Table(columns, rows)],
    )
