"""What a watched step brings: on the CPU, checked against its axes, cast once to the types it is stored in.

A float16 field that overflows is refused: an infinite or clipped value would pass for a measured one.

    brought = bring(step, layers, layer_visibility, axes, coords)
    brought.fields["received"]     # [layer, batch, group, key]
    brought.fields["row_key"]      # [layer, commit, head, rank]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from floatscope.canvas import Reductions, Step
from floatscope.errors import UserError
from floatscope.schema import FIELDS, SHARED
from floatscope.traces.assemble import join
from floatscope.traces.layout import OPTIONAL_FIELDS, TRACE_FIELDS, filling, stored_axes
from floatscope.traces.trace import Array

Axes = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Brought:
    """One step of a batch, as numpy arrays."""

    tokens: Array  # [batch, key]
    states: Array  # [batch, key]
    member: Array  # [batch, key, region]
    tokens_after: Array  # [batch, position]
    states_after: Array  # [batch, position]
    block: Array  # [batch, 2], [start, stop) of the block being filled; -1 when none
    active: Array  # [batch]
    owner: Array  # [commit], the sample each commit belongs to
    commits: Mapping[str, Array]  # commit_position, …: [commit]
    fields: Mapping[str, Array]  # [layer, batch, …] or [layer, commit, …]; `uniform` [visibility, batch, …]
    visibility: tuple[int, ...]  # the row of `uniform` each layer uses
    influence: Array | None  # [commit, key]; None: not asked for


def bring(
    step: Step,
    layers: Sequence[Reductions],
    layer_visibility: Sequence[int],
    axes: Axes,
    coords: Axes,
    influence: Tensor | None = None,
) -> Brought:
    """Check, cast and move one step; `axes` are those of every field that may come."""
    before, after = step.before, step.after
    member = before.regions.member
    if member is None:
        member = torch.zeros((*before.tokens.shape, 0), dtype=torch.bool)
    sizes = {axis: len(along) for axis, along in coords.items()}
    sizes |= {"batch": len(before.tokens), "key": before.tokens.shape[1], "commit": len(step.commits)}
    sizes |= {"region": member.shape[2], "key_region": member.shape[2]}
    names = dict.fromkeys(name for reductions in layers for name in reductions.fields)
    fields = {name: _over_layers(name, layers, axes, coords, sizes) for name in names}
    classes = list(dict.fromkeys(layer_visibility))
    for name in (name for name in SHARED if name in fields):  # they came with the first layer of each visibility
        fields[name] = fields[name][[list(layer_visibility).index(c) for c in classes]]
    return Brought(
        tokens=_numpy(before.tokens).astype(np.int32),
        states=_numpy(before.states).astype(np.int8),
        member=_numpy(member),
        tokens_after=_numpy(after.tokens).astype(np.int32),
        states_after=_numpy(after.states).astype(np.int8),
        block=np.full((len(before.tokens), 2), -1) if before.block is None else _numpy(before.block),
        active=np.ones(len(before.tokens), bool) if before.active is None else _numpy(before.active),
        owner=_numpy(step.commits.sample),
        commits={
            f"commit_{name}": _numpy(getattr(step.commits, name)).astype(TRACE_FIELDS[f"commit_{name}"].dtype)
            for name in ("position", "row", "token", "confidence")
        },
        fields=fields,
        visibility=tuple(classes.index(c) for c in layer_visibility),
        influence=None if influence is None else _numpy(influence).astype(OPTIONAL_FIELDS["influence"].dtype),
    )


def check_extra(extra: Axes) -> dict[str, tuple[str, ...]]:
    """The axes of fields that are not in `FIELDS`, refused where a trace could not tell them from its own."""
    taken = {*FIELDS, *TRACE_FIELDS, *OPTIONAL_FIELDS, *(axis for axes in extra.values() for axis in axes)}
    taken |= {axis for f in (*FIELDS.values(), *TRACE_FIELDS.values()) for axis in stored_axes("", f.axes)}
    for name, axes in extra.items():
        if name in taken:
            raise UserError(f"a field cannot be called '{name}': a trace has an array or an axis of that name")
        if len(set(axes)) != len(axes) or "commit" in axes[1:] or {"step", "layer", "batch"} & set(axes):
            raise UserError(
                f"field '{name}' has axes ({', '.join(axes)}): name each axis once, `commit` first if it has one, and "
                f"leave step, layer and batch to the recorder"
            )
    return {name: tuple(axes) for name, axes in extra.items()}


def _over_layers(name: str, layers: Sequence[Reductions], axes: Axes, coords: Axes, sizes: Mapping[str, int]) -> Array:
    """One field of all layers in its stored type; filled where a layer did not keep it."""
    if name not in axes:
        raise UserError(f"field '{name}' has no axes: name them, Recorder(extra_axes={{'{name}': ('head', …)}})")
    own = axes[name] if "commit" in axes[name] else ("batch", *axes[name])
    found: list[Array | None] = []
    for reductions in layers:
        tensor, what = reductions.fields.get(name), f"of layer {reductions.layer}"
        if tensor is None:
            found.append(None)
            continue
        if len(own) != tensor.ndim or any(sizes.get(a, n) != n for a, n in zip(own, tensor.shape, strict=True)):
            wanted = ", ".join(f"{axis} {sizes.get(axis, '')}".strip() for axis in own)
            raise UserError(f"field '{name}' {what} has shape {tuple(tensor.shape)}, not ({wanted})")
        found.append(_stored(name, tensor, what, coords.get(own[-1]))[None])
    shape = np.max([array.shape[1:] for array in found if array is not None], 0).tolist()
    return join(name, found, [1] * len(found), shape)


def _stored(name: str, tensor: Tensor, what: str, last: Sequence[str] | None) -> Array:
    """The tensor in the type the trace stores, refused if a value does not survive the cast."""
    exact = _numpy(tensor)
    dtype = np.dtype(FIELDS[name].dtype) if name in FIELDS else exact.dtype
    filling(name, dtype)  # refuses a type that has none
    with np.errstate(over="ignore"):
        stored = exact.astype(dtype)
    lost = np.isfinite(exact) & ~np.isfinite(stored) if dtype.kind == "f" else stored != exact
    if lost.any():
        at = tuple(np.argwhere(lost)[0])
        part = f" ({last[at[-1]]})" if last else ""
        limit = np.finfo(dtype).max if dtype.kind == "f" else np.iinfo(dtype).max
        raise UserError(
            f"field '{name}'{part} {what} holds {exact[at]:g}, and is stored as {dtype.name}, which ends at {limit:g}. "
            f"If such a value looks wrong, `floatscope doctor` tells whether the capture is; if it is the model's own, "
            f"trace without '{name}' by naming the other fields in `fields=`"
        )
    return stored


def _numpy(tensor: Tensor) -> Array:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()  # numpy has no bfloat16
