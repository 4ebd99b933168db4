"""Commands of floatscope in child processes: what they print, how they end, how long they take, how much memory.

    commands.preload()                                   # once: the children inherit everything that is imported
    done = commands.run(["models", "twin:mdm"])
    done.status, done.stderr, done.seconds, done.bytes
    pid = commands.start(["trace", …], output)           # to be killed

A child is a fork that calls the function behind `floatscope`, so that a command takes a second and not seven.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

THREADS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
MODULES = ("cli.main", "pipelines.studies", "pipelines.stress", "lab.adapt.train", "reports.build", "tasks.index")


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    words: list[str]
    status: int  # negative: a signal
    stdout: str
    stderr: str
    seconds: float  # on the clock
    processor_seconds: float
    bytes: int  # the largest resident set of the command and its own children

    @property
    def has_traceback(self) -> bool:
        """Whether it ended in a way that a person cannot understand."""
        return self.status not in (0, 2) or "Traceback (most recent call last)" in self.stderr


def preload() -> None:
    """Import what commands import, without starting a thread."""
    os.environ.update(THREADS)
    renew_thread_pool()
    for name in MODULES:
        importlib.import_module(f"floatscope.{name}")


def renew_thread_pool() -> None:
    """Let torch replace its thread pool after a fork, before the weights of a model are loaded in several threads.

    torch does it at the first use of the pool and without a lock, so a second thread may find none.
    """
    import torch

    torch.set_num_threads(1)


def start(words: Sequence[str], output: Path, folder: Path | None = None) -> int:
    """Start a command; it writes to the files `output`.out and `output`.err."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        renew_thread_pool()
        if folder is not None:
            os.chdir(folder)
        for descriptor, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(f"{output}{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = ["floatscope", *words]
        importlib.import_module("floatscope.cli.main").main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # noqa: BLE001 - the child prints it as Python would, and ends
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def run(words: Sequence[str], limit: float = 60.0, folder: Path | None = None) -> Done:
    """Run a command to its end, or kill it after `limit` seconds."""
    with TemporaryDirectory() as scratch:
        output, began = Path(scratch) / "text", time.monotonic()
        pid = start(words, output, folder)
        while True:
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            seconds = time.monotonic() - began
            if ended:
                break
            if seconds > limit:
                os.killpg(pid, signal.SIGKILL)
            time.sleep(0.01)
        texts = [Path(f"{output}{suffix}") for suffix in (".out", ".err")]
        out, err = (file.read_text(errors="replace") if file.exists() else "" for file in texts)
        work = usage.ru_utime + usage.ru_stime
        return Done(list(words), os.waitstatus_to_exitcode(status), out, err, seconds, work, usage.ru_maxrss * 1024)


def run_fresh(words: Sequence[str], folder: Path) -> Done:
    """Run a command in an interpreter of its own, without limits."""
    began = time.monotonic()
    command = [sys.executable, "-m", "floatscope", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    return Done(list(words), done.returncode, done.stdout, done.stderr, time.monotonic() - began, 0.0, 0)


def run_and_kill(words: Sequence[str], seconds: float) -> bool:
    """Start a command and kill it and its children after a time; whether it still ran."""
    with TemporaryDirectory() as scratch:
        pid = start(words, Path(scratch) / "text")
        time.sleep(seconds)
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(pid, signal.SIGKILL)  # it has no group of its own yet
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
