"""Ctrl-C while training: the step that runs is finished and kept.

with interrupts() as interrupted:
    for step in steps:
        if interrupted: break
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Ctrl-C ends the step that runs, so that it can be saved; a second one ends at once."""
    met: list[int] = []

    def meet(number: int, _: object) -> None:
        if met:
            raise KeyboardInterrupt
        met.append(number)

    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield met
        return
    before = signal.signal(signal.SIGINT, meet)
    try:
        yield met
    finally:
        signal.signal(signal.SIGINT, before)
