"""What an analysis reads of a trace that keeps only some fields."""

from __future__ import annotations

import numpy as np

from floatscope.errors import UserError
from floatscope.schema import FIELDS
from floatscope.traces import Trace


def kept(trace: Trace, name: str) -> np.ndarray:
    """An array of the trace; one that was not kept is named."""
    if name not in trace.arrays:
        raise UserError(
            f"the trace of '{trace.sample}' does not keep '{name}', which this reads; it comes with"
            f' keep="{FIELDS[name].level}" or more'
        )
    return trace.arrays[name]
