"""Rows that other processes make, and what becomes of these processes."""

from __future__ import annotations

import os
import signal
from contextlib import closing

import pytest

from floatscope.errors import UserError
from floatscope.training.ahead import ahead


def ended(number: int) -> int:
    os._exit(1)


def hears(number: int) -> bool:
    return signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_process_that_is_gone_is_one_sentence():
    with pytest.raises(UserError, match="was ended from outside; run the same command again"):
        next(ahead(ended, 0, 1))


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="Windows has no such mask")
def test_ctrl_c_is_for_the_process_that_trains_from_the_first_moment_on():
    with closing(ahead(hears, 0, 1)) as found:
        assert next(found) is False
    assert hears(0)
