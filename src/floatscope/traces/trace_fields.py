"""The arrays of a trace: their axes, types and fill values.

`schema.FIELDS` lists what a watched forward measures. A trace puts `step` and `layer` (or `commit` and `layer`) before
those axes and adds arrays of its own: the canvas at each step, the commits, the layers. The recorder builds arrays by
this table and the forecast counts their bytes by it.

    stored_axes("received", FIELDS["received"].axes)   # ("step", "layer", "group", "key")
    stored_axes("rows", FIELDS["rows"].axes)           # ("commit", "layer", "head", "key")
    fill_value("tokens", np.dtype("int32"))            # -1
"""

from __future__ import annotations

import numpy as np

from floatscope.errors import UserError, printable
from floatscope.schema import FIELDS, GROUPS, HEAD_STATS, KEY_STATS, ORDERS, QUANTITIES, SHARED, TOP_STATS, Field, State
from floatscope.traces.trace import Trace

TRACE_FIELDS: dict[str, Field] = {
    "tokens": Field(("step", "key"), "int32", "summary", "token ids the forward of a step saw; -1 beyond the canvas"),
    "states": Field(("step", "key"), "int8", "summary", "values of `State`; PAD beyond the canvas"),
    "keys": Field(("step",), "int32", "summary", "number of keys at that step"),
    "queries": Field(("step",), "int32", "summary", "number of query rows watched at that step (group `all`)"),
    "block": Field(("step", "bound"), "int32", "summary", "[start, stop) of the block being filled; -1 if none"),
    "layers": Field(("layer",), "int32", "summary", "the model's number of each stored layer"),
    "layer_visibility": Field(("layer",), "int32", "summary", "the entry of the visibility axis that a layer uses"),
    "commit_step": Field(("commit",), "int32", "summary", "index along `step`"),
    "commit_position": Field(("commit",), "int32", "summary", "the position written"),
    "commit_row": Field(("commit",), "int32", "summary", "the predicting row, which decided it"),
    "commit_token": Field(("commit",), "int32", "summary", "the token written"),
    "commit_confidence": Field(("commit",), "float32", "summary", "its probability, as the sampler computed it"),
    "region_member": Field(("key", "region"), "bool", "summary", "which keys belong to each region, at the last step"),
    "tokens_after": Field(
        ("position",), "int32", "summary", "the canvas after the last step; one longer than `key` if it grew"
    ),
}

OPTIONAL_FIELDS: dict[str, Field] = {
    "influence": Field(
        ("commit", "key"), "float32", "summary", "|∂ logit of the committed token / ∂ embedding of the key|"
    ),
}
"""Arrays that a trace has on request, `Watch(influence=True)`."""

COORDS: dict[str, tuple[str, ...]] = {
    "group": GROUPS,
    "top_stat": TOP_STATS,
    "key_stat": KEY_STATS,
    "quantity": QUANTITIES,
    "order": ORDERS,
    "head_stat": HEAD_STATS,
    "bound": ("start", "stop"),
}

_FILL_VALUES: dict[str, float | int | bool] = {"f": np.nan, "i": -1, "b": False}


def stored_axes(name: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes of a field in a trace, from its axes for one sample at one step and layer."""
    if axes[:1] == ("commit",):
        return ("commit", "layer", *axes[1:])
    return ("step", "visibility" if name in SHARED else "layer", *axes)


def check_arrays(trace: Trace) -> None:
    """Refuse a trace that lacks an array of TRACE_FIELDS, or has one with other axes or of another type than its field.

    Arrays of other names are a user's own, and may be anything.
    """
    fields = {**TRACE_FIELDS, **OPTIONAL_FIELDS}
    expected = {name: (field.axes, field.dtype) for name, field in fields.items()}
    expected |= {name: (stored_axes(name, field.axes), field.dtype) for name, field in FIELDS.items()}
    for name in TRACE_FIELDS:
        if name not in trace.arrays:
            raise UserError(f"array '{name}' is missing")
    for name, (axes, dtype) in expected.items():
        if name not in trace.arrays:
            continue
        found = trace.arrays[name].dtype.name
        if found != dtype:
            raise UserError(f"array '{name}' is {found}, not {dtype}")
        stored = trace.axes.get(name, ())
        if stored != axes:
            raise UserError(f"array '{name}' has the axes ({printable(', '.join(stored))}), not ({', '.join(axes)})")
        for axis in axes:
            if (axis in COORDS or axis.endswith("region")) and axis not in trace.coords:
                raise UserError(f"axis '{axis}' of array '{name}' has no names")


def fill_value(name: str, dtype: np.dtype[np.generic]) -> float | int | bool:
    """Return the value for what was not measured: NaN, -1, False or PAD. A float is never 0, which is a measurement."""
    if name == "states":
        return int(State.PAD)
    if dtype.kind not in _FILL_VALUES:
        raise UserError(
            f"field '{name}' is {dtype.name}, but a trace stores floats, signed integers and booleans: cast it to one"
        )
    return _FILL_VALUES[dtype.kind]
