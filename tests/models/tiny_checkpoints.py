"""Small checkpoints to load and to damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

import floatscope as fs

TINY = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48}
TINY_ARCHITECTURES = ("llada", "dream", "llama", "bert")


def write_tiny(folder: Path, architecture: str = "llada", **options: Any) -> Path:
    return fs.write_random(folder, architecture, **{**TINY, "context": 128, **options})


def edit_json(path: Path, **changes: Any) -> None:
    """Change a JSON file; None removes the key."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def read_weights(folder: Path) -> dict[str, Any]:
    return {k: t for file in sorted(folder.glob("*.safetensors")) for k, t in load_file(file).items()}


def change_weights(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the only weight file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
