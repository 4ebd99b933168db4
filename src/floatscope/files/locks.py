"""Lock files: one process at a time writes to a folder.

    with acquire_lock(folder / "index.lock"): ...               # raises at once if another process holds it
    with acquire_lock(folder / ".fetch.lock", wait=True): ...   # waits for the other process

The kernel releases the lock when it is closed or the process ends, however it ends. A lock file that is a symbolic link
is not followed.
"""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout

from floatscope.errors import UserError


class LockedError(UserError):
    """Another process holds the lock."""


class Lock:
    """A lock that is held until it is closed."""

    def __init__(self, held: FileLock) -> None:
        self._held, self.closed = held, False

    def close(self) -> None:
        """Release the lock."""
        self._held.release(force=True)
        self.closed = True

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def acquire_lock(path: Path, *, wait: bool = False, remedy: str = "wait for it, or stop it") -> Lock:
    """Lock the file at `path` and write this process's id into it.

    If another process holds the lock, raise a `LockedError` that names it and ends with `remedy`, or wait. An OSError
    means that the file cannot be written, is a symbolic link, or that the disk has no locks (some network disks).
    """
    path.parent.stat()  # the library would create it
    held = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        held.acquire(timeout=-1 if wait else 0)
    except Timeout as error:
        owner = path.read_text().strip()
        raise LockedError(f"{path.parent} is being written by process {owner}: {remedy}") from error
    lock = Lock(held)
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW), "w") as file:
            file.write(f"{os.getpid()}\n")
    except BaseException:
        lock.close()
        raise
    return lock
