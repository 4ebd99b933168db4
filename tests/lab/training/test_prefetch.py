"""Worker processes that prepare batches: they fail, end and ignore Ctrl-C as they should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing

import numpy as np
import pytest
import torch

from floatscope.errors import UserError
from floatscope.lab.training.prefetch import prefetch


def exit_at_once(number: int) -> int:
    os._exit(1)


def exit_at_three(number: int) -> int:
    if number == 3:
        time.sleep(0.5)  # the batches before are on their way
        os._exit(1)
    return number


def refuse(number: int) -> int:
    raise UserError("the corpus is damaged; remove it")


def numbered(number: int) -> tuple[int, np.ndarray]:
    return number, np.full(3, number)


def receives_sigint(number: int) -> bool:
    return signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_killed_worker_is_a_user_error():
    with pytest.raises(UserError, match="was killed; run the same command again"):
        next(prefetch(exit_at_once, 0, 1))


def test_worker_killed_later_does_not_interrupt_the_step():
    batches = prefetch(exit_at_three, 0, 1)
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    time.sleep(1)  # the step during which the worker dies
    with pytest.raises(UserError, match="was killed; run the same command again"):
        next(batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_error_of_the_user_is_one_sentence(workers):
    with pytest.raises(UserError) as error:
        next(prefetch(refuse, 0, workers))
    assert str(error.value) == "the corpus is damaged; remove it"


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_in_order_and_unchanged_and_no_random_number_is_drawn(workers):
    state = torch.random.get_rng_state()
    with closing(prefetch(numbered, 5, workers)) as batches:
        first = [next(batches) for _ in range(9)]
    assert [number for number, _ in first] == list(range(5, 14))
    assert all(type(array) is np.ndarray and (array == number).all() for number, array in first)
    assert torch.equal(torch.random.get_rng_state(), state)


SCRIPT = """
import os, time
from floatscope.lab.training.prefetch import prefetch

def pid(number):
    return os.getpid(), bytes(10**6)  # more than a pipe takes

if __name__ == "__main__":
    batches = prefetch(pid, 0, 1)
    print(next(batches)[0], flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
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
