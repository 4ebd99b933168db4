"""training.json: how a model was trained, beside its weights. The card is made from it.

run = run_record(progress, tokens, device=…, parameters=…, weights=…, command=…)
write_training(folder, TwinTraining(kind="mdm", recipe=recipe, **run, …))
read_training(folder, TwinTraining).steps
"""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from msgspec import to_builtins

from floatscope import __version__
from floatscope.errors import UserError, name_in_errors
from floatscope.files.json_files import write_json
from floatscope.files.records import Record, read_typed
from floatscope.lab.training.progress import Progress

TRAINING = "training.json"
RENAMED_KEYS = {  # 0.6 → now
    "peak": "lr",
    "decay": "weight_decay",
    "material": "corpus",
    "held_text": "held_out_text",
    "held_data": "held_out_data",
    "left_out": "excluded",
    "end": "end_id",
    "fill": "pad_id",
    "says": "caption",
}


class TrainingRecord(Record):
    """What every training.json has, beside its recipe."""

    kind: str
    command: str
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: int
    device: str
    versions: dict[str, str]
    parameters: int
    weights: str  # sha256 of their file
    losses: list[tuple[int, float, float]]  # (step, text, answers)


Training = TypeVar("Training", bound=TrainingRecord)


def run_record(
    progress: Progress,
    tokens: int,
    *,
    device: torch.device,
    parameters: int,
    weights: str,
    command: str,
) -> dict[str, Any]:
    """Return the measured entries of a training.json; `tokens` is the total, `weights` the sha256 of their file."""
    return {
        "command": command,
        "steps": progress.step,
        "tokens": tokens,
        "seconds": round(progress.seconds, 2),
        "tokens_per_second": round(tokens / progress.seconds),
        "device": device_name(device),
        "versions": library_versions(),
        "parameters": parameters,
        "weights": weights,
        "losses": [(step, float(f"{text:.5g}"), float(f"{answers:.5g}")) for step, text, answers in progress.losses],
    }


def write_training(folder: Path, record: TrainingRecord) -> None:
    """Write training.json."""
    write_json(folder / TRAINING, to_builtins(record))


def read_training(folder: Path, kind: type[Training]) -> Training:
    """Read the training.json of a model or adapter; keys of floatscope 0.6 are renamed."""
    path = folder / TRAINING
    if not path.is_file():
        raise UserError(f"{folder} has no {TRAINING}, so floatscope did not train it; use another --out")
    with name_in_errors(path):  # a recipe checks its numbers
        return read_typed(path, kind, upgrade=rename_keys)


def rename_keys(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content with the keys of floatscope 0.6 renamed, also inside."""
    renamed = ((RENAMED_KEYS.get(key, key), value) for key, value in content.items())
    return {key: rename_keys(value) if isinstance(value, dict) else value for key, value in renamed}


def library_versions() -> dict[str, str]:
    """Return the versions of floatscope, Python, torch and transformers."""
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return {"floatscope": __version__, "python": platform.python_version(), **libraries}


def device_name(device: torch.device) -> str:
    """Return the GPU's model name, or the machine and device type: "x86_64 CPU"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {device.type.upper()}"
