"""Writing that may fail: a full disk, or a folder one may not write to, becomes one sentence.

with writing("the scores", folder): write_json(folder / "scores.json", scores)
with writing_whole("the checkpoint", folder) as part: save_file(tensors, part / "piece-00.safetensors")
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from floatscope.errors import UserError
from floatscope.models.said import is_rust, reason
from floatscope.trace.atomic import PART, sync


@contextmanager
def writing(what: str, to: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not (isinstance(error, OSError | SafetensorError) or is_rust(error)):  # the tokenizer's own writer is Rust
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
