"""Work on untrusted files in a child process, with limits on processor time and memory.

    run_limited(lambda: parse(path))                       # raises LimitExceeded instead of filling the memory
    process = LimitedProcess(tokenizer.encode)
    process.request("What floats?")                        # what the function returns in the child

The child is a fork of this process, so it starts in some 25 ms and has every import. Only JSON crosses the boundary.
The child closes all inherited files, so it holds no lock and ends when this process ends, even by `kill -9`. Limits
need Linux; elsewhere a fork is not safe, or memory has no limit, and the work runs in this process.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import select
import signal
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

from floatscope.errors import UserError
from floatscope.files.sizes import format_size

logger = logging.getLogger(__name__)

HAS_LIMITS = sys.platform == "linux"
MAX_ANSWER = 1 << 26  # bytes of JSON
HEADER = 8  # bytes that say the length of a message
MEMORY_SIGNALS = (signal.SIGABRT, signal.SIGKILL)  # Rust aborts if it gets no memory; the kernel kills
TORCH_MEMORY_ERROR = "DefaultCPUAllocator: can't allocate memory"
PARALLELISM = "TOKENIZERS_PARALLELISM"


@dataclass(frozen=True)
class Limits:
    """What one request may cost.

    Attributes:
        seconds: of processor time. On the clock, a child may wait much longer, for a slow disk or a busy machine.
        memory: bytes beyond those that this process has when the child starts.
    """

    seconds: float = 10.0
    memory: int = 1 << 30


DEFAULT_LIMITS = Limits()


def limits_for(size: int, seconds_per_megabyte: float) -> Limits:
    """Return limits that grow with the size of a file, for readers whose time and memory do so too."""
    seconds = DEFAULT_LIMITS.seconds + size / 1e6 * seconds_per_megabyte
    return Limits(seconds, DEFAULT_LIMITS.memory + 32 * size)


class LimitExceeded(Exception):
    """The child was stopped; the message says why: "it needs more than 10 s"."""


class ChildError(Exception):
    """The work raised something else than a `UserError`; the message is the traceback in the child."""


def run_limited(work: Callable[[], object], limits: Limits | None = None) -> None:
    """Run `work` in a child and drop its result. If this returns, the same work in this process stays within limits.

    Raises the `UserError` of the work. Any other exception of the work is left to this process, which meets it too.
    """
    if not HAS_LIMITS:
        work()
        return

    def drop_result(_: None) -> None:
        work()

    process = LimitedProcess(drop_result, limits)
    try:
        with suppress(ChildError):
            process.request(None)
    finally:
        process.close()


class LimitedProcess:
    """A function in a child process that answers one request after another.

    The child starts with the first request. One that exceeded a limit is replaced at the next request.
    """

    def __init__(self, function: Callable[[Any], Any], limits: Limits | None = None) -> None:
        self._function, self._limits = function, limits or DEFAULT_LIMITS
        self._lock = Lock()
        self._child: _Child | None = None

    def request(self, value: Any) -> Any:
        """Return what the function returns for a JSON value.

        Raises:
            UserError: the function raised it.
            LimitExceeded: it needed too much time or memory, or crashed the child.
            ChildError: the function raised anything else.
        """
        if not HAS_LIMITS:
            return json.loads(json.dumps(self._function(value)))
        with self._lock:
            if self._child is None or self._child.owner != os.getpid():  # none yet, or this process is a fork
                self._child = _Child(self._function, self._limits)
                logger.debug("started child process %d", self._child.pid)
            try:
                answer = self._child.request(json.dumps(value).encode())
            except BaseException:
                self._close()
                raise
            if "limit" in answer:
                self._close()
                logger.info("a child process was stopped: %s; another starts when it is needed", answer["limit"])
                raise LimitExceeded(answer["limit"])
        if "error" in answer:
            raise UserError(answer["error"])
        if "traceback" in answer:
            raise ChildError(answer["traceback"])
        return answer["value"]

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._child is not None:
            self._child.end()
            logger.debug("ended child process %d", self._child.pid)
            self._child = None


class _Child:
    """The process itself, with a pipe to it and one from it."""

    def __init__(self, function: Callable[[Any], Any], limits: Limits) -> None:
        self.owner, self._limits = os.getpid(), limits
        (requests, self._requests), (self._answers, answers) = os.pipe(), os.pipe()
        with _quiet_fork():
            self.pid = os.fork()
            if self.pid == 0:
                _serve(function, limits, requests, answers)
        os.close(requests)
        os.close(answers)
        self.end = weakref.finalize(self, _end, self.owner, self.pid, self._requests, self._answers)

    def request(self, message: bytes) -> dict[str, Any]:
        deadline = time.monotonic() + 30 + 3 * self._limits.seconds
        try:
            _write_message(self._requests, message)
            answer: dict[str, Any] = json.loads(_read_message(self._answers, MAX_ANSWER, deadline))
        except TimeoutError:
            raise LimitExceeded(_time_limit(self._limits)) from None
        except OverflowError:
            raise LimitExceeded(f"its result is larger than {format_size(MAX_ANSWER)}") from None
        except (BrokenPipeError, EOFError):
            raise LimitExceeded(self._cause_of_death()) from None
        return answer

    def _cause_of_death(self) -> str:
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # another part of the program has waited for it
            code = 0
        if -code == signal.SIGXCPU:
            return _time_limit(self._limits)
        if -code in MEMORY_SIGNALS:
            return _memory_limit(self._limits)
        return f"it crashes the process that reads it (status {code})"


def _end(owner: int, pid: int, *pipes: int) -> None:
    """Kill the child, unless this process is itself a fork of the owner."""
    if os.getpid() != owner:
        return
    for pipe in pipes:
        os.close(pipe)
    with suppress(ProcessLookupError, ChildProcessError):
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@contextmanager
def _quiet_fork() -> Iterator[None]:
    """Let a fork print no warnings, and keep the tokenizers library in one thread: the child has no others."""
    previous = os.environ.get(PARALLELISM)
    os.environ[PARALLELISM] = "false"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a fork of a process with threads
            yield
    finally:
        if previous is None:
            del os.environ[PARALLELISM]
        else:
            os.environ[PARALLELISM] = previous


# In the child


def _serve(function: Callable[[Any], Any], limits: Limits, requests: int, answers: int) -> NoReturn:
    """Answer requests until the pipe closes; never return to the code that forked."""
    try:
        _leave_parent(requests, answers)
        _limit_memory(limits.memory)
        while True:
            message = _read_message(requests)
            _limit_time(limits.seconds)
            _write_message(answers, _answer(function, message, limits))
    finally:
        os._exit(0)


def _answer(function: Callable[[Any], Any], message: bytes, limits: Limits) -> bytes:
    try:
        answer = {"value": function(json.loads(message))}
        return json.dumps(answer).encode()
    except BaseException as error:  # noqa: BLE001
        if _is_memory_error(error):
            answer = {"limit": _memory_limit(limits)}
        elif isinstance(error, UserError):
            answer = {"error": str(error)}
        else:
            answer = {"traceback": traceback.format_exc()}
    return json.dumps(answer).encode()


def _is_memory_error(error: BaseException | None) -> bool:
    """Look for a lack of memory among the causes: libraries and our own messages wrap it."""
    visited: list[BaseException] = []
    while error is not None and error not in visited:
        if isinstance(error, MemoryError) or TORCH_MEMORY_ERROR in str(error):
            return True
        visited.append(error)
        error = error.__cause__ or error.__context__
    return False


def _leave_parent(requests: int, answers: int) -> None:
    """Give up what the child shares with its parent: files and their locks, the terminal, Ctrl-C, threads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)  # a notebook or a test has its own
    first, second = sorted((requests, answers))
    os.closerange(3, first)
    os.closerange(first + 1, second)
    os.closerange(second + 1, os.sysconf("SC_OPEN_MAX"))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.freeze()  # a collection would touch, and so copy, everything that the parent has


