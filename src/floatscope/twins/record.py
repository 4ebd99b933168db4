"""What a trained twin tells of its training: training.json, beside its weights.

    write_training(folder, training_facts(kind="mdm", recipe=recipe, progress=progress, text=material.facts, …))
    read_training(folder)["steps"]

Everything a reader needs to judge the twin or to train it again; the card is made from it.
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
from floatscope.trace.atomic import write_atomic
from floatscope.twins.train import Progress, Recipe

TRAINING = "training.json"


def training_facts(
    *,
    kind: str,
    recipe: Recipe,
    progress: Progress,
    parameters: int,
    text: Mapping[str, Any],
    licence: str,
    command: str,
    device: str,
    weights: str,
) -> dict[str, Any]:
    """`text` is what `prepare` noted of the text files; `licence` and `command` are the user's words."""
    tokens = progress.step * recipe.batch * recipe.length
    return {
        "kind": kind,
        "command": command,
        "seed": recipe.seed,
        "steps": progress.step,
        "tokens": tokens,
        "seconds": round(progress.seconds, 2),
        "tokens_per_second": round(tokens / progress.seconds),
        "device": device,
        "versions": versions(),
        "parameters": parameters,
        "weights": weights,
        "recipe": recipe.as_json,
        "text": {
            "files": text["text"],
            "characters": text["characters"],
            "tokens": text["tokens"],
            "licence": licence,
        },
        "losses": [[step, *(float(f"{loss:.5g}") for loss in losses)] for step, *losses in progress.losses],
    }


def write_training(folder: Path, training: Mapping[str, Any]) -> None:
    write_json(folder / TRAINING, training)


def read_training(folder: Path) -> dict[str, Any]:
    if not (folder / TRAINING).is_file():
        raise UserError(f"{folder} has no {TRAINING}: `floatscope twins train` did not write it; use another --out")
    return read_json(folder / TRAINING)


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


def versions() -> dict[str, str]:
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return {"floatscope": __version__, "python": platform.python_version(), **libraries}


def device_name(place: torch.device) -> str:
    if place.type == "cuda":
        return torch.cuda.get_device_name(place)
    return f"{platform.machine()} {place.type.upper()}"
