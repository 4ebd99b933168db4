"""`run.json`: what was asked of a run, on what machine, with which versions; and whether it was asked the same again.

record = new_record(settings, ["nq-1", "nq-2"], plan=None)
write_record(Path("runs/demo"), record)
list(differences(record["settings"], {"steps": 64}))     # ["steps: 32 in the folder, 64 now"]
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from floatscope.errors import UserError
from floatscope.files.atomic import write_atomic
from floatscope.traces.trace import plain_json

FORMAT = 1
RECORD = "run.json"
PACKAGES = ("floatscope", "torch", "transformers", "numpy", "safetensors")
_ABSENT = object()


def new_record(
    settings: Mapping[str, Any], samples: Sequence[str], plan: Sequence[Sequence[str]] | None
) -> dict[str, Any]:
    asked = plain_json({"settings": dict(settings), "samples": list(samples), "plan": plan}, "the settings of a run")
    return {"format": FORMAT, "status": "unfinished", "provenance": provenance(), "resumed": [], **asked}


def provenance() -> dict[str, Any]:
    """What a result may depend on besides its settings."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": _device(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def read_record(folder: Path) -> dict[str, Any]:
    path = folder / RECORD
    try:
        record = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{folder} is not a run folder: it has no {RECORD}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        record = None
    if (
        not isinstance(record, dict)
        or not {"format", "status", "provenance", "resumed", "settings", "samples", "plan"} <= record.keys()
    ):
        raise UserError(
            f"{path} is damaged, or not floatscope's; restore it from a copy, or start again in another folder"
        )
    if record["format"] != FORMAT:
        theirs = record["format"]
        raise UserError(f"{folder} has run format {theirs}, not {FORMAT}: open it with the floatscope that made it")
    return record


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    write_atomic(folder / RECORD, [json.dumps(record, indent=1).encode() + b"\n"])


_DIGEST = re.compile("[0-9a-f]{64}")


def differences(then: Any, now: Any, key: str = "") -> Iterator[str]:
    """A clause for every entry that differs, with both values."""
    if isinstance(then, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*then, *now]):
            yield from differences(then.get(name, _ABSENT), now.get(name, _ABSENT), f"{key}.{name}" if key else name)
    elif then != now:
        if isinstance(then, list) and isinstance(now, list) and max(len(then), len(now)) > 8:
            at = next((i for i, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), min(len(then), len(now)))
            key += f" ({len(then)} entries in the folder, {len(now)} now), first at entry {at}"
            then, now = (x[at] if at < len(x) else _ABSENT for x in (then, now))
        yield f"{key}: {_brief(then)} in the folder, {_brief(now)} now"


def _brief(value: Any) -> str:
    if isinstance(value, str) and _DIGEST.fullmatch(value):
        value = f"{value[:12]}…"
    text = "nothing" if value is _ABSENT else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "mps" if torch.backends.mps.is_available() else "cpu"
