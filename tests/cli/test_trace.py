"""`floatscope trace`: what it prints and leaves behind, how it goes on, and mistakes in a sentence."""

from __future__ import annotations

import json
import os
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
from floatscope.pipelines.trace import TraceJob
from floatscope.traces import controls, open_run

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
def ask(home, tmp_path):
    def asked(*words: str, model: str = "llada", data: str | None = "data.jsonl", out: str = "run"):
        given = ["--data", str(home / data)] if data else []
        words = ("trace", str(home / model), *given, "--out", str(tmp_path / out), "--new-tokens", "4", *words)
        return CliRunner().invoke(app, list(words))

    return asked


def plain(text: str) -> str:
    return " ".join(text.split())


def test_it_says_what_it_does_and_where_it_is(ask, tmp_path):
    done = ask("--control", "untrained", "--control-seeds", "2")
    assert done.exit_code == 0, done.output
    said = plain(done.stdout)
    assert "model Model(llada: masked diffusion, 2 layers" in said
    assert "KiB for 9 samples in 3 runs" in said
    assert "9/9 in 0:00:0" in said
    assert f"run {tmp_path / 'run'}: 3 samples, " in said
    assert f"control {tmp_path / 'run/untrained-1'}: 3 samples, " in said
    assert said.count("acc 0.000") == 3
    run = open_run(tmp_path / "run")
    assert run.samples == ("1", "2", "3")
    assert (run.settings["data"], run.settings["limit"]) == ("data.jsonl", None)
    assert run.record["status"] == "finished"
    assert [path.name for path in controls(tmp_path / "run")] == ["untrained-0", "untrained-1"]


def test_json_is_one_object(ask, tmp_path):
    done = ask("--control", "untrained", "--control-seeds", "1", "--json", "--limit", "2")
    told = json.loads(done.stdout)
    sizes = [sum(f.stat().st_size for f in (tmp_path / at / "samples").iterdir()) for at in ("run", "run/untrained-0")]
    mine = {"samples": 2, "acc": 0.0}
    assert told == {
        "run": str(tmp_path / "run"),
        **mine,
        "bytes": sizes[0],
        "kept": 0,
        "bad": 0,
        "controls": [{"run": str(tmp_path / "run/untrained-0"), **mine, "bytes": sizes[1]}],
    }


def test_the_same_command_goes_on_and_says_so(ask, tmp_path):
    ask()
    (tmp_path / "run/samples/2.safetensors").unlink()
    done = ask()
    assert "kept 2 of 3 samples, finished before; going on with the others" in plain(done.stdout)
    assert "3/3" in done.stdout
    done = ask("--seed", "1")
    assert done.exit_code == 2
    assert "cannot be resumed with other settings: seed: 0 in the folder, 1 now" in done.stderr


def test_prompts_may_be_given_one_by_one(ask, tmp_path):
    done = ask("--prompt", "What floats?", "--prompt", "What [bold]sinks[/]?", data=None, model="llama")
    assert done.exit_code == 0, done.output
    assert "acc" not in done.stdout
    assert open_run(tmp_path / "run").samples == ("prompt-1", "prompt-2")


def test_settings_reach_the_run(ask, tmp_path):
    words = ["--steps", "2", "--block", "2", "--sampler", "margin", "--temperature", "0.5", "--seed", "7"]
    done = ask(*words, "--keep", "heads", "--batch", "2", "--raw", "--limit", "2")
    assert done.exit_code == 0, done.output
    run = open_run(tmp_path / "run")
    assert {name: run.settings[name] for name in ("steps", "block", "sampler", "temperature", "seed", "keep")} == {
        "steps": 2, "block": 2, "sampler": "margin", "temperature": 0.5, "seed": 7, "keep": "heads",
    }  # fmt: skip
    assert (run.settings["template"], run.settings["limit"], run.plan) == (None, 2, [["1", "2"]])
    assert ask("--preset", "dream", "--steps", "4", out="other").exit_code == 0
    assert open_run(tmp_path / "other").settings["sampler"] == "origin"


def test_influence_is_kept_where_it_is_asked_for(ask, tmp_path):
    done = ask("--influence", "--limit", "2")
    assert done.exit_code == 0, done.output
    for made in open_run(tmp_path / "run"):
        assert made.arrays["influence"].shape == (4, made.arrays["keys"][0])
        assert (made.arrays["influence"] > 0).all()
    done = ask("--limit", "2")
    assert done.exit_code == 2
    assert '"influence" in the folder, nothing now' in done.stderr


def test_an_interrupt_says_how_far_it_came(ask, monkeypatch):
    whole = TraceJob.__iter__

    def interrupted(self):
        yield next(whole(self))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(TraceJob, "__iter__", interrupted)
        done = ask("--batch", "1")
    assert done.exit_code == 130
    assert done.stderr == (
        "floatscope: interrupted; 1 of 3 samples are finished and kept, and the same command goes on with the others\n"
    )
    assert "kept 1 of 3 samples" in plain(ask("--batch", "1").stdout)


