"""A question as task files have it: its answers, the passages it may be answered from, and where the evidence stands.

passage = Passage("Mira", "Mira lives in Velmora.", gold=True, evidence=((14, 21),))
Sample("q-1", "Where does Mira live?", ("Velmora",), (passage,), {"kind": "reading"})
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Passage:
    title: str
    text: str
    gold: bool = False
    evidence: tuple[tuple[int, int], ...] = ()  # [start, stop) characters of the answer in `text`
    relations: tuple[str, ...] = ()  # what it tells, where that is known; not written to files


@dataclass(frozen=True)
class Sample:
    id: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """A line of a task file; `read_samples` reads it back."""
        passages = [
            {"title": p.title, "text": p.text, "gold": p.gold, "evidence": [list(span) for span in p.evidence]}
            for p in self.passages
        ]
        return {
            "id": self.id,
            "question": self.question,
            "answers": list(self.answers),
            "passages": passages,
            **self.meta,
        }
