"""Errors a person can fix.

    raise UserError("steps must be at least 1, got 0")
    raise unknown_choice("level", "sumary", ["summary", "heads"])

A `UserError` carries one sentence: what was given, what is allowed, what helps. The command line prints it without a
traceback and exits with status 2. Every other exception that escapes is a bug and may crash loudly. The helpers below
turn the errors of files and libraries into such sentences.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager


class UserError(Exception):
    """An error the caller can fix; the message says how.

    Example:
        try:
            fs.load("twin:none")
        except fs.UserError as error:
            print(error)
    """


def unknown_choice(kind: str, name: str, allowed: Iterable[str]) -> UserError:
    """Return the error for a name that is not among `allowed`, with the closest match as a hint.

    >>> str(unknown_choice("level", "sumary", ["summary", "heads"]))
    "unknown level 'sumary' (did you mean 'summary'?); allowed: summary, heads"
    """
    names = list(allowed)
    similar = find_similar(name, names)
    hint = f" (did you mean '{similar}'?)" if similar else ""
    return UserError(f"unknown {kind} '{name}'{hint}; allowed: {', '.join(names)}")


def find_similar(name: str, names: Iterable[str]) -> str | None:
    """Return the name that a slip or two turn into `name`, or None: two words of one length are not yet similar.

    >>> find_similar("promt", ["preset", "prompt"]), find_similar("promt", ["preset"])
    ('prompt', None)
    """
    cutoff = 0.75 if len(name) > 3 else 0.6  # one wrong letter of four, or of three in a short name
    return next(iter(difflib.get_close_matches(name, list(names), 1, cutoff)), None)


# Texts from files and libraries, as part of a message

MAX_PHRASE, MAX_SENTENCE = 200, 2000  # characters
CONTROLS = re.compile(
    r"[\x00-\x1f\x7f-\x9f"  # ASCII and Latin-1 control characters
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # those that change the direction of text
    r"\u200b\u2028\u2029\u2060-\u2064\ufeff\ufff9-\ufffb"  # invisible ones; joiners are part of words and emojis
    r"\ud800-\udfff]"  # halves of a character
)


def escape_controls(text: str, keep: str = "\n\t") -> str:
    """Return the text with control characters spelled out, except those in `keep`.

    >>> escape_controls("a\x1b[2J\u202eb")
    'a\\\\x1b[2J\\\\u202eb'
    """
    return CONTROLS.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def printable(text: object, limit: int = MAX_PHRASE) -> str:
    """Return foreign text that is safe in a sentence: control characters escaped, at most `limit` characters."""
    escaped = escape_controls(str(text)[: limit + 1], keep="")
    return escaped if len(escaped) <= limit else f"{escaped[: limit - 1]}…"


def join_names(names: Collection[str], limit: int = 8) -> str:
    """Return sorted names as one phrase: `join_names({"b", "a"})` → "a, b"; at most `limit`, then "and 3 more"."""
    shown = [printable(name, 100) for name in sorted(names)[:limit]]
    more = [f"and {len(names) - limit:,} more"] if len(names) > limit else []
    return ", ".join([*shown, *more]) or "none"


def summarize_error(error: BaseException) -> str:
    """Return the line of a library's error message that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if len(lines) > 1 and lines[0].endswith(":"):  # "Validation error for field 'use_cache':", and then the error
        return printable(f"{lines[0]} {lines[1]}")
    return printable(lines[-1] if lines[0].endswith("(") else lines[0])  # some print a module before the error


# Errors of libraries

LIBRARY_ERRORS = (  # what library code raises on a description it cannot follow: a wrong file, not a bug of ours
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def is_rust_error(error: BaseException) -> bool:
    """Tell whether the tokenizers library raised it: a plain Exception, or the PanicException of its Rust code."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


@contextmanager
def name_in_errors(path: object) -> Iterator[None]:
    """Put `path` before the message of a `UserError` raised inside the block, unless the message names it already."""
    try:
        yield
    except UserError as error:
        message = str(error)
        raise (error if str(path) in message else UserError(f"{path}: {message}")) from error.__cause__


@contextmanager
def explain_read_errors(name: object) -> Iterator[None]:
    """Turn every error that the files of checkpoint `name` cause inside the block into one printable `UserError`."""
    outer_error = sys.exc_info()[1]  # a caller may already be handling an interrupt
    try:
        yield
    except BaseException as error:
        if _was_interrupted(error, outer_error):
            raise KeyboardInterrupt from error
        if isinstance(error, UserError):
            message = printable(error, MAX_SENTENCE)
            raise (error if message == str(error) else UserError(message)) from error.__cause__
        if isinstance(error, RecursionError):
            raise UserError(f"{printable(name)} holds a file that is nested too deeply; download it again") from error
        if isinstance(error, OSError):
            path = printable(error.filename or name)
            raise UserError(f"cannot read {path} ({printable(error.strerror or error)})") from error
        raise


def _was_interrupted(error: BaseException, outer_error: BaseException | None) -> bool:
    """Look for a Ctrl-C among the causes: transformers turns one during its late imports into an ImportError."""
    visited: list[BaseException] = []
    while error not in visited:
        if isinstance(error, KeyboardInterrupt):
            return True
        visited.append(error)
        cause = error.__cause__ or error.__context__
        if cause is None or cause is outer_error:
            return False
        error = cause
    return False
