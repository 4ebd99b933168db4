"""`floatscope trace`: what it prints and writes, how it resumes, and mistakes in one sentence."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple

import pytest
from typer.testing import CliRunner

import floatscope as fs
from floatscope.cli.main import app
from floatscope.pipelines.trace import TracePart
from floatscope.traces import find_controls, open_run

LINES = [
    {"question": "Where does Mira live?", "answer": "Velmora", "passages": [{"text": "Mira lives in Velmora."}]},
    {"question": "Who?", "answer": "Mira"},
    {"question": "Whom?", "answer": "Jon"},
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    for layout in ("llada", "llama"):
        fs.write_random(home / layout, layout, seed=2, layers=2, width=32, context=256)
    (home / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return home


@pytest.fixture
def invoke(home, tmp_path):
    def call(*words: str, model: str = "llada", data: str | None = "data.jsonl", out: str = "run"):
        given = ["--data", str(home / data)] if data else []
        words = ("trace", str(home / model), *given, "--out", str(tmp_path / out), "--new-tokens", "4", *words)
        return CliRunner().invoke(app, list(words))

    return call


def plain(text: str) -> str:
    return " ".join(text.split())


def test_it_prints_the_forecast_the_progress_and_the_runs(invoke, tmp_path):
    result = invoke("--untrained-controls", "2")
    assert result.exit_code == 0, result.output
    message = plain(result.stdout)
    assert "model Model(llada: masked diffusion, 2 layers" in message
    assert "KiB for 9 samples in 3 runs" in message
    assert re.search(r"tracing 9 of 9, run/untrained-1: acc 0.0 %, in 0:00:\d\d", message)
    assert f"run {tmp_path / 'run'}: 3 samples, " in message
    assert f"control {tmp_path / 'run/untrained-1'}: 3 samples, " in message
    assert message.count("acc 0.000") == 3
    run = open_run(tmp_path / "run")
    assert run.samples == ("1", "2", "3")
    assert (run.settings["data"], run.settings["limit"]) == ("data.jsonl", None)
    assert run.record["status"] == "finished"
    assert [path.name for path in find_controls(tmp_path / "run")] == ["untrained-0", "untrained-1"]


def test_json_is_one_object(invoke, tmp_path):
    result = invoke("--untrained-controls", "1", "--json", "--limit", "2")
    record = json.loads(result.stdout)
    sizes = [sum(f.stat().st_size for f in (tmp_path / at / "samples").iterdir()) for at in ("run", "run/untrained-0")]
    mine = {"samples": 2, "acc": 0.0}
    assert record == {
        "run": str(tmp_path / "run"),
        **mine,
        "bytes": sizes[0],
        "resumed": 0,
        "skipped": 0,
        "controls": [{"run": str(tmp_path / "run/untrained-0"), **mine, "bytes": sizes[1]}],
    }


def test_the_same_command_resumes(invoke, tmp_path):
    invoke()
    (tmp_path / "run/samples/2.safetensors").unlink()
    result = invoke()
    assert "resuming 2 of 3 samples are already finished" in plain(result.stdout)
    assert "tracing    3 of 3, run: " in result.stdout
    result = invoke("--seed", "1")
    assert result.exit_code == 2
    assert "cannot be resumed with other settings: seed: 0 in the folder, 1 now" in result.stderr


def test_prompts_can_be_given_as_text(invoke, tmp_path):
    result = invoke("--prompt", "What floats?", "--prompt", "What [bold]sinks[/]?", data=None, model="llama")
    assert result.exit_code == 0, result.output
    assert "acc" not in result.stdout
    assert open_run(tmp_path / "run").samples == ("prompt-1", "prompt-2")


def test_settings_reach_the_run(invoke, tmp_path):
    words = ["--steps", "2", "--block", "2", "--sampler", "margin", "--temperature", "0.5", "--seed", "7"]
    result = invoke(*words, "--level", "heads", "--batch-size", "2", "--no-chat", "--limit", "2")
    assert result.exit_code == 0, result.output
    run = open_run(tmp_path / "run")
    assert {name: run.settings[name] for name in ("steps", "block", "sampler", "temperature", "seed", "level")} == {
        "steps": 2, "block": 2, "sampler": "margin", "temperature": 0.5, "seed": 7, "level": "heads",
    }  # fmt: skip
    assert (run.settings["chat"], run.settings["limit"], run.plan) == (False, 2, [["1", "2"]])
    assert invoke("--preset", "dream", "--steps", "4", out="other").exit_code == 0
    assert open_run(tmp_path / "other").settings["sampler"] == "origin"


def test_influence_is_stored_on_request(invoke, tmp_path):
    result = invoke("--influence", "--limit", "2")
    assert result.exit_code == 0, result.output
    for made in open_run(tmp_path / "run"):
        assert made.arrays["influence"].shape == (4, made.arrays["keys"][0])
        assert (made.arrays["influence"] > 0).all()
    result = invoke("--limit", "2")
    assert result.exit_code == 2
    assert '"influence" in the folder, nothing now' in result.stderr


def test_an_interrupt_reports_what_is_finished(invoke, monkeypatch):
    original = TracePart.work

    def interrupted(self):
        yield next(original(self))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(TracePart, "work", interrupted)
        result = invoke("--batch-size", "1")
    assert result.exit_code == 130
    assert result.stderr == ("floatscope: interrupted; 1 of 3 samples are finished; run the same command to resume\n")
    assert "resuming 1 of 3 samples" in plain(invoke("--batch-size", "1").stdout)


def accept_interrupts():
    """Also if the tests run in the background of a shell, whose children ignore interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_a_real_interrupt_ends_with_130(home, tmp_path):
    lines = [{"id": f"s{i}", "question": f"Who is number {i}?", "answers": []} for i in range(400)]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["trace", home / "llada", "--data", tmp_path / "many.jsonl", "--out", tmp_path / "run", "--batch-size", "2"]
    command = [sys.executable, "-m", "floatscope", *words]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, preexec_fn=accept_interrupts
    )
    until = time.monotonic() + 200
    while not list(tmp_path.glob("run/samples/*.safetensors")) and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, message = process.communicate(timeout=100)
    assert process.returncode == 130
    finished = len(open_run(tmp_path / "run").finished)
    assert 0 < finished < 400
    assert message.startswith(
        f"floatscope: interrupted; {finished} of 400 samples are finished; run the same command to resume"
    )
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "data", "message"),
    [
        ([], None, "give either --data FILE or --prompt TEXT"),
        (["--prompt", "x"], "data.jsonl", "give either --data FILE or --prompt TEXT"),
        (["--prompt", "x", "--limit", "3"], None, "--limit, --format and --skip-bad apply to --data"),
        (["--prompt", "x", "--skip-bad"], None, "--limit, --format and --skip-bad apply to --data"),
        (["--format", "hotpott"], "data.jsonl", "unknown format 'hotpott' (did you mean 'hotpot'?)"),
        (["--prompt", " "], None, "sample 'prompt-1' is empty; give it some text"),
        (["--prompt", "why " * 99], None, "sample 'prompt-1' has "),
        ([], "nowhere.jsonl", "nowhere.jsonl: No such file or directory"),
        (["--limit", "0"], "data.jsonl", "invalid value for '--limit': it should be greater than or equal to 1"),
        (["--level", "sumary"], "data.jsonl", "unknown level 'sumary' (did you mean 'summary'?)"),
        (["--untrained-controls", "-1"], "data.jsonl", "invalid value for '--untrained-controls': "),
        (["--batch-size", "0"], "data.jsonl", "invalid value for '--batch-size': "),
        (["--sampler", "confidense"], "data.jsonl", "unknown sampler 'confidense' (did you mean 'confidence'?)"),
        (["--steps", "3", "--block", "2"], "data.jsonl", "3 steps do not divide among 2 blocks"),
        (["--device", "cuda:9"], "data.jsonl", "device cuda:9 does not exist"),
    ],
)
def test_a_mistake_is_one_sentence(invoke, home, tmp_path, words, data, message):
    result = invoke(*words, data=data)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout in ("", f"opening    {home / 'llada'}\n")
    assert not (tmp_path / "run").exists()


