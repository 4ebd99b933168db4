"""Batches prepared in advance by worker processes.

    for batch in prefetch(BatchMaker(corpus, recipe), start=0, workers=8): ...     # batch i does not depend on workers

`make_batch` is called with the number of a batch. It is pickled once per worker, so it must be small and open its files
on the first call.
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


def prefetch(make_batch: Callable[[int], Batch], start: int, workers: int) -> Generator[Batch, None, None]:
    """Yield the batches from number `start` on, without end; with 0 workers this process makes them itself."""
    number = start
    if not workers:
        while True:
            yield make_batch(number)
            number += 1
    context = get_context("spawn")  # a forked process cannot use CUDA and may hang
    with ProcessPoolExecutor(workers, context, _init_worker, (make_batch,)) as pool:
        with _block_sigint():
            queue: deque[Future[Batch]] = deque(pool.submit(_make_batch, start + i) for i in range(3 * workers))
        number = start + len(queue)
        try:
            while True:
                batch = queue.popleft().result()
                queue.append(pool.submit(_make_batch, number))
                number += 1
                yield batch
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process that prepares batches was killed; run the same command again, with fewer --workers"
                " if memory is short"
            ) from error
        finally:
            for future in queue:
                future.cancel()


@contextmanager
def _block_sigint() -> Iterator[None]:
    """Block Ctrl-C while workers start, so that they inherit the block; this process receives it afterwards."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker_function: Callable[[int], Any] | None = None  # set in worker processes only


def _init_worker(make_batch: Callable[[int], Any]) -> None:
    global _worker_function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process handles Ctrl-C and stops its workers
    Thread(target=_exit_with_parent, daemon=True).start()
    _worker_function = make_batch


def _exit_with_parent() -> None:
    """Exit when the training process is gone: a killed process cannot stop its workers."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _make_batch(number: int) -> Any:
    assert _worker_function is not None
    return _worker_function(number)
