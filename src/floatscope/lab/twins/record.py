"""What a trained twin tells of its training: training.json, beside its weights.

    write_training(folder, training_facts(kind="mdm", recipe=recipe, progress=progress, text=material.facts, …))
    read_training(folder)["steps"]

Everything a reader needs to judge the twin or to train it again; the card is made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from floatscope.errors import UserError
from floatscope.files.records import read_json, versions, write_json
from floatscope.lab.training.progress import Progress
from floatscope.lab.twins.train import Recipe

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
