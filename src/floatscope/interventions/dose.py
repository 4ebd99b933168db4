"""The dose of edits: how much attention they move, as a share of all attention.

    total = measure_dose(edit, selection, unedited)     # [batch], summed over the rows and heads of one call
    doses = DoseSum()
    doses.add(total, rows, active)
    doses.means(samples=8)                              # per sample, over all calls

Hidden keys and moves count the attention that the call before the edit gives to the edited keys: hiding spares the own
row of a key, and a move only reaches rows that see the target. Scaled values count that attention times |1 − factor|,
a zeroed head counts as 1. Other edits have no dose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from floatscope.interventions.edits import Bias, Edit, KeyEdit, Move, ScaleValues, ZeroHeads
from floatscope.interventions.key_selection import Selection, to_mask
from floatscope.interventions.unedited import UneditedCall


def has_dose(edit: Edit) -> bool:
    """Whether the attention that an edit moves is defined."""
    return isinstance(edit, ZeroHeads | Move | ScaleValues) or (isinstance(edit, Bias) and edit.hides_keys)


def measure_dose(edit: KeyEdit, selection: Selection, unedited: UneditedCall) -> Float[Tensor, " batch"]:
    """The attention that an edit of keys moves in one call, summed over rows and heads; 0 if it moves none."""
    if isinstance(edit, Move):
        return unedited.moved(selection.keys, selection.target, selection.queries)
    edited = to_mask(selection.keys, unedited.call.visibility.keys)
    if isinstance(edit, Bias) and edit.hides_keys:
        return (unedited.hidden(selection.queries).double() * edited).sum((1, 2))
    if isinstance(edit, ScaleValues):
        return (unedited.received().double() * edited).sum((1, 2)) * abs(1 - edit.factor)
    return edited.new_zeros(len(edited), dtype=torch.float64)


@dataclass
class DoseSum:
    """The attention moved so far, and the rows and heads that could have moved it."""

    _moved: Float[Tensor, " batch"] | None = None
    _total: Float[Tensor, " batch"] | None = None

    def add(self, moved: Tensor, total: Tensor, active: Bool[Tensor, " batch"] | None) -> None:
        """Add one call; samples that are not active any more do not count."""
        counts = torch.ones_like(total, dtype=torch.bool) if active is None else active.to(total.device)
        moved, total = moved.double() * counts, total.double() * counts
        self._moved = moved if self._moved is None else self._moved.to(moved.device) + moved
        self._total = total if self._total is None else self._total.to(total.device) + total

    def means(self, samples: int) -> list[float]:
        """The dose of each sample; 0 if no edit was ever active."""
        if self._moved is None or self._total is None:
            return [0.0] * samples
        return (self._moved / self._total.clamp_min(1)).tolist()
