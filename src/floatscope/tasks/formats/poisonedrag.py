"""The files of PoisonedRAG: a question, its answer, a wrong answer, and passages written to support the wrong one.

{"test1": {"id": "test1", "question": "…", "correct answer": "23", "incorrect answer": "24", "adv_texts": ["…", …]}}

No passage states the correct answer, so none is gold. `meta` has the `incorrect_answer` and the numbers of the
`adversarial` passages, counted from 1 like documents.
"""

from __future__ import annotations

from floatscope.errors import UserError
from floatscope.tasks.formats.fields import (
    Record,
    get_field,
    get_id,
    get_list,
    get_text,
    list_answers,
    require_answers,
)
from floatscope.tasks.sample import Passage, Sample


def matches(record: Record) -> bool:
    """Whether an object is a question of PoisonedRAG."""
    return "adv_texts" in record


def read(record: Record, number: str) -> Sample:
    """Read a question with its adversarial passages."""
    texts = get_list(record, "adv_texts")
    for place, text in enumerate(texts, 1):
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"passage {place} must be a text that is not empty")
    return Sample(
        id=get_id(record, number, "id"),
        question=get_text(record, "question"),
        answers=require_answers(list_answers(get_field(record, "correct answer"))),
        passages=tuple(Passage("", text) for text in texts),
        meta={
            "incorrect_answer": get_text(record, "incorrect answer"),
            "adversarial": list(range(1, len(texts) + 1)),
        },
    )
