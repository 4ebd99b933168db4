"""Writing that may fail: a full disk, or a folder one may not write to, becomes one sentence.

with writing("the checkpoint", folder): save_file(tensors, folder / "piece-00.safetensors")
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from floatscope.errors import UserError
from floatscope.models.said import is_rust, reason


@contextmanager
def writing(what: str, to: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not (isinstance(error, OSError | SafetensorError) or is_rust(error)):  # the tokenizer's own writer is Rust
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else reason(error)
        raise UserError(
            f"cannot write {what} to {to} ({why}); make room there and run the same command again"
        ) from error
