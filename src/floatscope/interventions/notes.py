"""What an edit did not do, as values: steps at which it selected nothing, or that it never reached.

note = EditNote("mask_anchors(k=5)", Problem.NO_KEYS, 3, 40)
str(note)                           # mask_anchors(k=5) selected no keys in 3 of 40 steps
merge_notes([note, note])           # one note for each problem, with the counts added
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any


class EditWarning(UserWarning):
    """An edit did not do at every step what was asked; `Decoding.notes` has the same as values."""


class Problem(Enum):
    """Why an edit did less than was asked."""

    NO_KEYS = "no keys"
    TOO_LITTLE_ATTENTION = "too little attention"
    NEVER_ACTIVE = "never active"


@dataclass(frozen=True)
class EditNote:
    """An edit, what was wrong, and how often: in `count` of `total` steps, or heads and steps."""

    edit: str
    problem: Problem
    count: int
    total: int

    def __str__(self) -> str:
        return self.describe(self.edit)

    @property
    def as_json(self) -> dict[str, Any]:
        """The note as JSON values."""
        return {**asdict(self), "problem": self.problem.value}

    @staticmethod
    def from_json(note: Mapping[str, Any]) -> EditNote:
        """The inverse of `as_json`."""
        return EditNote(**{**note, "problem": Problem(note["problem"])})

    def describe(self, subject: str) -> str:
        """Return the note as a sentence about `subject`."""
        if self.problem is Problem.NO_KEYS:
            return f"{subject} selected no keys in {self.count} of {self.total} steps"
        if self.problem is Problem.NEVER_ACTIVE:
            return f"{subject} was never active: there were only {self.total} steps"
        share = f"{100 * self.count / self.total:.2g} % of heads and steps"
        return f"all other keys hold less attention than the edited keys in {share}: {subject}"


def merge_notes(notes: Iterable[EditNote]) -> list[EditNote]:
    """Return one note for each problem, with counts and totals added; the steps of a note about them do not add up."""
    merged: dict[Problem, EditNote] = {}
    for note in notes:
        known = merged.get(note.problem)
        if known is None:
            merged[note.problem] = note
        elif note.problem is not Problem.NEVER_ACTIVE:
            merged[note.problem] = replace(known, count=known.count + note.count, total=known.total + note.total)
    return list(merged.values())
