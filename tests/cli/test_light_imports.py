"""Commands that compute nothing import neither torch nor transformers, and mistakes are found before they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import floatscope as fs
from floatscope.cli.main import app
from shell import all_commands

PROGRAM = """
import json, sys
from typer.testing import CliRunner
from floatscope.cli.main import app

for words in json.load(sys.stdin):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, words, prog_name="floatscope")
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    print(json.dumps([result.exit_code, heavy, result.stdout or result.stderr]), flush=True)
    if heavy:
        break
"""

LIGHT = [
    ["data", "data.jsonl"],
    ["data", "twin:reading-5"],
    ["compare", "eval-0", "eval-1"],
    ["report", "trace"],
    ["models"],
    ["twins"],
    ["intervene", "--list"],
]
MISTAKES = [
    ["--wrong"],
    ["trace", "--wrong"],
    ["trace", "twin:mdn", "--prompt", "x", "--out", "x"],
    ["trace", "nowhere", "--prompt", "x", "--out", "x"],
    ["trace", "smollm2:arn", "--prompt", "x", "--out", "x"],
    ["trace", "twin:mdm", "--data", "nowhere.jsonl", "--out", "x"],
    ["trace", "twin:mdm", "--prompt", "x", "--out", "x", "--level", "sumary"],
    ["trace", "twin:mdm", "--prompt", "x", "--out", "x", "--new-tokens", "-1"],
    ["decode", "twin:mdm", "--prompt", "x", "--sampler", "confidense"],
    ["decode", "twin:mdm", "--prompt", "x", "--preset", "lada"],
    ["decode", "twin:mdm", "--prompt", "x", "--eos", "sometimes"],
    ["decode", "twin:mdm", "--prompt", "x", "--top-p", "0"],
    ["decode", "twin:mdm", "--prompt", "x", "--dtype", "float8"],
    ["decode", "twin:mdm", "--prompt", "x", "--device", "gpu"],
    ["lens", "twin:mdm", "--prompt", "x", "--out", "lens.txt"],
    ["eval", "twin:mdm", "--data", "data.jsonl", "--out", "x", "--template", "defualt"],
    ["eval", "twin:mdm", "--data", "data.jsonl", "--out", "x", "--passages", "many"],
    ["stress", "twin:mdm", "--data", "data.jsonl", "--out", "x", "--kind", "poistion"],
    ["stress", "twin:mdm", "--data", "data.jsonl", "--out", "x", "--kind", "noise", "--set", "k=1"],
    ["intervene", "twin:mdm", "--data", "data.jsonl", "--out", "x", "--edit", "mask_anchor(k=5)"],
    ["intervene", "twin:mdm", "twin:mdm", "--data", "data.jsonl", "--out", "x", "--edit", "spread"],
    ["study", "sink", "twin:mdm", "--data", "data.jsonl", "--out", "x"],
    ["report", "trace", "--figure-format", "bmp", "--figures", "f"],
    ["compare", "eval-0", "--out", "table.txt"],
    ["fetch", "smolm2"],
    ["adapt", "twin:arm", "--lr", "-1"],
]


def run_program(commands: list[list[str]], folder: Path, env: dict[str, str]) -> list[tuple[int, list[str], str]]:
    """Run commands in one fresh process: the status, the heavy modules imported so far and the output of each."""
    program = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        program,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **env},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def run_all(commands: list[list[str]], folder: Path) -> None:
    """Run commands; after each of them neither torch nor transformers is imported."""
    results = run_program(commands, folder, {})
    for words, (status, heavy, output) in zip(commands, results, strict=False):
        assert (status, heavy) == (2 if words in MISTAKES else 0, []), f"{words}: {output}"
    assert len(results) == len(commands)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Two small evaluations and a trace."""
    home = tmp_path_factory.mktemp("home")
    fs.write_random(home / "llada", "llada", layers=2, width=32, context=512)
    question = {"question": "Who?", "answer": "Mira", "passages": [{"text": "Mira did.", "gold": True}]}
    (home / "data.jsonl").write_text(json.dumps(question) + "\n")
    words = [str(home / "llada"), "--data", str(home / "data.jsonl"), "--new-tokens", "2"]
    for name, more in {"eval-0": ["--passages", "0"], "eval-1": [], "trace": []}.items():
        command = "trace" if name == "trace" else "eval"
        done = CliRunner().invoke(app, [command, *words, *more, "--out", str(home / name)])
        assert done.exit_code == 0, done.output
    return home


def test_help_imports_no_torch(tmp_path):
    run_all([[*command.split(), "--help"] for command in all_commands()], tmp_path)


def test_commands_that_only_read_import_no_torch(home):
    run_all(LIGHT, home)


def test_mistakes_are_found_before_torch_is_imported(home):
    run_all(MISTAKES, home)


FIRST_LINES = [
    ["trace", "twin:mdm", "--prompt", "x"],
    ["eval", "twin:mdm", "--data", "data.jsonl"],
    ["stress", "twin:mdm", "--data", "data.jsonl", "--kind", "position"],
    ["intervene", "twin:mdm", "--data", "data.jsonl", "--edit", "spread"],
    ["study", "sinks", "twin:mdm", "--data", "data.jsonl"],
    ["demo"],
    ["twins", "train"],
    ["adapt", "twin:mdm"],
]


def test_the_first_line_is_printed_before_torch_is_imported(home, tmp_path):
    """Torch is replaced by a module that cannot be imported: the line is there all the same."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    commands = [[*words, "--out", str(tmp_path / "out")] for words in FIRST_LINES]
    results = run_program(commands, home, {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])})
    for words, (status, _, output) in zip(FIRST_LINES, results, strict=True):
        assert (status, len(output.splitlines())) == (130, 1), f"{words}: {output}"
