"""`Recorder`: Steps and Reductions in, one `Trace` per sample out.

Every step is moved to the CPU in its stored type and cut at once to each sample's own valid positions, so a sample
decoded in a padded batch leaves the same trace as one decoded alone. Positions therefore count from the sample's first
valid one: commits, blocks and every integer field whose name ends in `_key`.

    recorder = Recorder(["nq-1", "nq-2"], meta={"model": "my-mdm"})
    for step, layers, visibility in watched: recorder.add(step, layers, visibility)
    first, second = recorder.traces()

A user's reducer adds a field by naming its axes, those of one sample at one step and layer, as `FIELDS` does:
`Recorder(…, extra_axes={"sharpness": ("head", "query")})`. `query` rows are the last ones of the canvas: all of it, or,
with a cache, only what is new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from floatscope.canvas import Reductions, Step
from floatscope.errors import UserError
from floatscope.schema import FIELDS, SHARED
from floatscope.traces.assemble import Piece, assemble
from floatscope.traces.cut import cut, valid_span
from floatscope.traces.intake import bring, check_extra
from floatscope.traces.layout import COORDS, OPTIONAL_FIELDS, TRACE_FIELDS, stored_axes
from floatscope.traces.trace import Array, Trace


@dataclass
class _Kept:
    """One sample so far, a list entry for each step."""

    first: int = 0  # the canvas position of its first valid token
    pieces: list[Piece] = field(default_factory=list)
    visibility: list[tuple[int, ...]] = field(default_factory=list)  # the class of each layer
    member: list[Array] = field(default_factory=list)  # [key, region]
    after: Array = field(default_factory=lambda: np.empty(0, np.int32))  # [position], after the last step


class Recorder:
    """Collects the steps of one batch; it is a class because it accumulates."""

    def __init__(
        self,
        samples: Sequence[str],
        meta: Mapping[str, Any] | None = None,
        extra_axes: Mapping[str, tuple[str, ...]] | None = None,
        coords: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`meta` goes into every trace; meta["rows"] = "cache" says that a step watches only the rows new to it.

        `coords` names what lies along an axis where it is not the default: other groups, `{"layer": module_names}`.
        """
        self.samples = tuple(samples)
        self.meta = dict(meta or {})
        self.axes = {name: f.axes for name, f in FIELDS.items()} | check_extra(extra_axes or {})
        self.coords = COORDS | {axis: tuple(names) for axis, names in (coords or {}).items()}
        self._layers: tuple[int, ...] | None = None
        self._regions: tuple[str, ...] = ()
        self._kept = [_Kept() for _ in self.samples]

    def add(
        self,
        step: Step,
        layers: Sequence[Reductions],
        layer_visibility: Sequence[int],
        influence: Tensor | None = None,
    ) -> None:
        """Append one step, but not to samples that were finished before it, nor to a canvas that is all padding."""
        self._check(step, layers, layer_visibility)
        brought = bring(step, layers, layer_visibility, self.axes, self.coords, influence)
        for b, (sample, kept) in enumerate(zip(self.samples, self._kept, strict=True)):
            start, stop = valid_span(brought.states[b], sample)
            if start == stop or not brought.active[b]:
                continue
            if kept.pieces and start != kept.first:
                raise ValueError(f"sample '{sample}' began at position {kept.first} and now begins at {start}")
            piece = cut(brought, self.axes, b, start, stop)
            cached = kept.pieces[-1]["keys"] if kept.pieces and self.meta.get("rows") == "cache" else 0
            piece["queries"] = piece["keys"] - cached
            piece["commit_step"] = np.full(len(piece["commit_token"]), len(kept.pieces), np.int32)
            kept.first = start
            kept.pieces.append(piece)
            kept.visibility.append(brought.visibility)
            kept.member.append(brought.member[b, start:stop])
            kept.after = brought.tokens_after[b, slice(*valid_span(brought.states_after[b], sample))]

    def traces(self) -> list[Trace]:
        """One trace per sample, in the order of `samples`."""
        return [self._trace(sample, kept) for sample, kept in zip(self.samples, self._kept, strict=True)]

    def _trace(self, sample: str, kept: _Kept) -> Trace:
        if not kept.pieces:
            raise UserError(f"sample '{sample}' has no steps: nothing of it was decoded while the recorder watched")
        visibility, pieces = _shared_visibility(kept)
        names = dict.fromkeys(name for piece in pieces for name in piece)
        axes = {name: f.axes for name, f in TRACE_FIELDS.items()}
        axes |= {name: stored_axes(name, self.axes[name]) for name in names if name in self.axes}
        axes |= {name: f.axes for name, f in OPTIONAL_FIELDS.items() if name in names}
        arrays = assemble(pieces, axes)
        arrays["layers"] = np.array(self._layers, np.int32)
        arrays["layer_visibility"] = np.array(visibility, np.int32)
        arrays["tokens_after"] = kept.after
        arrays["region_member"] = np.zeros((arrays["tokens"].shape[1], len(self._regions)), bool)
        arrays["region_member"][: len(kept.member[-1])] = kept.member[-1]

        regions = _own_regions(kept.member, self._regions)
        for name in arrays:
            for at, axis in enumerate(axes[name]):
                if axis in ("region", "key_region"):
                    arrays[name] = np.take(arrays[name], regions, at)
        coords = self.coords | dict.fromkeys(("region", "key_region"), tuple(self._regions[r] for r in regions))
        used = {axis for along in axes.values() for axis in along}
        return Trace(
            sample,
            {name: arrays[name] for name in axes},
            axes,
            {axis: along for axis, along in coords.items() if axis in used},
            self.meta,
        )

    def _check(self, step: Step, layers: Sequence[Reductions], layer_visibility: Sequence[int]) -> None:
        """What the loop that drives the recorder must get right; a slip here is a bug, not a user's mistake."""
        if len(step.before.tokens) != len(self.samples):
            raise ValueError(f"a canvas of {len(step.before.tokens)} samples for a recorder of {len(self.samples)}")
        if len(layers) != len(layer_visibility):
            raise ValueError(f"{len(layers)} layers and {len(layer_visibility)} visibilities")
        numbers, regions = tuple(r.layer for r in layers), step.before.regions.names
        if self._layers is None:
            self._layers, self._regions = numbers, regions
        if (numbers, regions) != (self._layers, self._regions):
            raise ValueError(f"layers {self._layers} and regions {self._regions} became {numbers} and {regions}")


def _shared_visibility(kept: _Kept) -> tuple[list[int], list[Piece]]:
    """The visibility of each layer over the whole trace, and the pieces with the shared fields in those rows.

    Layers share a visibility if they share one at every step: a sliding window shows only once the canvas is long.
    """
    by_layer = list(zip(*kept.visibility, strict=True))
    classes = list(dict.fromkeys(by_layer))
    pieces = [
        piece | {name: piece[name][:, [c[t] for c in classes]] for name in SHARED if name in piece}
        for t, piece in enumerate(kept.pieces)
    ]
    return [classes.index(c) for c in by_layer], pieces


def _own_regions(member: Sequence[Array], names: Sequence[str]) -> list[int]:
    """The regions the sample has at any step, in reading order.

    A batch names the regions of all its samples; neither their number nor their order may depend on the neighbours.
    """
    starts = {r: min((int(m[:, r].argmax()) for m in member if m[:, r].any()), default=-1) for r in range(len(names))}
    return sorted((r for r in starts if starts[r] >= 0), key=lambda r: (starts[r], names[r]))
