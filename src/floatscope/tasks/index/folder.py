"""The folder of an index: its meta.json, and the lock of the one who writes."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from floatscope.errors import UserError
from floatscope.tasks.index.passages import unreadable

FORMAT = 2
META, LOCK, ENGINE = "meta.json", "index.lock", "tantivy"


def read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads((path / META).read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{path} is no index: it has no {META}; floatscope index add makes one") from error
    except OSError as error:
        raise unreadable(path / META, error) from error
    except ValueError:
        meta = None
    theirs = meta.get("format") if isinstance(meta, dict) else None
    if isinstance(theirs, int) and theirs != FORMAT:
        age, remedy = ("a newer", "update floatscope, or ") if theirs > FORMAT else ("an older", "")
        raise UserError(
            f"{path} was written by {age} floatscope (index format {theirs}, and this one has {FORMAT}): "
            f"{remedy}make the index anew"
        )
    if not isinstance(meta, dict) or theirs != FORMAT or not {"floatscope", "tantivy", "files"} <= meta.keys():
        raise UserError(f"{path / META} is damaged, or not floatscope's; restore it from a copy, or make it anew")
    return meta


def write_meta(path: Path, meta: dict[str, Any]) -> None:
    from floatscope.files.atomic import write_atomic  # brings torch along, which searching need not wait for

    try:
        write_atomic(path / META, [json.dumps(meta, indent=1).encode() + b"\n"])
    except OSError as error:
        raise UserError(f"cannot write {path / META}: {error.strerror}") from error


def check_place(path: Path) -> None:
    """Whether an index may begin here: in a folder that is new, empty, or left by a process killed at its birth."""
    if (path / META).exists():
        raise UserError(f"{path} already holds an index: open it, or give another path")
    if not path.exists():
        return
    ours = path.is_dir() and set(os.listdir(path)) <= {LOCK, META + ".part", ENGINE}
    if not ours or any((path / ENGINE).glob("*.store")):  # passages without a meta.json are not written over
        raise UserError(f"{path} exists and is no index (it has no {META}): give another path")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold index.lock, until the block is left or the process is gone, however it goes: the kernel frees an flock."""
    try:
        lock = (path / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
        except BlockingIOError as error:
            lock.seek(0)
            writer = lock.read().strip()
            raise UserError(f"{path} is being written by process {writer}: wait for it, or stop it") from error
        except OSError as error:  # a network disk without locks, or a full one
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        yield


def size(path: Path) -> int:
    """Bytes of the index."""
    return sum(_bytes(file) for file in [path / META, *(path / ENGINE).iterdir()])


def _bytes(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # merged into another one just now
        return 0


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
