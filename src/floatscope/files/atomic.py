"""Files that are complete or absent, whatever happens to the machine while they are written.

The bytes go to `<name>.part` beside the file, are forced to disk, and only then take the final name.

    write_atomic(Path("run.json"), [b"{}"])     # a reader sees the old file or the new one, never half of it
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from floatscope.errors import UserError, is_rust_error, summarize_error

PART_SUFFIX = ".part"


def write_atomic(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write `chunks` one after the other; on failure remove the temporary file and leave the old `path` as it was."""
    part = path.with_name(path.name + PART_SUFFIX)
    try:
        with part.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        fsync_path(path.parent)
    finally:
        with suppress(OSError):  # already renamed, or on a disk that became read-only: that error is being raised
            part.unlink()


@contextmanager
def write_folder_atomic(content: str, folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to write into; rename it to `folder` once everything is on disk, remove it on failure.

    `content` names what is written, for error messages: `write_folder_atomic("the adapter", path)`.
    """
    part = folder.with_name(folder.name + PART_SUFFIX)
    shutil.rmtree(part, ignore_errors=True)
    try:
        with explain_write_errors(content, folder):
            part.mkdir(parents=True)
            yield part
            for file in part.iterdir():
                fsync_path(file)
            fsync_path(part)
            part.rename(folder)
            fsync_path(folder.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def explain_write_errors(content: str, path: Path) -> Iterator[None]:
    """Turn a failed write inside the block into a `UserError` that names `content`, `path` and a remedy."""
    try:
        yield
    except Exception as error:
        from safetensors import SafetensorError

        # The Rust errors come from the tokenizer's own writer.
        if not (isinstance(error, OSError | SafetensorError) or is_rust_error(error)):
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else summarize_error(error)
        wrong_place = isinstance(error, NotADirectoryError | FileExistsError | PermissionError)
        wrong_place |= isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
        remedy = "use another --out" if wrong_place else "make room there and run the same command again"
        raise UserError(f"cannot write {content} to {path} ({why}); {remedy}") from error


def fsync_path(path: Path) -> None:
    """Force a file, or the names in a folder, to disk; without it a power cut can lose a renamed file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
