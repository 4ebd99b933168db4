"""Our own files, the twins' held-out ones among them, and plain questions with an answer.

    {"question": "Where does Mira live?", "answer": "Velmora"}
    {"id": "q-2", "question": "…", "answers": ["…"], "passages": [{"text": "…", "gold": true, "evidence": [[14, 21]]}]}

`"answers": []` says that there is none. Evidence that is not given is looked for. What else there is goes into `meta`.
"""

from __future__ import annotations

from typing import Any

from floatscope.errors import UserError, unknown_choice
from floatscope.tasks.formats.fields import Told, brief, find, flag, text, title
from floatscope.tasks.sample import Passage, Sample

PASSAGE = ("title", "text", "gold", "evidence")


def looks(told: Told) -> bool:
    return "question" in told and ("answer" in told or "answers" in told)


def read(told: Told, number: str) -> Sample:
    """An object of our own files."""
    id, question, answers = text({"id": number} | told, "id"), text(told, "question"), _answers(told)
    passages = told.get("passages", [])
    if not isinstance(passages, list):
        raise UserError('"passages" must be a list')
    return Sample(
        id=id,
        question=question,
        answers=answers,
        passages=tuple(_passage(passage, place, answers) for place, passage in enumerate(passages, 1)),
        meta={k: v for k, v in told.items() if k not in ("id", "question", "answer", "answers", "passages")},
    )


def _answers(told: Told) -> tuple[str, ...]:
    if "answer" in told and "answers" in told:
        raise UserError('it has "answer" and "answers"; give one of them')
    if "answer" not in told and "answers" not in told:
        raise UserError('it has neither "answer" nor "answers"; write "answers": [] if there is none')
    given = told["answer"] if "answer" in told else told["answers"]
    answers = [given] if isinstance(given, str) else given
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise UserError("answers must be a text or a list of texts")
    if not all(answer.strip() for answer in answers):
        raise UserError('an answer is empty; write "answers": [] if there is none')
    return tuple(answers)


def _passage(told: Any, place: int, answers: tuple[str, ...]) -> Passage:
    try:
        if not isinstance(told, dict):
            raise UserError('it must be an object with a "text"')
        if strange := [name for name in told if name not in PASSAGE]:
            raise unknown_choice("field", brief(strange[0]), PASSAGE)
        named, words, gold = title(told), text(told, "text"), flag(told, "gold")
        evidence = told.get("evidence", find(words, answers) if gold else ())
        if not isinstance(evidence, list | tuple) or not all(_is_span(span, len(words)) for span in evidence):
            raise UserError(f'"evidence" must be a list of [start, stop] within its {len(words)} characters')
    except UserError as error:
        raise UserError(f"passage {place}: {error}") from error
    return Passage(named, words, gold, tuple((start, stop) for start, stop in evidence))


def _is_span(span: Any, length: int) -> bool:
    whole = isinstance(span, list | tuple) and len(span) == 2 and all(type(end) is int for end in span)
    return whole and 0 <= span[0] < span[1] <= length
