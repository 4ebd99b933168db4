"""The payload of the canvas explorer: one sample's trace, small enough for a page.

    payload = build_payload(trace, "twin:mdm", max_bytes=1_800_000)
    payload["lift"], payload["notes"]        # packed numbers; sentences about what was left out to fit

The payload holds the canvas of the first step and the changes of each later step. It holds the lift of every step,
layer and eligible key as one byte on a logarithmic scale per layer (`encode`); the error is below 2.3 % and mostly
below 1 %. `decode` restores the values in the same way as the page. The top key of a layer is that of
`Trace.anchor_path`, 0 at a step without an anchor. Of single heads it holds only the first keys of the trace's
`top_key`. For a model with a cache, lift is that of the whole prefix, and the top keys of a head are those of the new
rows.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np

from floatscope.errors import UserError
from floatscope.files.sizes import format_size
from floatscope.schema import RowSource
from floatscope.traces.trace import Array, Trace

RANKS = 4  # top keys per head
MAX_RATIO = 1e5  # of the largest to the smallest value on a scale; smaller values get the smallest code
FLAT_RATIO = 1.0005  # a layer whose values differ by less than this factor counts as constant
MAX_BYTES = 1_800_000


def build_payload(trace: Trace, label: str, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The data of a trace for the explorer, at most `max_bytes` as JSON.

    A trace that is too large loses its single heads first, then every second layer, and so on. `notes` says so.
    """
    layers = trace.arrays["layers"]
    has_eligible = "eligible" in trace.arrays
    lift = trace.received(scale="lift", eligible=has_eligible).astype(np.float64)
    anchor_path = trace.anchor_path() if has_eligible else np.full(lift.shape[:2], -1)
    canvas, uniform, heads = _canvas(trace), _uniform(trace), _top_keys_of_heads(trace)
    with_heads, layer_step = heads is not None, 1
    while True:
        part = slice(None, None, layer_step)
        payload = {
            "label": label,
            "sample": trace.sample,
            "rows": trace.meta.get("rows", RowSource.ALL),
            "layers": layers[part].tolist(),
            "notes": _notes(heads is not None and not with_heads, layers[part].tolist(), len(layers), max_bytes),
            **canvas,
            "lift": encode(lift[:, part]),
            "top_keys": pack((anchor_path[:, part] + 1).astype(np.uint32)),
            "uniform": uniform,
            "layer_visibility": trace.arrays["layer_visibility"][part].tolist(),
            "heads": _encode_heads(heads, part) if heads is not None and with_heads else None,
        }
        size = len(json.dumps(payload))
        if size <= max_bytes:
            return payload
        if with_heads:
            with_heads = False
        elif layer_step < len(layers):
            layer_step *= 2
        else:
            raise UserError(
                f"the explorer cannot show '{trace.sample}' in {format_size(max_bytes)}: one of its layers alone takes"
                f" {format_size(size)}; choose a sample with fewer steps or keys, or allow more"
            )


