"""Batches made ahead by other processes.

    for rows in ahead(Maker(material, recipe), start=0, workers=8): ...     # batch i is the same whoever makes it

A maker is called with the number of a batch. It travels to each worker once, so it must be small when it is pickled and
open its files when it is first called.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any, TypeVar

from floatscope.errors import UserError

Batch = TypeVar("Batch")


def ahead(make: Callable[[int], Batch], start: int, workers: int) -> Generator[Batch, None, None]:
    """Batch after batch from number `start` on, made here if there are no workers."""
    number = start
    if not workers:
        while True:
            yield make(number)
            number += 1
    context = get_context("spawn")  # a process that was forked off CUDA cannot use it, and may hang
    with ProcessPoolExecutor(workers, context, _begin, (make,)) as pool:
        with _deaf():
            coming: deque[Future[Batch]] = deque(pool.submit(_make, start + i) for i in range(3 * workers))
        number = start + len(coming)
        try:
            while True:
                batch = coming.popleft().result()
                coming.append(pool.submit(_make, number))
                number += 1
                yield batch
        except BrokenProcessPool as error:
            raise UserError(
                "a process that makes rows was ended from outside; run the same command again, with fewer --workers if"
                " memory is short"
            ) from error
        finally:
            for future in coming:
                future.cancel()


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that begin here never hear Ctrl-C, which is for the one that trains; it hears it when they have."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_maker: Callable[[int], Any] | None = None  # of a worker process


def _begin(make: Callable[[int], Any]) -> None:
    global _maker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that trains; it ends its workers
    Thread(target=_end_with_parent, daemon=True).start()
    _maker = make


def _end_with_parent() -> None:
    """A process that trains and is killed cannot end its workers."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _make(number: int) -> Any:
    assert _maker is not None
    return _maker(number)
