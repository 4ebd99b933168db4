"""Prompt templates: TOML files with the pieces of a prompt. A file of your own works like a built-in template.

    load_template("instruct").prompt(sample)                          # the text, and where each region is in it
    load_template("mine.toml").prompt(sample, shots=[other])
    place_question(load_template("default"), "middle").prompt(sample)      # the question between the passages

| key | placeholders | default |
|---|---|---|
| `prompt` | `{question}`, once or more; `{instruction}`, `{shots}`, `{passages}` | required |
| `passage` | `{text}`; `{number}`, `{title}` | `Document {number}: {text}\\n` |
| `shot` | `{question}`, `{answer}`; `{passages}` | `{passages}Question: {question}\\nAnswer: {answer}\\n\\n` |
| `instruction` | | empty |
| `no_passages` | what `{passages}` becomes if a sample has none | empty |

`{first_half}` and `{second_half}` together may replace `{passages}`. Write a literal brace twice: `{{`, `}}`.
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
from typing import Any, NamedTuple

from msgspec.structs import asdict

from floatscope.errors import UserError, unknown_choice
from floatscope.files.records import Record, convert
from floatscope.tasks.regions import Prompt, Span
from floatscope.tasks.sample import Passage, Sample

HALVES = ("first_half", "second_half")
PLACEHOLDERS = {
    "prompt": ("instruction", "shots", "passages", *HALVES, "question"),
    "passage": ("number", "title", "text"),
    "shot": ("passages", *HALVES, "question", "answer"),
    "instruction": (),
    "no_passages": (),
}
"""The placeholders each key allows."""

REQUIRED = {"prompt": ("question",), "passage": ("text",), "shot": ("question", "answer")}
REPEATABLE = ("question", "number")
"""Placeholders that may occur more than once."""

BRACE_RULE = "write a literal brace twice"
PLACEMENTS = ("before", "after", "both", "middle")
_FOLDER = files("floatscope.tasks") / "templates"
TEMPLATES = tuple(sorted(file.name.removesuffix(".toml") for file in _FOLDER.iterdir() if file.name.endswith(".toml")))
"""The names of the built-in templates."""


class Pieces(Record):
    """The type of a template file."""

    prompt: str
    passage: str = "Document {number}: {text}\n"
    shot: str = "{passages}Question: {question}\nAnswer: {answer}\n\n"
    instruction: str = ""
    no_passages: str = ""


class Piece(NamedTuple):
    """A part of a prompt that belongs to one region."""

    region: str
    text: str
    gold: bool = False
    evidence: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Template:
    """The pieces of a prompt: key → text with placeholders. Missing keys get their defaults.

    template = Template("short", {"prompt": "{passages}Q: {question}\\nA:"})
    template.prompt(sample).text
    """

    name: str
    pieces: Mapping[str, Any] = field(hash=False)  # of the type `Pieces`

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "pieces", asdict(convert(self.pieces, Pieces)))
        except ValueError as error:
            raise UserError(f"{error}; a template is texts, and its prompt has {{question}} in it") from error
        for key in PLACEHOLDERS:
            _check_placeholders(key, [name for _, name in self._parsed[key] if name is not None])

    @cached_property
    def sha256(self) -> str:
        """The digest of the pieces; the name does not count."""
        return hashlib.sha256(json.dumps(self.pieces, sort_keys=True).encode()).hexdigest()

    def prompt(self, sample: Sample, shots: Sequence[Sample] = (), placement: str | None = None) -> Prompt:
        """Write the prompt of a sample.

        Args:
            sample: The question, with the passages to show.
            shots: Solved examples that come before it; each needs an answer.
            placement: Where the question is (`place_question`); None: where the template has it.
        """
        if placement is not None:
            return place_question(self, placement).prompt(sample, shots)
        if shots and "shots" not in (name for _, name in self._parsed["prompt"]):
            raise UserError(f"the template {self.name} has no place for shots: add {{shots}} to its prompt")
        values = {
            "instruction": self._fill("instruction", {}),
            "shots": [Piece(f"shot {number}", self._shot(shot)) for number, shot in enumerate(shots, 1)],
            "question": [Piece("question", sample.question)],
            **self._passage_values(sample.passages),
        }
        return _join_pieces(self._fill("prompt", values))

    @cached_property
    def _parsed(self) -> dict[str, list[tuple[str, str | None]]]:
        return {key: _parse_piece(key, text) for key, text in self.pieces.items()}

    def _fill(self, key: str, values: Mapping[str, Sequence[Piece]]) -> list[Piece]:
        """Return the literal parts of a key's text, with the values in place of their placeholders."""
        pieces: list[Piece] = []
        for literal, name in self._parsed[key]:
            pieces.append(Piece("template", literal))
            if name is not None:
                pieces += values[name]
        return pieces

    def _passage_values(self, passages: Sequence[Passage]) -> dict[str, list[Piece]]:
        """Return the pieces of all passages and of both halves; the first half of an odd number is the larger one."""
        written = [self._passage(number, passage) for number, passage in enumerate(passages, 1)]
        half = (len(written) + 1) // 2
        first = list(chain(*written[:half])) if written else self._fill("no_passages", {})
        second = list(chain(*written[half:]))
        return {"passages": first + second, "first_half": first, "second_half": second}

    def _passage(self, number: int, passage: Passage) -> list[Piece]:
        region = f"document {number}"
        values = {
            "number": [Piece("template", str(number))],
            "title": [Piece(region, passage.title, passage.gold)],
            "text": [Piece(region, passage.text, passage.gold, passage.evidence)],
        }
        return self._fill("passage", values)

    def _shot(self, shot: Sample) -> str:
        if not shot.answers:
            raise UserError(f"'{shot.id}' has no answer, so it cannot be a shot; choose another")
        question, answer = Piece("", shot.question), Piece("", shot.answers[0])
        values = {"question": [question], "answer": [answer], **self._passage_values(shot.passages)}
        return "".join(piece.text for piece in self._fill("shot", values))


