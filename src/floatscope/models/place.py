"""Where a model goes and in which precision: what was asked for, and whether it fits.

place, dtype = device_of(None), dtype_of("bf16")       # a GPU if there is one
check_fits("LLaDA-8B", 8_015_581_184, torch.float32, place)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from floatscope.errors import UserError, unknown_choice

Place = str | torch.device  # "auto": over all GPUs
CPU = torch.device("cpu")
DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float64": torch.float64,
}
GIB = 2**30


def device_of(given: str | torch.device | None) -> Place:
    """The device asked for, which must be here."""
    if given is None:
        given = "cuda" if torch.cuda.is_available() else "cpu"
    if given == "auto":
        if not torch.cuda.is_available():
            raise UserError("device='auto' spreads a model over GPUs, and there is none here; device='cpu' works")
        return "auto"
    try:
        place = torch.device(given)
    except (RuntimeError, TypeError):
        place = torch.device("meta")
    if place.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"unknown device {given!r}; allowed: cpu, cuda, cuda:0 …, mps, auto")
    if place.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        place = torch.device("cuda", place.index or 0)
        if place.index >= count:
            raise UserError(f"{given} was asked for, and there {_are(count)} here; device='cpu' works")
    if place.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("mps was asked for, and there is none here; device='cpu' works")
    return place


def dtype_of(given: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype asked for; None: as it comes."""
    if given is None or (isinstance(given, torch.dtype) and given in DTYPES.values()):
        return given
    name = str(given).removeprefix("torch.")
    if name not in DTYPES:
        raise unknown_choice("dtype", name, DTYPES)
    return DTYPES[name]


def check_fits(name: str, parameters: int, dtype: torch.dtype, place: Place) -> None:
    """A sentence instead of a crash in the middle of loading."""
    free = free_bytes(place)
    if free is not None and parameters * dtype.itemsize > free:
        raise too_large(name, parameters, dtype, place, free)


def too_large(name: str, parameters: int, dtype: torch.dtype, place: Place, free: int) -> UserError:
    """What is needed, what is free, what would fit."""
    half, where = torch.bfloat16, "all GPUs" if place == "auto" else place
    said = (
        f"{name} needs {parameters * dtype.itemsize / GIB:.1f} GiB on {where} in {str(dtype).removeprefix('torch.')},"
        f" and {free / GIB:.1f} GiB are free"
    )
    if dtype.itemsize > half.itemsize and parameters * half.itemsize <= free:
        return UserError(f"{said}; dtype='bfloat16' needs {parameters * half.itemsize / GIB:.1f} GiB")
    if place != "auto" and torch.device(place).type == "cuda" and torch.cuda.device_count() > 1:
        return UserError(f"{said}; device='auto' spreads it over {torch.cuda.device_count()} GPUs")
    return UserError(f"{said}; it takes a larger device or a smaller checkpoint")


def free_bytes(place: Place) -> int | None:
    """Free memory of a device; None where it cannot be told."""
    if place == "auto":
        return sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))
    if torch.device(place).type == "cuda":
        return int(torch.cuda.mem_get_info(place)[0])
    if place != CPU or not Path("/proc/meminfo").is_file():
        return None
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) * 1024 if found else None


def _are(count: int) -> str:
    return {0: "is no GPU", 1: "is one GPU"}.get(count, f"are {count} GPUs")


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes on one thread inside the block, and on as many as before after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
