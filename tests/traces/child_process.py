"""A forked child process that can be limited, stripped of its rights, or killed.

run_in_child(lambda: "from the child")                    # "from the child"
with fork_child(write_forever) as pid: os.kill(pid, signal.SIGKILL)
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def fork_child(work: Callable[[], object]) -> Iterator[int]:
    """Run `work` in a child process, which is killed when the block ends."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            os._exit(status)  # never return into pytest
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def run_in_child(work: Callable[[], str]) -> str:
    """Return what `work` returns in a child process."""
    reader, writer = os.pipe()
    with fork_child(lambda: os.write(writer, work().encode())) as pid:
        os.close(writer)
        os.waitpid(pid, 0)
        with os.fdopen(reader) as output:
            return output.read()