def load_template(name: str | Path = "default") -> Template:
    """Load a built-in template by its name (`TEMPLATES`), or a TOML file by its path."""
    if name in TEMPLATES:
        return _load_built_in(str(name))
    path = Path(name)
    try:
        return Template(path.name, _parse_toml(path.read_bytes()))
    except (FileNotFoundError, ValueError) as error:  # ValueError: the name cannot be a path
        raise UserError(f"{unknown_choice('template', str(name), TEMPLATES)}, or the path of a TOML file") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


@lru_cache(maxsize=64)
def place_question(template: Template, placement: str) -> Template:
    """Return the template with its question `before` the passages, `after` them, `both`, or in the `middle` of them.

    The line of the question moves, with the blank lines after it. A heading right above the passages stays with them.
    A question that is already on the requested side stays where it is.
    """
    if placement not in PLACEMENTS:
        raise unknown_choice("placement", placement, PLACEMENTS)
    shot_names = {name for _, name in template._parsed["shot"]}
    keys = ["prompt", "shot"] if shot_names & {"passages", *HALVES} else ["prompt"]
    changes = {key: _move_question(template.pieces[key], placement) for key in keys}
    if not all(changes.values()) or not template.pieces["passage"].endswith("\n"):
        raise UserError(
            f"the question of the template {template.name} cannot be moved: that needs {{passages}} and one"
            " {question}, each at the start of a line or after a placeholder, and a line end after it and each passage"
        )
    if changes.items() <= template.pieces.items():
        return template
    return replace(template, name=f"{template.name}, question {placement}", pieces={**template.pieces, **changes})


@cache
def _load_built_in(name: str) -> Template:
    return Template(name, _parse_toml((_FOLDER / f"{name}.toml").read_bytes()))


