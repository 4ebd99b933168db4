"""Figures about passages: what the answer reads by position of the gold passage, and the scores with passages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from floatscope.analysis.run_tables import RunTables
from floatscope.analysis.sample_table import POSITIONS
from floatscope.analysis.statistics import difference, estimate
from floatscope.reports.charts import Chart, Lines, Map, Section, Table
from floatscope.reports.intervals import UNTRAINED, Interval
from floatscope.reports.paper.runs import PaperRun, format_notes, sort_charts
from floatscope.reports.report_runs import ReportRun
from floatscope.reports.sections.chart_builders import (
    INTERVALS,
    LIFT,
    Row,
    build_lines,
    build_section,
    join_words,
    map_values,
    region_sort_key,
)

POSITION_NAMES = {"first": "first", "middle": "in the middle", "last": "last"}
PUBLISHED = {"Llama": (28.89, 36.25), "Qwen": (28.09, 37.74), "Dream": (26.16, 39.39), "LLaDA": (22.52, 48.20)}
"""The paper's Table 1: mean of Acc and F1, without passages and with five."""
SCORES = {"acc": "acc", "f1": "F1", "mean_score": "mean of both"}


def build_flow_section(paper_runs: Sequence[PaperRun]) -> Section:
    """What the answer attends to, by position of the gold passage."""
    measured = [each for each in paper_runs if each.run.has_table("flow")]
    tables = [(each.run, position, _answer_flow(each, position)) for position in POSITIONS for each in measured]
    filled = [(run, position, table) for run, position, table in tables if table["ratio"].notna().any()]
    highest = max((float(table["ratio"].max()) for *_, table in filled), default=0.0)
    charts: list[Chart] = [_build_flow_map(run.label, position, table, highest) for run, position, table in filled]
    charts += [_build_gold_lines(paper_runs, position) for position in POSITIONS]
    notes = "".join(f" {sentence}" for sentence in _list_missing_positions(measured))
    return build_section(
        "region-flow",
        "Flow between regions, by position of the gold passage",
        "What the rows of the answer attend to, by layer, when the gold passage is first, in the middle or last. A"
        f" model that reads follows the passage to any position; a model that prefers a position does not.{notes}"
        + format_notes(
            "**In the paper**, regions are pooled before attention is followed through the layers, and their mass is"
            " summed. **Here**, each layer is shown by itself and relative to uniform attention, because a sum favours"
            " long passages and a causal mask favours early ones. The standard report shows rollouts of both kinds.",
            "In an autoregressive model, the row before a token predicts it, so the rows of the answer do not include"
            " the row that predicts its first token. The line charts show the predicting rows of every model.",
        ),
        "Maps: attention of an average row of the answer on a region, divided by the value under uniform attention with"
        " the same mask; mean over heads, steps and the samples of a group; all maps share one colour scale. Lines:"
        " attention of the predicting rows on the gold passage, each at the step that commits its token, relative to"
        " uniform attention.",
        [each.run for each in paper_runs],
        charts,
        "flow",
    )


def _answer_flow(paper_run: PaperRun, position: str) -> pd.DataFrame:
    """Attention of the answer on each region, in the samples with this position of the gold passage."""
    table = paper_run.run.table("flow", {"region": "answer"})
    return table[table["sample"].isin(paper_run.samples_with_gold(position))]


def _build_gold_lines(paper_runs: Sequence[PaperRun], position: str) -> Lines:
    """Attention of the predicting rows on the gold passage, in the samples with this position."""
    runs = [
        _select_samples(each.run, "predicting_rows", each.samples_with_gold(position))
        for each in paper_runs
        if each.run.has_table("predicting_rows") and each.samples_with_gold(position)
    ]
    title = f"Gold passage {POSITION_NAMES[position]}: attention of predicting rows"
    return build_lines(runs, title, LIFT, "predicting_rows", "ratio", {"region": "gold"}, 1.0, log=True)


def _select_samples(run: ReportRun, name: str, samples: Collection[str]) -> ReportRun:
    """The run with one table, reduced to some samples."""

    def select(tables: RunTables) -> RunTables:
        table = tables.tables[name]
        return RunTables({name: table[table["sample"].isin(samples)]}, {})

    controls = [select(control) for control in run.controls if name in control.tables]
    return replace(run, tables=select(run.tables), controls=controls)


def _build_flow_map(label: str, position: str, table: pd.DataFrame, highest: float) -> Map:
    """Regions × layers."""
    ratio = table.groupby(["key_region", "layer"])["ratio"].mean().unstack("layer")
    ratio = ratio.reindex(sorted(ratio.index, key=region_sort_key))
    n = table["sample"].nunique()
    title = f"{label}: gold passage {POSITION_NAMES[position]}, {n} sample{'s' if n > 1 else ''}"
    x, y = [float(layer) for layer in ratio.columns], [str(name) for name in ratio.index]
    return Map(title, "layer", "key region", map_values(ratio, 2), x, y, [], "lift", label, log=True,
               bounds=(0.1, max(10.0, highest)))  # fmt: skip


def _list_missing_positions(paper_runs: Sequence[PaperRun]) -> Iterator[str]:
    """Sentences about positions without samples and samples without a position; equal ones are merged over runs."""
    labels: dict[str, list[str]] = {}
    for each in paper_runs:
        for sentence in _describe_missing_positions(each):
            labels.setdefault(sentence, []).append(each.run.label)
    return (sentence.format(join_words(names)) for sentence, names in labels.items())