def hears_interrupts():
    """Even where the tests run in the background of a shell, which has its children ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_real_interrupt_ends_with_130(home, tmp_path):
    lines = [{"id": f"s{i}", "question": f"Who is number {i}?", "answers": []} for i in range(400)]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["trace", home / "llada", "--data", tmp_path / "many.jsonl", "--out", tmp_path / "run", "--batch", "2"]
    command = [sys.executable, "-m", "floatscope", *words]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, preexec_fn=hears_interrupts
    )
    until = time.monotonic() + 200
    while not list(tmp_path.glob("run/samples/*.safetensors")) and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 130
    finished = len(open_run(tmp_path / "run").done)
    assert 0 < finished < 400
    assert said.startswith(f"floatscope: interrupted; {finished} of 400 samples are finished and kept")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "data", "said"),
    [
        ([], None, "give --data FILE or --prompt TEXT, one of the two"),
        (["--prompt", "x"], "data.jsonl", "give --data FILE or --prompt TEXT, one of the two"),
        (["--prompt", "x", "--limit", "3"], None, "--limit takes the first samples of --data"),
        (["--prompt", "x", "--skip-bad"], None, "--format and --skip-bad say how --data is read"),
        (["--format", "hotpott"], "data.jsonl", "unknown format 'hotpott' (did you mean 'hotpot'?)"),
        (["--prompt", " "], None, "sample 'prompt-1' is empty; give it some text"),
        (["--prompt", "why " * 99], None, "sample 'prompt-1' has "),
        ([], "nowhere.jsonl", "nowhere.jsonl: No such file or directory"),
        (["--limit", "0"], "data.jsonl", "limit must be at least 1, got 0"),
        (["--keep", "sumary"], "data.jsonl", "unknown keep level 'sumary' (did you mean 'summary'?)"),
        (["--control", "untraned"], "data.jsonl", "unknown control 'untraned' (did you mean 'untrained'?)"),
        (["--control", "untrained", "--control-seeds", "0"], "data.jsonl", "--control-seeds must be at least 1, got 0"),
        (["--batch", "0"], "data.jsonl", "a batch must hold at least 1 sample, got 0"),
        (["--sampler", "confidense"], "data.jsonl", "unknown sampler 'confidense' (did you mean 'confidence'?)"),
        (["--steps", "3", "--block", "2"], "data.jsonl", "3 steps do not divide among 2 blocks"),
        (["--device", "cuda:9"], "data.jsonl", "cuda:9 was asked for"),
    ],
)
def test_a_mistake_gets_one_sentence(ask, tmp_path, words, data, said):
    done = ask(*words, data=data)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert not (tmp_path / "run").exists()


def test_bad_lines_are_left_out_and_told(ask, tmp_path):
    (tmp_path / "bad.jsonl").write_text("".join(f"{line}\n" for line in (json.dumps(LINES[0]), "{", '{"id": 1}')))
    done = ask("--skip-bad", "--format", "own", data=str(tmp_path / "bad.jsonl"))
    assert done.exit_code == 0, done.output
    assert "left out 2 lines that cannot be read; the first is line 2: it is no whole JSON" in plain(done.stdout)
    assert len(open_run(tmp_path / "run").done) == 1
    again = ask("--skip-bad", "--json", data=str(tmp_path / "bad.jsonl"))
    assert json.loads(again.stdout)["bad"] == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: it is no whole"),
        ('{"question": "Who?", "answer": "x", "id": "1"}', "line 2: the id '1' is that"),
    ],
)
def test_malformed_data_is_refused_by_its_line(ask, home, tmp_path, line, said):
    (tmp_path / "bad.jsonl").write_text(json.dumps(LINES[0]) + "\n" + line + "\n")
    done = ask(data=str(tmp_path / "bad.jsonl"))
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_folder_of_other_files_is_not_touched(ask, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.tex").write_text("mine")
    done = ask()
    assert done.exit_code == 2
    assert done.stderr == (
        f"floatscope: {tmp_path / 'run'} exists and is not a run folder (it has no run.json): give another path\n"
    )
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_a_disk_without_room_is_refused(ask, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 0, 1000))
    done = ask()
    assert done.exit_code == 2
    assert "has 1000 B left: take fewer samples or controls, keep less, or give a folder on another disk" in done.stderr


def test_an_unknown_option_is_a_word_away(ask):
    done = ask("--limt", "3")
    assert done.exit_code == 2
    assert "--limit" in done.stderr


def test_an_autoregressive_model_takes_the_same_command(ask, tmp_path):
    for model in ("llada", "llama"):
        done = ask("--steps", "4", model=model, out=model)
        assert done.exit_code == 0, done.output
    both = [open_run(tmp_path / model) for model in ("llada", "llama")]
    assert len({run.settings["samples_sha256"] for run in both}) == 1
    assert {len(made.arrays["keys"]) for run in both for made in run} == {4}
