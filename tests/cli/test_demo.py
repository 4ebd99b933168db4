"""The demo with few questions: what it writes, that it resumes, what it refuses."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

import floatscope as fs
from floatscope.analysis.claims import CLAIMS, registry_digest, registry_line
from floatscope.cli.help_text import EXAMPLES
from floatscope.cli.main import app
from floatscope.pipelines import demo
from floatscope.pipelines.demo import TWINS, plan_demo, select_questions
from floatscope.traces import find_controls
from jobs import run_batches


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


def test_questions_have_answers_of_several_sentences_that_fit_the_new_tokens():
    samples = select_questions()
    tokenizer = fs.load("twin:mdm", device="cpu").tokenizer
    assert len({sample.id for sample in samples}) == 12
    for sample in samples:
        assert sample.answers[0].count(".") >= 3
        assert 12 <= len(tokenizer.encode(sample.answers[0], chat=False)) < demo.NEW_TOKENS


@pytest.mark.slow
def test_the_demo_writes_a_run_of_every_twin_and_its_control(finished):
    folder, _, _ = finished
    for twin in TWINS:
        run = fs.open_run(folder / "runs" / twin)
        assert run.record["status"] == "finished"
        assert len(run.finished) == 3
        (control,) = find_controls(run.path)
        assert fs.open_run(control).finished == run.finished


@pytest.mark.slow
def test_the_demo_prints_a_line_per_claim_and_writes_the_page(finished):
    folder, output, again = finished
    page, text = (folder / "report.html").read_text(), " ".join(output.split())
    assert re.search(r"right arm \d+%, mdm \d+%, mdm-adapted \d+% of 12 answers, complete and in order", text)
    assert "Published claims, tested on these runs:" in output
    claims = json.loads(again.stdout)["claims"]
    assert len(claims) >= 3
    for claim in claims:
        assert f"• {' '.join(claim.split())}" in text
        assert any(claim.startswith(f"{each.short}: ") for each in CLAIMS.values() if each.short)
        assert all(f"twin:{twin} " in claim for twin in TWINS)
    assert all(f"twin:{twin}" in page for twin in TWINS)
    assert "page       demo/report.html" in output


@pytest.mark.slow
def test_output_and_page_print_the_digest_of_the_registry(finished):
    folder, output, _ = finished
    assert registry_line() in " ".join(output.split())
    assert registry_digest() in registry_line()
    assert registry_line() in (folder / "report.html").read_text()


@pytest.mark.slow
def test_a_second_run_decodes_nothing_and_reports_the_same(finished):
    folder, _, again = finished
    assert json.loads(again.stderr.splitlines()[-2]) == {"event": "started", "done": 18, "total": 18}
    record = json.loads(again.stdout)
    assert set(record) == {"page", "runs", "acc", "claims", "summary"}
    for twin in TWINS:
        scores = [trace.meta["acc"] for trace in fs.open_run(folder / "runs" / twin)]
        assert record["acc"][twin] == pytest.approx(sum(scores) / 3)
    before = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/samples/*")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "select_questions", lambda count: select_questions(3))
        assert run_batches(plan_demo(folder)) == []
    assert {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/samples/*")} == before


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "report.html").write_text("precious")
    with pytest.raises(fs.UserError, match="has other files, which the demo might overwrite"):
        plan_demo(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
