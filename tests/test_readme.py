"""The documents are true: every Python block and every command runs, in order, in one empty folder per document."""

from __future__ import annotations

import ast
import re
import shlex
from contextlib import suppress
from pathlib import Path

import pytest
import typer
from typer.main import get_command

import floatscope as fs
from floatscope.cli.main import app
from shell import run_command, split_commands

ROOT = Path(__file__).parents[1]
PAGES = (
    "adapt", "analysis", "architecture", "glossary", "interventions", "methods", "models", "studies", "tasks", "trace",
    "twins",
)  # fmt: skip
DOCUMENTS = ["README.md", *(f"docs/{page}.md" for page in PAGES)]
WRITTEN = ["docs/benchmarks.md", "docs/claims.md", "docs/pair.md"]  # by scripts, which take hours


def read_blocks(document: str) -> list[tuple[str, str]]:
    """The fenced blocks of a document: (language, text)."""
    return re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


def read_commands(document: str, *languages: str) -> list[str]:
    """The commands in the blocks of some languages; "" is a block that names none, whose commands cannot run here."""
    texts = [text for language, text in read_blocks(document) if language in languages]
    return [line for text in texts for line in split_commands(text)]


@pytest.mark.slow
@pytest.mark.parametrize("document", [d for d in DOCUMENTS if read_blocks(d)])
def test_blocks_run_in_order(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "document"}
    for language, text in read_blocks(document):
        if language == "python":
            exec(compile(text, document, "exec"), names)
        elif language == "toml":  # the first line names the file
            Path(text.split()[1].rstrip(":")).write_text(text)
        elif language == "sh":
            for line in split_commands(text):
                if not line.startswith("make "):
                    run_command(line, tmp_path)


@pytest.mark.parametrize("document", [*DOCUMENTS, *WRITTEN])
def test_commands_have_valid_options(document):
    for line in read_commands(document, "", "sh"):
        words = shlex.split(line.partition(" | ")[0].partition(" > ")[0], comments=True)
        if words[0] != "floatscope" or "…" in line:
            continue
        command, rest = get_command(app), words[1:]
        while rest and rest[0] in getattr(command, "commands", {}):
            command, rest = command.commands[rest[0]], rest[1:]
        with suppress(typer.Exit):  # of an option such as --list
            command.make_context("floatscope", rest)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_blocks_compile_and_use_public_names(document):
    for language, text in read_blocks(document):
        if language == "python":
            tree = ast.parse(text, document)
            used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_package(node.value)}
            assert used <= set(dir(fs)), used - set(dir(fs))


def is_package(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "fs"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_commands_are_targets_of_the_makefile(document):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in read_commands(document, "sh"):
        program, *words = shlex.split(line, comments=True)
        assert program != "make" or set(words) <= targets


def test_the_readme_begins_with_the_two_commands_that_set_everything_up():
    first = [shlex.split(line, comments=True) for line in read_commands("README.md", "sh")[:2]]
    assert first == [["make", "demo"], ["make", "test"]]


def test_the_picture_is_there_and_small():
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert len(pictures) == 1
    assert 0 < (ROOT / pictures[0]).stat().st_size < 200_000


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files(document):
    text = (ROOT / document).read_text()
    for link in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert ((ROOT / document).parent / link).exists(), link
