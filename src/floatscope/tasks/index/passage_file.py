"""Passages, and files of passages.

for id, title, text in PassageFile("passages.jsonl.gz"): ...
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from floatscope.errors import UserError
from floatscope.files.inputs import require_regular_file
from floatscope.tasks.json_entries import read_error

LONGEST_ID = 1000
FIELDS = ("id", "title", "text")

PassageEntry = tuple[str | None, str, str]
"""(id, title, text); an id of None is made from title and text."""


class PassageFile:
    """The passages of a file: one JSON object per line, or one JSON list of objects; also .gz and .xz.

    Iterate over it for (id, title, text). `progress` goes from 0 to 1 meanwhile, and `ignored_fields` collects the
    names of fields that are not part of a passage.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = require_regular_file(Path(path))
        self.progress = 0.0
        self.ignored_fields: dict[str, None] = {}
        try:
            self.bytes = self.path.stat().st_size
        except OSError as error:
            raise read_error(self.path, error) from error

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        self.progress, count = 0.0, 0
        for where, record in self._read_objects():
            try:
                passage = self._read_passage(record)
            except UserError as error:
                raise UserError(f"{self.path}, {where}: {error}") from error
            yield passage
            count += 1
        if not count:
            raise UserError(f'{self.path} contains no passages: give JSON objects with a "text", one on each line')
        self.progress = 1.0

    def describe(self) -> dict[str, Any]:
        """Return the name, digest and size of the file, as an index records them."""
        try:
            with self.path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise read_error(self.path, error) from error
        return {"name": self.path.name, "sha256": digest, "bytes": self.bytes}

    def _read_objects(self) -> Iterator[tuple[str, Any]]:
        """Yield each object, after the words for its place in the file."""
        try:
            with self.path.open("rb") as raw, _open_text(self.path, raw) as lines:
                is_first = True
                for number, line in enumerate(lines, 1):
                    if not line.strip():
                        continue
                    if is_first and line.lstrip().startswith("["):
                        yield from self._read_list(line + lines.read())
                        return
                    is_first = False
                    self.progress = min(1.0, raw.tell() / max(1, self.bytes))
                    yield f"line {number}", self._parse(line, f"{self.path}, line {number}")
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path} is not UTF-8 text ({error.reason})") from error
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{self.path} is damaged ({error}); download it again") from error
        except OSError as error:
            raise read_error(self.path, error) from error

    def _read_list(self, text: str) -> Iterator[tuple[str, Any]]:
        records = self._parse(text, str(self.path))
        for place, record in enumerate(records, 1):
            self.progress = place / len(records)
            yield f"passage {place}", record

    def _parse(self, text: str, where: str) -> Any:
        try:
            return json.loads(text)
        except RecursionError as error:
            raise UserError(f"{where}: it is nested too deeply") from error
        except ValueError as error:
            raise UserError(f"{where}: it is not valid JSON ({error})") from error

    def _read_passage(self, record: Any) -> tuple[str, str, str]:
        if not isinstance(record, dict):
            raise UserError(f'a passage is a JSON object with a "text", and this is a {type(record).__name__}')
        if len(self.ignored_fields) < 100:
            self.ignored_fields |= dict.fromkeys(name for name in record if name not in FIELDS)
        id, title, text = record.get("id"), record.get("title"), record.get("text", "")
        if type(id) is int:
            id = str(id)
        for name, value in (("id", id or ""), ("title", title or ""), ("text", text)):
            if not isinstance(value, str):
                raise UserError(f'"{name}" must be a text')
        return check_passage(id, title or "", text)


def check_passage(id: str | None, title: str, text: str) -> tuple[str, str, str]:
    """Return a passage that can be stored, with an id; raise UserError if its text or its id is not valid."""
    if not text.strip():
        raise UserError('"text" must be a text that is not empty')
    try:
        (title + text + (id or "")).encode()
    except UnicodeEncodeError as error:
        raise UserError("it contains half a character (a lone surrogate)") from error
    if id is None:
        return passage_id(title, text), title, text
    if not id.strip() or len(id) > LONGEST_ID:
        raise UserError(f'"id" must be a text of 1 to {LONGEST_ID} characters, or be left out')
    return id, title, text


def passage_id(title: str, text: str) -> str:
    """Return the id of a passage that has none: a hash of its title and text."""
    return hashlib.sha256(json.dumps([title, text]).encode()).hexdigest()[:20]


def _open_text(path: Path, raw: io.BufferedReader) -> io.TextIOWrapper:
    opener: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix)
    return io.TextIOWrapper(raw if opener is None else opener(raw), encoding="utf-8-sig")
