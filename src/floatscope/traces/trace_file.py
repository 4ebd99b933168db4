"""One trace ↔ one safetensors file, with a digest over all of its bytes.

Any safetensors reader opens the arrays. Axes, coords and meta are JSON in the file's metadata, next to the SHA-256 of
the file (computed with the digest's own 64 characters as zeros). A file is checked completely before it is used.

    write_trace(Path("samples/nq-1.safetensors"), trace)
    read_trace(Path("samples/nq-1.safetensors"))             # equal to `trace`, bit for bit, or a UserError

The writer is our own because the library writes the metadata in random order, and equal traces must give equal files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from floatscope.errors import UserError, printable, summarize_error
from floatscope.files.atomic import write_atomic
from floatscope.files.records import Record, convert
from floatscope.schema import MaskStructure, RowSource
from floatscope.traces.trace import Array, Trace
from floatscope.traces.trace_fields import check_arrays
from floatscope.traces.upgrade import upgrade_field, upgrade_settings

TRACE_FORMAT, OLD_TRACE_FORMAT = "floatscope trace 2", "floatscope trace 1"
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
BLANK_DIGEST = "0" * 64
CHUNK = 1 << 20


class KnownMeta(msgspec.Struct):
    """The types of those entries of `meta` that are read from files; others may have any."""

    pieces: dict[int, str] | msgspec.UnsetType = msgspec.UNSET
    special: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    special_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    rows: RowSource | msgspec.UnsetType = msgspec.UNSET
    masks: list[MaskStructure] | msgspec.UnsetType = msgspec.UNSET
    acc: float | msgspec.UnsetType | None = msgspec.UNSET


class TraceMetadata(Record):
    """The type of the metadata of a trace file, except its digest."""

    format: str
    sample: str
    axes: dict[str, list[str]]
    coords: dict[str, list[str]]
    meta: KnownMeta
    order: list[str]


def write_trace(path: Path, trace: Trace) -> None:
    """Write the trace to `path`, completely or not at all; the same trace always gives the same bytes."""
    # The widest types come first, so that every array begins at a multiple of its item size.
    names = sorted(trace.arrays, key=lambda name: (-trace.arrays[name].itemsize, name))
    arrays = [np.ascontiguousarray(trace.arrays[name]) for name in names]
    digest = hashlib.sha256(_build_header(trace, names, BLANK_DIGEST))
    for array in arrays:
        digest.update(array.data)
    header = _build_header(trace, names, digest.hexdigest())
    write_atomic(path, [header, *(array.data for array in arrays)])


def read_trace(path: Path) -> Trace:
    """Read a trace after checking all of its bytes; a damaged file is refused by name.

    A trace of floatscope 0.6 comes back under today's names (`upgrade`).
    """
    metadata = check_trace_file(path)
    arrays, axes, meta = _read_arrays(path, metadata["order"]), _to_tuples(metadata["axes"]), metadata["meta"]
    if metadata["format"] == OLD_TRACE_FORMAT:
        arrays = {upgrade_field(name): array for name, array in arrays.items()}
        axes = {upgrade_field(name): names for name, names in axes.items()}
        meta = upgrade_settings(meta)
    try:
        trace = Trace(metadata["sample"], arrays, axes, _to_tuples(metadata["coords"]), meta)
        check_arrays(trace)
    except UserError as error:
        raise _damaged_error(path, str(error)) from error
    return trace


def check_trace_file(path: Path) -> dict[str, Any]:
    """Compare the file with its digest and return its metadata as stored; raise a `UserError` if it is damaged."""
    try:
        with path.open("rb") as file:
            length = file.read(8)
            header = file.read(min(int.from_bytes(length, "little"), path.stat().st_size))
            metadata = msgspec.convert(json.loads(header)["__metadata__"], dict[str, str])
            written = metadata.pop("sha256")
            digest = hashlib.sha256(length + header.replace(written.encode(), BLANK_DIGEST.encode(), 1))
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # damage to the JSON, its keys or its types
        raise _damaged_error(path, "its header cannot be read") from error
    if digest.hexdigest() != written:
        raise _damaged_error(path, "its bytes do not match its digest")
    return _parse_metadata(path, metadata)


def _parse_metadata(path: Path, texts: dict[str, str]) -> dict[str, Any]:
    """The metadata as values. The format comes first: one of another version may have other entries."""
    stored_format = texts.pop("format", None)
    if stored_format is None:
        raise _damaged_error(path, "its metadata names no format")
    if stored_format not in (TRACE_FORMAT, OLD_TRACE_FORMAT):
        raise UserError(
            f"{path} has the format '{printable(stored_format)}', but this floatscope reads '{TRACE_FORMAT}' and"
            f" '{OLD_TRACE_FORMAT}'; open it with the version that wrote it"
        )
    metadata: dict[str, Any] = {"format": stored_format}
    for key, text in texts.items():
        try:
            metadata[key] = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _damaged_error(path, f"its metadata '{printable(key)}' is not valid JSON") from error
    try:
        convert(metadata, TraceMetadata)
    except ValueError as error:
        raise _damaged_error(path, f"wrong metadata ({error})") from error
    return metadata


def _read_arrays(path: Path, order: list[str]) -> dict[str, Array]:
    try:
        with safe_open(path, "np") as file:
            if sorted(order) != sorted(file.keys()):
                raise _damaged_error(path, "its metadata 'order' does not name its arrays, each once")
            types = {name: file.get_slice(name).get_dtype() for name in order}
            if foreign := [name for name in order if types[name] not in DTYPES.values()]:
                raise _damaged_error(path, f"array '{printable(foreign[0])}' has the type {types[foreign[0]]}")
            return {name: file.get_tensor(name) for name in order}
    except (SafetensorError, OSError) as error:
        raise _damaged_error(path, f"its arrays cannot be read ({summarize_error(error)})") from error


def trace_file_name(sample: str) -> str:
    """Return a file name for a sample id: the id itself if it is plain, else its readable part and a hash.

    Plain includes lower case, because some file systems treat "A" and "a" as one name; "~" occurs only before a hash.
    """
    if re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,99}", sample):
        return f"{sample}.safetensors"
    readable = re.sub(r"[^a-z0-9]+", "-", sample.lower()).strip("-")[:60]
    return f"{readable}~{hashlib.sha256(sample.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}.safetensors"


def _damaged_error(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is damaged: {reason}. Delete it and resume the run, which decodes that sample again")


def _build_header(trace: Trace, names: list[str], digest: str) -> bytes:
    """The safetensors header: its length in eight bytes, then JSON padded with spaces to a multiple of eight."""
    entries = {
        "axes": trace.axes,
        "coords": trace.coords,
        "meta": trace.meta,
        "order": list(trace.arrays),
        "sample": trace.sample,
    }
    metadata = {key: json.dumps(value) for key, value in entries.items()} | {"format": TRACE_FORMAT, "sha256": digest}
    header: dict[str, Any] = {"__metadata__": metadata}
    for name, start, stop in _offsets(trace, names):
        array = trace.arrays[name]
        if array.dtype.str not in DTYPES:
            raise UserError(
                f"array '{name}' is {array.dtype.name}, but a trace stores floats, signed integers and booleans"
            )
        header[name] = {"dtype": DTYPES[array.dtype.str], "shape": list(array.shape), "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _offsets(trace: Trace, names: list[str]) -> Iterator[tuple[str, int, int]]:
    stop = 0
    for name in names:
        start, stop = stop, stop + trace.arrays[name].nbytes
        yield name, start, stop


def _to_tuples(lists: dict[str, list[str]]) -> dict[str, tuple[str, ...]]:
    return {key: tuple(value) for key, value in lists.items()}
