"""sha256 digests of files and JSON values, and a fast fingerprint of large weight files.

sha256_file(Path("model.safetensors"))      # as sha256sum prints it
sha256_json({"files": ["a", "b"]})          # the order of the keys does not matter
fingerprint(Path("model.safetensors"))      # reads 4 MiB at most per file
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from floatscope.errors import UserError

BLOCK, BLOCKS = 64 * 1024, 64  # size and number of the blocks in a fingerprint


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's bytes in hex."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def sha256_json(content: Mapping[str, Any]) -> str:
    """Return the sha256 of a JSON object in hex, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def fingerprint(*files: Path) -> str:
    """Return a sha256 over each file's name, size and 64 evenly spaced blocks of 64 KiB.

    Small files are read completely, and of safetensors files the header too. Two checkpoints have different
    fingerprints, at a cost that does not grow with the weights; a change between the blocks goes unnoticed.
    """
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            digest.update(f"{file.name} {size}\n".encode())
            if size <= BLOCK * BLOCKS:
                digest.update(handle.read())
                continue
            if file.suffix == ".safetensors":
                digest.update(handle.read(int.from_bytes(handle.read(8), "little")))
            for i in range(BLOCKS):
                handle.seek((size - BLOCK) * i // (BLOCKS - 1))
                digest.update(handle.read(BLOCK))
    return digest.hexdigest()