def _parse_toml(data: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"the file is not UTF-8 text ({error.reason})") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"the file is not valid TOML ({error})") from error


def _parse_piece(key: str, text: str) -> list[tuple[str, str | None]]:
    """Return [(literal, the placeholder after it)]; the last placeholder may be None."""
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        raise UserError(f'"{key}" cannot be parsed ({error}); {BRACE_RULE}') from error
    if formatted := [name for _, name, spec, conversion in parsed if spec or conversion]:
        raise UserError(f'"{key}" formats {{{formatted[0]}}} with ! or :, and a placeholder is only a name')
    return [(literal, name) for literal, name, _, _ in parsed]


def _check_placeholders(key: str, names: Sequence[str]) -> None:
    """Raise UserError for placeholders that are unknown, missing or repeated."""
    for name in names:
        if name not in PLACEHOLDERS[key]:
            allowed = ", ".join(f"{{{placeholder}}}" for placeholder in PLACEHOLDERS[key]) or "none"
            raise UserError(f'"{key}" has an unknown placeholder {{{name}}}; allowed: {allowed}; {BRACE_RULE}')
        if name not in REPEATABLE and names.count(name) > 1:
            raise UserError(f'"{key}" has {{{name}}} {names.count(name)} times; it may occur once')
    for name in REQUIRED.get(key, ()):
        if name not in names:
            raise UserError(f'"{key}" lacks {{{name}}}; add it where the {name} belongs')
    halves = [name for name in HALVES if name in names]
    if halves and ("passages" in names or len(halves) == 1):
        raise UserError(f'"{key}" has {{{halves[0]}}}: give {{passages}}, or both {{first_half}} and {{second_half}}')


def _join_pieces(pieces: Sequence[Piece]) -> Prompt:
    """Concatenate the pieces and record where each region is."""
    at, texts = 0, []
    spans, nested = dict[str, list[Span]](), dict[str, list[Span]]()
    for region, text, gold, evidence in _split_lines(pieces):
        spans.setdefault(region, []).append((at, at + len(text)))
        if gold:
            nested.setdefault("gold", []).append((at, at + len(text)))
        if evidence:
            nested.setdefault("evidence", []).extend((at + start, at + stop) for start, stop in evidence)
        at += len(text)
        texts.append(text)
    return Prompt("".join(texts), spans | nested)


def _split_lines(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Join neighbouring literal pieces and split them at line ends."""
    for region, group in groupby(pieces, key=lambda piece: piece.region):
        if region == "template":
            text = "".join(piece.text for piece in group)
            yield from (Piece(region, line) for line in text.splitlines(keepends=True))
        else:
            yield from group


_QUESTION_LINE = re.compile(r"(?:^|(?<=[\n}]))[^\n{}]*\{question\}[^\n{}]*\n+")
_PASSAGES_BLOCK = re.compile(r"(?:^|(?<=[\n}]))(?:[^\n{}]+\n)*\{passages\}")


def _move_question(text: str, placement: str) -> str:
    """Return a key's text with its question moved; an empty text if it is not made of such lines."""
    question = _QUESTION_LINE.search(text)
    if question is None:
        return ""
    line, at = question.group(), question.start()
    rest = text[:at] + text[question.end() :]
    passages = _PASSAGES_BLOCK.search(rest)
    if passages is None or "{question}" in rest:
        return ""
    before, after = (line if placement in (side, "both") else "" for side in ("before", "after"))
    is_after, stop = at >= passages.end(), passages.end()
    start = passages.start() if is_after else max(passages.start(), at)
    block = rest[start:stop]
    if placement == "middle":
        block = block.replace("{passages}", f"{{first_half}}{line}{{second_half}}")
    if is_after:
        return rest[:start] + before + block + rest[stop:at] + after + rest[at:]
    return rest[:at] + before + rest[at:start] + block + after + rest[stop:]
