"""`Recorder`: steps and reductions go in, one `Trace` per sample comes out.

Every step is moved to the CPU in its stored type and cut to each sample's own valid positions, so a sample decoded in a
padded batch leaves the same trace as one decoded alone. Positions count from the first valid one of the sample: those
of commits, blocks and every integer field whose name ends in `_key`.

    recorder = Recorder(["nq-1", "nq-2"], meta={"model": "my-mdm"})
    for step, capture in watched: recorder.add(step, capture)
    first, second = recorder.build_traces()

A reducer of your own adds a field by naming its axes, those of one sample at one step and layer, as `FIELDS` does:
`Recorder(…, extra_axes={"sharpness": ("head", "query")})`. `query` rows are the last rows of the canvas: all of them,
or, with a cache, the new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from floatscope.canvas import Step, StepCapture
from floatscope.errors import UserError
from floatscope.schema import FIELDS, SHARED, MaskStructure, RowSource
from floatscope.traces.step_arrays import (
    SampleStep,
    check_extra_axes,
    cut_sample,
    join_steps,
    to_step_arrays,
    valid_span,
)
from floatscope.traces.trace import Array, Trace
from floatscope.traces.trace_fields import COORDS, OPTIONAL_FIELDS, TRACE_FIELDS, stored_axes


@dataclass
class _SampleHistory:
    """The steps of one sample so far; each list has an entry per step."""

    first: int = 0  # the canvas position of the first valid token
    steps: list[SampleStep] = field(default_factory=list)
    visibility: list[tuple[int, ...]] = field(default_factory=list)  # the visibility class of each layer
    masks: list[tuple[MaskStructure, ...]] = field(default_factory=list)  # the mask of each layer
    member: list[Array] = field(default_factory=list)  # [key, region]
    after: Array = field(default_factory=lambda: np.empty(0, np.int32))  # [position], after the last step


class Recorder:
    """Collects the steps of one batch and builds a trace per sample."""

    def __init__(
        self,
        samples: Sequence[str],
        meta: Mapping[str, Any] | None = None,
        extra_axes: Mapping[str, tuple[str, ...]] | None = None,
        coords: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Start a recorder for samples with these ids.

        Args:
            samples: the sample ids, in the order of the batch.
            meta: goes into every trace; meta["rows"] = "cache" says that a step watches only its new rows, "block" that
                it watches those of the current block, and that the canvases of a batch move so that all end together.
            extra_axes: the axes of a user's own fields.
            coords: names along an axis that differ from the default: other groups, `{"layer": module_names}`.
        """
        self.samples = tuple(samples)
        self.meta = dict(meta or {})
        self.axes = {name: f.axes for name, f in FIELDS.items()} | check_extra_axes(extra_axes or {})
        self.coords = COORDS | {axis: tuple(names) for axis, names in (coords or {}).items()}
        self._layers: tuple[int, ...] | None = None
        self._regions: tuple[str, ...] = ()
        self._histories = [_SampleHistory() for _ in self.samples]

    def add(self, step: Step, capture: StepCapture) -> None:
        """Append one step to every sample that is still active and whose canvas is not all padding."""
        self._check(step, capture)
        arrays = to_step_arrays(step, capture, self.axes, self.coords)
        for b, (sample, history) in enumerate(zip(self.samples, self._histories, strict=True)):
            start, stop = valid_span(arrays.states[b], sample)
            if start == stop or not arrays.active[b]:
                continue
            if history.steps and start != history.first and self.meta.get("rows") != RowSource.BLOCK:
                raise ValueError(f"sample '{sample}' began at position {history.first} and now begins at {start}")
            cut = cut_sample(arrays, self.axes, b, start, stop)
            if capture.queries is not None:
                computed = max(start, step.before.tokens.shape[1] - capture.queries)  # the first computed row
                cut["queries"] = np.array([max(0, stop - computed)], np.int32)
            else:
                cached = history.steps[-1]["keys"] if history.steps and self.meta.get("rows") == RowSource.CACHE else 0
                cut["queries"] = cut["keys"] - cached
            cut["commit_step"] = np.full(len(cut["commit_token"]), len(history.steps), np.int32)
            history.first = start
            history.steps.append(cut)
            history.visibility.append(arrays.visibility)
            history.masks.append(tuple(arrays.masks[v] for v in arrays.visibility))
            history.member.append(arrays.member[b, start:stop])
            history.after = arrays.tokens_after[b, slice(*valid_span(arrays.states_after[b], sample))]

    def build_traces(self) -> list[Trace]:
        """Return one trace per sample, in the order of `samples`."""
        return [self._build(sample, history) for sample, history in zip(self.samples, self._histories, strict=True)]

    def _build(self, sample: str, history: _SampleHistory) -> Trace:
        if not history.steps:
            raise UserError(f"sample '{sample}' has no steps: it was not decoded while the recorder watched")
        visibility, steps = _merge_visibilities(history)
        names = dict.fromkeys(name for step in steps for name in step)
        axes = {name: f.axes for name, f in TRACE_FIELDS.items()}
        axes |= {name: stored_axes(name, self.axes[name]) for name in names if name in self.axes}
        axes |= {name: f.axes for name, f in OPTIONAL_FIELDS.items() if name in names}
        arrays = join_steps(steps, axes)
        arrays["layers"] = np.array(self._layers, np.int32)
        arrays["layer_visibility"] = np.array(visibility, np.int32)
        arrays["tokens_after"] = history.after
        arrays["region_member"] = np.zeros((arrays["tokens"].shape[1], len(self._regions)), bool)
        arrays["region_member"][: len(history.member[-1])] = history.member[-1]

        regions = _sample_regions(history.member, self._regions)
        for name in arrays:
            for i, axis in enumerate(axes[name]):
                if axis in ("region", "key_region"):
                    arrays[name] = np.take(arrays[name], regions, i)
        coords = self.coords | dict.fromkeys(("region", "key_region"), tuple(self._regions[r] for r in regions))
        used = {axis for names in axes.values() for axis in names}
        return Trace(
            sample,
            {name: arrays[name] for name in axes},
            axes,
            {axis: names for axis, names in coords.items() if axis in used},
            self.meta | {"masks": [asdict(mask) for mask in _last_masks(history, visibility)]},
        )

    def _check(self, step: Step, capture: StepCapture) -> None:
        """Check the loop that drives the recorder; an error here is a bug, not a user's mistake."""
        if len(step.before.tokens) != len(self.samples):
            raise ValueError(f"a canvas of {len(step.before.tokens)} samples for a recorder of {len(self.samples)}")
        if len(capture.layers) != len(capture.layer_visibility):
            raise ValueError(f"{len(capture.layers)} layers and {len(capture.layer_visibility)} visibilities")
        numbers, regions = tuple(r.layer for r in capture.layers), step.before.regions.names
        if self._layers is None:
            self._layers, self._regions = numbers, regions
        if (numbers, regions) != (self._layers, self._regions):
            raise ValueError(f"layers {self._layers} and regions {self._regions} became {numbers} and {regions}")


