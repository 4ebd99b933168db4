"""Evaluations side by side: numbers by hand, paired gains, every format."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from floatscope.analysis.evaluations import PREDICTIONS_FILE
from floatscope.analysis.statistics import newcombe, wilson
from floatscope.cli.main import app
from floatscope.errors import UserError
from floatscope.reports.score_table import (
    WRITERS,
    compare,
    format_scores,
    list_cautions,
    measure_abstention,
    score_rows,
    select_columns,
)
from floatscope.traces import create_run


def write_evaluation(
    folder: Path, scores: list[float], model: str = "mdm", passages: object = 5, **more: object
) -> Path:
    """A folder as `evaluate` leaves it."""
    names = [f"q{i}" for i in range(len(scores))]
    settings = {"kind": "evaluation", "model": model, "data": "d.jsonl", "passages": passages, "shots": 0, **more}
    with create_run(folder, {"template": "default", **settings}, names):
        pass
    lines = [
        {"id": name, "prediction": "", "acc": x, "em": 0.0, "f1": x / 2, "abstained": False, "unanswerable": False}
        for name, x in zip(names, scores, strict=True)
    ]
    (folder / PREDICTIONS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_gains_are_paired_and_in_percent(tmp_path):
    closed = write_evaluation(tmp_path / "0", [0, 0, 1, 0], passages=0)
    with_passages = write_evaluation(tmp_path / "5", [1, 0, 1, 1])
    first, second = score_rows([with_passages, closed])
    assert (first.passages, second.passages) == ("closed book", "5")
    assert (first.acc.mean, second.acc.mean, second.f1.mean, second.both.mean) == (25, 75, 37.5, 56.25)
    assert first.gain is None
    assert second.gain.mean == 50
    acc, closed_acc = np.array([[1, 0, 1, 1]]).T, np.array([[0, 0, 1, 0]]).T
    bounds = 100 * newcombe(acc.astype(float), closed_acc.astype(float))[:, 0]
    assert [second.gain.low, second.gain.high] == pytest.approx(bounds)
    assert [second.acc.low, second.acc.high] == pytest.approx(100 * wilson(np.array(3), np.array(4)))
    assert second.gain_both.mean == 37.5


def test_a_perfect_score_has_a_wide_interval_at_small_n(tmp_path):
    (row,) = score_rows([write_evaluation(tmp_path / "5", [1] * 12)])
    assert row.acc.format(1) == "100.0 [75.8, 100.0]"  # 1 / (1 + 1.96² / 12)
    assert row.f1.format(1) == "50.0 [50.0, 50.0]"  # not a proportion: BCa


def test_a_small_n_is_noted_once(tmp_path):
    small = [write_evaluation(tmp_path / f"{i}", [0, 1] * 14, model=f"m{i}") for i in range(2)]
    large = write_evaluation(tmp_path / "large", [0, 1] * 15)
    note = "n < 30: intervals are approximate"
    for paths, count in ((small, 1), ([large], 0), ([*small, large], 1)):
        assert "\n".join(list_cautions(paths)).count(note) == count
        assert compare(paths).attrs["notes"] == [note] * count
        assert format_scores(score_rows(paths), "md").count(note) == count
        assert format_scores(score_rows(paths), "tex").count(r"n $<$ 30: intervals are approximate") == count
        assert note not in format_scores(score_rows(paths), "csv")
    result = CliRunner().invoke(app, ["compare", *map(str, small)])
    assert result.stderr.count(f"note: {note}") == 1


def test_compare_is_a_table_with_the_same_numbers(tmp_path):
    paths = [write_evaluation(tmp_path / "5", [1, 0, 1, 1]), write_evaluation(tmp_path / "0", [0, 0, 1], passages=0)]
    table, rows = compare(paths, out=tmp_path / "scores.md"), score_rows(paths)
    assert table["model"].tolist() == ["mdm", "mdm"]
    assert table["passages"].tolist() == ["closed book", "5"]
    for name in ("acc", "em", "f1", "both"):
        intervals = [getattr(row, name) for row in rows]
        for column, end in ((name, "mean"), (f"{name}_low", "low"), (f"{name}_high", "high")):
            assert table[column].tolist() == [getattr(interval, end) for interval in intervals]
    assert np.isnan(table["gain"][0])
    assert (table["gain"][1], table["gain_low"][1]) == (rows[1].gain.mean, rows[1].gain.low)
    assert table[["abstention_precision", "abstention_recall"]].isna().all(axis=None)
    assert table.attrs["notes"] == list_cautions(paths) != []
    assert (tmp_path / "scores.md").read_text() == format_scores(rows, "md")
    with pytest.raises(UserError, match=r"the table must end in .md, .tex, .csv, got 'scores.doc'"):
        compare(paths, out=tmp_path / "scores.doc")


def test_gain_needs_the_same_model_data_shots_and_template(tmp_path):
    closed = write_evaluation(tmp_path / "0", [0, 1], passages=0)
    others = [
        write_evaluation(tmp_path / "arm", [1, 1], model="arm"),
        write_evaluation(tmp_path / "data", [1, 1], data="other.jsonl"),
        write_evaluation(tmp_path / "file", [1, 1], data_sha256="of another file"),
        write_evaluation(tmp_path / "shots", [1, 1], shots=2),
        write_evaluation(tmp_path / "template", [1, 1], template="instruct"),
    ]
    assert all(row.gain is None for row in score_rows([closed, *others]))


def test_unfinished_evaluations_and_partial_gains_are_noted(tmp_path):
    closed = write_evaluation(tmp_path / "0", [0, 1, 1] * 12, passages=0)
    with_passages = write_evaluation(tmp_path / "5", [0, 1, 1] * 12)
    assert list_cautions([closed, with_passages]) == []
    file = closed / PREDICTIONS_FILE
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:30]))
    assert list_cautions([closed, with_passages]) == [
        f"{closed} is unfinished, 30 of 36; the same floatscope eval resumes it",
        f"{with_passages} and {closed} share 30 questions; the gain is over those",
    ]
    result = CliRunner().invoke(app, ["compare", str(closed), str(with_passages)])
    assert result.exit_code == 0
    assert "note: " in result.stderr
    result = CliRunner().invoke(app, ["compare", str(closed), "--out", str(tmp_path / "table.doc")])
    assert result.exit_code == 2
    assert "must end in .md, .tex, .csv, got 'table.doc'" in result.stderr


def test_abstention_by_hand():
    table = pd.DataFrame({"unanswerable": [1, 1, 0, 0, 0], "abstained": [1, 0, 1, 1, 0]})
    assert measure_abstention(table) == (1 / 3, 1 / 2)
    assert measure_abstention(table.assign(unanswerable=0)) is None
    assert np.isnan(measure_abstention(table.assign(abstained=0))[0])


def test_formats_have_the_same_cells(tmp_path):
    paths = [
        write_evaluation(tmp_path / "0", [0, 1], passages=0),
        write_evaluation(tmp_path / "5", [1, 1], data="a_b|c.jsonl"),
    ]
    rows = score_rows(paths)
    cells = list(csv.reader(io.StringIO(format_scores(rows, "csv"))))
    assert cells == [select_columns(rows)[0], *select_columns(rows)[1]]
    assert "shots" not in cells[0]
    markdown = format_scores(rows, "md").splitlines()
    assert len(markdown) == 6  # with an empty line and the note on small n
    assert "a_b\\|c.jsonl" in "".join(markdown)
    assert r"a\_b" in format_scores(rows, "tex")
    assert format_scores(rows, "tex").count(r"\\") == 4
    with pytest.raises(UserError, match="unknown format 'doc'"):
        format_scores(rows, "doc")


def test_mistakes_are_refused(tmp_path):
    folder = write_evaluation(tmp_path / "0", [0, 1])
    with pytest.raises(UserError, match="given twice"):
        score_rows([folder, folder])
    (folder / PREDICTIONS_FILE).unlink()
    with pytest.raises(UserError, match="no answer"):
        score_rows([folder])


def test_command_prints_and_writes(tmp_path):
    folders = [
        write_evaluation(tmp_path / "0", [0, 0], passages=0),
        write_evaluation(tmp_path / "5", [1, 0]),
    ]
    out = tmp_path / "table.md"
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["compare", *map(str, folders), "--out", str(out)])
    assert result.exit_code == 0
    assert "closed book" in result.output
    assert "closed book" in out.read_text()
    rows = json.loads(CliRunner().invoke(app, ["compare", *map(str, folders), "--json"]).stdout)
    assert rows[1]["gain"]["mean"] == 50
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "none")])
    assert result.exit_code == 2


def test_latex_escapes_what_means_something_else():
    written = WRITERS["tex"](["a", "b", "c", "d"], [["x_1 {y}", "50 %", r"C:\dir", "~^&#$<"]], "")
    assert r"x\_1 \{y\} & 50 \% & C:\textbackslash{}dir & \textasciitilde{}\textasciicircum{}\&\#\$$<$" in written
