"""The command line as a whole: mistakes in one sentence, exit codes that scripts can read, shared option tables."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import floatscope
from floatscope.cli import options, twins
from floatscope.cli.main import RENAMED_OPTIONS, app, name_flags
from floatscope.models.device import DTYPES
from floatscope.pipelines import doctor
from floatscope.pipelines.doctor import CallCheck, Case, ModelCheck, Report
from floatscope.sampling.settings import BLOCK_PRESETS, CANVAS_PRESETS, EOS_RULES, PRESETS, SAMPLER_NAMES
from floatscope.tasks.sample_files import SHIPPED
from shell import all_commands

COMMANDS = [name for name in all_commands() if name not in ("", "index", "twins")]
HEAVY = ("torch", "transformers", "matplotlib", "numpy", "xarray", "safetensors")


def invoke(*words: str):
    return CliRunner().invoke(app, list(words), prog_name="floatscope")


def test_importing_the_command_line_is_light():
    code = f"import sys, floatscope.cli.main; print([m for m in {HEAVY} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_names_that_are_checked_without_torch_are_those_of_the_tables():
    assert set(options.SAMPLERS) == set(SAMPLER_NAMES)
    assert set(options.PRESETS) == {*PRESETS, *BLOCK_PRESETS, *CANVAS_PRESETS}
    assert set(options.EOS_RULES) == set(EOS_RULES)
    assert set(options.DTYPES) == set(DTYPES)
    assert set(options.TWINS) == {name.removeprefix("twin:") for name in twins.MODELS}
    assert set(twins.QUESTION_FILES) == set(SHIPPED)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_has_one_meaning_in_all_commands(command):
    """The type, the metavar and the help agree; of a few flags the help says which file or how many are taken."""
    differing = {"--data", "--json", "--out", "--prompt"}
    for flag, shown in options_of(command).items():
        for other in (name for name in COMMANDS if name != command):
            if flag not in differing and flag in options_of(other):
                assert options_of(other)[flag] == shown, f"{flag} of {command} and {other}"


@pytest.mark.parametrize("command", ["trace", "eval", "stress", "intervene", "study", "lens", "decode"])
def test_everything_that_decodes_takes_the_sampling_options(command):
    sampling = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(options.SamplingOptions)}
    assert sampling <= set(options_of(command))
    assert {"--top-p", "--top-k", "--guidance", "--eos", "--stop"} <= sampling


def test_version_is_that_of_the_package():
    assert invoke("--version").output == f"floatscope {floatscope.__version__}\n"


def test_python_dash_m_runs_the_same_command():
    result = subprocess.run(
        [sys.executable, "-m", "floatscope", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout == f"floatscope {floatscope.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["docter"], "no such command 'docter' (did you mean doctor?); see floatscope --help"),
        (["lend"], "no such command 'lend' (did you mean lens?); see floatscope --help"),
        (["stretch"], "no such command 'stretch'; see floatscope --help"),
        (["twins", "feed"], "no such command 'feed'; see floatscope twins --help"),
        (["--frobnicate"], "no such option: --frobnicate; see floatscope --help"),
        (["decode", "twin:mdm", "--promt", "x"], "no such option: --promt (did you mean --prompt?);"),
        (["decode", "twin:mdm", "--temp", "1"], "no such option: --temp; see floatscope decode --help"),
        (["decode"], "missing argument 'MODEL'; see floatscope decode --help"),
        (["eval", "twin:mdm", "--data", "x", "--limit", "some"], "invalid value for '--limit': "),
        (
            ["eval", "twin:mdm", "--data", "x", "--limit", "0"],
            "invalid value for '--limit': it should be greater than or equal to 1",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_usage_error_is_one_sentence_with_the_remedy(words, message):
    result = invoke(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"floatscope: {message}")
    assert re.search(r"; see floatscope [a-z ]*--help\n$", result.stderr)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "old", "new"), [(c, old, new) for c, names in RENAMED_OPTIONS.items() for old, new in names.items()]
)
def test_an_option_of_0_6_is_refused_with_its_new_name(command, old, new):
    result = invoke(command, old, "x")
    assert result.exit_code == 2
    assert result.stderr == (
        f"floatscope: no such option: {old} (did you mean {new}?); see floatscope {command} --help\n"
    )
    assert new in options_of(command)


@pytest.mark.parametrize("words", [[], ["index"]], ids=" ".join)
def test_a_group_alone_prints_its_help(words):
    assert "Usage: floatscope" in invoke(*words).output


def test_twins_lists_the_models_and_the_question_files():
    output = invoke("twins").output
    for name in (*twins.MODELS, *twins.QUESTION_FILES):
        assert name in output
    record = json.loads(invoke("twins", "--json").stdout)
    assert [model["name"] for model in record["models"]] == list(twins.MODELS)
    assert {file["name"]: file["questions"] for file in record["data"]}["twin:reading-5"] == 500


@functools.cache
def options_of(command: str) -> dict[str, tuple[str, str, str]]:
    """The options of a command: (type, metavar, help) by flag."""
    found = get_command(app)
    for name in command.split():
        found = found.commands[name]
    options = [parameter for parameter in found.params if parameter.param_type_name == "option"]
    return {
        flag: (str(option.type_descriptor.annotation), str(option.metavar), str(option.help))
        for option in options
        for flag in (*option.opts, *option.secondary_opts)
        if flag != "--help"
    }


def test_a_user_error_is_one_sentence_on_stderr_and_status_2(tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("a file")
    result = invoke("demo", "--out", str(taken))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"floatscope: cannot write the demo to {taken}: ")
    assert result.stderr.endswith("give another folder with --out\n")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("there is none; use device='cpu'", "there is none; use --device cpu"),
        ("leave out mask_id= and shift=", "leave out --mask-id and --shift"),
        ("encode with chat=False", "encode with --no-chat"),
        ("set chat=True, or give a string", "set --chat, or give a string"),
        ("it runs only with trust_remote_code=True", "it runs only with --trust-remote-code"),
        ("revision='v2' needs a hub id", "--revision v2 needs a hub id"),
        ("exceeds new_tokens=8; give new_tokens=9 or more", "exceeds --new-tokens 8; give --new-tokens 9 or more"),
        ("unknown edit 'mask_anchors(k=5, steps=[0])'", "unknown edit 'mask_anchors(k=5, steps=[0])'"),
    ],
)
def test_messages_name_flags_on_the_command_line(message, shown):
    assert name_flags(message) == shown


def test_an_error_on_the_command_line_names_the_flag():
    result = invoke("decode", "twin:mdm", "--prompt", "x", "--device", "cuda:77")
    assert result.exit_code == 2
    assert result.stderr.endswith("here; use --device cpu\n")


def test_an_interrupt_is_one_line_and_status_130(monkeypatch):
    def interrupted() -> Report:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupted)
    result = invoke("doctor")
    assert result.exit_code == 130
    assert result.stderr == "floatscope: interrupted; everything finished is kept\n"


def test_a_bug_is_not_swallowed(monkeypatch):
    def broken() -> Report:
        raise ZeroDivisionError

    monkeypatch.setattr(doctor, "examine", broken)
    assert isinstance(invoke("doctor").exception, ZeroDivisionError)


CASE = Case("cpu", "window", "left", "float32", grouped=True, cached=False)
GOOD = CallCheck(CASE, "blocked", "the tensors are on cpu", {"output": 1e-7, "received": 2e-7})
BAD = CallCheck(CASE, "blocked", "the tensors are on cpu", {"output": 1e-7, "received": 3e-2})
RIGHT = ModelCheck("cpu", "float32", "a causal model", 1e-7, 1e-5)
WRONG = ModelCheck(
    "cpu", "float32", "a causal model", float("nan"), 1e-5, "captured differs from executed at layer '0'"
)


def test_doctor_succeeds_when_everything_agrees(monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: Report({"python": "3.11"}, [GOOD], [RIGHT]))
    result = invoke("doctor")
    assert result.exit_code == 0
    assert "captured == executed: 1 attention calls and 1 models checked" in result.output


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
def test_doctor_names_the_failures_and_ends_with_status_1(report, named, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: report)
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "captured != executed: 1 checks failed" in result.output
    assert named in result.output
    result = invoke("doctor", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["failures"] == [named]


def test_json_of_doctor_has_no_nan(monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: Report({}, [GOOD], [WRONG]))
    record = json.loads(invoke("doctor", "--json").stdout, parse_constant=pytest.fail)
    assert record["models"][0]["error"] is None
    assert record["models"][0]["ok"] is False


def test_a_closed_pipe_ends_a_command_like_any_other_tool():
    command = f"{sys.executable} -m floatscope data twin:reading-5 | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "141\n"
    assert done.stderr == ""


@pytest.mark.parametrize("words", [["--help"], ["data", "twin:reading-5"]])
def test_a_full_disk_under_stdout_is_one_sentence(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "floatscope", *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr.startswith("floatscope: cannot write the output (No space left on device); ")
    assert done.stderr.count("\n") == 1


LONG = "x" * 300


@pytest.mark.parametrize(
    "words",
    [
        ["models", LONG],
        ["data", LONG],
        ["report", LONG],
        ["compare", LONG],
        ["index", "search", LONG, "x"],
        ["trace", "twin:mdm", "--prompt", "x", "--new-tokens", "2", "--out", LONG],
        ["eval", "twin:mdm", "--data", "twin:reading-1", "--limit", "1", "--new-tokens", "2", "--out", LONG],
        ["lens", "twin:mdm", "--prompt", "x", "--new-tokens", "2", "--out", f"{LONG}.csv"],
    ],
    ids=lambda words: words[0],
)
def test_a_name_too_long_for_a_disk_is_one_sentence(words):
    result = invoke(*words)
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith("floatscope: ")
    assert "too long" in last
