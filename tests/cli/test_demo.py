"""The demo with few questions: what it writes, that it resumes, what it refuses."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from typer.testing import CliRunner

import floatscope as fs
from floatscope.cli.help_text import EXAMPLES
from floatscope.cli.main import app
from floatscope.pipelines import demo
from floatscope.pipelines.demo import TWINS, plan_demo, select_questions
from floatscope.traces import find_controls


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The example of the help on three questions: its folder, its output, and the same command again with --json."""
    home = tmp_path_factory.mktemp("demo")
    (example,) = EXAMPLES["demo"]
    words = example.split()[1:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "select_questions", lambda count: select_questions(3))
        patch.chdir(home)
        result = CliRunner().invoke(app, words, env={"COLUMNS": "100"})
        again = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == again.exit_code == 0, result.output
    return home / "demo", result.output, again


def test_gold_passages_are_first_in_the_middle_and_last():
    samples = select_questions()
    assert Counter(sample.meta["gold_at"] for sample in samples) == {0: 4, 2: 4, 4: 4}
    assert len({sample.id for sample in samples}) == 12


def test_the_demo_writes_a_run_of_every_twin_and_its_control(finished):
    folder, _, _ = finished
    for twin in TWINS:
        run = fs.open_run(folder / "runs" / twin)
        assert run.record["status"] == "finished"
        assert len(run.finished) == 3
        (control,) = find_controls(run.path)
        assert fs.open_run(control).finished == run.finished


def test_the_demo_prints_a_table_and_writes_the_page(finished):
    folder, output, _ = finished
    page = (folder / "report.html").read_text()
    for twin in TWINS:
        assert f"twin:{twin} " in output
        assert f"twin:{twin}" in page
    assert "page       demo/report.html" in output


def test_a_second_run_decodes_nothing_and_reports_the_same(finished):
    folder, _, again = finished
    assert "18 of 18 samples are already finished" in again.stderr
    twins = json.loads(again.stdout)["twins"]
    assert [row["twin"] for row in twins] == [f"twin:{twin}" for twin in TWINS]
    before = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/samples/*")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "select_questions", lambda count: select_questions(3))
        assert list(plan_demo(folder)) == []
    assert {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/samples/*")} == before


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "report.html").write_text("precious")
    with pytest.raises(fs.UserError, match="has other files, which the demo might overwrite"):
        plan_demo(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
