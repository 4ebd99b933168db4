"""The one error a person can fix.

`UserError` carries one sentence: what was given, what is allowed, what helps. The command line prints it without a
traceback and exits with status 2. Everything else that escapes is a bug and may crash loudly.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Something the caller can mend; the message says how."""


def unknown_choice(kind: str, given: str, allowed: Iterable[str]) -> UserError:
    """`unknown("keep level", "sumary", KEEP)` → "unknown keep level 'sumary' (did you mean 'summary'?); allowed: …"."""
    names = list(allowed)
    near = difflib.get_close_matches(given, names, n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    return UserError(f"unknown {kind} '{given}'{hint}; allowed: {', '.join(names)}")


LIBRARY_ERRORS = (  # what code raises that was given a description it cannot follow; a wrong file, not a bug of ours
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
PHRASE, SENTENCE = 200, 2000  # characters


def printable(text: object, longest: int = PHRASE) -> str:
    """A foreign string that no terminal obeys: line breaks, escapes and reversed writing spelled out; cut if long."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text)[: longest + 1])
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def reason(error: BaseException) -> str:
    """The line of a library's complaint that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if len(lines) > 1 and lines[0].endswith(":"):  # "Validation error for field 'use_cache':", and then the error
        return printable(f"{lines[0]} {lines[1]}")
    return printable(lines[-1] if lines[0].endswith("(") else lines[0])  # a module is printed before the complaint


def join_names(names: Collection[str], most: int = 8) -> str:
    """`listed(["b", "a"])` → "a, b"; of many the first few and how many more."""
    shown = [printable(name, 100) for name in sorted(names)[:most]]
    more = [f"and {len(names) - most:,} more"] if len(names) > most else []
    return ", ".join([*shown, *more]) or "none"


def is_rust_error(error: BaseException) -> bool:
    """The tokenizers library raises plain Exceptions, and its Rust code panics as a BaseException of its own."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


@contextmanager
def guard_reading(name: object) -> Iterator[None]:
    """The outermost guard of opening a checkpoint: what its files bring about is one printable sentence."""
    outside = sys.exc_info()[1]  # a caller may be handling an interrupt already
    try:
        yield
    except BaseException as error:
        if _interrupted(error, outside):
            raise KeyboardInterrupt from error
        if isinstance(error, UserError):
            said = printable(error, SENTENCE)
            raise (error if said == str(error) else UserError(said)) from error.__cause__
        if isinstance(error, RecursionError):
            raise UserError(f"{printable(name)} holds a file that is nested too deeply; fetch it again") from error
        if isinstance(error, OSError):
            where = printable(error.filename or name)
            raise UserError(f"{where} cannot be read ({printable(error.strerror or error)})") from error
        raise


def _interrupted(error: BaseException, outside: BaseException | None) -> bool:
    """transformers turns a Ctrl-C during its late imports into an ImportError: look behind it."""
    seen: list[BaseException] = []
    while error not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.append(error)
        behind = error.__cause__ or error.__context__
        if behind is None or behind is outside:
            return False
        error = behind
    return False


@contextmanager
def name_in_errors(where: object) -> Iterator[None]:
    """What is wrong in a checkpoint is said of that checkpoint."""
    try:
        yield
    except UserError as error:
        said = str(error)
        raise (error if str(where) in said else UserError(f"{where}: {said}")) from error.__cause__
