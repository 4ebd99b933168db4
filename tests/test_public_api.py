"""The public face: what `dir(fs)` shows, what each name documents, and that the examples in the docstrings run."""

from __future__ import annotations

import inspect
import re
import textwrap

import pytest

import floatscope as fs
from pairs import slow_except

NAMES = [name for name in fs.__all__ if name != "analysis"]


def example_of(value: object) -> str | None:
    """The code under `Example:` in a docstring, up to the next line that is not indented below it."""
    match = re.search(r"^Example:\n((?:[ ]+.*\n?|\n)+)", inspect.getdoc(value) or "", re.MULTILINE)
    return textwrap.dedent(match[1]).strip() if match else None


def test_dir_shows_public_names_only():
    assert dir(fs) == sorted([*fs.__all__, "__version__"])


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_a_docstring_with_an_example(name):
    assert example_of(getattr(fs, name)), f"fs.{name} has no `Example:` in its docstring"


@pytest.mark.parametrize("name", [name for name in NAMES if inspect.isfunction(getattr(fs, name))])
def test_every_public_function_documents_its_arguments_and_result(name):
    function = getattr(fs, name)
    document, signature = inspect.getdoc(function) or "", inspect.signature(function)
    undocumented = [argument for argument in signature.parameters if not re.search(rf"\b{argument}\b", document)]
    assert undocumented == []
    assert "Returns:" in document or "Yields:" in document


@pytest.mark.parametrize("name", slow_except(NAMES, *{*NAMES} - {"intervene", "stress", "study"}))
def test_the_example_of_a_docstring_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = example_of(getattr(fs, name))
    assert example is not None
    exec(compile(example, f"fs.{name}", "exec"), {"fs": fs})


def test_every_analysis_takes_a_run(tmp_path):
    run = fs.trace(fs.load("twin:mdm"), fs.read_samples("twin:reading-5", limit=2), tmp_path / "run", new_tokens=4)
    for name in ("absorption", "floating", "order"):
        table = getattr(fs.analysis, name)(run)
        assert set(table["sample"]) == set(run.samples), name
