"""Evaluations side by side: numbers by hand, gains question by question, every format."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from floatscope.analysis.evaluations import PREDICTIONS
from floatscope.cli.main import app
from floatscope.errors import UserError
from floatscope.reports.scores import abstention, cautions, compared, shown, written
from floatscope.traces import create_run


def evaluated(folder: Path, right: list[float], model: str = "mdm", passages: object = 5, **more: object) -> Path:
    """A folder as `evaluate` leaves it."""
    names = [f"q{i}" for i in range(len(right))]
    settings = {"what": "evaluation", "model": model, "data": "d.jsonl", "passages": passages, "shots": 0, **more}
    with create_run(folder, {"prompt": "default", **settings}, names):
        pass
    lines = [
        {"id": name, "prediction": "", "acc": x, "em": 0.0, "f1": x / 2, "abstained": False, "unanswerable": False}
        for name, x in zip(names, right, strict=True)
    ]
    (folder / PREDICTIONS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_gains_are_paired_and_percent(tmp_path):
    closed = evaluated(tmp_path / "0", [0, 0, 1, 0], passages=0)
    given = evaluated(tmp_path / "5", [1, 0, 1, 1])
    first, second = compared([given, closed])
    assert (first.passages, second.passages) == ("closed book", "5")
    assert (first.acc.mean, second.acc.mean, second.f1.mean, second.both.mean) == (25, 75, 37.5, 56.25)
    assert first.gain is None
    assert second.gain.mean == 50
    draws = np.random.default_rng(0).multinomial(4, [0.25] * 4, 2000) @ np.array([100, 0, 0, 100]) / 4
    assert [second.gain.low, second.gain.high] == pytest.approx(np.quantile(draws, [0.025, 0.975]))
    assert second.gain_both.mean == 37.5


def test_other_models_data_and_prompts_are_not_mixed(tmp_path):
    closed = evaluated(tmp_path / "0", [0, 1], passages=0)
    others = [
        evaluated(tmp_path / "arm", [1, 1], model="arm"),
        evaluated(tmp_path / "data", [1, 1], data="other.jsonl"),
        evaluated(tmp_path / "file", [1, 1], data_sha256="of another file"),
        evaluated(tmp_path / "shots", [1, 1], shots=2),
        evaluated(tmp_path / "prompt", [1, 1], prompt="instruct"),
    ]
    assert all(row.gain is None for row in compared([closed, *others]))


def test_what_is_unfinished_or_shares_few_questions_is_told(tmp_path):
    closed, given = evaluated(tmp_path / "0", [0, 1, 1], passages=0), evaluated(tmp_path / "5", [0, 1, 1])
    assert cautions([closed, given]) == []
    file = closed / PREDICTIONS
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))
    assert cautions([closed, given]) == [
        f"{closed} is unfinished, 2 of 3; the same floatscope eval goes on with it",
        f"{given} and {closed} have 2 questions in common: the gain is over those",
    ]
    said = CliRunner().invoke(app, ["compare", str(closed), str(given)])
    assert said.exit_code == 0
    assert "note: " in said.stderr
    wrong = CliRunner().invoke(app, ["compare", str(closed), "--out", str(tmp_path / "table.doc")])
    assert wrong.exit_code == 2
    assert "--out must end in .md, .tex, .csv, got 'table.doc'" in wrong.stderr


def test_abstention_by_hand():
    table = pd.DataFrame({"unanswerable": [1, 1, 0, 0, 0], "abstained": [1, 0, 1, 1, 0]})
    assert abstention(table) == (1 / 3, 1 / 2)
    assert abstention(table.assign(unanswerable=0)) is None
    assert np.isnan(abstention(table.assign(abstained=0))[0])


def test_formats_hold_the_same_cells(tmp_path):
    rows = compared(
        [evaluated(tmp_path / "0", [0, 1], passages=0), evaluated(tmp_path / "5", [1, 1], data="a_b|c.jsonl")]
    )
    told = list(csv.reader(io.StringIO(written(rows, "csv"))))
    assert told == [shown(rows)[0], *shown(rows)[1]]
    assert "shots" not in told[0]
    markdown = written(rows, "md").splitlines()
    assert len(markdown) == 4
    assert "a_b\\|c.jsonl" in "".join(markdown)
    assert r"a\_b" in written(rows, "tex")
    assert written(rows, "tex").count(r"\\") == 3
    with pytest.raises(UserError, match="unknown format 'doc'"):
        written(rows, "doc")


def test_mistakes(tmp_path):
    folder = evaluated(tmp_path / "0", [0, 1])
    with pytest.raises(UserError, match="given twice"):
        compared([folder, folder])
    (folder / PREDICTIONS).unlink()
    with pytest.raises(UserError, match="has no answer yet"):
        compared([folder])


def test_the_command_prints_and_writes(tmp_path):
    folders = [evaluated(tmp_path / "0", [0, 0], passages=0), evaluated(tmp_path / "5", [1, 0])]
    out = tmp_path / "table.md"
    said = CliRunner().invoke(app, ["compare", *map(str, folders), "--out", str(out)])
    assert said.exit_code == 0
    assert "closed book" in said.output
    assert "closed book" in out.read_text()
    told = json.loads(CliRunner().invoke(app, ["compare", *map(str, folders), "--json"]).output)
    assert told[1]["gain"]["mean"] == 50
    wrong = CliRunner().invoke(app, ["compare", str(tmp_path / "none")])
    assert wrong.exit_code == 2
