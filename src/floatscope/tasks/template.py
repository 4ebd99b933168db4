"""How a question is asked: a TOML file with the pieces of a prompt. A user's own takes the place of a built-in one.

    template("instruct").prompt(sample)                          # text, and where everything stands in it
    template("mine.toml").prompt(sample, shots=[other])
    placed(template("default"), "middle").prompt(sample)         # the question between the passages

| key | placeholders | without it |
|---|---|---|
| `prompt` | `{question}`, once or more; `{instruction}`, `{shots}`, `{passages}` | is needed |
| `passage` | `{text}`; `{number}`, `{title}` | `Document {number}: {text}\\n` |
| `shot` | `{question}`, `{answer}`; `{passages}` | `{passages}Question: {question}\\nAnswer: {answer}\\n\\n` |
| `instruction` | | nothing |
| `no_passages` | what `{passages}` is where there are none | nothing |

`{first_half}` and `{second_half}` may stand for `{passages}`. A brace that is meant is written twice: `{{`, `}}`.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from itertools import chain, groupby
from pathlib import Path
from string import Formatter
from typing import NamedTuple

from floatscope.errors import UserError, unknown_choice
from floatscope.tasks.sample import Passage, Sample

Span = tuple[int, int]

HALVES = ("first_half", "second_half")
ALLOWED = {
    "prompt": ("instruction", "shots", "passages", *HALVES, "question"),
    "passage": ("number", "title", "text"),
    "shot": ("passages", *HALVES, "question", "answer"),
    "instruction": (),
    "no_passages": (),
}
"""Key → its placeholders."""

NEEDED = {"prompt": ("question",), "passage": ("text",), "shot": ("question", "answer")}
MANY = ("question", "number")
"""Placeholders that may stand twice."""

USUAL = {
    "instruction": "",
    "passage": "Document {number}: {text}\n",
    "shot": "{passages}Question: {question}\nAnswer: {answer}\n\n",
    "no_passages": "",
}

BRACES = "a brace that is meant is written twice"
PLACES = ("before", "after", "both", "middle")
_FOLDER = files("floatscope.tasks") / "templates"
TEMPLATES = tuple(sorted(file.name.removesuffix(".toml") for file in _FOLDER.iterdir() if file.name.endswith(".toml")))


@dataclass(frozen=True)
class Prompt:
    text: str
    spans: dict[str, list[Span]]  # region → [start, stop) characters of `text`


class Piece(NamedTuple):
    """A stretch of a prompt."""

    region: str
    text: str
    gold: bool = False
    evidence: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Template:
    """A name, and key → text with placeholders; keys that are left out are as usual."""

    name: str
    pieces: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        for key in self.pieces:
            if key not in ALLOWED:
                raise unknown_choice("key", key, ALLOWED)
        if "prompt" not in self.pieces:
            raise UserError('the key "prompt" is missing; it is the text to ask with, with {question} in it')
        object.__setattr__(self, "pieces", USUAL | dict(self.pieces))
        for key in ALLOWED:
            _check(key, [name for _, name in self._parsed[key] if name is not None])

    @cached_property
    def sha256(self) -> str:
        """Of what it says, whatever it is called."""
        return hashlib.sha256(json.dumps(self.pieces, sort_keys=True).encode()).hexdigest()

    def prompt(self, sample: Sample, shots: Sequence[Sample] = (), placement: str | None = None) -> Prompt:
        """The sample as it is asked, after the shots with their answers; `placement` is that of `placed`."""
        if placement is not None:
            return placed(self, placement).prompt(sample, shots)
        if shots and "shots" not in (name for _, name in self._parsed["prompt"]):
            raise UserError(f"the template {self.name} has no place for shots: write {{shots}} into its prompt")
        return _prompt(
            self._filled(
                "prompt",
                {
                    "instruction": self._filled("instruction", {}),
                    "shots": [Piece(f"shot {number}", self._shot(shot)) for number, shot in enumerate(shots, 1)],
                    "question": [Piece("question", sample.question)],
                    **self._told(sample.passages),
                },
            )
        )

    @cached_property
    def _parsed(self) -> dict[str, list[tuple[str, str | None]]]:
        return {key: _parse(key, text) for key, text in self.pieces.items()}

    def _filled(self, key: str, values: Mapping[str, Sequence[Piece]]) -> list[Piece]:
        """The literal parts of a piece, with the values where their names stand."""
        pieces: list[Piece] = []
        for literal, name in self._parsed[key]:
            pieces.append(Piece("template", literal))
            if name is not None:
                pieces += values[name]
        return pieces

    def _told(self, passages: Sequence[Passage]) -> dict[str, list[Piece]]:
        """The passages, and both halves of them; of an odd number the first has more."""
        each = [self._passage(number, passage) for number, passage in enumerate(passages, 1)]
        half = (len(each) + 1) // 2
        first = list(chain(*each[:half])) if each else self._filled("no_passages", {})
        second = list(chain(*each[half:]))
        return {"passages": first + second, "first_half": first, "second_half": second}

    def _passage(self, number: int, passage: Passage) -> list[Piece]:
        region = f"document {number}"
        values = {
            "number": [Piece("template", str(number))],
            "title": [Piece(region, passage.title, passage.gold)],
            "text": [Piece(region, passage.text, passage.gold, passage.evidence)],
        }
        return self._filled("passage", values)

    def _shot(self, shot: Sample) -> str:
        if not shot.answers:
            raise UserError(f"'{shot.id}' has no answer, so it cannot be an example; choose another")
        question, answer = Piece("", shot.question), Piece("", shot.answers[0])
        values = {"question": [question], "answer": [answer], **self._told(shot.passages)}
        return "".join(piece.text for piece in self._filled("shot", values))


def template(name: str | Path = "default") -> Template:
    """A built-in template by its name (`TEMPLATES`), or the one in a file."""
    if name in TEMPLATES:
        return _built_in(str(name))
    path = Path(name)
    try:
        return Template(path.name, _read(path.read_bytes()))
    except (FileNotFoundError, ValueError) as error:  # the latter: no path can be called so
        raise UserError(f"{unknown_choice('template', str(name), TEMPLATES)}, or the path of a TOML file") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


@lru_cache(maxsize=64)
def placed(template: Template, where: str) -> Template:
    """The template with its question `before` the passages, `after` them, `both`, or in the `middle` of them.

    What is moved is the line of the question, with the blank lines behind it; a heading right above the passages stays
    with them. A question that is on the wanted side already stays where it is.
    """
    if where not in PLACES:
        raise unknown_choice("placement", where, PLACES)
    shown = {name for _, name in template._parsed["shot"]}
    keys = ["prompt", "shot"] if shown & {"passages", *HALVES} else ["prompt"]
    moved = {key: _moved(template.pieces[key], where) for key in keys}
    if not all(moved.values()) or not template.pieces["passage"].endswith("\n"):
        raise UserError(
            f"the template {template.name} cannot have its question elsewhere: that needs {{passages}} and one"
            " {question}, each where a line begins or after a placeholder, and a line end after it and each passage"
        )
    if moved.items() <= template.pieces.items():
        return template
    return replace(template, name=f"{template.name}, question {where}", pieces={**template.pieces, **moved})


@cache
def _built_in(name: str) -> Template:
    return Template(name, _read((_FOLDER / f"{name}.toml").read_bytes()))


def _read(data: bytes) -> dict[str, str]:
    try:
        told = tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"it is no UTF-8 text ({error.reason})") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"it is no TOML ({error})") from error
    for key, text in told.items():
        if not isinstance(text, str):
            raise UserError(f'"{key}" must be a text, not {type(text).__name__}; allowed keys: {", ".join(ALLOWED)}')
    return told


def _parse(key: str, text: str) -> list[tuple[str, str | None]]:
    """[(literal, the placeholder behind it)], the last perhaps without one."""
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        raise UserError(f'"{key}" cannot be read ({error}); {BRACES}') from error
    if changed := [name for _, name, spec, conversion in parsed if spec or conversion]:
        raise UserError(f'"{key}" changes {{{changed[0]}}} with ! or :, and a placeholder is a name alone')
    return [(literal, name) for literal, name, _, _ in parsed]


def _check(key: str, names: Sequence[str]) -> None:
    """Refuse placeholders that are unknown, missing, or there too often."""
    for name in names:
        if name not in ALLOWED[key]:
            allowed = ", ".join(f"{{{each}}}" for each in ALLOWED[key]) or "none"
            raise UserError(f'"{key}" has an unknown placeholder {{{name}}}; allowed: {allowed}; {BRACES}')
        if name not in MANY and names.count(name) > 1:
            raise UserError(f'"{key}" has {{{name}}} {names.count(name)} times; it may stand there once')
    for name in NEEDED.get(key, ()):
        if name not in names:
            raise UserError(f'"{key}" lacks {{{name}}}; write it where the {name} is to stand')
    halves = [name for name in HALVES if name in names]
    if halves and ("passages" in names or len(halves) == 1):
        raise UserError(f'"{key}" has {{{halves[0]}}}: write {{passages}}, or both {{first_half}} and {{second_half}}')


def _prompt(pieces: Sequence[Piece]) -> Prompt:
    """The pieces one after the other, and where they stand."""
    at, texts = 0, []
    spans, within = dict[str, list[Span]](), dict[str, list[Span]]()
    for region, text, gold, evidence in _by_line(pieces):
        spans.setdefault(region, []).append((at, at + len(text)))
        if gold:
            within.setdefault("gold", []).append((at, at + len(text)))
        if evidence:
            within.setdefault("evidence", []).extend((at + start, at + stop) for start, stop in evidence)
        at += len(text)
        texts.append(text)
    return Prompt("".join(texts), spans | within)


def _by_line(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Neighbours that are literal as one, cut where lines end."""
    for region, same in groupby(pieces, key=lambda piece: piece.region):
        if region == "template":
            whole = "".join(piece.text for piece in same)
            yield from (Piece(region, line) for line in whole.splitlines(keepends=True))
        else:
            yield from same


_ASKED = re.compile(r"(?:^|(?<=[\n}]))[^\n{}]*\{question\}[^\n{}]*\n+")
_TOLD = re.compile(r"(?:^|(?<=[\n}]))(?:[^\n{}]+\n)*\{passages\}")


def _moved(text: str, where: str) -> str:
    """A piece with its question elsewhere; nothing where it is not made of such lines."""
    asked = _ASKED.search(text)
    if asked is None:
        return ""
    line, at = asked.group(), asked.start()
    rest = text[:at] + text[asked.end() :]
    told = _TOLD.search(rest)
    if told is None or "{question}" in rest:
        return ""
    first, last = (line if where in (side, "both") else "" for side in ("before", "after"))
    late, stop = at >= told.end(), told.end()
    start = told.start() if late else max(told.start(), at)
    block = rest[start:stop]
    if where == "middle":
        block = block.replace("{passages}", f"{{first_half}}{line}{{second_half}}")
    if late:
        return rest[:start] + first + block + rest[stop:at] + last + rest[at:]
    return rest[:at] + first + rest[at:start] + block + last + rest[stop:]
