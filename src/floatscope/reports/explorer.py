"""One sample's trace made small enough to travel inside a page: the canvas at every step and where each layer looks.

    told = payload(trace, "twin:mdm", max_bytes=1_800_000)
    told["lift"], told["dropped"]            # packed numbers; what had to be left out to fit, in words

The canvas is kept as it began and by what changed. Lift is kept for every step, layer and eligible key as one byte on a
logarithmic scale of the layer's own (`coded`), which is within 2.3 % and mostly within 1 %; `decoded` is what the page
does to read it. Of single heads only the first keys of the trace's `top_key` are kept. The anchors are found before
anything is rounded. Of a cached model the lift is that of the whole prefix, and a head's top keys are its new rows'.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np

from floatscope.errors import UserError
from floatscope.files.sizes import format_size
from floatscope.traces.trace import Array, Trace

RANKS = 4  # top keys kept of each head
SPAN = 1e5  # the largest over the smallest value that is told apart
FLAT = 1.0005  # a layer whose values differ by less than this factor is taken to be constant
BUDGET = 1_800_000


def payload(trace: Trace, label: str, max_bytes: int = BUDGET) -> dict[str, Any]:
    """What the explorer needs of a trace, at most `max_bytes` as JSON: heads go first, then every second layer."""
    layers = trace.arrays["layers"]
    lift = trace.by_layer(scale="lift", eligible="eligible" in trace.arrays).astype(np.float64)
    canvas, uniform, top = _canvas(trace), _uniform(trace), _heads(trace)
    heads, every = top is not None, 1
    while True:
        kept = slice(None, None, every)
        told = {
            "label": label,
            "sample": trace.sample,
            "rows": trace.meta.get("rows", "all"),
            "layers": layers[kept].tolist(),
            "dropped": _dropped(top is not None and not heads, layers[kept].tolist(), len(layers), max_bytes),
            **canvas,
            "lift": coded(lift[:, kept]),
            "anchors": pack(_top(lift[:, kept])),
            "uniform": uniform,
            "masks": trace.arrays["layer_visibility"][kept].tolist(),
            "heads": _coded_heads(top, kept) if top is not None and heads else None,
        }
        size = len(json.dumps(told))
        if size <= max_bytes:
            return told
        if heads:
            heads = False
        elif every < len(layers):
            every *= 2
        else:
            raise UserError(
                f"the explorer cannot show '{trace.sample}' in {format_size(max_bytes)}: one of its layers alone takes"
                f" {format_size(size)}; choose a sample with fewer steps or keys, or allow more"
            )


def coded(values: Array, bits: int = 8) -> dict[str, Any]:
    """Values [step, layer, …] on a logarithmic scale per layer, packed: 0 is not measured, 1 the layer's low or less.

    Code c ≥ 1 of layer l stands for low[l] · (high[l] / low[l]) ** ((c − 1) / (2**bits − 2)).
    """
    most = 2**bits - 2
    there = np.isfinite(values)
    axes = (0, *range(2, values.ndim))
    high = np.where(there, values, 0).max(axes, initial=0)
    high = np.where(high > 0, high, 1.0)
    low = np.where(there & (values > 0), values, np.inf).min(axes, initial=np.inf)
    low = np.where(low < high / FLAT, np.clip(low, high / SPAN, high), high)
    shape = (1, -1, *(1,) * (values.ndim - 2))
    bottom, top = np.log(low).reshape(shape), np.log(high).reshape(shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        at = (np.log(values) - bottom) / np.where(top > bottom, top - bottom, 1.0)
    codes = np.where(there, 1 + np.rint(most * np.clip(np.nan_to_num(at, nan=0.0, neginf=0.0), 0, 1)), 0)
    packed = pack(codes.astype(np.uint8 if bits == 8 else np.uint16))
    return {"codes": packed, "low": low.tolist(), "high": high.tolist(), "most": most}


def decoded(told: dict[str, Any]) -> Array:
    """What the codes stand for; NaN where nothing was measured."""
    codes = unpack(told["codes"]).astype(np.float64)
    shape = (1, -1, *(1,) * (codes.ndim - 2))
    low, high = (np.array(told[end]).reshape(shape) for end in ("low", "high"))
    return np.where(codes > 0, low * (high / low) ** ((codes - 1) / told["most"]), np.nan)


def pack(codes: Array) -> dict[str, Any]:
    """Unsigned integers as text: what changed since the step before, deflated, in base64. Little steps deflate well."""
    changed = np.diff(codes, axis=0, prepend=np.zeros_like(codes[:1]))  # wraps around, and back when it is added up
    data = zlib.compress(changed.astype(codes.dtype.newbyteorder("<")).tobytes(), 9)
    return {"type": codes.dtype.name, "shape": list(codes.shape), "data": base64.b64encode(data).decode()}


def unpack(packed: dict[str, Any]) -> Array:
    changed = np.frombuffer(zlib.decompress(base64.b64decode(packed["data"])), np.dtype(packed["type"]))
    codes: Array = changed.reshape(packed["shape"]).cumsum(0, dtype=packed["type"])
    return codes


def _top(lift: Array) -> Array:
    """The key of largest lift + 1, [step, layer]; 0 where there is none."""
    ranked = np.where(np.isnan(lift), -np.inf, lift)
    return np.where(np.isfinite(ranked).any(-1), ranked.argmax(-1) + 1, 0).astype(np.uint32)


def _uniform(trace: Trace) -> dict[str, Any]:
    """What uniform attention would give, in percent, [step, mask, key]: times a lift it is the percentage received."""
    masks = trace.arrays["layer_visibility"].tolist()
    some = [masks.index(mask) for mask in range(max(masks) + 1)]  # a layer of each mask
    return coded(100 * trace.uniform()[:, some].astype(np.float64), bits=16)


def _heads(trace: Trace) -> tuple[Array, Array] | None:
    """The first top keys of each head + 1 and their lifts, [step, layer, head, rank]; None if the trace has none."""
    if not {"top_key", "top"} <= trace.arrays.keys():
        return None
    group, lift = trace.coords["group"].index("all"), trace.coords["top_stat"].index("lift")
    keys = trace.arrays["top_key"][:, :, :, group, :RANKS]
    return (keys + 1).astype(np.uint32), trace.arrays["top"][:, :, :, group, :RANKS, lift].astype(np.float64)


def _coded_heads(top: tuple[Array, Array], kept: slice) -> dict[str, Any]:
    keys, lifts = top
    small = keys.astype(np.uint16) if keys.max(initial=0) < 2**16 else keys
    return {"count": keys.shape[2], "keys": pack(small[:, kept]), "lift": coded(lifts[:, kept])}


def _canvas(trace: Trace) -> dict[str, Any]:
    """Tokens and states at the first step, what changed before each later one, commits, names of tokens, regions."""
    arrays = trace.arrays
    commits = list(
        zip(*(arrays[f"commit_{n}"].tolist() for n in ("step", "position", "token", "confidence")), strict=True)
    )
    tokens, states = arrays["tokens"], arrays["states"]
    width = max([tokens.shape[1], *(position + 1 for _, position, *_ in commits)])  # a growing canvas writes beyond it
    changed = np.argwhere((tokens[1:] != tokens[:-1]) | (states[1:] != states[:-1])).tolist()
    changes = [[t + 1, p, tokens[t + 1, p].item(), states[t + 1, p].item()] for t, p in changed]
    used = {*tokens[0].tolist(), *(c[2] for c in changes), *(c[2] for c in commits)} - {-1}
    known = trace.meta.get("pieces", {})
    beyond = width - tokens.shape[1]
    return {
        "steps": len(tokens),
        "keys": width,
        "tokens": tokens[0].tolist() + [-1] * beyond,
        "states": states[0].tolist() + [0] * beyond,
        "changes": changes,
        "commits": [[*where, float(f"{confidence:.4g}")] for *where, confidence in commits],
        "pieces": {str(token): known.get(str(token), f"<{token}>") for token in sorted(used)},
        "special": sorted(used & set(trace.meta.get("special_ids", ()))),
        "regions": _regions(trace),
    }


def _regions(trace: Trace) -> list[dict[str, Any]]:
    """Each region with its spans [start, stop)."""
    told = []
    for name, member in zip(trace.coords.get("region", ()), trace.arrays["region_member"].T, strict=True):
        edges = np.flatnonzero(np.diff(np.pad(member, 1).astype(np.int8)))
        told.append({"name": name, "spans": edges.reshape(-1, 2).tolist()})
    return told


def _dropped(heads: bool, layers: list[int], of: int, max_bytes: int) -> list[str]:
    said = ["single heads"] if heads else []
    if len(layers) < of:
        said.append(f"all but {len(layers)} of {of} layers ({', '.join(map(str, layers))})")
    return [f"Left out to stay within {format_size(max_bytes)}: {' and '.join(said)}."] if said else []
