"""What an adaptation reads, made ready once: ids of the text, its paragraphs, the questions, the tokenizer.

material = prepare(folder, model, Given(text=[…], data=[…], held_text=[…], held_data=[…]))
material.facts                     # files, digests, what was left out
material.ids("text")               # or "held": one long array of token ids
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from floatscope.errors import UserError
from floatscope.files.atomic import writing
from floatscope.files.records import digest, read_json, write_json
from floatscope.lab.adapt.gaps import gaps
from floatscope.lab.adapt.held import apart, refuse_held
from floatscope.lab.adapt.mask import text_of
from floatscope.lab.adapt.scores import LENGTH
from floatscope.lab.training.text import NO_TEXT, read_text
from floatscope.models.model import Model
from floatscope.models.text import ModelTokenizer, open_text
from floatscope.pipelines import prompts
from floatscope.tasks.read import read_samples
from floatscope.tasks.sample import Sample

RECORD = "material.json"
SHORTEST, LONGEST = 200, 900  # characters of a paragraph that is a passage
FEWEST_TOKENS = 2048
TOGETHER = 2000  # paragraphs encoded at once


@dataclass(frozen=True)
class Given:
    """The files: to learn from, and to be asked later."""

    text: Sequence[Path] = ()
    data: Sequence[Path] = ()
    held_text: Sequence[Path] = ()
    held_data: Sequence[Path] = ()

    @property
    def digests(self) -> dict[str, dict[str, str]]:
        kinds = {"text": self.text, "data": self.data, "held_text": self.held_text, "held_data": self.held_data}
        names = Counter(path.name for paths in kinds.values() for path in paths)
        if twice := [name for name, count in names.items() if count > 1]:
            raise UserError(f"two files are called {twice[0]}; rename one, for the card tells files by their names")
        return {kind: {path.name: digest(path) for path in paths} for kind, paths in kinds.items()}


@dataclass(frozen=True)
class Source:
    """How questions are written as tokens."""

    text: ModelTokenizer
    chat: bool
    end: int  # behind an answer
    fill: int  # where there is nothing


@dataclass(frozen=True)
class Material:
    folder: Path
    facts: dict[str, Any]

    def source(self) -> Source:
        text = open_text(self.folder)
        assert text is not None  # `prepare` wrote it
        return Source(text, self.facts["chat"], self.facts["end"], self.facts["fill"])

    def ids(self, name: str = "text") -> np.ndarray:
        with self._reading(f"{name}.npy") as path:
            found: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        return found

    def lines(self, name: str) -> list[str]:
        with self._reading(f"{name}.jsonl") as path:
            return path.read_text(encoding="utf-8").split("\n")[:-1]  # a line may hold other line breaks

    @contextmanager
    def _reading(self, name: str) -> Iterator[Path]:
        try:
            yield self.folder / name
        except (OSError, EOFError, ValueError) as error:
            raise UserError(
                f"{self.folder / name} is missing or damaged; remove {self.folder} and run the same command again"
            ) from error


def prepare(folder: Path, model: Model, given: Given) -> Material:
    """Made once and then read back; other files than before, or files that are held, are refused."""
    made = (folder / RECORD).is_file()
    if not made:
        refuse_held([*given.text, *given.data], [*given.held_text, *given.held_data])
    digests = given.digests
    if made:
        then = read_json(folder / RECORD)
        if then["base"] != model.spec.weights:
            raise UserError(f"{folder} was prepared for another base; use another --out")
        if any(digests.values()) and then["files"] != digests:
            told = ", ".join(name for named in then["files"].values() for name in named)
            raise UserError(f"{folder} was prepared from {told}; use those, or another --out")
        return Material(folder, then)
    if not given.text:
        raise UserError(NO_TEXT)
    refuse_held([*given.text, *given.data], [*given.held_text, *given.held_data])
    samples = [s for path in given.data for s in read_samples(path) if s.answers and any(p.gold for p in s.passages)]
    held = [sample for path in given.held_data for sample in read_samples(path)]
    kept, left_out = apart(samples, held)
    if given.data and not kept:
        raise UserError("none of the questions can be learnt from: each needs an answer and a passage marked as gold")
    with writing("the material", folder):
        folder.mkdir(parents=True, exist_ok=True)
        text_of(model).tokenizer.save_pretrained(str(folder))
        paragraphs = [p for path in given.text for p in read_text(path).splitlines() if p.strip()]
        tokens = _save_ids(folder / "text.npy", model, paragraphs)
        apart_too = [p for path in given.held_text for p in read_text(path).splitlines()]
        held_tokens = _save_ids(folder / "held.npy", model, apart_too)
        passages = [p for p in paragraphs if SHORTEST <= len(p) <= LONGEST and gaps(p)]
        _save_lines(folder / "paragraphs.jsonl", (json.dumps(p, ensure_ascii=False) for p in passages))
        _save_lines(folder / "questions.jsonl", _as_lines(kept))
        if tokens < FEWEST_TOKENS:
            raise UserError(f"the text has {tokens:,} tokens, and {FEWEST_TOKENS:,} are the least to learn from")
        least = min(LENGTH, model.spec.context or LENGTH)
        if given.held_text and held_tokens < least:
            raise UserError(
                f"the text held apart has {held_tokens:,} tokens, and {least} are the least to measure on; give more of"
                " it, or none"
            )
        facts = {
            "base": model.spec.weights,
            "files": digests,
            "tokens": tokens,
            "paragraphs": len(passages),
            "questions": len(kept),
            "left_out": left_out,
            **_written(model),
        }
        write_json(folder / RECORD, facts)
    return Material(folder, facts)


def _written(model: Model) -> dict[str, Any]:
    spec, chat = model.spec, prompts.uses_template(model, None)
    if not spec.stop_ids:
        raise UserError(f"{spec.name} has no token that ends a text, and an answer ends with one")
    end = spec.eot_id if chat and spec.eot_id is not None else spec.stop_ids[0]
    return {"chat": chat, "end": end, "fill": spec.stop_ids[0] if spec.pad_id is None else spec.pad_id}


def _save_ids(path: Path, model: Model, paragraphs: Sequence[str]) -> int:
    """All paragraphs as one array, a line break between them; how many tokens that is."""
    tokenizer, found = text_of(model).tokenizer, []
    for start in range(0, len(paragraphs), TOGETHER):
        some = [f"{p}\n" for p in paragraphs[start : start + TOGETHER]]
        found += [
            np.array(ids, np.int32) for ids in tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]
        ]
    ids = np.concatenate(found) if found else np.zeros(0, np.int32)
    np.save(path, ids.astype(np.uint16 if model.vocabulary <= 1 << 16 else np.int32))
    return len(ids)


def _as_lines(samples: Sequence[Sample]) -> Iterator[str]:
    for number, sample in enumerate(samples):
        told = sample.as_json()
        plain = {name: told[name] for name in ("question", "answers", "passages")}
        yield json.dumps({"id": str(number), **plain}, ensure_ascii=False)


def _save_lines(path: Path, lines: Iterator[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
