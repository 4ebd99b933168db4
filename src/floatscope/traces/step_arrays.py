"""The arrays of one decoding step: moved to the CPU, checked, cast, cut to each sample and joined over steps.

Canvases of different lengths share a batch through padding on the left or the right. `cut_sample` removes the padding
again, so positions count from the first valid one of the sample and the batch leaves no mark. `join_steps` fills what
was not measured with NaN, -1 or PAD. A value that does not fit its stored type is refused, because an infinite or
clipped value would look like a measured one.

    arrays = to_step_arrays(step, capture, axes, coords)
    arrays.fields["received"]                                       # [layer, batch, group, key]
    start, stop = valid_span(arrays.states[b], "nq-1")
    cut_sample(arrays, axes, b, start, stop)["received"]            # [1, layer, group, stop - start]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from floatscope.canvas import Reductions, Step, StepCapture
from floatscope.errors import UserError
from floatscope.schema import FIELDS, SHARED, MaskStructure, State
from floatscope.traces.trace import Array
from floatscope.traces.trace_fields import OPTIONAL_FIELDS, TRACE_FIELDS, fill_value, stored_axes

Axes = Mapping[str, tuple[str, ...]]
SampleStep = dict[str, Array]
"""What one step adds to the trace of one sample; each array begins with a `step` axis of length 1 or with `commit`."""


@dataclass(frozen=True)
class StepArrays:
    """One step of a batch, as numpy arrays."""

    tokens: Array  # [batch, key]
    states: Array  # [batch, key]
    member: Array  # [batch, key, region]
    tokens_after: Array  # [batch, position]
    states_after: Array  # [batch, position]
    block: Array  # [batch, 2], [start, stop) of the block being filled; -1 if there is none
    active: Array  # [batch]
    owner: Array  # [commit], the index of the sample each commit belongs to
    commits: Mapping[str, Array]  # commit_position, …: [commit]
    fields: Mapping[str, Array]  # [layer, batch, …] or [layer, commit, …]; shared fields [visibility, batch, …]
    visibility: tuple[int, ...]  # the row of the shared fields that each layer uses
    masks: tuple[MaskStructure, ...]  # the mask of each of these rows
    influence: Array | None  # [commit, key]; None if it was not requested


def to_step_arrays(step: Step, capture: StepCapture, axes: Axes, coords: Axes) -> StepArrays:
    """Move one step to numpy; `axes` names the axes of every field that may occur."""
    layers, influence = capture.layers, capture.influence
    before, after = step.before, step.after
    member = before.regions.member
    if member is None:
        member = torch.zeros((*before.tokens.shape, 0), dtype=torch.bool)
    sizes = {axis: len(names) for axis, names in coords.items()}
    sizes |= {"batch": len(before.tokens), "key": before.tokens.shape[1], "commit": len(step.commits)}
    sizes |= {"region": member.shape[2], "key_region": member.shape[2]}
    names = dict.fromkeys(name for reductions in layers for name in reductions.fields)
    fields = {name: _stack_layers(name, layers, axes, coords, sizes) for name in names}
    classes = list(dict.fromkeys(capture.layer_visibility))
    for name in (name for name in SHARED if name in fields):  # stored with the first layer of each visibility
        fields[name] = fields[name][[capture.layer_visibility.index(c) for c in classes]]
    return StepArrays(
        tokens=_to_numpy(before.tokens).astype(np.int32),
        states=_to_numpy(before.states).astype(np.int8),
        member=_to_numpy(member),
        tokens_after=_to_numpy(after.tokens).astype(np.int32),
        states_after=_to_numpy(after.states).astype(np.int8),
        block=np.full((len(before.tokens), 2), -1) if before.block is None else _to_numpy(before.block),
        active=np.ones(len(before.tokens), bool) if before.active is None else _to_numpy(before.active),
        owner=_to_numpy(step.commits.sample),
        commits={
            f"commit_{name}": _to_numpy(getattr(step.commits, name)).astype(TRACE_FIELDS[f"commit_{name}"].dtype)
            for name in ("position", "row", "token", "confidence")
        },
        fields=fields,
        visibility=tuple(classes.index(c) for c in capture.layer_visibility),
        masks=tuple(capture.masks[c] for c in classes),
        influence=None if influence is None else _to_numpy(influence).astype(OPTIONAL_FIELDS["influence"].dtype),
    )


def check_extra_axes(extra: Axes) -> dict[str, tuple[str, ...]]:
    """Return the axes of a user's own fields; refuse names that a trace uses itself."""
    reserved = {*FIELDS, *TRACE_FIELDS, *OPTIONAL_FIELDS, *(axis for axes in extra.values() for axis in axes)}
    reserved |= {axis for f in (*FIELDS.values(), *TRACE_FIELDS.values()) for axis in stored_axes("", f.axes)}
    for name, axes in extra.items():
        if name in reserved:
            raise UserError(f"a field cannot be called '{name}': a trace has an array or an axis of that name")
        if len(set(axes)) != len(axes) or "commit" in axes[1:] or {"step", "layer", "batch"} & set(axes):
            raise UserError(
                f"field '{name}' has axes ({', '.join(axes)}): name each axis once, put `commit` first if there is one,"
                f" and leave out step, layer and batch, which the recorder adds"
            )
    return {name: tuple(axes) for name, axes in extra.items()}


