"""One step of decoding: the canvas the model saw, what was committed, the canvas after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from floatscope.values import CanvasState, Commits

Forward = Callable[[CanvasState, slice], Float[Tensor, "batch row vocabulary"]]
"""The model as decoding sees it: the logits of the rows asked for."""


@dataclass(frozen=True)
class Step:
    """The attention of a step belongs to `before`; the commits were decided by that forward and stand in `after`."""

    before: CanvasState
    after: CanvasState
    commits: Commits
