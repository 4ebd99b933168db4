"""Where a model runs and in which precision, and whether it fits there.

device, dtype = resolve_device(None), resolve_dtype("bf16")       # a GPU if there is one
check_memory("LLaDA-8B", 8_015_581_184, torch.float32, device)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from floatscope.errors import UserError, unknown_choice

Device = str | torch.device  # "auto": spread over all GPUs
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


def resolve_device(device: str | torch.device | None) -> Device:
    """Return the device by its name, which must exist here; None: a GPU if there is one, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "auto":
        if not torch.cuda.is_available():
            raise UserError("device='auto' spreads a model over GPUs, and there is none here; use device='cpu'")
        return "auto"
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        resolved = torch.device("meta")
    if resolved.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"unknown device {device!r}; allowed: cpu, cuda, cuda:0 …, mps, auto")
    if resolved.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        resolved = torch.device("cuda", resolved.index or 0)
        if resolved.index >= count:
            there_is = {0: "there is no GPU", 1: "there is one GPU"}.get(count, f"there are {count} GPUs")
            raise UserError(f"device {device} does not exist: {there_is} here; use device='cpu'")
    if resolved.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("device mps does not exist here; use device='cpu'")
    return resolved


def resolve_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the torch dtype by its name, such as "bf16"; None stays None: the checkpoint's own."""
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype in DTYPES.values()):
        return dtype
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise unknown_choice("dtype", name, DTYPES)
    return DTYPES[name]


def check_memory(name: str, parameters: int, dtype: torch.dtype, device: Device) -> None:
    """Raise a `UserError` if the weights do not fit, instead of crashing in the middle of loading."""
    free = free_memory(device)
    if free is not None and parameters * dtype.itemsize > free:
        raise memory_error(name, parameters, dtype, device, free)


def memory_error(name: str, parameters: int, dtype: torch.dtype, device: Device, free: int) -> UserError:
    """Return the error that says how much memory is needed, how much is free, and what would fit."""
    half, where = torch.bfloat16, "all GPUs" if device == "auto" else device
    message = (
        f"{name} needs {parameters * dtype.itemsize / GIB:.1f} GiB on {where} in {str(dtype).removeprefix('torch.')},"
        f" and {free / GIB:.1f} GiB are free"
    )
    if dtype.itemsize > half.itemsize and parameters * half.itemsize <= free:
        return UserError(f"{message}; dtype='bfloat16' needs {parameters * half.itemsize / GIB:.1f} GiB")
    if device != "auto" and torch.device(device).type == "cuda" and torch.cuda.device_count() > 1:
        return UserError(f"{message}; device='auto' spreads it over {torch.cuda.device_count()} GPUs")
    return UserError(f"{message}; use a larger device or a smaller checkpoint")


def free_memory(device: Device) -> int | None:
    """Return the free memory of a device in bytes; None if it is unknown."""
    if device == "auto":
        return sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device != CPU or not Path("/proc/meminfo").is_file():
        return None
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(match[1]) * 1024 if match else None


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Let torch use one CPU thread inside the block; restore the number of threads after it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