def test_bad_lines_are_skipped_and_counted(invoke, tmp_path):
    (tmp_path / "bad.jsonl").write_text("".join(f"{line}\n" for line in (json.dumps(LINES[0]), "{", '{"id": 1}')))
    result = invoke("--skip-bad", "--format", "own", data=str(tmp_path / "bad.jsonl"))
    assert result.exit_code == 0, result.output
    assert "skipped 2 lines that cannot be read; the first is line 2: it is not valid JSON" in plain(result.stdout)
    assert len(open_run(tmp_path / "run").finished) == 1
    again = invoke("--skip-bad", "--json", data=str(tmp_path / "bad.jsonl"))
    assert json.loads(again.stdout)["skipped"] == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: it is not valid JSON"),
        ('{"question": "Who?", "answer": "x", "id": "1"}', "line 2: line 1 has the id '1' too"),
    ],
)
def test_malformed_data_is_refused_with_its_line(invoke, home, tmp_path, line, message):
    (tmp_path / "bad.jsonl").write_text(json.dumps(LINES[0]) + "\n" + line + "\n")
    result = invoke(data=str(tmp_path / "bad.jsonl"))
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_folder_with_other_files_is_not_touched(invoke, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.tex").write_text("mine")
    result = invoke()
    assert result.exit_code == 2
    assert result.stderr == (
        f"floatscope: {tmp_path / 'run'} exists and is not a run folder (it has no run.json): give another path\n"
    )
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_a_full_disk_is_refused(invoke, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 0, 1000))
    result = invoke()
    assert result.exit_code == 2
    assert "has 1000 B left; use fewer samples or controls" in result.stderr


def test_an_unknown_option_has_a_hint(invoke):
    result = invoke("--limt", "3")
    assert result.exit_code == 2
    assert "--limit" in result.stderr


def test_an_autoregressive_model_takes_the_same_command(invoke, tmp_path):
    for model in ("llada", "llama"):
        result = invoke("--steps", "4", model=model, out=model)
        assert result.exit_code == 0, result.output
    both = [open_run(tmp_path / model) for model in ("llada", "llama")]
    assert len({run.settings["samples_sha256"] for run in both}) == 1
    assert {len(made.arrays["keys"]) for run in both for made in run} == {4}
