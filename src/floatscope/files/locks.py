"""Lock files: one process at a time writes to a folder.

    with acquire_lock(folder / "index.lock"): ...               # raises at once if another process holds it
    with acquire_lock(folder / ".fetch.lock", wait=True): ...   # waits for the other process

The kernel releases the lock when the file is closed or the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from floatscope.errors import UserError


def acquire_lock(path: Path, *, wait: bool = False, remedy: str = "wait for it, or stop it") -> IO[str]:
    """Lock the file at `path` and write this process's id into it; closing the returned file releases the lock.

    If another process holds the lock, raise a `UserError` that names it and ends with `remedy`, or wait. An OSError
    means that the file cannot be written, or that the disk has no locks (some network disks).
    """
    lock = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
    except BlockingIOError as error:
        lock.seek(0)
        owner = lock.read().strip()
        lock.close()
        raise UserError(f"{path.parent} is being written by process {owner}: {remedy}") from error
    except BaseException:
        lock.close()
        raise
    return lock
