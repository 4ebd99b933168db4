"""Are the answers right, with and without passages?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from floatscope.analysis.estimate import difference, estimate
from floatscope.reports.charts import Chart, Section, Table
from floatscope.reports.compared import CONTROL, Interval
from floatscope.reports.paper.parts import Read, filled, notes
from floatscope.reports.sections.parts import INTERVALS, Cells

PUBLISHED = {"Llama": (28.89, 36.25), "Qwen": (28.09, 37.74), "Dream": (26.16, 39.39), "LLaDA": (22.52, 48.20)}
"""The paper's Table 1: mean of Acc and F1, without passages and with five."""
SCORES = {"acc": "acc", "f1": "F1", "both": "mean of both"}


def scores(read: Sequence[Read]) -> Section:
    """Right answers by the number of passages, what passages add, and what was published."""
    title = "Scores with and without passages"
    told = pd.concat([part for each in read for part in _answers(each)], ignore_index=True)
    told = told[told["acc"].notna()]
    if told.empty:
        none = "No sample of these runs has answers, so nothing is right or wrong. Trace a task file that gives them."
        return Section("scores", title, none, "", [])
    charts: list[Chart] = [Table(["model", "passages", "n", *SCORES.values()], list(_scored(told)), "These runs")]
    columns = ["model", "passages", "score", "closed book", "with passages", "gain"]
    charts.append(Table(columns, list(_gains(told)), "What passages add"))
    charts.append(
        Table(["model", "closed book", "5 passages", "gain"], _published(), "As published: mean of Acc and F1")
    )
    kept = filled(charts)
    need = "" if len(kept) == len(charts) else " That takes runs of one model with passages and without."
    return Section(
        "scores",
        title,
        f"Are the answers right, and how much do passages add?{need}"
        + notes(
            "**In the paper** the prompt of LLaDA differs from that of the other three and Dream ran at temperature"
            " 0.2, so that prompt and temperature are confounded with the family; here one template and one temperature"
            " hold for all unless a run was asked otherwise, because else a gain cannot be told from its prompt.",
            "**In the paper** scores are means over NQ, TQA, MarcoQA, HotpotQA and T-REx with 32 new tokens; here they"
            " are of the samples that were traced, so only the direction of a gain can be compared.",
        ),
        "acc: a right answer, normalised, is part of the prediction. F1: words in common with the best answer. Both in"
        " percent. A gain is taken sample by sample where both runs asked the same questions, else it is the difference"
        f" of the means and has no interval. {INTERVALS}",
        kept,
    )


def _answers(read: Read) -> Iterator[pd.DataFrame]:
    """The samples of a run, and those of each seed of its untrained control."""
    label, model = read.run.label, read.model
    yield read.asked.assign(run=label, model=model, seed=0)
    for seed, asked in enumerate(read.run.control_tables("asked")):
        yield asked.assign(run=f"{label}, {CONTROL}", model=f"{model}, {CONTROL}", seed=seed)


def _scored(told: pd.DataFrame) -> Iterator[Cells]:
    for (run, passages), rows in told.groupby(["run", "passages"], sort=False, dropna=False):
        yield [run, _passages(passages), rows["sample"].nunique(), *(_mean(rows, score).said(1) for score in SCORES)]


def _gains(told: pd.DataFrame) -> Iterator[Cells]:
    """With passages less without, for each model that has both."""
    for model, rows in told.groupby("model", sort=False):
        closed, given = rows[rows["passages"] == 0], rows[rows["passages"] > 0]
        if closed.empty:
            continue
        for passages, some in given.groupby("passages"):
            for score, called in SCORES.items():
                means = [_mean(each, score).said(1) for each in (closed, some)]
                yield [model, _passages(passages), called, *means, _gain(some, closed, score).said(1, sign=True)]


def _published() -> list[Cells]:
    return [
        [name, f"{closed:.2f}", f"{given:.2f}", f"{given - closed:+.2f}"] for name, (closed, given) in PUBLISHED.items()
    ]


def _gain(given: pd.DataFrame, closed: pd.DataFrame, score: str) -> Interval:
    if set(given["sample"]) & set(closed["sample"]):
        return Interval.of(difference(_seeds(given), _seeds(closed), score).iloc[0])
    return Interval(_mean(given, score).mean - _mean(closed, score).mean, np.nan, np.nan)


def _mean(rows: pd.DataFrame, score: str) -> Interval:
    return Interval.of(estimate(_seeds(rows), score).iloc[0])


def _seeds(rows: pd.DataFrame) -> list[pd.DataFrame]:
    return [some for _, some in rows.groupby("seed")]


def _passages(count: float) -> str:
    return "not known" if np.isnan(count) else f"{count:.0f}" if count else "closed book"
