"""SQuAD 1.1 and 2.0, XQuAD and similar files: articles with paragraphs and questions, or one row per question.

{"data": [{"title": "…", "paragraphs": [{"context": "…", "qas": [{"id": "…", "question": "…", "answers": […]}]}]}]}
{"id": "…", "title": "…", "context": "…", "question": "…", "answers": {"text": ["…"], "answer_start": [34]}}

`split_article` turns the first layout into rows of the second. The paragraph is the gold passage, and `answer_start`
gives the evidence. An impossible question has no answer and no gold passage; `meta` has its `plausible_answers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from floatscope.errors import UserError
from floatscope.tasks.formats.fields import (
    Record,
    Spans,
    drop_overlaps,
    get_flag,
    get_id,
    get_text,
    get_title,
    list_answers,
    require_answers,
    shorten,
)
from floatscope.tasks.sample import Passage, Sample


def is_article(value: Any) -> bool:
    """Whether this is an article with questions; MuSiQue has paragraphs too, but each of them is one passage."""
    paragraphs = value.get("paragraphs") if isinstance(value, dict) else None
    return isinstance(paragraphs, list) and any(isinstance(p, dict) and "qas" in p for p in paragraphs)


def split_article(article: Any) -> Iterator[Any]:
    """Yield one row per question of an article, or the UserError that explains why there is none."""
    if not isinstance(article, dict) or not isinstance(article.get("paragraphs"), list):
        yield UserError('an article must be an object with a list of "paragraphs"')
        return
    for paragraph in article["paragraphs"]:
        if not isinstance(paragraph, dict) or not isinstance(paragraph.get("qas"), list):
            yield UserError('a paragraph must be an object with a "context" and a list of "qas"')
            continue
        shared = {name: paragraph[name] for name in ("context",) if name in paragraph}
        shared |= {"title": article["title"]} if "title" in article else {}
        for question in paragraph["qas"]:
            yield question | shared if isinstance(question, dict) else UserError("a question must be an object")


def matches(record: Record) -> bool:
    """Whether an object is a row with a context and answers with their positions."""
    answers = record.get("answers")
    is_pieces = isinstance(answers, dict) or (isinstance(answers, list) and all(isinstance(a, dict) for a in answers))
    return isinstance(record.get("context"), str) and (is_pieces or "is_impossible" in record)


def read(record: Record, number: str) -> Sample:
    """Read a row; its paragraph is the gold passage unless the question is impossible."""
    question, context = get_text(record, "question"), get_text(record, "context")
    has_columns = isinstance(record.get("answers"), dict)
    answer_starts = _get_answer_starts(record)
    # Rows of columns have no other way to say that a question is impossible.
    is_impossible = get_flag(record, "is_impossible") or (has_columns and not answer_starts)
    answers = () if is_impossible else require_answers(tuple(dict.fromkeys(answer for answer, _ in answer_starts)))
    evidence = () if is_impossible else _build_evidence(context, answer_starts)
    plausible = list_answers(record.get("plausible_answers"))
    unanswerable = {"unanswerable": True} if is_impossible else {}
    return Sample(
        id=get_id(record, number, "id"),
        question=question,
        answers=answers,
        passages=(Passage(get_title(record), context, not is_impossible, evidence),),
        meta=unanswerable | ({"plausible_answers": list(plausible)} if plausible else {}),
    )


def _get_answer_starts(record: Record) -> list[tuple[str, int]]:
    """Return the answers and where each begins, from a list of objects or from two columns."""
    answers = record.get("answers", [])
    if isinstance(answers, dict):
        texts, starts = answers.get("text"), answers.get("answer_start")
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            raise UserError('"answers" must have as many "text" as "answer_start"')
        answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(answers, list) or not all(isinstance(answer, dict) for answer in answers):
        raise UserError('"answers" must be a list of objects with "text" and "answer_start"')
    for answer in answers:
        if type(answer.get("answer_start")) is not int:
            raise UserError('every answer must have an "answer_start" that is a whole number')
    return [(get_text(answer, "text"), answer["answer_start"]) for answer in answers]


def _build_evidence(context: str, answer_starts: list[tuple[str, int]]) -> Spans:
    spans: list[tuple[int, int]] = []
    for answer, start in sorted(answer_starts, key=lambda pair: -len(pair[0])):
        if start < 0 or context[start : start + len(answer)] != answer:
            actual = shorten(context[max(start, 0) :][: len(answer)], 40)
            raise UserError(f"the text at answer_start {start} is '{actual}', not the answer '{shorten(answer, 40)}'")
        spans += drop_overlaps([(start, start + len(answer))], spans)
    return tuple(sorted(spans))
