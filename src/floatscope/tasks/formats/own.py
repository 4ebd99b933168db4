"""The files of floatscope, the twins' held-out questions among them, and plain questions with an answer.

    {"question": "Where does Mira live?", "answer": "Velmora"}
    {"question": "Is Mira a singer?", "answer": true, "passage": "Mira sings in Velmora."}
    {"id": "q-2", "question": "…", "answers": ["…"], "passages": [{"text": "…", "gold": true, "evidence": [[14, 21]]}]}

`"answers": []` means that the question is unanswerable, and `"answer": true` is the answer "yes" (BoolQ). A `passage`
that is one text is the gold passage. Evidence that is not given is searched for. All other fields go
into `meta`; one that looks like a misspelt field is refused.
"""

from __future__ import annotations

import difflib
from typing import Any

from floatscope.errors import UserError, unknown_choice
from floatscope.tasks.formats.fields import Record, find_evidence, get_flag, get_text, get_title, shorten
from floatscope.tasks.sample import Passage, Sample

FIELDS = ("id", "question", "answer", "answers", "passage", "passages")
PASSAGE_FIELDS = ("title", "text", "gold", "evidence")


def matches(record: Record) -> bool:
    """Whether an object has a question and an answer."""
    return "question" in record and ("answer" in record or "answers" in record)


def read(record: Record, number: str) -> Sample:
    """Read a question with its answers and passages."""
    id, question, answers = get_text({"id": number} | record, "id"), get_text(record, "question"), _get_answers(record)
    passages = _get_passages(record)
    _check_spelling(record)
    return Sample(
        id=id,
        question=question,
        answers=answers,
        passages=tuple(_read_passage(passage, place, answers) for place, passage in enumerate(passages, 1)),
        meta={k: v for k, v in record.items() if k not in FIELDS or (k == "passage" and not isinstance(v, str))},
    )


def _get_passages(record: Record) -> list[Any]:
    if "passage" in record and "passages" in record:
        raise UserError('it has "passage" and "passages"; give one of them')
    if isinstance(record.get("passage"), str):
        return [{"text": record["passage"], "gold": True}]
    passages = record.get("passages", [])
    if not isinstance(passages, list):
        raise UserError('"passages" must be a list')
    return passages


def _check_spelling(record: Record) -> None:
    """Refuse a field whose name is close to one of ours: it would be dropped silently."""
    for name in record.keys() - set(FIELDS):
        if near := difflib.get_close_matches(name, [field for field in FIELDS if field not in record], 1, 0.8):
            raise UserError(f'it has "{shorten(name)}"; did you mean "{near[0]}"? Rename it if it is another field')


def _get_answers(record: Record) -> tuple[str, ...]:
    if "answer" in record and "answers" in record:
        raise UserError('it has "answer" and "answers"; give one of them')
    if "answer" not in record and "answers" not in record:
        raise UserError('it has neither "answer" nor "answers"; write "answers": [] if there is none')
    value = record["answer"] if "answer" in record else record["answers"]
    if isinstance(value, bool):
        return ("yes" if value else "no",)
    answers = [value] if isinstance(value, str) else value
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise UserError("answers must be a text or a list of texts")
    if not all(answer.strip() for answer in answers):
        raise UserError('an answer is empty; write "answers": [] if there is none')
    return tuple(answers)


def _read_passage(record: Any, place: int, answers: tuple[str, ...]) -> Passage:
    try:
        if not isinstance(record, dict):
            raise UserError('it must be an object with a "text"')
        if unknown := [name for name in record if name not in PASSAGE_FIELDS]:
            raise unknown_choice("field", shorten(unknown[0]), PASSAGE_FIELDS)
        title, text, gold = get_title(record), get_text(record, "text"), get_flag(record, "gold")
        evidence = record.get("evidence", find_evidence(text, answers) if gold else ())
        if not isinstance(evidence, list | tuple) or not all(_is_span(span, len(text)) for span in evidence):
            raise UserError(f'"evidence" must be a list of [start, stop] within its {len(text)} characters')
    except UserError as error:
        raise UserError(f"passage {place}: {error}") from error
    return Passage(title, text, gold, tuple((start, stop) for start, stop in evidence))


def _is_span(span: Any, length: int) -> bool:
    is_pair = isinstance(span, list | tuple) and len(span) == 2 and all(type(end) is int for end in span)
    return is_pair and 0 <= span[0] < span[1] <= length
