"""Steps of different widths joined into arrays: what is missing is filled, never guessed.

An autoregressive canvas grows by a token a step, and a field may be absent at a step or in a layer. Pieces are laid
into arrays as wide as the widest, and what no piece covers stays NaN, -1 or PAD (`layout.filling`).

    pieces = [{"keys": [[3]], "residual": [1, layer, 3]}, {"keys": [[4]], "residual": [1, layer, 4]}]
    assemble(pieces, {"keys": ("step",), "residual": ("step", "layer", "key")})["residual"]    # [2, layer, 4]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from floatscope.traces.layout import filling
from floatscope.traces.trace import Array

Piece = dict[str, Array]
"""What one step adds to one sample; every array begins with its `step` axis (of length 1) or its `commit` axis."""


def assemble(pieces: Sequence[Piece], axes: Mapping[str, tuple[str, ...]]) -> dict[str, Array]:
    """Join the pieces along their first axis; an axis has one length in all arrays, the longest met."""
    sizes: dict[str, int] = {}
    for piece in pieces:
        for name, array in piece.items():
            for axis, size in zip(axes[name][1:], array.shape[1:], strict=True):
                sizes[axis] = max(size, sizes.get(axis, 0))
    commits = [len(piece["commit_step"]) for piece in pieces]
    arrays = {}
    for name in dict.fromkeys(name for piece in pieces for name in piece):
        lengths = commits if axes[name][0] == "commit" else [1] * len(pieces)
        arrays[name] = join(name, [piece.get(name) for piece in pieces], lengths, [sizes[a] for a in axes[name][1:]])
    return arrays


def join(name: str, found: Sequence[Array | None], lengths: Sequence[int], shape: Sequence[int]) -> Array:
    """Concatenate arrays of `lengths` along the first axis into [Σ lengths, *shape]; None is filled throughout."""
    dtype = np.result_type(*(array.dtype for array in found if array is not None))
    joined = np.full((sum(lengths), *shape), filling(name, dtype), dtype)
    at = 0
    for array, length in zip(found, lengths, strict=True):
        if array is not None:
            joined[(slice(at, at + length), *map(slice, array.shape[1:]))] = array
        at += length
    return joined