def _merge_visibilities(history: _SampleHistory) -> tuple[list[int], list[SampleStep]]:
    """The visibility of each layer over the whole trace, and the steps with the shared fields in that order.

    Layers share a visibility if they share one at every step: a sliding window shows only once the canvas is long.
    """
    per_layer = list(zip(*history.visibility, strict=True))
    classes = list(dict.fromkeys(per_layer))
    steps = [
        step | {name: step[name][:, [c[t] for c in classes]] for name in SHARED if name in step}
        for t, step in enumerate(history.steps)
    ]
    return [classes.index(c) for c in per_layer], steps


def _last_masks(history: _SampleHistory, visibility: Sequence[int]) -> list[MaskStructure]:
    """The mask of each visibility at the last step: a window that is longer than the canvas may begin as causal."""
    return [history.masks[-1][visibility.index(v)] for v in range(max(visibility, default=-1) + 1)]


def _sample_regions(member: Sequence[Array], names: Sequence[str]) -> list[int]:
    """The regions that the sample has at any step, in reading order.

    A batch names the regions of all its samples; neither their number nor their order may depend on the neighbours.
    """
    starts = {r: min((int(m[:, r].argmax()) for m in member if m[:, r].any()), default=-1) for r in range(len(names))}
    return sorted((r for r in starts if starts[r] >= 0), key=lambda r: (starts[r], names[r]))
