"""`TraceView`: one trace seen through one detector, with everything the analyses read computed once.

    view = TraceView(trace, "zscore")
    view.lift, view.top_key, view.anchors      # [step, layer, key], [step, layer], [step, layer, key]
    view.commits, view.steps_with_commits      # the commits of the answer, and the steps that make them
    for view in trace_views(run): ...          # one sample at a time, so a large run fits in memory

Analyses of reading, retrieval, order and floating read the commits of the answer: a model that has finished, or an MDM
that fills a canvas longer than its answer, commits end-of-text tokens, and these are most of its commits. With
`counted="all"` every position counts. With token editing, the commit of a position is its last one.

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
from floatscope.errors import UserError, unknown_choice
from floatscope.schema import UNDECIDED, RowSource
from floatscope.traces import Run, Trace, open_run

COUNTED = ("answer", "all")
"""Which commits count: those of the answer, or all, which include the end-of-text tokens after it."""


class TraceView:
    """All rows of the forward, the mean over heads, the whole prefix of a cached model: one rule for every model."""

    def __init__(self, trace: Trace, detector: str | Detector = "zscore", counted: str = "answer") -> None:
        if counted not in COUNTED:
            raise unknown_choice("commits to count", counted, COUNTED)
        self.trace, self.detector, self.counted = trace, parse_detector(detector), counted

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
        """Whether the forward of a step had all rows: at every step, or with a cache at the first. With a cache of
        finished blocks, every step has all rows of its block. Analyses of single heads read these steps."""
        return (self.trace.arrays["queries"] == self.keys) | (self.trace.meta.get("rows") == RowSource.BLOCK)

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
    def anchor_path(self) -> Int[np.ndarray, "step layer"]:
        """The top key where it is an anchor, with a lift of at least 2; −1 elsewhere."""
        return self.trace.anchor_path()

    @cached_property
    def anchors(self) -> Bool[np.ndarray, "step layer key"]:
        """The keys that the detector finds."""
        return detect(self.trace, self.detector)

    @cached_property
    def commits(self) -> Int[np.ndarray, " commit"]:
        """The indices of the commits that count; a trace without any is refused."""
        if not len(self.trace.arrays["commit_token"]):
            raise UserError(f"the trace of '{self.sample}' has no commits; trace a decoding, step by step")
        counts = answer_commits(self.trace) if self.counted == "answer" else self.trace.is_last_commit
        indices = np.flatnonzero(counts)
        if not len(indices):
            raise UserError(
                f"the answer of '{self.sample}' is empty: no token comes before its first end-of-text token; count all"
                ' commits with commits="all"'
            )
        return indices

    @cached_property
    def steps_with_commits(self) -> Int[np.ndarray, " counted"]:
        """The steps with a commit that counts; every step of a trace without commits, such as one of a final state."""
        if not len(self.trace.arrays["commit_token"]):
            return np.arange(self.steps)
        return np.unique(self.trace.arrays["commit_step"][self.commits]).astype(np.int64)

    @cached_property
    def uniform_region_mass(self) -> Float[np.ndarray, "layer region"]:
        """What the predicting rows would give each region under uniform attention, mean over the commits that count."""
        arrays = self.trace.arrays
        member = arrays["region_member"].astype(np.float64)
        per_step = np.nan_to_num(self.trace.uniform("predicting")) @ member  # [step, layer, region]
        mass: np.ndarray = per_step[arrays["commit_step"][self.commits]].mean(0)
        return mass

    @cached_property
    def token_classes(self) -> Int[np.ndarray, "step key"]:
        """The class of each token of the canvas, an index into `tokens.CLASSES`; −1 beyond the canvas."""
        return classify_tokens(self.trace)

    @cached_property
    def is_masked(self) -> Bool[np.ndarray, "step key"]:
        """Which positions have no committed token at each step: masks, or noise."""
        return np.isin(self.trace.arrays["states"], UNDECIDED)


Source = Run | Trace | TraceView | Iterable[Trace] | str | Path
"""What an analysis reads: a run, the path of a run folder, traces, one trace or one view."""


def answer_commits(trace: Trace) -> Bool[np.ndarray, " commit"]:
    """Return which commits write the answer: the last one of each position before its first end-of-text token."""
    token, position = trace.arrays["commit_token"], trace.arrays["commit_position"]
    special = trace.meta.get("special", {})
    is_last = trace.is_last_commit
    is_end = np.isin(token, [special[role] for role in ("eos", "eot", "pad") if role in special]) & is_last
    return is_last & (position < position[is_end].min(initial=position.max(initial=0) + 1))


def trace_views(source: Source, detector: str | Detector = "zscore", commits: str = "answer") -> Iterator[TraceView]:
    """Iterate over the views of a run or of traces, one at a time. A view is returned as it is."""
    parsed = parse_detector(detector)
    if isinstance(source, TraceView):
        return iter([source])
    if isinstance(source, Trace):
        source = [source]
    elif isinstance(source, str | Path):
        source = open_run(source)
    return (TraceView(trace, parsed, commits) for trace in source)


def per_sample(compute: Callable[..., pd.DataFrame]) -> Callable[..., pd.DataFrame]:
    """Make a function of one `TraceView` a function of a run, of traces or of one trace; the tables are concatenated.

    Its options become keyword arguments: `sinks(view, eps)` is called as `sinks(run, detector="zscore", eps=0.3)`.
    `commits` says which commits count, those of the answer or all, in the analyses that read commits.
    """

    @functools.wraps(compute)
    def table(
        source: Source, detector: str | Detector = "zscore", *, commits: str = "answer", **options: Any
    ) -> pd.DataFrame:
        if isinstance(source, TraceView):
            return compute(source, **options)
        return concat_tables([compute(view, **options) for view in trace_views(source, detector, commits)])

    source = inspect.Parameter("source", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="Source")
    detector = source.replace(name="detector", default="zscore", annotation="str | Detector")
    commits = inspect.Parameter("commits", inspect.Parameter.KEYWORD_ONLY, default="answer", annotation="str")
    options = list(inspect.signature(compute).parameters.values())[1:]
    keywords = (option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options)
    parameters = [source, detector, commits, *keywords]
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
