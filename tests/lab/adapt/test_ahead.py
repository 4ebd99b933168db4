"""Rows that other processes make, and what becomes of these processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing

import pytest

from floatscope.errors import UserError
from floatscope.lab.training.ahead import ahead


def ended(number: int) -> int:
    os._exit(1)


def hears(number: int) -> bool:
    return signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_process_that_is_gone_is_one_sentence():
    with pytest.raises(UserError, match="was ended from outside; run the same command again"):
        next(ahead(ended, 0, 1))


TRAINS = """
import os, time
from floatscope.lab.training.ahead import ahead

def pid(number):
    return os.getpid()

if __name__ == "__main__":
    rows = ahead(pid, 0, 1)
    print(next(rows), flush=True)
    time.sleep(60)
"""


def test_a_process_that_makes_rows_ends_with_the_one_that_trains(tmp_path):
    (tmp_path / "trains.py").write_text(TRAINS)
    trains = subprocess.Popen([sys.executable, tmp_path / "trains.py"], stdout=subprocess.PIPE, text=True)
    worker = int(trains.stdout.readline())
    os.kill(worker, 0)
    trains.kill()
    trains.communicate(timeout=30)  # the worker has the other end of it


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="Windows has no such mask")
def test_ctrl_c_is_for_the_process_that_trains_from_the_first_moment_on():
    with closing(ahead(hears, 0, 1)) as found:
        assert next(found) is False
    assert hears(0)
