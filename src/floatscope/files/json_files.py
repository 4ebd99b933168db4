"""JSON objects on disk: written atomically, read with errors that name the file.

write_json(folder / "training.json", {"steps": 2000, "loss": [4.1, 3.2]})
read_json(folder / "training.json")["steps"]      # 2000
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from floatscope.errors import UserError, summarize_error
from floatscope.files.atomic import write_atomic


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object with one entry per line, so that a list of numbers stays on one line."""
    lines = (f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in content.items())
    write_atomic(path, [("{\n" + ",\n".join(lines) + "\n}\n").encode()])


def read_json(path: Path, remedy: str = "restore it from a copy, or remove it") -> dict[str, Any]:
    """Read an object; if the file is missing or damaged, raise a `UserError` that ends with `remedy`."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing; {remedy}") from error
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise UserError(f"{path} is damaged ({summarize_error(error)}); {remedy}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged (it holds no JSON object); {remedy}")
    return content
