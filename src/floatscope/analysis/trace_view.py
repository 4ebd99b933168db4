"""`TraceView`: one trace seen through one detector, with everything the analyses read computed once.

    view = TraceView(trace, "zscore")
    view.lift, view.top_key, view.anchors      # [step, layer, key], [step, layer], [step, layer, key]
    for view in trace_views(run): ...          # one sample at a time, so a large run fits in memory

An analysis is a function of one view that returns a table. `@per_sample` makes it a public function of a run, of traces
or of one trace, with a row (or several) per sample.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from floatscope.analysis.detectors import Detector, detect, parse_detector
from floatscope.analysis.tokens import classify_tokens
from floatscope.errors import UserError
from floatscope.schema import State
from floatscope.traces import Run, Trace, open_run


class TraceView:
    """All rows of the forward, the mean over heads, the whole prefix of a cached model: one rule for every model."""

    def __init__(self, trace: Trace, detector: str | Detector = "zscore") -> None:
        self.trace, self.detector = trace, parse_detector(detector)

    @property
    def sample(self) -> str:
        """The id of the sample."""
        return self.trace.sample

    @property
    def layers(self) -> Int[np.ndarray, " layer"]:
        """The model's number of each layer."""
        return self.trace.arrays["layers"]

    @property
    def depth(self) -> Float[np.ndarray, " layer"]:
        """Relative depth: 0 is the first layer of the model, 1 the last one watched."""
        return self.layers / max(1, int(self.layers[-1]))

    @property
    def keys(self) -> Int[np.ndarray, " step"]:
        """The number of keys at each step."""
        return self.trace.arrays["keys"]

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.keys)

    @property
    def has_all_rows(self) -> Bool[np.ndarray, " step"]:
        """Whether the forward of a step had all rows: at every step, or with a cache at the first. Analyses of single
        heads read these steps."""
        return self.trace.arrays["queries"] == self.keys

    @cached_property
    def received(self) -> Float[np.ndarray, "step layer key"]:
        """Received attention on the scale "mean"."""
        return self.trace.received(scale="mean")

    @cached_property
    def uniform(self) -> Float[np.ndarray, "step layer key"]:
        """What `received` would be under uniform attention."""
        return self.trace.uniform()

    @cached_property
    def contribution_share(self) -> Float[np.ndarray, "step layer key"]:
        """Each key's share of the contribution (received attention times the norm that its value adds to the residual
        stream); NaN if the trace does not store it."""
        if "contribution" not in self.trace.arrays:
            return np.full(self.received.shape, np.nan)
        contribution = np.nan_to_num(self.trace.contribution())
        total = contribution.sum(-1, keepdims=True)
        return contribution / np.where(total > 0, total, np.nan)

    @cached_property
    def lift(self) -> Float[np.ndarray, "step layer key"]:
        """The lift of the eligible keys; NaN elsewhere."""
        return self.trace.received(scale="lift", eligible=True)

    @cached_property
    def top_key(self) -> Int[np.ndarray, "step layer"]:
        """The key of largest lift; −1 where nothing was measured."""
        return argmax_key(self.lift)

    @cached_property
    def always_eligible(self) -> Bool[np.ndarray, "layer key"]:
        """Keys that are eligible at every step. A key of a growing text that becomes eligible later has not moved."""
        is_eligible = np.isfinite(self.lift)
        return (is_eligible | ~is_eligible.any(-1, keepdims=True)).all(0)  # ignoring steps without any measurement

    @cached_property
    def top_path(self) -> Int[np.ndarray, "step layer"]:
        """The key of largest lift among the keys that are always eligible: p* in docs/analysis.md."""
        return argmax_key(np.where(self.always_eligible, self.lift, np.nan))

    @cached_property
    def anchors(self) -> Bool[np.ndarray, "step layer key"]:
        """The keys that the detector finds."""
        return detect(self.trace, self.detector)

    @cached_property
    def persistent_anchors(self) -> Bool[np.ndarray, "step layer key"]:
        """The anchors among the keys that are always eligible."""
        return self.anchors & self.always_eligible

    @cached_property
    def uniform_region_mass(self) -> Float[np.ndarray, "layer region"]:
        """What the predicting rows would give each region under uniform attention, mean over commits."""
        arrays = self.trace.arrays
        member = arrays["region_member"].astype(np.float64)
        per_step = np.nan_to_num(self.trace.uniform("predicting")) @ member  # [step, layer, region]
        mass: np.ndarray = per_step[arrays["commit_step"]].mean(0)
        return mass

    @cached_property
    def token_classes(self) -> Int[np.ndarray, "step key"]:
        """The class of each token of the canvas, an index into `tokens.CLASSES`; −1 beyond the canvas."""
        return classify_tokens(self.trace)

    @cached_property
    def is_masked(self) -> Bool[np.ndarray, "step key"]:
        """Which positions are masked at each step."""
        return self.trace.arrays["states"] == State.MASKED


Source = Run | Trace | TraceView | Iterable[Trace] | str | Path
"""What an analysis reads: a run, the path of a run folder, traces, one trace or one view."""


def trace_views(source: Source, detector: str | Detector = "zscore") -> Iterator[TraceView]:
    """Iterate over the views of a run or of traces, one at a time. A view is returned as it is."""
    parsed = parse_detector(detector)
    if isinstance(source, TraceView):
        return iter([source])
    if isinstance(source, Trace):
        source = [source]
    elif isinstance(source, str | Path):
        source = open_run(source)
    return (TraceView(trace, parsed) for trace in source)


def per_sample(compute: Callable[..., pd.DataFrame]) -> Callable[..., pd.DataFrame]:
    """Make a function of one `TraceView` a function of a run, of traces or of one trace; the tables are concatenated.

    Its options become keyword arguments: `sinks(view, eps)` is called as `sinks(run, detector="zscore", eps=0.3)`.
    """

    @functools.wraps(compute)
    def table(source: Source, detector: str | Detector = "zscore", **options: Any) -> pd.DataFrame:
        if isinstance(source, TraceView):
            return compute(source, **options)
        return concat_tables([compute(view, **options) for view in trace_views(source, detector)])

    source = inspect.Parameter("source", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="Source")
    detector = source.replace(name="detector", default="zscore", annotation="str | Detector")
    options = list(inspect.signature(compute).parameters.values())[1:]
    parameters = [source, detector, *(option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options)]
    table.__signature__ = inspect.Signature(parameters, return_annotation="pd.DataFrame")  # type: ignore[attr-defined]
    return table


def concat_tables(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """Return the tables of several samples as one; refuse an empty list."""
    if not tables:
        raise UserError("there is no finished trace to analyse; trace some samples first, or resume the run")
    return pd.concat(tables, ignore_index=True)


def argmax_key(values: Float[np.ndarray, "*axes key"]) -> Int[np.ndarray, "*axes"]:
    """Return the first of the largest values along the last axis; −1 where all are NaN."""
    has_values = np.isfinite(values).any(-1)
    return np.where(has_values, np.where(np.isnan(values), -np.inf, values).argmax(-1), -1)
