"""A file that is whole or absent, whatever happens to the machine while it is written.

The bytes go to `<name>.part` beside the file, are forced to the disk, and only then take its name.

    write_atomic(Path("run.json"), [b"{}"])     # a reader sees the old file or the new one, never half of it
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

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
