"""What readers take from an object: texts, answers, passages. What is not as it must be is refused in one sentence.

question = text(told, "input", "query", "question")      # the first that is there
texts([{"answer": "Velmora"}, "Velm"])                   # ("Velmora", "Velm")
find("Mira lives in Velmora.", ["velmora"])              # ((14, 21),): where an answer stands
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from floatscope.errors import UserError
from floatscope.tasks.sample import Passage

Told = dict[str, Any]
Spans = tuple[tuple[int, int], ...]

JUDGEMENTS = ("yes", "no")  # answers that are no part of a text; a "no" found there says nothing
WORDS = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}


def brief(said: object, longest: int = 60) -> str:
    """Something of a file within a sentence: printable, on one line, cut if it is long."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(said)[: longest + 1])
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def kind(value: object) -> str:
    """A JSON value in a word."""
    return WORDS.get(type(value), "null")


def the(told: Told, *names: str) -> Any:
    """The first of these fields that is there."""
    for name in names:
        if name in told:
            return told[name]
    quoted = [f'"{name}"' for name in names]
    raise UserError(f"it has no {quoted[0]}" if len(names) == 1 else f"it has none of {', '.join(quoted)}")


def text(told: Told, *names: str) -> str:
    """A text that is there and says something."""
    value = the(told, *names)
    if not isinstance(value, str) or not value.strip():
        name = next(name for name in names if name in told)
        such = f', such as "{brief(value)}"' if type(value) is int else ""
        raise UserError(f'"{name}" must be a text{such}, and not an empty one')
    return value


def title(told: Told) -> str:
    """A title, if there is one."""
    value = told.get("title")
    if value is not None and not isinstance(value, str):
        raise UserError('"title" must be a text')
    return value or ""


def items(told: Told, *names: str) -> list[Any]:
    """A list that is there."""
    value = the(told, *names)
    if not isinstance(value, list):
        name = next(name for name in names if name in told)
        raise UserError(f'"{name}" must be a list, and is {kind(value)}')
    return value


def flag(told: Told, name: str) -> bool:
    """True or false, or not there, which is false."""
    value = told.get(name)
    if value is not None and not isinstance(value, bool):
        raise UserError(f'"{name}" must be true or false')
    return bool(value)


def identity(told: Told, number: str, *names: str) -> str:
    """The id of an object, a text or a whole number; its line or element if it has none."""
    value = next((told[name] for name in names if told.get(name) is not None), number)
    if type(value) is int:
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise UserError("its id must be a text or a whole number, and not an empty text")
    return value


def texts(value: Any, depth: int = 3) -> tuple[str, ...]:
    """The answers in a text, a list, or an object with "answer" or "text", each once; empty ones are none."""
    if isinstance(value, str):
        return (value,) if value.strip() else ()
    if value is None or (isinstance(value, dict) and not {"answer", "text"} & value.keys()):
        return ()
    if not isinstance(value, list | dict) or not depth:
        raise UserError(f"an answer must be a text, and one is {kind(value)}")
    parts = value if isinstance(value, list) else [value.get("answer", value.get("text"))]
    return tuple(dict.fromkeys(answer for part in parts for answer in texts(part, depth - 1)))


def some(answers: tuple[str, ...]) -> tuple[str, ...]:
    """Answers, of which there must be one."""
    if not answers:
        raise UserError("it has no answer, and nothing says that it has none")
    return answers


def objects(parts: Iterable[Any], what: str = "passage") -> list[Told]:
    """The objects of a list."""
    found = list(parts)
    for place, part in enumerate(found, 1):
        if not isinstance(part, dict):
            raise UserError(f"{what} {place} must be an object, and is {kind(part)}")
    return found


def passage(told: Told, place: int, name: str, gold: str | None = None) -> Passage:
    """A passage whose text stands in one field; a second may say whether it is gold."""
    try:
        return Passage(title(told), text(told, name), gold is not None and flag(told, gold))
    except UserError as error:
        raise UserError(f"passage {place}: {error}") from error


def found(passages: Iterable[Passage], answers: Sequence[str]) -> tuple[Passage, ...]:
    """The passages, the gold ones with their evidence looked for."""
    return tuple(replace(p, evidence=find(p.text, answers)) if p.gold else p for p in passages)


def find(text: str, answers: Sequence[str]) -> Spans:
    """Where the answers stand in a text: whole words, whatever their case and spacing; of two that overlap the longer.

    A plain "yes" or "no" is looked for nowhere.
    """
    taken: list[tuple[int, int]] = []
    for answer in sorted(set(answers), key=lambda answer: (-len(answer), answer)):
        if answer.strip() and answer.strip().lower() not in JUDGEMENTS:
            taken += apart((match.span() for match in _pattern(answer).finditer(text)), taken)
    return tuple(sorted(taken))


def apart(spans: Iterable[tuple[int, int]], taken: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans that share no character with those already taken."""
    return [(start, stop) for start, stop in spans if all(stop <= a or b <= start for a, b in taken)]


def _pattern(answer: str) -> re.Pattern[str]:
    words = answer.split()
    before = r"(?<!\w)" if re.match(r"\w", words[0]) else ""
    behind = r"(?!\w)" if re.search(r"\w\Z", words[-1]) else ""
    return re.compile(before + r"\s+".join(map(re.escape, words)) + behind, re.IGNORECASE)
