"""Small checkpoints to load and to spoil."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

import floatscope as fs

TINY = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48}
LAYOUTS = ("llada", "dream", "llama", "bert")


def tiny(folder: Path, layout: str = "llada", **more: Any) -> Path:
    shape = {**TINY, "context": 128} | {k: v for k, v in more.items() if k not in ("seed", "shards")}
    return fs.write_random(folder, layout, **{k: more[k] for k in ("seed", "shards") if k in more}, **shape)


def edit(path: Path, **changes: Any) -> None:
    """Change a JSON file; None takes the key away."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def weights(folder: Path) -> dict[str, Any]:
    return {k: t for file in sorted(folder.glob("*.safetensors")) for k, t in load_file(file).items()}


def spoil(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the one weight file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
