"""Task files → samples. A line is a JSON object; what cannot be read is refused with its line and the reason.

    samples = read_samples("held-out/reading-5.jsonl", limit=100)
    about("held-out/reading-5.jsonl", limit=100)       # name and digest of the file, for the run's settings

    {"question": "Where does Mira live?", "answer": "Velmora"}
    {"id": "q-2", "question": "…", "answers": ["…"], "passages": [{"text": "…", "gold": true, "evidence": [[14, 21]]}]}

A sample without an id is named by its line. Whatever else an object holds is kept in `Sample.meta`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from floatscope.errors import UserError, unknown
from floatscope.tasks.sample import Passage, Sample

OPENERS: dict[str, Callable[..., IO[str]]] = {".gz": gzip.open, ".xz": lzma.open}
PASSAGE = ("title", "text", "gold", "evidence")


def read_samples(path: str | Path, limit: int | None = None) -> list[Sample]:
    """The samples of a file in its order, the first `limit` of them."""
    if limit is not None and limit < 1:
        raise UserError(f"limit must be at least 1, got {limit}")
    path = Path(path)
    samples: dict[str, Sample] = {}
    lines: dict[str, int] = {}
    for number, line in _lines(path):
        try:
            sample = _sample(_object(line), number)
            if sample.id in samples:
                raise UserError(f"the id '{sample.id}' is that of line {lines[sample.id]} too; ids must differ")
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from error
        samples[sample.id], lines[sample.id] = sample, number
        if len(samples) == limit:
            break
    if not samples:
        raise UserError(f"{path} holds no samples: give a file with a JSON object on each line")
    return list(samples.values())


def about(path: str | Path, limit: int | None = None) -> dict[str, Any]:
    """What a run says of its data."""
    try:
        with Path(path).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(Path(path), error) from error
    return {"data": Path(path).name, "data_sha256": digest, "limit": limit}


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, counted from 1."""
    try:
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no UTF-8 text ({error.reason})") from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged ({error}); fetch it again") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot read {path}: {error.strerror or error}")


def _object(line: str) -> dict[str, Any]:
    def refuse(word: str) -> None:
        raise UserError(f"{word} is no JSON")

    try:
        told = json.loads(line, parse_constant=refuse)
        json.dumps(told, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError("it holds half a character (a lone surrogate)") from error
    except RecursionError as error:
        raise UserError("it is nested too deeply") from error
    except ValueError as error:
        raise UserError(f"it is no JSON ({error}); a file has one object on each line") from error
    if not isinstance(told, dict):
        raise UserError(f"a sample is a JSON object, and this is a {type(told).__name__}")
    return told


def _sample(told: dict[str, Any], number: int) -> Sample:
    """An object of our own files; one with no more than a question and an answer is one too."""
    given = dict(told)
    id, question = _text(given, "id", str(number)), _text(given, "question")
    if "answer" in given and "answers" in given:
        raise UserError('it has "answer" and "answers"; give one of them')
    if "answer" not in given and "answers" not in given:
        raise UserError('it has neither "answer" nor "answers"; write "answers": [] if there is none')
    answers = [given.pop("answer")] if "answer" in given else given.pop("answers")
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise UserError('"answers" must be a list of texts, and "answer" one text')
    passages = given.pop("passages", [])
    if not isinstance(passages, list):
        raise UserError('"passages" must be a list')
    return Sample(
        id=id,
        question=question,
        answers=tuple(answers),
        passages=tuple(_passage(passage, place) for place, passage in enumerate(passages, 1)),
        meta=given,
    )


def _passage(told: Any, place: int) -> Passage:
    try:
        if not isinstance(told, dict):
            raise UserError('it must be an object with a "text"')
        if strange := [name for name in told if name not in PASSAGE]:
            raise unknown("field", strange[0], PASSAGE)
        given, title = dict(told), told.get("title", "")
        text, gold, evidence = _text(given, "text"), given.get("gold", False), given.get("evidence", [])
        if not isinstance(title, str):
            raise UserError('"title" must be a text')
        if not isinstance(gold, bool):
            raise UserError('"gold" must be true or false')
        if not isinstance(evidence, list) or not all(_is_span(span, len(text)) for span in evidence):
            raise UserError(f'"evidence" must be a list of [start, stop] within its {len(text)} characters')
    except UserError as error:
        raise UserError(f"passage {place}: {error}") from error
    return Passage(title, text, gold, tuple((start, stop) for start, stop in evidence))


def _text(given: dict[str, Any], name: str, default: str | None = None) -> str:
    """Take a text that must be there and say something."""
    text = given.pop(name, default)
    if not isinstance(text, str) or not text.strip():
        beside = f', such as "{text}"' if isinstance(text, int) and not isinstance(text, bool) else ""
        raise UserError(f'"{name}" must be a text{beside}, and not an empty one')
    return text


def _is_span(span: Any, length: int) -> bool:
    whole = isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span)
    return whole and 0 <= span[0] < span[1] <= length