def _limit_memory(memory: int) -> None:
    """Limit the memory that the child can write, which mapped files are not part of."""
    import resource

    status = Path("/proc/self/status").read_text()
    data = int(status.partition("VmData:")[2].split()[0]) * 1024
    _lower_limit(resource.RLIMIT_DATA, data + memory)
    _lower_limit(resource.RLIMIT_CORE, 0)


def _limit_time(seconds: float) -> None:
    """Limit the processor time from now on."""
    import resource

    _lower_limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds))


def _lower_limit(kind: int, value: int) -> None:
    """Set the soft limit; the hard limit stays, so that a later request can have another one."""
    import resource

    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


# On both sides


def _read_message(pipe: int, limit: int = sys.maxsize, deadline: float = math.inf) -> bytes:
    size = int.from_bytes(_read_bytes(pipe, HEADER, deadline), "little")
    if size > limit:
        raise OverflowError
    return _read_bytes(pipe, size, deadline)


def _read_bytes(pipe: int, count: int, deadline: float) -> bytes:
    parts, poll = [], select.poll()
    poll.register(pipe, select.POLLIN)
    while count:
        wait = None if deadline == math.inf else max(0.0, deadline - time.monotonic()) * 1000
        if not poll.poll(wait):
            raise TimeoutError
        part = os.read(pipe, min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _write_message(pipe: int, message: bytes) -> None:
    data = memoryview(len(message).to_bytes(HEADER, "little") + message)
    while data:
        data = data[os.write(pipe, data) :]


def _time_limit(limits: Limits) -> str:
    return f"it needs more than {limits.seconds:.0f} s"


def _memory_limit(limits: Limits) -> str:
    return f"it needs more than {format_size(limits.memory)} of memory"
