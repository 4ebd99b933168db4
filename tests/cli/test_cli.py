"""How the command line answers: help at once, mistakes in one sentence, exit codes that scripts can read."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import floatscope
from floatscope.cli.main import app
from floatscope.pipelines import doctor
from floatscope.pipelines.doctor import Case, Outcome, Report, Verdict

HEAVY = ("torch", "transformers", "matplotlib", "numpy", "xarray", "safetensors")


def ask(*words: str):
    return CliRunner().invoke(app, list(words), prog_name="floatscope")


def test_help_needs_no_torch():
    code = f"import sys, floatscope.cli.main; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("words", [[], ["demo"], ["doctor"]], ids=" ".join)
def test_help_shows_an_example(words):
    done = ask(*words, "--help")
    assert done.exit_code == 0
    assert "Example: floatscope" in done.output


def test_version_is_the_packages():
    assert ask("--version").output == f"floatscope {floatscope.__version__}\n"


def test_python_dash_m_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "floatscope", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"floatscope {floatscope.__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["docter"], "no such command 'docter'; did you mean 'doctor'; floatscope --help tells"),
        (["twins", "feed"], "no such command 'feed'; floatscope twins --help tells"),
        (["--frobnicate"], "no such option: --frobnicate; floatscope --help tells"),
        (["decode", "twin:mdm", "--promt", "x"], "no such option: --promt (Possible options: --preset, --prompt);"),
        (["decode"], "missing argument 'model'; floatscope decode --help tells"),
        (["eval", "twin:mdm", "--data", "x", "--limit", "some"], "invalid value for '--limit': "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_word_is_one_sentence_with_the_remedy(words, said):
    done = ask(*words)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"floatscope: {said}")
    assert done.stderr.endswith(" --help tells what can be given\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["twins"]], ids=" ".join)
def test_a_group_alone_tells_its_commands(words):
    assert "Usage: floatscope" in ask(*words).output


def test_a_users_mistake_is_one_sentence_on_stderr_and_status_2(tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("a file")
    done = ask("demo", "--out", str(taken))
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"floatscope: cannot write the demo to {taken}: ")
    assert done.stderr.endswith("give another folder with --out\n")
    assert done.stderr.count("\n") == 1


def test_an_interrupt_is_one_line_and_status_130(monkeypatch):
    def interrupted() -> Report:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupted)
    done = ask("doctor")
    assert done.exit_code == 130
    assert done.stderr == "floatscope: interrupted; whatever was finished is kept\n"


def test_a_bug_is_not_swallowed(monkeypatch):
    def broken() -> Report:
        raise ZeroDivisionError

    monkeypatch.setattr(doctor, "examine", broken)
    assert isinstance(ask("doctor").exception, ZeroDivisionError)


CASE = Case("cpu", "window", "left", "float32", grouped=True, cached=False)
GOOD = Outcome(CASE, "blocked", "the tensors are on cpu", {"output": 1e-7, "received": 2e-7})
BAD = Outcome(CASE, "blocked", "the tensors are on cpu", {"output": 1e-7, "received": 3e-2})
RIGHT = Verdict("cpu", "float32", "a causal model", 1e-7, 1e-5)
WRONG = Verdict("cpu", "float32", "a causal model", float("nan"), 1e-5, "captured differs from executed at layer '0'")


def test_doctor_ends_well_when_everything_agrees(monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: Report({"python": "3.11"}, [GOOD], [RIGHT]))
    done = ask("doctor")
    assert done.exit_code == 0
    assert "captured == executed here: 1 attention calls and 1 models checked" in done.output


@pytest.mark.parametrize(
    ("report", "named"),
    [
        (
            Report({}, [GOOD, BAD], [RIGHT]),
            "window mask, left padding, float32, grouped heads, on cpu: received is off by 3.0e-02 (allowed 1e-05)",
        ),
        (
            Report({}, [GOOD], [WRONG]),
            "a causal model on cpu in float32: captured differs from executed at layer '0'",
        ),
    ],
    ids=["call", "model"],
)
def test_doctor_names_what_fails_and_ends_with_status_1(report, named, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: report)
    done = ask("doctor")
    assert done.exit_code == 1
    assert "captured != executed here: 1 checks failed" in done.output
    assert named in done.output
    done = ask("doctor", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["failures"] == [named]


def test_json_has_no_nan(monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: Report({}, [GOOD], [WRONG]))
    told = json.loads(ask("doctor", "--json").stdout, parse_constant=pytest.fail)
    assert told["models"][0]["error"] is None
    assert told["models"][0]["ok"] is False
