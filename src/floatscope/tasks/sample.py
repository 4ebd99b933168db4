"""A question with its answers, the passages it can be answered from, and where the evidence is in them.

passage = Passage("Mira", "Mira lives in Velmora.", gold=True, evidence=((14, 21),))
Sample("q-1", "Where does Mira live?", ("Velmora",), (passage,), {"kind": "reading"})
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Passage:
    """A text that may answer a question.

    Attributes:
        title: The title; may be empty.
        text: The text that a prompt shows.
        gold: Whether the passage is needed for the answer.
        evidence: [start, stop) characters of the answer in `text`.
        relations: The relations that the text states, if known. They are not written to files.

    Example:
        passage = fs.Passage("Mira", "Mira lives in Velmora.", gold=True, evidence=((14, 21),))
        passage.text[14:21]  # 'Velmora'
    """

    title: str
    text: str
    gold: bool = False
    evidence: tuple[tuple[int, int], ...] = ()
    relations: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """A question of a task file.

    Attributes:
        id: The name of the sample; it is unique within a file.
        question: The question.
        answers: All correct answers; empty if the question cannot be answered.
        passages: The passages that belong to it, in the order in which a prompt shows them.
        meta: All other fields of its line.

    Example:
        fs.Sample("q-1", "Where does Mira live?", ("Velmora",)).answers
    """

    id: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the sample as one line of a task file; `read_samples` reads it back."""
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
