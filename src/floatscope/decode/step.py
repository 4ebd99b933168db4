"""One step of decoding: the canvas the model saw, what was committed, the canvas after."""

from __future__ import annotations

from dataclasses import dataclass

from floatscope.values import CanvasState, Commits


@dataclass(frozen=True)
class Step:
    """The attention of a step belongs to `before`; the commits were decided by that forward and stand in `after`."""

    before: CanvasState
    after: CanvasState
    commits: Commits
