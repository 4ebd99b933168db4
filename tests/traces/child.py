"""Another process, forked, so that it can be limited, stripped of its rights, or killed.

in_child(lambda: "said by another process")         # "said by another process"
with forked(write_for_ever) as pid: os.kill(pid, signal.SIGKILL)
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def forked(work: Callable[[], object]) -> Iterator[int]:
    """Run `work` in a child; the child is gone when the block is left."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            os._exit(status)  # never back into pytest
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def in_child(work: Callable[[], str]) -> str:
    reader, writer = os.pipe()
    with forked(lambda: os.write(writer, work().encode())) as pid:
        os.close(writer)
        os.waitpid(pid, 0)
        with os.fdopen(reader) as said:
            return said.read()