def valid_span(states: Array, sample: str) -> tuple[int, int]:
    """Return [first valid, last valid + 1) of one canvas; (0, 0) if it is all padding."""
    valid = np.flatnonzero(states != State.PAD)
    if not len(valid):
        return 0, 0
    start, stop = int(valid[0]), int(valid[-1]) + 1
    if stop - start != len(valid):
        raise UserError(
            f"sample '{sample}' has padding between its positions {start} and {stop - 1}: pad left or right"
        )
    return start, stop


def cut_sample(arrays: StepArrays, axes: Axes, b: int, start: int, stop: int) -> SampleStep:
    """Return what the step adds to sample `b`, without `commit_step` and `queries`, which depend on earlier steps."""
    commits = np.flatnonzero(arrays.owner == b)
    block = np.where(arrays.block[b] < 0, -1, (arrays.block[b] - start).clip(0))
    cut: SampleStep = {
        "tokens": arrays.tokens[b, None, start:stop],
        "states": arrays.states[b, None, start:stop],
        "keys": np.array([stop - start], np.int32),
        "block": np.array([block], np.int32),
        **{name: array[commits] for name, array in arrays.commits.items()},
    }
    cut["commit_position"] -= start
    cut["commit_row"] -= start
    if arrays.influence is not None:
        cut["influence"] = arrays.influence[commits, start:stop]
    for name, array in arrays.fields.items():
        if "commit" in axes[name]:
            part, part_axes = np.swapaxes(array[:, commits], 0, 1), axes[name][1:]  # [commit, layer, …]
        else:
            part, part_axes = array[None, :, b], axes[name]  # [1, layer, …]
        part = part[_key_slices(part_axes, part.shape[2:], arrays.tokens.shape[1], start, stop)]
        has_positions = name.endswith("_key") and part.dtype.kind == "i"
        cut[name] = _shift_keys(part, name, start, stop) if has_positions else part
    return cut


def join_steps(steps: Sequence[SampleStep], axes: Axes) -> dict[str, Array]:
    """Join the steps of one sample along their first axis; every other axis gets the longest length that occurs.

    An autoregressive canvas grows by a token per step, and a field may be absent at a step or in a layer.
    """
    sizes: dict[str, int] = {}
    for step in steps:
        for name, array in step.items():
            for axis, size in zip(axes[name][1:], array.shape[1:], strict=True):
                sizes[axis] = max(size, sizes.get(axis, 0))
    commits = [len(step["commit_step"]) for step in steps]
    arrays = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        lengths = commits if axes[name][0] == "commit" else [1] * len(steps)
        shape = [sizes[axis] for axis in axes[name][1:]]
        arrays[name] = _join_arrays(name, [step.get(name) for step in steps], lengths, shape)
    return arrays


