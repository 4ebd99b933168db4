"""`Look`: one trace seen through one detector; what the analyses read, each computed once.

look = Look(trace, "zscore")
look.lift, look.top, look.anchors          # [step, layer, key], [step, layer], [step, layer, key]
for look in looks(run): ...                # one sample after the other, none kept
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int

from floatscope.analysis.detectors import Detector, detect, detector
from floatscope.analysis.tokens import classes_of
from floatscope.schema import State
from floatscope.traces import Trace


class TraceView:
    """All rows of the forward, mean over heads, a cached model's prefix: one rule for every model."""

    def __init__(self, trace: Trace, by: str | Detector = "zscore") -> None:
        self.trace, self.detector = trace, detector(by)

    @property
    def sample(self) -> str:
        return self.trace.sample

    @property
    def layers(self) -> Int[np.ndarray, " layer"]:
        return self.trace.arrays["layers"]

    @property
    def depth(self) -> Float[np.ndarray, " layer"]:
        """0 the first layer of the model, 1 the last one watched."""
        return self.layers / max(1, int(self.layers[-1]))

    @property
    def keys(self) -> Int[np.ndarray, " step"]:
        return self.trace.arrays["keys"]

    @property
    def steps(self) -> int:
        return len(self.keys)

    @property
    def whole(self) -> Bool[np.ndarray, " step"]:
        """Steps whose forward had all rows: every one, or with a cache the first. Single heads are read there."""
        return self.trace.arrays["queries"] == self.keys

    @cached_property
    def received(self) -> Float[np.ndarray, "step layer key"]:
        return self.trace.by_layer(scale="mean")

    @cached_property
    def uniform(self) -> Float[np.ndarray, "step layer key"]:
        return self.trace.uniform()

    @cached_property
    def moved(self) -> Float[np.ndarray, "step layer key"]:
        """The share of each key in what the attention moves: received attention times the norm its value adds to the
        residual stream. NaN throughout where the trace does not know."""
        if "contribution" not in self.trace.arrays:
            return np.full(self.received.shape, np.nan)
        each = np.nan_to_num(self.trace.contribution())
        total = each.sum(-1, keepdims=True)
        return each / np.where(total > 0, total, np.nan)

    @cached_property
    def lift(self) -> Float[np.ndarray, "step layer key"]:
        """Of the eligible keys; NaN elsewhere."""
        return self.trace.by_layer(scale="lift", eligible=True)

    @cached_property
    def top(self) -> Int[np.ndarray, "step layer"]:
        """The key of largest lift; −1 where nothing was measured."""
        return argmax(self.lift)

    @cached_property
    def always(self) -> Bool[np.ndarray, "layer key"]:
        """Keys that are eligible at every step: one of a growing text that comes to be ranked later has not moved."""
        there = np.isfinite(self.lift)
        return (there | ~there.any(-1, keepdims=True)).all(0)  # but for steps at which nothing was measured

    @cached_property
    def path(self) -> Int[np.ndarray, "step layer"]:
        """The key of largest lift among those."""
        return argmax(np.where(self.always, self.lift, np.nan))

    @cached_property
    def anchors(self) -> Bool[np.ndarray, "step layer key"]:
        return detect(self.trace, self.detector)

    @cached_property
    def lasting(self) -> Bool[np.ndarray, "step layer key"]:
        """The anchors among the keys that are eligible at every step."""
        return self.anchors & self.always

    @cached_property
    def evenly(self) -> Float[np.ndarray, "layer region"]:
        """What the predicting rows would give each region if they attended uniformly, mean over commits."""
        arrays = self.trace.arrays
        member = arrays["region_member"].astype(np.float64)
        each = np.nan_to_num(self.trace.uniform("predicting")) @ member  # [step, layer, region]
        shares: np.ndarray = each[arrays["commit_step"]].mean(0)
        return shares

    @cached_property
    def classes(self) -> Int[np.ndarray, "step key"]:
        """The class of each token of the canvas, a number into `tokens.CLASSES`; −1 beyond the canvas."""
        return classes_of(self.trace)

    @cached_property
    def masked(self) -> Bool[np.ndarray, "step key"]:
        return self.trace.arrays["states"] == State.MASKED


def argmax(values: Float[np.ndarray, "*axes key"]) -> Int[np.ndarray, "*axes"]:
    """The first of the largest; −1 where all are NaN."""
    there = np.isfinite(values).any(-1)
    return np.where(there, np.where(np.isnan(values), -np.inf, values).argmax(-1), -1)


def trace_views(traces: Iterable[Trace], by: str | Detector = "zscore") -> Iterator[TraceView]:
    """Of a run or of any traces."""
    chosen = detector(by)
    return (TraceView(trace, chosen) for trace in traces)
