"""The files of PoisonedRAG: a question, its answer, a wrong one, and passages written to make a model believe that.

{"test1": {"id": "test1", "question": "…", "correct answer": "23", "incorrect answer": "24", "adv_texts": ["…", …]}}

Nothing in such a file tells the correct answer: no passage is gold. `meta` has the `incorrect_answer`, and the numbers
of the passages that are `adversarial`, counted from 1 as documents are.
"""

from __future__ import annotations

from floatscope.errors import UserError
from floatscope.tasks.formats.fields import Told, identity, items, some, text, texts, the
from floatscope.tasks.sample import Passage, Sample


def looks(told: Told) -> bool:
    return "adv_texts" in told


def read(told: Told, number: str) -> Sample:
    written = items(told, "adv_texts")
    for place, words in enumerate(written, 1):
        if not isinstance(words, str) or not words.strip():
            raise UserError(f"passage {place} must be a text, and not an empty one")
    return Sample(
        id=identity(told, number, "id"),
        question=text(told, "question"),
        answers=some(texts(the(told, "correct answer"))),
        passages=tuple(Passage("", words) for words in written),
        meta={
            "incorrect_answer": text(told, "incorrect answer"),
            "adversarial": list(range(1, len(written) + 1)),
        },
    )
