"""The help of every command: its examples run as written, in an empty folder, and answer sensibly."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from floatscope.cli.help_text import EXAMPLES
from floatscope.cli.main import app
from pairs import slow_except
from shell import all_commands, run_command, split_commands

ELSEWHERE = ("", "demo", "doctor", "fetch")  # demo runs in test_demo.py, fetch with another pip in test_fetch.py
RUN = [name for name in EXAMPLES if name not in ELSEWHERE]
SLOW = {"adapt", "compare", "decode", "intervene", "report", "stress", "study", "trace", "twins train"}
EXPECTED = {  # a command → a part of what its examples print
    "decode": "Dramora",
    "data": "500",
    "eval": "acc 100.0",
    "compare": "gain",
    "index search": "Mira lives in Dramora.",
    "intervene": "mask_anchors",
    "models": "masked diffusion",
    "trace": "acc 1.000",
    "twins": "twin:reading-5",
}


def read_examples(command: str) -> list[str]:
    """The examples as an 80-column terminal shows them; a wrapped line would not run."""
    done = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*command.split(), "--help"])
    assert done.exit_code == 0, done.output
    lines = [line[1:].rstrip() for line in done.output.splitlines()]
    start = next(i for i, line in enumerate(lines) if line in ("Example:", "Examples:"))
    return split_commands("\n".join(lines[start + 1 :]))


def test_every_command_has_examples():
    assert set(EXAMPLES) == set(all_commands()) - {"index"}


@pytest.mark.parametrize("command", [name for name in EXAMPLES if name])
def test_help_ends_with_an_example_of_the_command(command):
    assert any(f"floatscope {command}" in line for line in read_examples(command))


@pytest.mark.parametrize("command", [name for name in EXAMPLES if name])
def test_examples_have_valid_options(command):
    for line in read_examples(command):
        program, *words = shlex.split(line.partition(" | ")[0].partition(" > ")[0], comments=True)
        if program != "floatscope":
            continue
        group = get_command(app)
        while words and words[0] in getattr(group, "commands", {}):
            group, words = group.commands[words[0]], words[1:]
        with suppress(typer.Exit):  # of an option such as --list
            group.make_context("floatscope", words)


@pytest.mark.slow
@pytest.mark.parametrize("command", slow_except(RUN, *{*RUN} - SLOW))
def test_examples_run_as_written_in_an_empty_folder(command, tmp_path):
    output = "".join(run_command(line, tmp_path) for line in read_examples(command))
    assert EXPECTED.get(command, "") in output


@pytest.mark.slow
def test_the_example_of_doctor_writes_json(tmp_path):
    (line,) = read_examples("doctor")
    run_command(line, tmp_path)
    assert json.loads((tmp_path / "doctor.json").read_text())["failures"] == []
