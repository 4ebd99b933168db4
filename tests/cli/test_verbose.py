"""`floatscope -v …` shows the log on stderr; without it there is none."""

from __future__ import annotations

import logging

from typer.testing import CliRunner

from floatscope.capture.backends import _log_once
from floatscope.cli.main import app
from floatscope.models.limited_process import LimitedProcess

OPENED = "floatscope.models.loader: opened twin:mdm: architecture llada, paradigm mdm, torch.float32 on cpu, weights "


def test_the_log_is_shown_when_it_is_asked_for(tmp_path):
    command = ["trace", "twin:mdm", "--data", "twin:reading-1", "--limit", "1", "--new-tokens", "1", "--device", "cpu"]
    results = {}
    for words in (["-v"], [], ["--verbose"]):
        _log_once.cache_clear()
        out = tmp_path / ("quiet" if not words else "verbose")
        results["".join(words)] = CliRunner().invoke(app, [*words, *command, "--out", str(out)])
        assert logging.getLogger("floatscope").handlers == []
        assert logging.getLogger("floatscope").level == logging.NOTSET
    assert {result.exit_code for result in results.values()} == {0}
    first = results["-v"].stderr
    assert OPENED in first
    assert "floatscope.pipelines.trace: verbose: 1 of 1 batches to do, up to 1 samples each\n" in first
    assert "attention is reduced by the blocked backend (the tensors are on cpu)\n" in first
    assert "floatscope.pipelines.job: verbose: all 1 samples are on disk\n" in results["--verbose"].stderr
    assert results[""].stderr == ""


def test_the_option_stands_before_the_command():
    result = CliRunner().invoke(app, ["data", "twin:reading-1", "-v"])
    assert result.exit_code == 2
    assert "no such option: -v (did you mean" in result.stderr
    assert "-v data?)" in result.stderr


def test_child_processes_are_logged_at_the_second_level(caplog):
    with caplog.at_level(logging.DEBUG, "floatscope"):
        process = LimitedProcess(lambda value: value + 1)
        assert process.request(1) == 2
        process.close()
    assert [record.levelno for record in caplog.records] == [logging.DEBUG] * 2
    started, ended = (record.getMessage() for record in caplog.records)
    assert (started.partition("process ")[0], ended.partition("process ")[0]) == ("started child ", "ended child ")
