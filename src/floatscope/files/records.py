"""What a training leaves in words: JSON beside the weights, digests of files, versions and device.

write_json(folder / "training.json", facts)
digest(Path("model.safetensors"))            # sha256, as sha256sum prints it
digest_of({"files": …})                      # of what is told in words
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from floatscope import __version__
from floatscope.errors import UserError
from floatscope.files.atomic import write_atomic


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """One entry to a line; a list of numbers stays on one."""
    lines = (f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in content.items())
    write_atomic(path, [("{\n" + ",\n".join(lines) + "\n}\n").encode()])


def read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); restore it from a copy, or remove it") from error


def digest(path: Path) -> str:
    """sha256 of a file: which weights a record speaks of."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def digest_of(facts: Mapping[str, Any]) -> str:
    """sha256 of what is told, whatever its order."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, str]:
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return {"floatscope": __version__, "python": platform.python_version(), **libraries}


def device_name(place: torch.device) -> str:
    if place.type == "cuda":
        return torch.cuda.get_device_name(place)
    return f"{platform.machine()} {place.type.upper()}"
