"""Helpers of the format readers: get texts, answers and passages from an object, or raise a one-sentence UserError.

question = get_text(record, "input", "query", "question")      # the first field that exists
list_answers([{"answer": "Velmora"}, "Velm"])                  # ("Velmora", "Velm")
find_evidence("Mira lives in Velmora.", ["velmora"])           # ((14, 21),): where an answer is in a text
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from floatscope.errors import UserError, printable
from floatscope.tasks.sample import Passage

Record = dict[str, Any]
"""A JSON object of a file."""

Spans = tuple[tuple[int, int], ...]

YES_NO = ("yes", "no")  # answers that are not part of a text; a "no" in a passage is no evidence
TYPE_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number",
}


def shorten(value: object, limit: int = 60) -> str:
    """Return a value for a message: printable, on one line, at most `limit` characters."""
    return printable(value, limit)


def describe_type(value: object) -> str:
    """Return the type of a JSON value in words."""
    return TYPE_NAMES.get(type(value), "null")


def get_field(record: Record, *names: str) -> Any:
    """Return the first of these fields that exists."""
    for name in names:
        if name in record:
            return record[name]
    quoted = [f'"{name}"' for name in names]
    raise UserError(f"it has no {quoted[0]}" if len(names) == 1 else f"it has none of {', '.join(quoted)}")


def get_text(record: Record, *names: str) -> str:
    """Return the first of these fields that exists; it must be a text that is not empty."""
    value = get_field(record, *names)
    if not isinstance(value, str) or not value.strip():
        name = next(name for name in names if name in record)
        if type(value) is int:
            raise UserError(f'"{name}" must be a text such as "{shorten(value)}", and is a number')
        raise UserError(f'"{name}" must be a text that is not empty')
    return value


def get_title(record: Record) -> str:
    """Return the title, or an empty text if there is none."""
    value = record.get("title")
    if value is not None and not isinstance(value, str):
        raise UserError('"title" must be a text')
    return value or ""


def get_list(record: Record, *names: str) -> list[Any]:
    """Return the first of these fields that exists; it must be a list."""
    value = get_field(record, *names)
    if not isinstance(value, list):
        name = next(name for name in names if name in record)
        raise UserError(f'"{name}" must be a list, and is {describe_type(value)}')
    return value


def get_flag(record: Record, name: str) -> bool:
    """Return a boolean field; false if it does not exist."""
    value = record.get(name)
    if value is not None and not isinstance(value, bool):
        raise UserError(f'"{name}" must be true or false')
    return bool(value)


def get_id(record: Record, number: str, *names: str) -> str:
    """Return the id of an object, a text or a whole number; its line or element if it has none."""
    value = next((record[name] for name in names if record.get(name) is not None), number)
    if type(value) is int:
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise UserError("its id must be a whole number or a text that is not empty")
    return value


def list_answers(value: Any, depth: int = 3) -> tuple[str, ...]:
    """Return the distinct answers in a text, a list, or an object with "answer" or "text"; empty ones do not count."""
    if isinstance(value, str):
        return (value,) if value.strip() else ()
    if value is None or (isinstance(value, dict) and not {"answer", "text"} & value.keys()):
        return ()
    if not isinstance(value, list | dict) or not depth:
        raise UserError(f"an answer must be a text, and one is {describe_type(value)}")
    parts = value if isinstance(value, list) else [value.get("answer", value.get("text"))]
    return tuple(dict.fromkeys(answer for part in parts for answer in list_answers(part, depth - 1)))


def require_answers(answers: tuple[str, ...]) -> tuple[str, ...]:
    """Return the answers; raise UserError if there are none."""
    if not answers:
        raise UserError("it has no answer, and no field says that it is unanswerable")
    return answers


def require_objects(parts: Iterable[Any]) -> list[Record]:
    """Return the passages of a list; each must be an object."""
    records = list(parts)
    for place, part in enumerate(records, 1):
        if not isinstance(part, dict):
            raise UserError(f"passage {place} must be an object, and is {describe_type(part)}")
    return records


def build_passage(record: Record, place: int, name: str, gold: str | None = None) -> Passage:
    """Build a passage from an object: its text is the field `name`, and the field `gold` says whether it is gold."""
    try:
        return Passage(get_title(record), get_text(record, name), gold is not None and get_flag(record, gold))
    except UserError as error:
        raise UserError(f"passage {place}: {error}") from error


def add_evidence(passages: Iterable[Passage], answers: Sequence[str]) -> tuple[Passage, ...]:
    """Return the passages, with the evidence of the gold ones searched for."""
    return tuple(replace(p, evidence=find_evidence(p.text, answers)) if p.gold else p for p in passages)


def find_evidence(text: str, answers: Sequence[str]) -> Spans:
    """Find the answers in a text as whole words, in any case and spacing; of two that overlap the longer one counts.

    A plain "yes" or "no" is never evidence.
    """
    spans: list[tuple[int, int]] = []
    for answer in sorted(set(answers), key=lambda answer: (-len(answer), answer)):
        if answer.strip() and answer.strip().lower() not in YES_NO:
            spans += drop_overlaps((match.span() for match in _answer_pattern(answer).finditer(text)), spans)
    return tuple(sorted(spans))


def drop_overlaps(spans: Iterable[tuple[int, int]], taken: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans that share no character with `taken`."""
    return [(start, stop) for start, stop in spans if all(stop <= a or b <= start for a, b in taken)]


def _answer_pattern(answer: str) -> re.Pattern[str]:
    words = answer.split()
    before = r"(?<!\w)" if re.match(r"\w", words[0]) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", words[-1]) else ""
    return re.compile(before + r"\s+".join(map(re.escape, words)) + after, re.IGNORECASE)
