"""Passages, and files of them."""

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

LONGEST_ID = 1000
FIELDS = ("id", "title", "text")

Entry = tuple[str | None, str, str]


class PassageFile:
    """The passages of a file: a JSON object on each line, or one JSON list of objects; also .gz and .xz."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.read = 0.0  # how much of it, from 0 to 1
        self.passed_over: dict[str, None] = {}  # fields that are no part of a passage
        try:
            self.bytes = self.path.stat().st_size
        except OSError as error:
            raise unreadable(self.path, error) from error

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        self.read, count = 0.0, 0
        for where, told in self._objects():
            try:
                passage = self._passage(told)
            except UserError as error:
                raise UserError(f"{self.path}, {where}: {error}") from error
            yield passage
            count += 1
        if not count:
            raise UserError(f'{self.path} holds no passages: give JSON objects with a "text", one on each line')
        self.read = 1.0

    def about(self) -> dict[str, Any]:
        try:
            with self.path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise unreadable(self.path, error) from error
        return {"name": self.path.name, "sha256": digest, "bytes": self.bytes}

    def _objects(self) -> Iterator[tuple[str, Any]]:
        """Each object, and the words for where it stands."""
        try:
            with self.path.open("rb") as raw, _unpacked(self.path, raw) as lines:
                seen = False
                for number, line in enumerate(lines, 1):
                    if not line.strip():
                        continue
                    if not seen and line.lstrip().startswith("["):
                        yield from self._listed(line + lines.read())
                        return
                    seen = True
                    self.read = min(1.0, raw.tell() / max(1, self.bytes))
                    yield f"line {number}", self._json(line, f"{self.path}, line {number}")
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path} is no UTF-8 text ({error.reason})") from error
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{self.path} is damaged ({error}); fetch it again") from error
        except OSError as error:
            raise unreadable(self.path, error) from error

    def _listed(self, text: str) -> Iterator[tuple[str, Any]]:
        told = self._json(text, str(self.path))
        for place, each in enumerate(told, 1):
            self.read = place / len(told)
            yield f"passage {place}", each

    def _json(self, text: str, where: str) -> Any:
        try:
            return json.loads(text)
        except RecursionError as error:
            raise UserError(f"{where}: it is nested too deeply") from error
        except ValueError as error:
            raise UserError(f"{where}: it is no JSON ({error})") from error

    def _passage(self, told: Any) -> tuple[str, str, str]:
        if not isinstance(told, dict):
            raise UserError(f'a passage is a JSON object with a "text", and this is a {type(told).__name__}')
        if len(self.passed_over) < 100:
            self.passed_over |= dict.fromkeys(name for name in told if name not in FIELDS)
        id, title, text = told.get("id"), told.get("title"), told.get("text", "")
        if type(id) is int:
            id = str(id)
        for name, value in (("id", id or ""), ("title", title or ""), ("text", text)):
            if not isinstance(value, str):
                raise UserError(f'"{name}" must be a text')
        return checked(id, title or "", text)


def checked(id: str | None, title: str, text: str) -> tuple[str, str, str]:
    """A passage that can be kept: with an id, with a text, of whole characters."""
    if not text.strip():
        raise UserError('"text" must be a text, and not an empty one')
    try:
        (title + text + (id or "")).encode()
    except UnicodeEncodeError as error:
        raise UserError("it holds half a character (a lone surrogate)") from error
    if id is None:
        return passage_id(title, text), title, text
    if not id.strip() or len(id) > LONGEST_ID:
        raise UserError(f'"id" must be a text of 1 to {LONGEST_ID} characters, or left out')
    return id, title, text


def passage_id(title: str, text: str) -> str:
    """The id of a passage that has none: the same for the same title and text, anywhere."""
    return hashlib.sha256(json.dumps([title, text]).encode()).hexdigest()[:20]


def _unpacked(path: Path, raw: io.BufferedReader) -> io.TextIOWrapper:
    packed: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix)
    return io.TextIOWrapper(raw if packed is None else packed(raw), encoding="utf-8-sig")


def unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot read {path}: {error.strerror or error}")
