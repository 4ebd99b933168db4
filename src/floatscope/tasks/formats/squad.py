"""SQuAD 1.1 and 2.0, XQuAD and their kin: articles of paragraphs of questions; or a row for each question.

{"data": [{"title": "…", "paragraphs": [{"context": "…", "qas": [{"id": "…", "question": "…", "answers": […]}]}]}]}
{"id": "…", "title": "…", "context": "…", "question": "…", "answers": {"text": ["…"], "answer_start": [34]}}

`rows` makes the second of the first. The paragraph is the gold passage and evidence stands where `answer_start` says.
A question that is impossible has no answer and no gold passage; an annotator's guess is kept as `plausible_answers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from floatscope.errors import UserError
from floatscope.tasks.formats.fields import Spans, Told, apart, brief, flag, identity, some, text, texts, title
from floatscope.tasks.sample import Passage, Sample


def is_article(told: Any) -> bool:
    """Whether this is an article with questions; MuSiQue has paragraphs too, but each is one passage."""
    paragraphs = told.get("paragraphs") if isinstance(told, dict) else None
    return isinstance(paragraphs, list) and any(isinstance(p, dict) and "qas" in p for p in paragraphs)


def rows(article: Any) -> Iterator[Any]:
    """A row for each question of an article, or the reason why there is none."""
    if not isinstance(article, dict) or not isinstance(article.get("paragraphs"), list):
        yield UserError('an article must be an object with a list of "paragraphs"')
        return
    for paragraph in article["paragraphs"]:
        if not isinstance(paragraph, dict) or not isinstance(paragraph.get("qas"), list):
            yield UserError('a paragraph must be an object with a "context" and a list of "qas"')
            continue
        told = {name: paragraph[name] for name in ("context",) if name in paragraph}
        told |= {"title": article["title"]} if "title" in article else {}
        for asked in paragraph["qas"]:
            yield asked | told if isinstance(asked, dict) else UserError("a question must be an object")


def looks(told: Told) -> bool:
    answers = told.get("answers")
    pieces = isinstance(answers, dict) or (isinstance(answers, list) and all(isinstance(a, dict) for a in answers))
    return isinstance(told.get("context"), str) and (pieces or "is_impossible" in told)


def read(told: Told, number: str) -> Sample:
    question, context = text(told, "question"), text(told, "context")
    columns = isinstance(told.get("answers"), dict)
    given = _given(told)
    impossible = flag(told, "is_impossible") or (columns and not given)  # rows of columns have no other way to say so
    answers = () if impossible else some(tuple(dict.fromkeys(answer for answer, _ in given)))
    guesses = texts(told.get("plausible_answers"))
    return Sample(
        id=identity(told, number, "id"),
        question=question,
        answers=answers,
        passages=(Passage(title(told), context, not impossible, () if impossible else _evidence(context, given)),),
        meta=({"unanswerable": True} if impossible else {}) | ({"plausible_answers": list(guesses)} if guesses else {}),
    )


def _given(told: Told) -> list[tuple[str, int]]:
    """The answers and where each begins, from a list of objects or from two columns."""
    answers = told.get("answers", [])
    if isinstance(answers, dict):
        words, starts = answers.get("text"), answers.get("answer_start")
        if not isinstance(words, list) or not isinstance(starts, list) or len(words) != len(starts):
            raise UserError('"answers" must have as many "text" as "answer_start"')
        answers = [{"text": word, "answer_start": start} for word, start in zip(words, starts, strict=True)]
    if not isinstance(answers, list) or not all(isinstance(answer, dict) for answer in answers):
        raise UserError('"answers" must be a list of objects with "text" and "answer_start"')
    for answer in answers:
        if type(answer.get("answer_start")) is not int:
            raise UserError('"answer_start" must be a whole number, and be there')
    return [(text(answer, "text"), answer["answer_start"]) for answer in answers]


def _evidence(context: str, given: list[tuple[str, int]]) -> Spans:
    taken: list[tuple[int, int]] = []
    for answer, start in sorted(given, key=lambda one: -len(one[0])):
        if start < 0 or context[start : start + len(answer)] != answer:
            there = brief(context[max(start, 0) :][: len(answer)], 40)
            raise UserError(f"at answer_start {start} stands '{there}', and not the answer '{brief(answer, 40)}'")
        taken += apart([(start, start + len(answer))], taken)
    return tuple(sorted(taken))
