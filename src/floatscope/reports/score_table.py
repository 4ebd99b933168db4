"""Scores side by side: each evaluation with its 95 % CIs, the gain from passages, and how well models abstain.

    table = compare(["runs/mdm-0", "runs/mdm-5", "runs/arm-0", "runs/arm-5"], out="scores.md")    # a data frame
    rows = score_rows([Path("runs/mdm-0"), Path("runs/mdm-5")])                                  # rows of intervals
    format_scores(rows, "tex")                                                                   # or "md", "csv"

The gain is the paired difference from the closed-book evaluation of the same model, data, shots and template.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pandas as pd

from floatscope.analysis.evaluations import Evaluation, open_evaluation
from floatscope.analysis.statistics import difference, estimate, note_small_n
from floatscope.errors import UserError, unknown_choice
from floatscope.files.atomic import write_atomic
from floatscope.reports.intervals import Interval

SCORES = ("acc", "em", "f1", "both")
COLUMNS = {
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
"""Field of `ScoreRow` → its column title."""


def compare(runs: Sequence[str | Path], out: str | Path | None = None) -> pd.DataFrame:
    """Compare evaluations: a row per folder, models together, fewest passages first.

    Scores are in percent: `acc`, `em`, `f1`, `both` (the mean of acc and F1), each with the ends of its 95 % CI as
    `…_low` and `…_high`. `gain` (in acc) and `gain_both` are paired differences from the closed-book evaluation of the
    same model, data, shots and template; NaN without one. `abstention_precision` and `abstention_recall` (0 to 1) are
    NaN unless the data has both answerable and unanswerable questions. `table.attrs["notes"]` lists what a reader
    should know, such as unfinished evaluations.

    Args:
        runs: folders of `fs.evaluate` or `floatscope eval`.
        out: also write the table with intervals to a .md, .tex or .csv file.

    Returns:
        A row per folder.

    Example:
        samples = fs.read_samples("twin:reading-1", limit=2)
        evaluation = fs.evaluate(fs.load("twin:mdm"), samples, "runs/eval", new_tokens=4)
        fs.compare(["runs/eval"])[["model", "acc", "acc_low", "acc_high"]]
    """
    paths = [Path(run) for run in runs]
    rows = score_rows(paths)
    if out is not None:
        write_scores(rows, Path(out))
    table = pd.DataFrame([_flatten(row) for row in rows])
    table.attrs["notes"] = list_cautions(paths)
    return table


@dataclass(frozen=True)
class ScoreRow:
    """The scores of one evaluation, in percent."""

    model: str
    data: str
    passages: str
    shots: int
    n: int
    acc: Interval
    em: Interval
    f1: Interval
    both: Interval
    gain: Interval | None  # in acc, over closed book
    gain_both: Interval | None
    abstention: tuple[float, float] | None  # precision and recall

    @property
    def cells(self) -> list[str]:
        """The fields as text, in the order of `COLUMNS`."""
        return [_format_cell(getattr(self, field.name)) for field in fields(self)]


def score_rows(paths: Sequence[Path]) -> list[ScoreRow]:
    """A row for each evaluation folder, models together, fewest passages first."""
    if len(set(map(str, paths))) != len(paths):
        raise UserError("an evaluation is given twice; give each evaluation once")
    evaluations = [open_evaluation(path) for path in paths]
    closed_book = _find_closed_book(evaluations)
    ordered = sorted(evaluations, key=lambda evaluation: (_pairing_key(evaluation), _passage_order(evaluation)))
    return [_build_row(evaluation, closed_book.get(_pairing_key(evaluation))) for evaluation in ordered]


def list_cautions(paths: Sequence[Path]) -> list[str]:
    """Sentences about unfinished evaluations, gains over only some of the questions, and small n."""
    evaluations = [open_evaluation(path) for path in paths]
    closed_book, notes = _find_closed_book(evaluations), []
    counts = [len(evaluation.table) for evaluation in evaluations]
    for evaluation in evaluations:
        if evaluation.missing:
            done, total = len(evaluation.table), len(evaluation.run.samples)
            notes.append(f"{evaluation.path} is unfinished, {done} of {total}; the same floatscope eval resumes it")
        other = closed_book.get(_pairing_key(evaluation))
        if other is not None and other is not evaluation:
            shared = len(set(evaluation.table["sample"]) & set(other.table["sample"]))
            counts.append(shared)
            if shared < len(evaluation.table):
                notes.append(f"{evaluation.path} and {other.path} share {shared} questions; the gain is over those")
    if note := note_small_n(counts):
        notes.append(note.removesuffix("."))
    return notes


def format_scores(rows: Sequence[ScoreRow], format: str) -> str:
    """The table as text: `md`, `tex` or `csv`. Below n = 30, `md` and `tex` note that intervals are approximate."""
    if format not in WRITERS:
        raise unknown_choice("format", format, WRITERS)
    columns, cells = select_columns(rows)
    return WRITERS[format](columns, cells, note_small_n(row.n for row in rows))


def write_scores(rows: Sequence[ScoreRow], path: Path) -> None:
    """Write the table in the format of the path's suffix: .md, .tex or .csv."""
    format = path.suffix.lstrip(".")
    if format not in WRITERS:
        raise UserError(f"the table must end in .{', .'.join(WRITERS)}, got '{path.name}'")
    try:
        write_atomic(path, [format_scores(rows, format).encode()])
    except OSError as error:
        raise UserError(f"cannot write the table to {path}: {error.strerror}; give another path") from error


