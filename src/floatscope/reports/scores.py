"""Scores side by side: each evaluation with its intervals, what passages add, and how well models abstain.

    rows = compared([Path("runs/mdm-0"), Path("runs/mdm-5"), Path("runs/arm-0"), Path("runs/arm-5")])
    written(rows, "md")                      # or "tex", "csv"; the terminal has the same cells

The gain is taken sample by sample against the evaluation of the same model, data, shots and prompt without passages.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pandas as pd

from floatscope.analysis.estimate import difference, estimate
from floatscope.analysis.evaluations import Evaluation, open_evaluation
from floatscope.errors import UserError, unknown_choice
from floatscope.reports.compared import Interval

SCORES = ("acc", "em", "f1", "both")
HEADS = {
    "model": "model",
    "data": "data",
    "passages": "passages",
    "shots": "shots",
    "n": "n",
    "acc": "acc",
    "em": "em",
    "f1": "F1",
    "both": "(acc + F1) / 2",
    "gain": "gain, acc",
    "gain_both": "gain, both",
    "abstention": "abstention P / R",
}


@dataclass(frozen=True)
class Row:
    """An evaluation in a line; scores are percent."""

    model: str
    data: str
    passages: str
    shots: int
    n: int
    acc: Interval
    em: Interval
    f1: Interval
    both: Interval
    gain: Interval | None  # in acc, over the closed book
    gain_both: Interval | None
    abstention: tuple[float, float] | None  # precision and recall

    @property
    def cells(self) -> list[str]:
        return [_cell(getattr(self, field.name)) for field in fields(self)]


def compared(paths: Sequence[Path]) -> list[Row]:
    """A row for each folder, models together, fewest passages first."""
    if len(set(map(str, paths))) != len(paths):
        raise UserError("an evaluation is given twice; give each once")
    results = [open_evaluation(path) for path in paths]
    closed = _closed(results)
    order = sorted(results, key=lambda each: (_alike(each), _many(each)))
    return [_row(each, closed.get(_alike(each))) for each in order]


def cautions(paths: Sequence[Path]) -> list[str]:
    """What to know about the rows: evaluations that are not finished, and gains over some of their questions only."""
    results = [open_evaluation(path) for path in paths]
    closed, told = _closed(results), []
    for each in results:
        if each.missing:
            done, all = len(each.table), len(each.run.samples)
            told.append(f"{each.path} is unfinished, {done} of {all}; the same floatscope eval goes on with it")
        other = closed.get(_alike(each))
        if other is not None and other is not each:
            both = len(set(each.table["sample"]) & set(other.table["sample"]))
            if both < len(each.table):
                told.append(f"{each.path} and {other.path} have {both} questions in common: the gain is over those")
    return told


def written(rows: Sequence[Row], format: str) -> str:
    """The table as text."""
    if format not in WRITERS:
        raise unknown_choice("format", format, WRITERS)
    heads, cells = shown(rows)
    return WRITERS[format](heads, cells)


def shown(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The columns in which some row has something, and their cells."""
    some = [i for i, _ in enumerate(HEADS) if any(row.cells[i] not in ("–", "0") for row in rows)]
    return [list(HEADS.values())[i] for i in some], [[row.cells[i] for i in some] for row in rows]


def scored(table: pd.DataFrame) -> dict[str, Interval]:
    """acc, em, F1 and the mean of acc and F1, in percent."""
    told = _percent(table)
    return {name: Interval.of(estimate(told, name).iloc[0]) for name in SCORES}


def abstention(table: pd.DataFrame) -> tuple[float, float] | None:
    """Of those that abstained the share that had no answer, and of those without one the share that abstained."""
    none, said = table["unanswerable"].astype(bool), table["abstained"].astype(bool)
    if not none.any() or none.all():
        return None
    both = float((none & said).sum())
    return both / said.sum() if said.any() else float("nan"), both / none.sum()


def _row(results: Evaluation, closed: Evaluation | None) -> Row:
    settings = results.settings
    gains: dict[str, Interval | None] = {"acc": None, "both": None}
    if closed is not None and closed is not results:
        ours, theirs = _percent(results.table), _percent(closed.table)
        if set(ours["sample"]) & set(theirs["sample"]):
            gains = {name: Interval.of(difference(ours, theirs, name).iloc[0]) for name in gains}
    return Row(
        str(settings["model"]),
        str(settings.get("data", "–")),
        "closed book" if settings["passages"] == 0 else str(settings["passages"]),
        int(settings["shots"]),
        len(results.table),
        **scored(results.table),
        gain=gains["acc"],
        gain_both=gains["both"],
        abstention=abstention(results.table),
    )


def _percent(table: pd.DataFrame) -> pd.DataFrame:
    told = table[["sample", "acc", "em", "f1"]].copy()
    told[["acc", "em", "f1"]] *= 100
    return told.assign(both=(told["acc"] + told["f1"]) / 2)


def _closed(results: Sequence[Evaluation]) -> dict[tuple[str | int, ...], Evaluation]:
    """The evaluations without passages, by what else was asked."""
    return {_alike(each): each for each in results if each.settings["passages"] == 0}


def _alike(results: Evaluation) -> tuple[str | int, ...]:
    told = results.settings
    data = str(told.get("data", "")), str(told.get("data_sha256", ""))  # another file may have the name
    return str(told["model"]), *data, int(told["shots"]), str(told["prompt"])


def _many(results: Evaluation) -> tuple[int, int]:
    passages = results.settings["passages"]
    return (0, passages) if isinstance(passages, int) else (1 + (passages == "all"), 0)


def _cell(value: object) -> str:
    if isinstance(value, Interval):
        return value.said(1)
    if isinstance(value, tuple):
        return " / ".join("–" if part != part else f"{100 * part:.0f}" for part in value)
    return "–" if value is None else str(value)


def _markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _latex(heads: list[str], rows: list[list[str]]) -> str:
    def escaped(text: str) -> str:
        for sign in "&%_#$":
            text = text.replace(sign, f"\\{sign}")
        return text.replace("−", "$-$").replace("–", "--")

    body = [" & ".join(map(escaped, line)) + r" \\" for line in rows]
    head = " & ".join(map(escaped, heads)) + r" \\"
    columns = "lll" + "r" * (len(heads) - 3)
    return "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule",
                      r"\end{tabular}", ""])  # fmt: skip


def _csv(heads: list[str], rows: list[list[str]]) -> str:
    out = io.StringIO()
    csv.writer(out).writerows([heads, *rows])
    return out.getvalue()


WRITERS: dict[str, Callable[[list[str], list[list[str]]], str]] = {"md": _markdown, "tex": _latex, "csv": _csv}