def _join_arrays(name: str, parts: Sequence[Array | None], lengths: Sequence[int], shape: Sequence[int]) -> Array:
    """Concatenate arrays of `lengths` along the first axis into [Σ lengths, *shape]; None is filled completely."""
    dtype = np.result_type(*(array.dtype for array in parts if array is not None))
    joined = np.full((sum(lengths), *shape), fill_value(name, dtype), dtype)
    start = 0
    for array, length in zip(parts, lengths, strict=True):
        if array is not None:
            joined[(slice(start, start + length), *map(slice, array.shape[1:]))] = array
        start += length
    return joined


def _stack_layers(name: str, layers: Sequence[Reductions], axes: Axes, coords: Axes, sizes: Mapping[str, int]) -> Array:
    """One field of all layers in its stored type; filled where a layer does not have it."""
    if name not in axes:
        raise UserError(f"field '{name}' has no axes: name them, Recorder(extra_axes={{'{name}': ('head', …)}})")
    field_axes = axes[name] if "commit" in axes[name] else ("batch", *axes[name])
    parts: list[Array | None] = []
    for reductions in layers:
        tensor, where = reductions.fields.get(name), f"of layer {reductions.layer}"
        if tensor is None:
            parts.append(None)
            continue
        if len(field_axes) != tensor.ndim or any(
            sizes.get(axis, n) != n for axis, n in zip(field_axes, tensor.shape, strict=True)
        ):
            expected = ", ".join(f"{axis} {sizes.get(axis, '')}".strip() for axis in field_axes)
            raise UserError(f"field '{name}' {where} has shape {tuple(tensor.shape)}; expected ({expected})")
        parts.append(_cast(name, tensor, where, coords.get(field_axes[-1]))[None])
    shape = np.max([array.shape[1:] for array in parts if array is not None], 0).tolist()
    return _join_arrays(name, parts, [1] * len(parts), shape)


def _cast(name: str, tensor: Tensor, where: str, last_axis: Sequence[str] | None) -> Array:
    """The tensor in its stored type, refused if a value does not survive the cast."""
    exact = _to_numpy(tensor)
    dtype = np.dtype(FIELDS[name].dtype) if name in FIELDS else exact.dtype
    fill_value(name, dtype)  # refuses a type without one
    with np.errstate(over="ignore"):
        stored = exact.astype(dtype)
    is_lost = np.isfinite(exact) & ~np.isfinite(stored) if dtype.kind == "f" else stored != exact
    if is_lost.any():
        index = tuple(np.argwhere(is_lost)[0])
        part = f" ({last_axis[index[-1]]})" if last_axis else ""
        limit = np.finfo(dtype).max if dtype.kind == "f" else np.iinfo(dtype).max
        raise UserError(
            f"field '{name}'{part} {where} has the value {exact[index]:g}, but {dtype.name}, its stored type, ends at "
            f"{limit:g}. If the value looks wrong, run `floatscope doctor` to check the capture; if it is right, trace"
            f" without '{name}' by naming the other fields in `fields=`"
        )
    return stored


def _to_numpy(tensor: Tensor) -> Array:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()  # numpy has no bfloat16


def _key_slices(axes: tuple[str, ...], shape: tuple[int, ...], width: int, start: int, stop: int) -> tuple[slice, ...]:
    """Slices that select the sample's own keys and queries; queries are the last positions of a canvas `width` wide."""
    index = [slice(None), slice(None)]
    for axis, size in zip(axes, shape, strict=True):
        offset = {"key": 0, "query": width - size}.get(axis)
        index.append(slice(None) if offset is None else slice(max(start - offset, 0), max(stop - offset, 0)))
    return tuple(index)


def _shift_keys(keys: Array, name: str, start: int, stop: int) -> Array:
    """Key positions counted from `start`; -1 means no key and stays."""
    if (((keys >= 0) & (keys < start)) | (keys >= stop)).any():
        raise ValueError(f"field '{name}' names a key outside the valid positions {start} to {stop - 1}; no key is -1")
    return np.where(keys < 0, keys, keys - start).astype(keys.dtype)
