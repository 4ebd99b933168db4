"""The demo, with fewer questions than it has: what it leaves, that it goes on where it stopped, what it refuses."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from typer.testing import CliRunner

import floatscope as fs
from floatscope.cli.main import app
from floatscope.pipelines import demo
from floatscope.pipelines.demo import TWINS, prepare, questions, watch
from floatscope.traces import controls


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The command itself on three questions; the page, the words, the folder."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "questions", lambda count: questions(3))
        done = CliRunner().invoke(app, ["demo", "--out", str(folder)], env={"COLUMNS": "100"})
        told = CliRunner().invoke(app, ["demo", "--out", str(folder), "--json"])
    assert done.exit_code == told.exit_code == 0, done.output
    return folder, done.output, told


def test_questions_have_their_passage_first_in_the_middle_and_last():
    chosen = questions()
    assert Counter(sample.meta["gold_at"] for sample in chosen) == {0: 4, 2: 4, 4: 4}
    assert len({sample.id for sample in chosen}) == 12


def test_the_demo_leaves_a_run_of_every_twin_with_its_control(shown):
    folder, _, _ = shown
    for twin in TWINS:
        run = fs.open_run(folder / "runs" / twin)
        assert run.record["status"] == "finished"
        assert len(run.done) == 3
        (control,) = controls(run.path)
        assert fs.open_run(control).done == run.done


def test_the_demo_ends_with_a_table_and_the_page(shown):
    folder, said, _ = shown
    page = (folder / "report.html").read_text()
    for twin in TWINS:
        assert f"twin:{twin} " in said
        assert f"twin:{twin}" in page
    assert f"page: {folder / 'report.html'}" in said.replace("\n", "")


def test_once_more_decodes_nothing_and_says_the_same(shown):
    folder, _, told = shown
    assert "18 samples were finished before" in told.stderr
    twins = json.loads(told.stdout)["twins"]
    assert [row["twin"] for row in twins] == [f"twin:{twin}" for twin in TWINS]
    before = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/samples/*")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "questions", lambda count: questions(3))
        assert list(watch(prepare(folder))) == []
    assert {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/samples/*")} == before


def test_a_folder_of_other_files_is_left_alone(tmp_path):
    (tmp_path / "report.html").write_text("precious")
    with pytest.raises(fs.UserError, match="holds other files, which the demo might overwrite"):
        prepare(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