def select_columns(rows: Sequence[ScoreRow]) -> tuple[list[str], list[list[str]]]:
    """The titles of the columns that are not empty in every row, and the cells of each row."""
    used = [i for i, _ in enumerate(COLUMNS) if any(row.cells[i] not in ("–", "0") for row in rows)]
    return [list(COLUMNS.values())[i] for i in used], [[row.cells[i] for i in used] for row in rows]


def estimate_scores(table: pd.DataFrame) -> dict[str, Interval]:
    """acc, em, F1 and the mean of acc and F1 of an evaluation's table, in percent."""
    scores = _add_mean_score(table)
    return {name: Interval.from_row(estimate(scores, name).iloc[0]).to_percent() for name in SCORES}


def measure_abstention(table: pd.DataFrame) -> tuple[float, float] | None:
    """Precision and recall of abstaining on unanswerable questions; None if all or no questions are unanswerable."""
    unanswerable, abstained = table["unanswerable"].astype(bool), table["abstained"].astype(bool)
    if not unanswerable.any() or unanswerable.all():
        return None
    hits = float((unanswerable & abstained).sum())
    return hits / abstained.sum() if abstained.any() else float("nan"), hits / unanswerable.sum()


def _build_row(evaluation: Evaluation, closed_book: Evaluation | None) -> ScoreRow:
    settings = evaluation.settings
    gains: dict[str, Interval | None] = {"acc": None, "both": None}
    if closed_book is not None and closed_book is not evaluation:
        scores, closed_scores = _add_mean_score(evaluation.table), _add_mean_score(closed_book.table)
        if set(scores["sample"]) & set(closed_scores["sample"]):
            gains = {
                name: Interval.from_row(difference(scores, closed_scores, name).iloc[0]).to_percent() for name in gains
            }
    return ScoreRow(
        str(settings["model"]),
        str(settings.get("data", "–")),
        "closed book" if settings["passages"] == 0 else str(settings["passages"]),
        int(settings["shots"]),
        len(evaluation.table),
        **estimate_scores(evaluation.table),
        gain=gains["acc"],
        gain_both=gains["both"],
        abstention=measure_abstention(evaluation.table),
    )


def _add_mean_score(table: pd.DataFrame) -> pd.DataFrame:
    """The scores from 0 to 1, with the mean of acc and F1 as `both`."""
    return table[["sample", "acc", "em", "f1"]].assign(both=(table["acc"] + table["f1"]) / 2)


def _find_closed_book(evaluations: Sequence[Evaluation]) -> dict[tuple[str | int, ...], Evaluation]:
    """The evaluations without passages, by their other settings."""
    return {_pairing_key(each): each for each in evaluations if each.settings["passages"] == 0}


def _pairing_key(evaluation: Evaluation) -> tuple[str | int, ...]:
    """The settings that two evaluations share if their difference is a gain from passages."""
    settings = evaluation.settings
    data = str(settings.get("data", "")), str(settings.get("data_sha256", ""))  # another file may have the same name
    return str(settings["model"]), *data, int(settings["shots"]), str(settings["template"])


def _passage_order(evaluation: Evaluation) -> tuple[int, int]:
    passages = evaluation.settings["passages"]
    return (0, passages) if isinstance(passages, int) else (1 + (passages == "all"), 0)


def _flatten(row: ScoreRow) -> dict[str, str | int | float]:
    """A row with one number per column."""
    record: dict[str, str | int | float] = {}
    for field in fields(row):
        value = getattr(row, field.name)
        if field.name == "abstention":
            precision, recall = value or (float("nan"), float("nan"))
            record |= {"abstention_precision": precision, "abstention_recall": recall}
        elif isinstance(value, Interval) or value is None:
            mean, low, high = (value.mean, value.low, value.high) if value else [float("nan")] * 3
            record |= {field.name: mean, f"{field.name}_low": low, f"{field.name}_high": high}
        else:
            record[field.name] = value
    return record


def _format_cell(value: object) -> str:
    if isinstance(value, Interval):
        return value.format(1)
    if isinstance(value, tuple):
        return " / ".join("–" if part != part else f"{100 * part:.0f}" for part in value)
    return "–" if value is None else str(value)


def _format_markdown(columns: list[str], rows: list[list[str]], note: str) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    table = "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
    return f"{table}\n{note}\n" if note else table


LATEX = {character: f"\\{character}" for character in "&%_#${}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "−": "$-$",
    "–": "--",
    "<": "$<$",
    ">": "$>$",
}
"""Characters that mean something else in LaTeX."""


def _format_latex(columns: list[str], rows: list[list[str]], note: str) -> str:
    def escape(text: str) -> str:
        return "".join(LATEX.get(character, character) for character in text)

    head, *body = (" & ".join(map(escape, line)) + r" \\" for line in (columns, *rows))
    alignment = "lll" + "r" * (len(columns) - 3)
    last = [r"\midrule", rf"\multicolumn{{{len(columns)}}}{{l}}{{{escape(note)}}} \\"] if note else []
    return "\n".join([rf"\begin{{tabular}}{{{alignment}}}", r"\toprule", head, r"\midrule", *body, *last,
                      r"\bottomrule", r"\end{tabular}", ""])  # fmt: skip


def _format_csv(columns: list[str], rows: list[list[str]], note: str) -> str:
    """Cells only: the column `n` is enough for a program."""
    out = io.StringIO()
    csv.writer(out).writerows([columns, *rows])
    return out.getvalue()


WRITERS: dict[str, Callable[[list[str], list[list[str]], str], str]] = {
    "md": _format_markdown,
    "tex": _format_latex,
    "csv": _format_csv,
}
