"""One trace ↔ one safetensors file, with a digest over every byte of it.

Any safetensors reader opens the arrays; axes, coords and meta lie in the file's metadata as JSON, beside the SHA-256 of
the file (the digest's own 64 characters counted as zeros). A file is checked whole before any of it is believed.

    write_trace(Path("samples/nq-1.safetensors"), trace)
    read_trace(Path("samples/nq-1.safetensors"))             # equal to `trace`, bit for bit, or a UserError

The writer is our own because the library's puts the metadata in random order, and equal traces must give equal files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from floatscope.errors import UserError
from floatscope.files.atomic import write_atomic
from floatscope.traces.trace import Array, Trace

FORMAT = "floatscope trace 1"
DTYPES = {
    "<f8": "F64",
    "<f4": "F32",
    "<f2": "F16",
    "<i8": "I64",
    "<i4": "I32",
    "<i2": "I16",
    "|i1": "I8",
    "|b1": "BOOL",
}
BLANK = "0" * 64
CHUNK = 1 << 20


def write_trace(path: Path, trace: Trace) -> None:
    """Write the trace to `path`, whole or not at all; the same trace always gives the same bytes."""
    # The widest types first, so that every array begins at a multiple of its item size.
    names = sorted(trace.arrays, key=lambda name: (-trace.arrays[name].itemsize, name))
    arrays = [np.ascontiguousarray(trace.arrays[name]) for name in names]
    blank = _header(trace, names, BLANK)
    digest = hashlib.sha256(blank)
    for array in arrays:
        digest.update(array.data)
    header = _header(trace, names, digest.hexdigest())
    write_atomic(path, [header, *(array.data for array in arrays)])


def read_trace(path: Path) -> Trace:
    """Read a trace whose every byte has been checked; a damaged file is refused by name."""
    about = check_file(path)
    with safe_open(path, "np") as file:
        arrays: dict[str, Array] = {name: file.get_tensor(name) for name in about["order"]}
    return Trace(about["sample"], arrays, _tuples(about["axes"]), _tuples(about["coords"]), about["meta"])


def check_file(path: Path) -> dict[str, Any]:
    """Compare the file with its digest and return what its metadata says, or raise a `UserError` that names it."""
    try:
        with path.open("rb") as file:
            length = file.read(8)
            header = file.read(min(int.from_bytes(length, "little"), path.stat().st_size))
            about: dict[str, str] = json.loads(header)["__metadata__"]
            written = about.pop("sha256")
            digest = hashlib.sha256(length + header.replace(written.encode(), BLANK.encode(), 1))
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # a bent header: its JSON, its keys, their types
        raise _damaged(path, "its header cannot be read") from error
    if digest.hexdigest() != written:
        raise _damaged(path, "its bytes do not match its digest")
    if (form := about.pop("format")) != FORMAT:
        raise UserError(
            f"{path} holds a '{form}', and this floatscope reads '{FORMAT}'; open it with the version that wrote it"
        )
    return {key: json.loads(text) for key, text in about.items()}


def file_name(sample: str) -> str:
    """A file name for a sample id: the id itself if it is plain, else what is readable of it and a hash.

    Plain means lower case too, because some file systems take "A" and "a" for one name; "~" stands only before a hash.
    """
    if re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,99}", sample):
        return f"{sample}.safetensors"
    readable = re.sub(r"[^a-z0-9]+", "-", sample.lower()).strip("-")[:60]
    return f"{readable}~{hashlib.sha256(sample.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}.safetensors"


def _damaged(path: Path, how: str) -> UserError:
    return UserError(f"{path} is damaged: {how}. Delete it and resume the run, which decodes that sample again")


def _header(trace: Trace, names: list[str], digest: str) -> bytes:
    """The safetensors header: its length in eight bytes, then JSON padded with spaces to a multiple of eight."""
    about = {
        "axes": trace.axes,
        "coords": trace.coords,
        "meta": trace.meta,
        "order": list(trace.arrays),
        "sample": trace.sample,
    }
    metadata = {key: json.dumps(value) for key, value in about.items()} | {"format": FORMAT, "sha256": digest}
    header: dict[str, Any] = {"__metadata__": metadata}
    for name, start, stop in _offsets(trace, names):
        array = trace.arrays[name]
        if array.dtype.str not in DTYPES:
            raise UserError(f"array '{name}' is {array.dtype.name}; a trace keeps floats, signed integers and booleans")
        header[name] = {"dtype": DTYPES[array.dtype.str], "shape": list(array.shape), "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _offsets(trace: Trace, names: list[str]) -> Iterator[tuple[str, int, int]]:
    stop = 0
    for name in names:
        start, stop = stop, stop + trace.arrays[name].nbytes
        yield name, start, stop


def _tuples(lists: dict[str, list[str]]) -> dict[str, tuple[str, ...]]:
    return {key: tuple(value) for key, value in lists.items()}
