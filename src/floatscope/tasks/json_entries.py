"""The entries of a JSON file: its lines, the elements of one document, or the questions of SQuAD articles.

unit, entries = read_entries(Path("nq.jsonl.gz"))       # "line", and lazily (number, value or UserError)
"""

from __future__ import annotations

import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any

from floatscope.errors import UserError
from floatscope.tasks.formats.fields import shorten
from floatscope.tasks.formats.squad import is_article, split_article

OPENERS: dict[str, Callable[..., IO[str]]] = {".gz": gzip.open, ".xz": lzma.open}
EXPECTED = "give a file with a JSON object on each line, or one JSON list of objects"

Entries = Iterator[tuple[int, Any]]
"""(number from 1, the JSON value or the UserError that explains why there is none)."""


def read_entries(path: Path) -> tuple[str, Entries]:
    """Return the unit in which a file is counted (line, element or question) and its entries.

    A file of lines is read lazily, a document at once. Files that end in .gz or .xz are decompressed.
    """
    lines = _read_lines(path)
    head: list[str] = []
    for line in lines:
        head.append(line)
        if line.strip():
            break
    else:
        raise UserError(f"{path} contains no samples: {EXPECTED}")
    if head[-1].startswith("version https://git-lfs"):
        raise UserError(f"{path} is a Git LFS pointer and not the file itself; fetch that with `git lfs pull`")
    first = _parse(head[-1])
    if isinstance(first, dict) and not _is_collection(first):
        return "line", _parse_lines(chain(head, lines))
    return _parse_document(path, [*head, *lines])


def read_error(path: Path, error: OSError) -> UserError:
    """Return the error for a file that the system cannot read."""
    return UserError(f"cannot read {path}: {error.strerror or error}")


def _read_lines(path: Path) -> Iterator[str]:
    try:
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason})") from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged ({error}); download it again") from error
    except OSError as error:
        raise read_error(path, error) from error


def _parse_lines(lines: Iterable[str]) -> Entries:
    return ((number, _parse(line)) for number, line in enumerate(lines, 1) if line.strip())


def _parse_document(path: Path, lines: list[str]) -> tuple[str, Entries]:
    """Parse one JSON value over all lines; if that fails but most lines are objects, the file has bad lines."""
    document = _parse("".join(lines))
    if isinstance(document, UserError):
        filled = [line for line in lines if line.strip()]
        if 2 * sum(isinstance(_parse(line), dict) for line in filled) > len(filled):
            return "line", _parse_lines(lines)
        raise UserError(f"{path}: {document}; {EXPECTED}") from document
    elements = _list_elements(document)
    if any(map(is_article, elements)):
        return "question", enumerate((row for article in elements for row in split_article(article)), 1)
    return "element", enumerate(elements, 1)


def _is_collection(value: dict[str, Any]) -> bool:
    """Whether an object holds many samples: a list called "data", or objects by their ids."""
    objects = sum(isinstance(part, dict) for part in value.values())
    return "question" not in value and (isinstance(value.get("data"), list) or 2 * objects > len(value))


def _list_elements(document: Any) -> list[Any]:
    if isinstance(document, list):
        return document
    if not isinstance(document, dict) or not _is_collection(document):
        return [document]
    if isinstance(document.get("data"), list):
        elements: list[Any] = document["data"]
        return elements
    return [{"id": id} | part if isinstance(part, dict) else part for id, part in document.items()]


def _parse(text: str) -> Any:
    """Return the JSON value, or the UserError that explains why there is none."""

    def refuse(word: str) -> None:
        raise UserError(f"{word} is not valid JSON")

    try:
        value = json.loads(text := text.rstrip(), parse_constant=refuse)
        if re.search(r"\\u[dD]", text):
            json.dumps(value, ensure_ascii=False).encode()
    except UserError as error:
        return error
    except UnicodeEncodeError:
        return UserError("it contains half a character (a lone surrogate)")
    except RecursionError:
        return UserError("it is nested too deeply")
    except json.JSONDecodeError as error:
        return UserError(_explain_syntax_error(text, error))
    except ValueError as error:  # a number with too many digits
        return UserError(f"it is not valid JSON ({shorten(error, 100)})")
    return value


def _explain_syntax_error(text: str, error: json.JSONDecodeError) -> str:
    where = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}"
    message = f"{error.msg.removesuffix(' at')} at {where}"
    is_cut = error.pos >= len(text) or error.msg.startswith("Unterminated string")
    return f"it is not valid JSON ({message}){', it seems to be cut off' if is_cut else ''}"
