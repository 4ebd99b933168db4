"""The folder of an index: its meta.json, and the lock of the process that writes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from floatscope.errors import UserError
from floatscope.files.atomic import write_atomic
from floatscope.files.locks import acquire_lock
from floatscope.tasks.json_entries import read_error

FORMAT = 2
META, LOCK, ENGINE = "meta.json", "index.lock", "tantivy"


def read_meta(path: Path) -> dict[str, Any]:
    """Read meta.json; raise UserError if the folder is not an index of this format."""
    try:
        meta = json.loads((path / META).read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{path} is not an index: it has no {META}; create one with floatscope index add") from error
    except OSError as error:
        raise read_error(path / META, error) from error
    except ValueError:
        meta = None
    format = meta.get("format") if isinstance(meta, dict) else None
    if isinstance(format, int) and format != FORMAT:
        age, remedy = ("a newer", "update floatscope, or ") if format > FORMAT else ("an older", "")
        raise UserError(
            f"{path} was written by {age} floatscope (index format {format}, this version reads {FORMAT}): "
            f"{remedy}build the index again"
        )
    if not isinstance(meta, dict) or format != FORMAT or not {"floatscope", "tantivy", "files"} <= meta.keys():
        raise UserError(
            f"{path / META} is damaged or was not written by floatscope; restore it from a copy, or build it again"
        )
    return meta


def write_meta(path: Path, meta: dict[str, Any]) -> None:
    """Write meta.json atomically."""
    try:
        write_atomic(path / META, [json.dumps(meta, indent=1).encode() + b"\n"])
    except OSError as error:
        raise UserError(f"cannot write {path / META}: {error.strerror}") from error


def check_free(path: Path) -> None:
    """Raise UserError unless an index may be created here: the folder is new, empty, or left by a killed creation."""
    if (path / META).exists():
        raise UserError(f"{path} already contains an index: open it, or give another path")
    if not path.exists():
        return
    is_ours = path.is_dir() and set(os.listdir(path)) <= {LOCK, META + ".part", ENGINE}
    if not is_ours or any((path / ENGINE).glob("*.store")):  # never overwrite passages that lack a meta.json
        raise UserError(f"{path} exists and is not an index (it has no {META}): give another path")


@contextmanager
def lock_index(path: Path) -> Iterator[None]:
    """Hold index.lock inside the block; the kernel releases it when the process ends, however it ends."""
    try:
        lock = acquire_lock(path / LOCK)
    except OSError as error:  # a network disk without locks, or a full one
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    with lock:
        yield


def measure_size(path: Path) -> int:
    """Return the size of the index in bytes."""
    return sum(_file_size(file) for file in [path / META, *(path / ENGINE).iterdir()])


def _file_size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # merged into another one just now
        return 0


def timestamp() -> str:
    """Return the current time in UTC, in ISO format."""
    return datetime.now(UTC).isoformat(timespec="seconds")
