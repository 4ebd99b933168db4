"""`floatscope decode`: the same text in a pipe, as JSON and live; mistakes are one sentence."""

from __future__ import annotations

import json
import os
import pty
import re
import sys
from contextlib import suppress

import pytest
from typer.testing import CliRunner

import floatscope as fs
from floatscope.cli.main import app, main

PROMPT = "What floats?\nAnd what sinks?"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    for layout in ("llada", "dream", "llama"):
        fs.write_random(home / layout, layout, seed=2, layers=2, width=32)
    return home


def run(*words: str, stdin: str | None = None):
    return CliRunner().invoke(app, ["decode", *words], input=stdin)


def run_live(*words: str, columns: int = 100) -> str:
    """What a terminal would show, escape sequences and all; the command runs in a child process of its own."""
    pid, terminal = pty.fork()
    if pid == 0:
        status = 1
        try:
            os.environ |= {"COLUMNS": str(columns), "LINES": "40", "TERM": "xterm-256color", "COLORTERM": "truecolor"}
            sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
            sys.argv = ["floatscope", "decode", *words]
            main()
        except SystemExit as error:
            status = int(error.code or 0)
            sys.stdout.flush()
        finally:
            os._exit(status)  # never return into pytest
    shown = b""
    with os.fdopen(terminal, "rb", 0) as reader, suppress(OSError):  # at the end, when the child has closed its side
        while piece := reader.read(65536):
            shown += piece
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown
    return shown.decode()


@pytest.mark.parametrize("layout", ["llada", "dream", "llama"])
def test_a_pipe_receives_only_the_text(folders, layout):
    result = run(str(folders / layout), "--prompt", PROMPT, "--new-tokens", "12")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == fs.decode(fs.load(folders / layout), PROMPT, new_tokens=12).text + "\n"
    assert result.stderr == ""


def test_the_prompt_can_be_read_from_stdin(folders):
    words = (str(folders / "llada"), "--new-tokens", "8", "--prompt")
    assert run(*words, "-", stdin=PROMPT).stdout == run(*words, PROMPT).stdout


@pytest.mark.parametrize("layout", ["dream", "llama"])
def test_json_agrees_with_python(folders, layout):
    result = run(str(folders / layout), "--prompt", PROMPT, "--new-tokens", "6", "--layer", "1", "--json", "--no-stop")
    record = json.loads(result.stdout)
    out = fs.decode(fs.load(folders / layout), PROMPT, new_tokens=6, stop=False, watch=fs.Watch())
    assert record["text"] == out.text
    assert record["tokens"] == out.generated_ids[0]
    assert len(record["steps"]) == len(out.steps)
    for mine, step in zip(record["steps"], out.steps, strict=True):
        assert [c["position"] for c in mine["commits"]] == step.commits.position.tolist()
        assert [c["token"] for c in mine["commits"]] == step.commits.token.tolist()
        assert [c["confidence"] for c in mine["commits"]] == pytest.approx(step.commits.confidence.tolist(), abs=1e-5)
    lift = out.trace.received(1, scale="lift", eligible=True, view="row")
    for t, mine in enumerate(record["steps"]):
        top = mine["anchors"][0]
        assert top["lift"] == pytest.approx(lift[t][~(lift[t] != lift[t])].max(), rel=1e-4)
        assert lift[t, top["position"]] == pytest.approx(top["lift"], rel=1e-4)
    assert record["run"]["sampler"] == out.sampling.sampler


def test_a_terminal_shows_the_canvas_step_by_step(folders):
    shown = run_live(str(folders / "llada"), "--prompt", PROMPT, "--new-tokens", "8", "--block", "4", "--layer", "1")
    assert "░" in shown
    assert re.search(r"\x1b\[1;37;48;2;\d+;\d+;\d+m", shown)  # a fresh commit, coloured by its confidence
    assert re.search(r"\x1b\[[\d;]*4[\d;]*m", shown)  # an anchor, underlined
    plain = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown)
    assert "block 1/2" in plain
    assert "block 2/2" in plain
    assert "8 committed · 0 masked" in plain
    assert re.search(r"anchors \(layer 1\): .+ at \d+, \d+\.\d×", plain)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "5", "--block", "2", "--new-tokens", "4"], "5 steps do not divide among 2 blocks"),
        (["--block", "64"], "a block of 64 is longer than the 32 new tokens"),
        (["--sampler", "confidense"], "unknown sampler 'confidense' (did you mean 'confidence'?)"),
        (["--sampler", "ar"], "sampler 'ar' is not for a masked diffusion model"),
        (["--mask-id", "100000"], "100000"),
        (["--device", "cuda:9"], "device cuda:9 does not exist"),
        (["--layer", "7"], "there is no layer 7: llada has layers 0 to 1"),
        (["--new-tokens", "5000"], "was trained for 4096; shorten it by"),
        (["--preset", "lada"], "unknown preset 'lada' (did you mean 'llada'?)"),
    ],
)
def test_a_mistake_is_one_sentence(folders, words, message):
    result = CliRunner().invoke(app, ["decode", str(folders / "llada"), "--prompt", "hello", *words])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_infill_fills_a_mask_in_the_prompt(folders):
    words = (str(folders / "llada"), "--prompt", "a<|mdm_mask|>b<|mdm_mask|>", "--no-chat", "--new-tokens", "0")
    result = run(*words)
    assert result.exit_code == 2
    assert "contains the mask token" in result.stderr
    assert "--infill" in result.stderr
    result = run(*words, "--infill")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("a")
