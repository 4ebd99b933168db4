"""`run.json`: the settings of a run, its samples, the machine and the versions; and a comparison of two of them.

record = new_record(settings, ["nq-1", "nq-2"], plan=None)
write_record(Path("runs/demo"), record)
list(list_differences(record["settings"], {"steps": 64}))     # ["steps: 32 in the folder, 64 now"]
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from floatscope.errors import UserError
from floatscope.files import records
from floatscope.traces.trace import to_plain_json
from floatscope.traces.upgrade import upgrade_settings

RUN_FORMAT, OLD_RUN_FORMAT = 2, 1
RECORD_FILE = "run.json"
UNFINISHED, FINISHED = "unfinished", "finished"
"""The status of a run."""
PACKAGES = ("floatscope", "torch", "transformers", "numpy", "safetensors")
_ABSENT = object()
_DIGEST = re.compile("[0-9a-f]{64}")


def new_record(
    settings: Mapping[str, Any], samples: Sequence[str], plan: Sequence[Sequence[str]] | None
) -> dict[str, Any]:
    """Return the record of a run that begins now."""
    plain = to_plain_json({"settings": dict(settings), "samples": list(samples), "plan": plan}, "the settings of a run")
    return {"format": RUN_FORMAT, "status": UNFINISHED, "provenance": collect_provenance(), "resumed": [], **plain}


def collect_provenance() -> dict[str, Any]:
    """Return what a result may depend on besides its settings: time, device, platform, versions."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": _device_name(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: _package_version(name) for name in PACKAGES},
    }


class RunRecord(records.Record):
    """The type of run.json."""

    format: int
    status: Literal["unfinished", "finished"]
    provenance: dict[str, Any]
    resumed: list[dict[str, Any]]
    settings: dict[str, Any]
    samples: list[str]
    plan: list[list[str]] | None


def read_record(folder: Path) -> dict[str, Any]:
    """Read `run.json`; one of floatscope 0.6 comes back under today's names (`upgrade`)."""
    try:
        record = records.read_record(folder / RECORD_FILE, RunRecord, "restore it from a copy, or use another folder")
    except (FileNotFoundError, NotADirectoryError) as error:
        remedy = "give a folder that floatscope trace or floatscope eval wrote"
        if not folder.exists():
            raise UserError(f"{folder} does not exist; {remedy}") from error
        raise UserError(f"{folder} is not a run folder: it has no {RECORD_FILE}; {remedy}") from error
    if record["format"] == OLD_RUN_FORMAT:
        return {**record, "format": RUN_FORMAT, "settings": upgrade_settings(record["settings"])}
    if record["format"] != RUN_FORMAT:
        raise UserError(
            f"{folder} has run format {record['format']}, but this floatscope reads {OLD_RUN_FORMAT} and {RUN_FORMAT}:"
            f" open it with the version that wrote it"
        )
    return record


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write `run.json`, completely or not at all."""
    records.write_record(folder / RECORD_FILE, record)


def list_differences(then: Any, now: Any, key: str = "") -> Iterator[str]:
    """Yield a clause for every entry that differs, with both values; `key` is the name of the entry."""
    if isinstance(then, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*then, *now]):
            inner = f"{key}.{name}" if key else name
            yield from list_differences(then.get(name, _ABSENT), now.get(name, _ABSENT), inner)
    elif then != now:
        if isinstance(then, list) and isinstance(now, list) and max(len(then), len(now)) > 8:
            first = next(
                (i for i, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), min(len(then), len(now))
            )
            key += f" ({len(then)} entries in the folder, {len(now)} now), first at entry {first}"
            then, now = (x[first] if first < len(x) else _ABSENT for x in (then, now))
        yield f"{key}: {_shorten(then)} in the folder, {_shorten(now)} now"


def _shorten(value: Any) -> str:
    if isinstance(value, str) and _DIGEST.fullmatch(value):
        value = f"{value[:12]}…"
    text = "nothing" if value is _ABSENT else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _device_name() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "mps" if torch.backends.mps.is_available() else "cpu"
