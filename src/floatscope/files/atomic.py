"""A file that is whole or absent, whatever happens to the machine while it is written.

The bytes go to `<name>.part` beside the file, are forced to the disk, and only then take its name.

    write_atomic(Path("run.json"), [b"{}"])     # a reader sees the old file or the new one, never half of it
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from floatscope.errors import UserError, is_rust_error, reason

PART = ".part"


def write_atomic(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write `chunks` one after the other; on any failure the temporary file goes and the old `path` stays."""
    part = path.with_name(path.name + PART)
    try:
        with part.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync(path.parent)
    finally:
        with suppress(
            OSError
        ):  # gone by its renaming, or on a disk that has become read-only: the error itself is on its way
            part.unlink()


def sync(path: Path) -> None:
    """Force a file, or a folder's names, to the disk: without it a renamed file can be lost with the power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(what: str, to: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not (
            isinstance(error, OSError | SafetensorError) or is_rust_error(error)
        ):  # the tokenizer's own writer is Rust
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else reason(error)
        elsewhere = isinstance(error, NotADirectoryError | FileExistsError | PermissionError)
        remedy = "use another --out" if elsewhere else "make room there and run the same command again"
        raise UserError(f"cannot write {what} to {to} ({why}); {remedy}") from error


@contextmanager
def writing_whole(what: str, folder: Path) -> Iterator[Path]:
    """A folder to write files into, which becomes `folder` when they are all on the disk, and is gone if not."""
    part = folder.with_name(folder.name + PART)
    shutil.rmtree(part, ignore_errors=True)
    try:
        with writing(what, folder):
            part.mkdir(parents=True)
            yield part
            for file in part.iterdir():
                sync(file)
            sync(part)
            part.rename(folder)
            sync(folder.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
