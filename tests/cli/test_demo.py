"""The demo from outside, as a process: what it leaves, and what a kill or an interrupt in its middle leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import floatscope as fs
from floatscope.demo import prepare

COMMAND = [sys.executable, "-m", "floatscope", "demo", "--json", "--out"]
MODELS = ("random", "untrained")


def run(out: Path) -> dict[str, object]:
    done = subprocess.run([*COMMAND, str(out)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told: dict[str, object] = json.loads(done.stdout)
    return told


def files(out: Path) -> dict[str, Path]:
    return {f"{path.parent.parent.name}/{path.name}": path for path in sorted(out.glob("runs/*/samples/*"))}


def stop_in_the_middle(out: Path, how: signal.Signals) -> tuple[int, str]:
    """Start the demo, and send it a signal once two samples are on disk."""
    process = subprocess.Popen([*COMMAND, str(out)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while len(list(out.glob("runs/*/samples/*.safetensors"))) < 2 and time.monotonic() < until:
        assert process.poll() is None, "it ended before it could be stopped"
        time.sleep(0.002)
    process.send_signal(how)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> tuple[Path, dict[str, object]]:
    out = tmp_path_factory.mktemp("unbroken") / "demo"
    return out, run(out)


def test_the_demo_leaves_a_checkpoint_two_runs_and_two_maps(unbroken):
    _, told = unbroken
    assert fs.load(told["checkpoint"]).spec.family == "mdm"
    for model in MODELS:
        opened = fs.open_run(told["runs"][model])
        assert opened.record["status"] == "finished"
        trace = opened.trace("even")
        assert trace.coords["region"] == ("question", "passage 1", "passage 2", "answer")
        assert Path(told["maps"][model]).read_bytes().startswith(b"\x89PNG")
    assert told["kept"] == 0


def test_the_forecast_is_what_the_arrays_weigh(unbroken):
    _, told = unbroken
    arrays = [
        array for model in MODELS for trace in fs.open_run(told["runs"][model]) for array in trace.arrays.values()
    ]
    assert sum(array.nbytes for array in arrays) == told["forecast"]


def test_a_killed_demo_resumes_to_the_bytes_of_an_unbroken_one(unbroken, tmp_path):
    out = tmp_path / "demo"
    stop_in_the_middle(out, signal.SIGKILL)
    before = {name: path.stat().st_mtime_ns for name, path in files(out).items() if path.suffix == ".safetensors"}
    assert 2 <= len(before) < len(files(unbroken[0]))

    told = run(out)

    assert told["kept"] == len(before)
    after = files(out)
    assert {name: after[name].stat().st_mtime_ns for name in before} == before
    assert {n: p.read_bytes() for n, p in after.items()} == {n: p.read_bytes() for n, p in files(unbroken[0]).items()}
    for model in MODELS:
        assert fs.open_run(out / "runs" / model).record["status"] == "finished"


def test_an_interrupted_demo_keeps_what_was_finished_and_says_so(tmp_path):
    out = tmp_path / "demo"
    status, said = stop_in_the_middle(out, signal.SIGINT)
    assert status == 130
    assert said.endswith("floatscope: interrupted; whatever was finished is kept\n")
    assert "Traceback" not in said
    opened = fs.open_run(out / "runs/random")
    opened.check()
    assert len(opened.done) >= 2


def test_a_folder_of_other_files_is_left_alone(tmp_path):
    (tmp_path / "random.png").write_text("precious")
    with pytest.raises(fs.UserError, match="holds other files, which the demo might overwrite"):
        prepare(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["random.png"]
