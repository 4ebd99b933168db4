"""JSON objects with a type and a digest: a damaged or foreign one is refused in one sentence.

    write_record(folder / "stress.json", {"kind": "noise", "points": []})
    read_record(folder / "stress.json", StressRecord, "give a folder that floatscope stress wrote")
    parse_record(line, Prediction)                      # one line of a JSON lines file
    read_typed(folder / "scores.json", TwinScores).files             # a file without a digest, as a value of its type
    convert({"prompt": 3}, Pieces)                      # ValueError: Expected 'str', got 'int' - in 'prompt'

A type is a `msgspec.Struct` with `forbid_unknown_fields`. The digest is over all other entries; a file of an earlier
version has none.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from floatscope.errors import UserError, printable, unknown_choice
from floatscope.files.atomic import write_atomic
from floatscope.files.json_files import read_json

DIGEST = "digest"
MAX_REASON = 600  # characters: a list of allowed fields is long

Value = TypeVar("Value")


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
        content: dict[str, Any] = convert(json.loads(text), dict)
        digest = content.pop(DIGEST, None)
        if digest is not None and digest != _digest(content):
            raise ValueError("its contents do not match its digest")
        upgraded = upgrade(content)
        convert(upgraded, kind)
    except (RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError("it is not valid JSON") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no {kind.__name__}") from error
    return upgraded


def read_typed(
    path: Path,
    kind: type[Value],
    remedy: str = "restore it from a copy, or remove it",
    upgrade: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Value:
    """Read a JSON file as a value of this type; a `UserError` names the file, the field, what it holds and expects."""
    content = read_json(path, remedy)
    try:
        return convert(upgrade(content), kind)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({printable(error, MAX_REASON)}); {remedy}") from error


def convert(content: Any, kind: type[Value]) -> Value:
    """Return JSON values as a value of this type; a ValueError names the field, what it holds and what is expected."""
    try:
        return msgspec.convert(content, kind, str_keys=True)
    except msgspec.ValidationError as error:
        reason = str(error).removeprefix("Object ").replace("`", "'").replace(" at '$.", " in '").replace("'$.", "'")
        if unknown := re.fullmatch("contains unknown field '(.*)'", reason):
            fields = msgspec.structs.fields(cast("type[msgspec.Struct]", kind))
            reason = str(unknown_choice("field", unknown[1], [field.encode_name for field in fields]))
        raise ValueError(reason) from error


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