def _describe_missing_positions(paper_run: PaperRun) -> Iterator[str]:
    positions = paper_run.samples["gold_position"]
    if paper_run.run.table("flow", {"region": "answer"})["ratio"].isna().all():
        yield "Not shown for {}: under this attention mask, the uniform attention of an answer is unknown."
    elif positions.isna().all():
        yield "No sample of {} has exactly one gold passage among several; mark it in the task file and trace again."
    else:
        if empty := [POSITION_NAMES[position] for position in POSITIONS if not (positions == position).any()]:
            yield f"No sample of {{}} has its gold passage {' or '.join(empty)}."
        if missing := int(positions.isna().sum()):
            yield (
                f"Left out of {{}}: {missing} of {len(positions)} samples, which do not have exactly one gold passage"
                " among several."
            )


def build_scores_section(paper_runs: Sequence[PaperRun]) -> Section:
    """Scores by number of passages, the gain from passages, and the published numbers."""
    title = "Scores with and without passages"
    answers = pd.concat([part for each in paper_runs for part in _collect_answers(each)], ignore_index=True)
    answers = answers[answers["acc"].notna()]
    if answers.empty:
        text = "No sample of these runs has reference answers, so there are no scores. Trace a task file with answers."
        return Section("scores", title, text, "", [])
    charts: list[Chart] = [
        Table(["model", "passages", "n", *SCORES.values()], list(_list_scores(answers)), "These runs")
    ]
    columns = ["model", "passages", "score", "closed book", "with passages", "gain"]
    charts.append(Table(columns, list(_list_gains(answers)), "Gain from passages"))
    columns = ["model", "closed book", "5 passages", "gain"]
    charts.append(Table(columns, _list_published(), "Published: mean of Acc and F1"))
    filled = sort_charts(charts)
    need = "" if len(filled) == len(charts) else " A gain needs runs of one model with and without passages."
    return Section(
        "scores",
        title,
        f"Are the answers right, and how much do passages add?{need}"
        + format_notes(
            "**In the paper**, the prompt of LLaDA differs from that of the other three models, and Dream runs at"
            " temperature 0.2, so prompt and temperature are confounded with the paradigm. **Here**, all runs share one"
            " template and one temperature unless set otherwise, because otherwise a gain is confounded with the"
            " prompt.",
            "**In the paper**, scores are means over NQ, TQA, MarcoQA, HotpotQA and T-REx with 32 new tokens. **Here**,"
            " they are over the traced samples, so only the direction of a gain is comparable.",
        ),
        "acc: the normalised prediction contains a right answer. F1: word overlap with the best answer. Both in"
        " percent. A gain is paired by sample if both runs share questions; otherwise it is the difference of the"
        f" means, without an interval. {INTERVALS}",
        filled,
    )


def _collect_answers(paper_run: PaperRun) -> Iterator[pd.DataFrame]:
    """The samples of a run, and those of each seed of its untrained control."""
    label, model = paper_run.run.label, paper_run.model
    yield paper_run.samples.assign(run=label, model=model, seed=0)
    for seed, samples in enumerate(paper_run.run.control_tables("samples")):
        yield samples.assign(run=f"{label}, {UNTRAINED}", model=f"{model}, {UNTRAINED}", seed=seed)


def _list_scores(answers: pd.DataFrame) -> Iterator[Row]:
    for (run, passages), rows in answers.groupby(["run", "passages"], sort=False, dropna=False):
        scores = (_estimate_score(rows, score).format(1) for score in SCORES)
        yield [run, _describe_passages(passages), rows["sample"].nunique(), *scores]


def _list_gains(answers: pd.DataFrame) -> Iterator[Row]:
    """Scores with passages − without passages, for each model that has both."""
    for model, rows in answers.groupby("model", sort=False):
        closed, with_passages = rows[rows["passages"] == 0], rows[rows["passages"] > 0]
        if closed.empty:
            continue
        for passages, some in with_passages.groupby("passages"):
            for score, name in SCORES.items():
                means = [_estimate_score(each, score).format(1) for each in (closed, some)]
                gain = _estimate_gain(some, closed, score).format(1, sign=True)
                yield [model, _describe_passages(passages), name, *means, gain]


def _list_published() -> list[Row]:
    return [
        [name, f"{closed:.2f}", f"{with_passages:.2f}", f"{with_passages - closed:+.2f}"]
        for name, (closed, with_passages) in PUBLISHED.items()
    ]


def _estimate_gain(with_passages: pd.DataFrame, closed: pd.DataFrame, score: str) -> Interval:
    if set(with_passages["sample"]) & set(closed["sample"]):
        return Interval.from_row(difference(_split_seeds(with_passages), _split_seeds(closed), score).iloc[0])
    return Interval(_estimate_score(with_passages, score).mean - _estimate_score(closed, score).mean, np.nan, np.nan)


def _estimate_score(rows: pd.DataFrame, score: str) -> Interval:
    return Interval.from_row(estimate(_split_seeds(rows), score).iloc[0])


def _split_seeds(rows: pd.DataFrame) -> list[pd.DataFrame]:
    return [table for _, table in rows.groupby("seed")]


def _describe_passages(count: float) -> str:
    return "unknown" if np.isnan(count) else f"{count:.0f}" if count else "closed book"
