"""training.json: how a model was trained, beside its weights. The card is made from it.

record = {"kind": "mdm", **run_record(recipe, progress, tokens, device=…, parameters=…, weights=…, command=…)}
write_json(folder / TRAINING, record)
read_training(folder)["steps"]
"""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from floatscope import __version__
from floatscope.errors import UserError
from floatscope.files.json_files import read_json
from floatscope.lab.training.progress import Progress, Recipe

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
}


def run_record(
    recipe: Recipe,
    progress: Progress,
    tokens: int,
    *,
    device: torch.device,
    parameters: int,
    weights: str,
    command: str,
) -> dict[str, Any]:
    """Return the entries every training.json has; `tokens` is the total, `weights` the sha256 of the weights' file."""
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
        "recipe": recipe.as_json,
        "losses": [[step, *(float(f"{loss:.5g}") for loss in losses)] for step, *losses in progress.losses],
    }


def read_training(folder: Path) -> dict[str, Any]:
    """Read the training.json of a model or adapter; keys of floatscope 0.6 are renamed."""
    if not (folder / TRAINING).is_file():
        raise UserError(f"{folder} has no {TRAINING}, so floatscope did not train it; use another --out")
    return dict(_rename_keys(read_json(folder / TRAINING)))


def _rename_keys(content: Any) -> Any:
    if isinstance(content, dict):
        return {RENAMED_KEYS.get(key, key): _rename_keys(value) for key, value in content.items()}
    return content


def library_versions() -> dict[str, str]:
    """Return the versions of floatscope, Python, torch and transformers."""
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return {"floatscope": __version__, "python": platform.python_version(), **libraries}


def device_name(device: torch.device) -> str:
    """Return the GPU's model name, or the machine and device type: "x86_64 CPU"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {device.type.upper()}"
