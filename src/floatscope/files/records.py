"""JSON objects with a type and a digest: a damaged or foreign one is refused in one sentence.

    write_record(folder / "stress.json", {"kind": "noise", "points": []})
    read_record(folder / "stress.json", StressRecord, "give a folder that floatscope stress wrote")
    parse_record(line, Prediction)                      # one line of a JSON lines file

A type is a `msgspec.Struct` with `forbid_unknown_fields`. The digest is over all other entries; a file of an earlier
version has none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from floatscope.errors import UserError, printable
from floatscope.files.atomic import write_atomic

DIGEST = "digest"


class Record(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The base of record types."""


def with_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with its digest as the last entry."""
    return {**content, DIGEST: _digest(content)}


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object with its digest, completely or not at all."""
    write_atomic(path, [json.dumps(with_digest(content), indent=1).encode() + b"\n"])


def read_record(
    path: Path, kind: type[Record], remedy: str, upgrade: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> dict[str, Any]:
    """Read an object of this type without its digest. A file that is missing raises FileNotFoundError.

    `upgrade` gives the entries of an earlier version their names of today.
    """
    try:
        return parse_record(path.read_bytes(), kind, upgrade)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged, or floatscope did not write it ({error}); {remedy}") from error


def parse_record(
    text: bytes, kind: type[Record], upgrade: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> dict[str, Any]:
    """Return the object in a JSON text without its digest; a ValueError says what is wrong."""
    try:
        content = json.loads(text)
        check_type(content, dict[str, Any])
        digest = content.pop(DIGEST, None)
        if digest is not None and digest != _digest(content):
            raise ValueError("its contents do not match its digest")
        upgraded = upgrade(content)
        check_type(upgraded, kind)
    except (RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError("it is not valid JSON") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no {kind.__name__}") from error
    return upgraded


def check_type(content: object, kind: Any) -> None:
    """Raise a ValueError that names the entry of a JSON value that does not have this type."""
    try:
        msgspec.convert(content, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(printable(error).replace("`", "'").replace(" at '$.", " in '")) from error


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
