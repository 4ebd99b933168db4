"""Batches prepared in advance by worker processes, with torch's DataLoader.

    for batch in prefetch(BatchMaker(corpus, recipe), start=0, workers=8): ...     # batch i does not depend on workers

`make_batch` is called with the number of a batch. It is pickled once per worker, so it must be small and open its files
on the first call.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing import parent_process, resource_tracker
from threading import Thread, current_thread, main_thread
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from floatscope.errors import UserError

Batch = TypeVar("Batch")


def prefetch(make_batch: Callable[[int], Batch], start: int, workers: int) -> Generator[Batch, None, None]:
    """Yield the batches from number `start` on, without end; with 0 workers this process makes them itself."""
    in_workers: dict[str, Any] = {
        "num_workers": workers,
        "prefetch_factor": 3,
        "worker_init_fn": _init_worker,
        "multiprocessing_context": "spawn",  # a forked process cannot use CUDA and may hang
    }
    loader = DataLoader(
        _Batches(make_batch),
        batch_size=None,
        sampler=_NumbersFrom(start),
        collate_fn=_return_unchanged,
        generator=torch.Generator(),  # of the workers' seeds, which are not used; torch's own stays as it is
        **(in_workers if workers else {}),
    )
    with _block_sigint(), _keep_sigchld_handler():
        batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise UserError(
                "a worker process that prepares batches was killed; run the same command again, with fewer --workers"
                " if memory is short"
            ) from error
        if isinstance(batch, UserError):
            raise batch
        yield batch


class _Batches(Dataset[Any], Generic[Batch]):
    """Batches by their number. An error of the user is returned: the DataLoader would put a traceback into it."""

    def __init__(self, make_batch: Callable[[int], Batch]) -> None:
        self._make_batch = make_batch

    def __getitem__(self, number: int) -> Batch | UserError:
        try:
            return self._make_batch(number)
        except UserError as error:
            return error


class _NumbersFrom(Sampler[int]):
    """start, start + 1, … without end."""

    def __init__(self, start: int) -> None:
        self._start = start

    def __iter__(self) -> Iterator[int]:
        return count(self._start)


def _return_unchanged(batch: Any) -> Any:
    return batch


@contextmanager
def _block_sigint() -> Iterator[None]:
    """Block Ctrl-C while workers start, so that they inherit the block; this process receives it afterwards."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # which unblocks Ctrl-C when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _keep_sigchld_handler() -> Iterator[None]:
    """Undo the DataLoader's own handler: a dead worker would raise in the middle of a step or a checkpoint."""
    if not hasattr(signal, "SIGCHLD") or current_thread() is not main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _init_worker(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process handles Ctrl-C and stops its workers
    Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit when the training process is gone: a worker with a batch that nobody reads would wait for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
