"""A folder for each model of a command that takes several."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from floatscope.errors import UserError
from floatscope.models.model import Model


def model_folders(models: Sequence[Model | str], out: Path) -> list[Path]:
    """The folder of each model: `model_folders(["twin:mdm"], Path("runs"))` → [Path("runs/twin-mdm")]."""
    names = [model.spec.name if isinstance(model, Model) else model for model in models]
    paths = [out / re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-") for name in names]
    for place, path in enumerate(paths):
        if path in paths[:place]:
            raise UserError(f"two models would share the folder {path}; give each model once")
    return paths
