"""Worker processes that prepare batches: they fail, end and ignore Ctrl-C as they should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing

import pytest

from floatscope.errors import UserError
from floatscope.lab.training.prefetch import prefetch


def exit_at_once(number: int) -> int:
    os._exit(1)


def receives_sigint(number: int) -> bool:
    return signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_killed_worker_is_a_user_error():
    with pytest.raises(UserError, match="was killed; run the same command again"):
        next(prefetch(exit_at_once, 0, 1))


SCRIPT = """
import os, time
from floatscope.lab.training.prefetch import prefetch

def pid(number):
    return os.getpid()

if __name__ == "__main__":
    batches = prefetch(pid, 0, 1)
    print(next(batches), flush=True)
    time.sleep(60)
"""


def test_worker_exits_with_the_training_process(tmp_path):
    (tmp_path / "training.py").write_text(SCRIPT)
    training = subprocess.Popen([sys.executable, tmp_path / "training.py"], stdout=subprocess.PIPE, text=True)
    worker = int(training.stdout.readline())
    os.kill(worker, 0)
    training.kill()
    training.communicate(timeout=30)  # returns once the worker has closed its end of the pipe


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="Windows has no such mask")
def test_workers_ignore_ctrl_c_from_the_start():
    with closing(prefetch(receives_sigint, 0, 1)) as batches:
        assert next(batches) is False
    assert receives_sigint(0)
