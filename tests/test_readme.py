"""What the documents show, runs: every Python block and every command, in order, in an empty folder."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from floatscope.cli.main import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", "docs/architecture.md", "docs/methods.md", "docs/models.md", "docs/trace.md"]
DOCUMENTS += ["docs/analysis.md", "docs/twins.md", "docs/tasks.md", "docs/interventions.md", "docs/studies.md"]
DOCUMENTS += ["docs/adapt.md"]
STORIES = ["docs/tasks.md", "docs/interventions.md", "docs/studies.md", "docs/adapt.md"]
"""Whose blocks build on each other: Python, commands, and files by the name in their first line."""


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


def commands(document: str) -> list[list[str]]:
    lines = "".join(blocks(document, "sh")).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d not in STORIES and blocks(d, "python")])
def test_python_blocks_run_in_order(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "document"}
    for block in blocks(document, "python"):
        exec(compile(block, document, "exec"), names)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_commands_are_targets_of_the_makefile(document):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {target for program, *rest in commands(document) if program == "make" for target in rest}
    assert asked <= targets


def test_the_readme_begins_with_the_two_commands_that_set_everything_up():
    assert commands("README.md")[:2] == [["make", "demo"], ["make", "test"]]


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, id=" ".join(c)) for d in DOCUMENTS if d not in STORIES for c in commands(d) if c[0] != "make"],
)
def test_commands_run(command, tmp_path):
    run(command, tmp_path)


@pytest.mark.parametrize("document", STORIES)
def test_a_story_can_be_followed(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "document"}
    told = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)
    assert {"python", "sh"} <= {language for language, _ in told} <= {"python", "sh", "toml"}
    for language, block in told:
        if language == "python":
            exec(compile(block, document, "exec"), names)
        elif language == "toml":
            Path(block.split()[1].rstrip(":")).write_text(block)
        else:
            for line in block.splitlines():
                run(shlex.split(line, comments=True), tmp_path)


def run(command, folder):
    """In this process, where everything is imported once: a command of its own would take five seconds for that."""
    program, *words = command
    assert program == "floatscope"
    with contextlib.chdir(folder):
        done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output


def test_the_picture_is_there_and_small():
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert len(pictures) == 1
    assert 0 < (ROOT / pictures[0]).stat().st_size < 200_000


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_to_files_lead_somewhere(document):
    text = (ROOT / document).read_text()
    for link in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert ((ROOT / document).parent / link).exists(), link
