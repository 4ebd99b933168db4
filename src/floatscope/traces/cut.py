"""One sample's part of a batched step, cut to its own valid positions.

Canvases of different lengths are padded on the left or the right to share a batch. Here the padding goes again: keys
and queries are sliced, and positions count from the sample's first valid one, so the batch leaves no mark.

    start, stop = valid_span(brought.states[b], "nq-1")
    cut(brought, axes, b, start, stop)["received"]        # [1, layer, group, stop - start]
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from floatscope.errors import UserError
from floatscope.schema import State
from floatscope.traces.assemble import Piece
from floatscope.traces.intake import Brought
from floatscope.traces.trace import Array


def valid_span(states: Array, sample: str) -> tuple[int, int]:
    """[first valid, last valid + 1) of one canvas; (0, 0) if it is all padding."""
    valid = np.flatnonzero(states != State.PAD)
    if not len(valid):
        return 0, 0
    start, stop = int(valid[0]), int(valid[-1]) + 1
    if stop - start != len(valid):
        raise UserError(
            f"sample '{sample}' has padding between its positions {start} and {stop - 1}: pad left or right"
        )
    return start, stop


def cut(brought: Brought, axes: Mapping[str, tuple[str, ...]], b: int, start: int, stop: int) -> Piece:
    """The piece sample `b` adds to its trace; its `commit_step` and `queries` depend on its past and are not here."""
    mine = np.flatnonzero(brought.owner == b)
    block = np.where(brought.block[b] < 0, -1, (brought.block[b] - start).clip(0))
    piece: Piece = {
        "tokens": brought.tokens[b, None, start:stop],
        "states": brought.states[b, None, start:stop],
        "keys": np.array([stop - start], np.int32),
        "block": np.array([block], np.int32),
        **{name: array[mine] for name, array in brought.commits.items()},
    }
    piece["commit_position"] -= start
    piece["commit_row"] -= start
    if brought.influence is not None:
        piece["influence"] = brought.influence[mine, start:stop]
    for name, array in brought.fields.items():
        if "commit" in axes[name]:
            part, own = np.swapaxes(array[:, mine], 0, 1), axes[name][1:]  # [commit, layer, …]
        else:
            part, own = array[None, :, b], axes[name]  # [1, layer, …]
        part = part[_window(own, part.shape[2:], brought.tokens.shape[1], start, stop)]
        piece[name] = _shifted(part, name, start, stop) if name.endswith("_key") and part.dtype.kind == "i" else part
    return piece


def _window(axes: tuple[str, ...], shape: tuple[int, ...], width: int, start: int, stop: int) -> tuple[slice, ...]:
    """Slices that keep the sample's own keys and queries; queries are the last positions of a canvas `width` wide."""
    index = [slice(None), slice(None)]
    for axis, size in zip(axes, shape, strict=True):
        ahead = {"key": 0, "query": width - size}.get(axis)
        index.append(slice(None) if ahead is None else slice(max(start - ahead, 0), max(stop - ahead, 0)))
    return tuple(index)


def _shifted(keys: Array, name: str, start: int, stop: int) -> Array:
    """Key positions counted from `start`; -1, no key, stays."""
    if (((keys >= 0) & (keys < start)) | (keys >= stop)).any():
        raise ValueError(f"field '{name}' names a key outside the valid positions {start} to {stop - 1}; no key is -1")
    return np.where(keys < 0, keys, keys - start).astype(keys.dtype)
