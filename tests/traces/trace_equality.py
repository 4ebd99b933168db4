"""Compare traces completely: names, types, axes, coords, meta and every bit, including NaN payloads."""

from __future__ import annotations

from floatscope.traces import Trace


def assert_equal_traces(a: Trace, b: Trace) -> None:
    """Fail unless the traces are equal bit for bit."""
    assert a.sample == b.sample
    assert dict(a.axes) == dict(b.axes)
    assert dict(a.coords) == dict(b.coords)
    assert a.meta == b.meta
    assert list(a.arrays) == list(b.arrays)
    for name, array in a.arrays.items():
        other = b.arrays[name]
        assert (array.dtype, array.shape) == (other.dtype, other.shape), name
        assert array.tobytes() == other.tobytes(), name