def encode(values: Array, bits: int = 8) -> dict[str, Any]:
    """Values [step, layer, …] as packed codes on a logarithmic scale per layer.

    Code 0 means not measured. Code c ≥ 1 of layer l means low[l] · (high[l] / low[l]) ** ((c − 1) / max_level), where
    max_level = 2**bits − 2; smaller values than low[l] get code 1.
    """
    max_level = 2**bits - 2
    measured = np.isfinite(values)
    axes = (0, *range(2, values.ndim))
    high = np.where(measured, values, 0).max(axes, initial=0)
    high = np.where(high > 0, high, 1.0)
    low = np.where(measured & (values > 0), values, np.inf).min(axes, initial=np.inf)
    low = np.where(low < high / FLAT_RATIO, np.clip(low, high / MAX_RATIO, high), high)
    shape = (1, -1, *(1,) * (values.ndim - 2))
    bottom, top = np.log(low).reshape(shape), np.log(high).reshape(shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        position = (np.log(values) - bottom) / np.where(top > bottom, top - bottom, 1.0)  # 0 at low, 1 at high
    levels = np.rint(max_level * np.clip(np.nan_to_num(position, nan=0.0, neginf=0.0), 0, 1))
    packed = pack(np.where(measured, 1 + levels, 0).astype(np.uint8 if bits == 8 else np.uint16))
    return {"codes": packed, "low": low.tolist(), "high": high.tolist(), "max_level": max_level}


def decode(encoded: dict[str, Any]) -> Array:
    """The values of `encode`, rounded to their codes; NaN where nothing was measured."""
    codes = unpack(encoded["codes"]).astype(np.float64)
    shape = (1, -1, *(1,) * (codes.ndim - 2))
    low, high = (np.array(encoded[end]).reshape(shape) for end in ("low", "high"))
    return np.where(codes > 0, low * (high / low) ** ((codes - 1) / encoded["max_level"]), np.nan)


def pack(codes: Array) -> dict[str, Any]:
    """Unsigned integers as text: differences from step to step, deflated, in base64. Small differences deflate well."""
    changes = np.diff(codes, axis=0, prepend=np.zeros_like(codes[:1]))  # wraps around; the sum in `unpack` wraps back
    data = zlib.compress(changes.astype(codes.dtype.newbyteorder("<")).tobytes(), 9)
    return {"type": codes.dtype.name, "shape": list(codes.shape), "data": base64.b64encode(data).decode()}


def unpack(packed: dict[str, Any]) -> Array:
    """The inverse of `pack`."""
    changes = np.frombuffer(zlib.decompress(base64.b64decode(packed["data"])), np.dtype(packed["type"]))
    codes: Array = changes.reshape(packed["shape"]).cumsum(0, dtype=packed["type"])
    return codes


def _uniform(trace: Trace) -> dict[str, Any]:
    """The percentage of each key under uniform attention, [step, mask, key]; times lift, the percentage it receives."""
    visibility = trace.arrays["layer_visibility"].tolist()
    layers = [visibility.index(mask) for mask in range(max(visibility) + 1)]  # one layer of each attention mask
    return encode(100 * trace.uniform()[:, layers].astype(np.float64), bits=16)


def _top_keys_of_heads(trace: Trace) -> tuple[Array, Array] | None:
    """The top keys of each head + 1 and their lifts, [step, layer, head, rank]; None if the trace has none."""
    if not {"top_key", "top"} <= trace.arrays.keys():
        return None
    group, lift = trace.coords["group"].index("all"), trace.coords["top_stat"].index("lift")
    keys = trace.arrays["top_key"][:, :, :, group, :RANKS]
    return (keys + 1).astype(np.uint32), trace.arrays["top"][:, :, :, group, :RANKS, lift].astype(np.float64)


def _encode_heads(heads: tuple[Array, Array], layers: slice) -> dict[str, Any]:
    keys, lifts = heads
    compact = keys.astype(np.uint16) if keys.max(initial=0) < 2**16 else keys
    return {"count": keys.shape[2], "keys": pack(compact[:, layers]), "lift": encode(lifts[:, layers])}


def _canvas(trace: Trace) -> dict[str, Any]:
    """Tokens and states of the first step, the changes before each later step, commits, token texts, regions."""
    arrays = trace.arrays
    commits = list(
        zip(*(arrays[f"commit_{n}"].tolist() for n in ("step", "position", "token", "confidence")), strict=True)
    )
    tokens, states = arrays["tokens"], arrays["states"]
    width = max([tokens.shape[1], *(position + 1 for _, position, *_ in commits)])  # the last commit may lie outside
    changed = np.argwhere((tokens[1:] != tokens[:-1]) | (states[1:] != states[:-1])).tolist()
    changes = [[t + 1, p, tokens[t + 1, p].item(), states[t + 1, p].item()] for t, p in changed]
    used = {*tokens[0].tolist(), *(c[2] for c in changes), *(c[2] for c in commits)} - {-1}
    pieces = trace.meta.get("pieces", {})
    padding = width - tokens.shape[1]
    return {
        "steps": len(tokens),
        "keys": width,
        "tokens": tokens[0].tolist() + [-1] * padding,
        "states": states[0].tolist() + [0] * padding,
        "changes": changes,
        "commits": [[*place, float(f"{confidence:.4g}")] for *place, confidence in commits],
        **({"edits": np.flatnonzero(trace.is_edit).tolist()} if trace.is_edit.any() else {}),  # indices of commits
        "pieces": {str(token): pieces.get(str(token), f"<{token}>") for token in sorted(used)},
        "special_ids": sorted(used & set(trace.meta.get("special_ids", ()))),
        "regions": _regions(trace),
    }


def _regions(trace: Trace) -> list[dict[str, Any]]:
    """Each region with its spans [start, stop)."""
    regions = []
    for name, member in zip(trace.coords.get("region", ()), trace.arrays["region_member"].T, strict=True):
        edges = np.flatnonzero(np.diff(np.pad(member, 1).astype(np.int8)))
        regions.append({"name": name, "spans": edges.reshape(-1, 2).tolist()})
    return regions


def _notes(without_heads: bool, layers: list[int], layer_count: int, max_bytes: int) -> list[str]:
    parts = ["single heads"] if without_heads else []
    if len(layers) < layer_count:
        parts.append(f"all but {len(layers)} of {layer_count} layers ({', '.join(map(str, layers))})")
    return [f"Left out to stay within {format_size(max_bytes)}: {' and '.join(parts)}."] if parts else []
