"""The training data of an adaptation: token ids of the text, its paragraphs, the questions, the tokenizer.

corpus = prepare_corpus(folder, model, TrainingFiles(text=[…], data=[…], held_out_text=[…], held_out_data=[…]))
corpus.facts                       # of corpus.json: files, digests, sizes, number of excluded questions
corpus.ids("text")                 # or "held_out": one long array of token ids
find_gaps("The town is old. That winter the river froze at Oslo.")     # [("That winter the … Oslo.", ["Oslo"])]

What a model will be evaluated on must not be in its training data: held-out files are refused by their digest, and
questions that share a question or a gold passage with a held-out file are excluded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import to_builtins

from floatscope.errors import UserError
from floatscope.files.atomic import explain_write_errors
from floatscope.files.digests import sha256_file
from floatscope.files.inputs import require_regular_file
from floatscope.files.json_files import write_json
from floatscope.files.records import Record, read_typed
from floatscope.lab.adapt.recipe import require_tokenizer
from floatscope.lab.adapt.scores import LENGTH
from floatscope.lab.training.text import NO_TEXT, OPENERS, read_text
from floatscope.models.model import Model
from floatscope.models.tokenizer import ModelTokenizer
from floatscope.models.tokenizer_files import open_tokenizer
from floatscope.pipelines import prompting
from floatscope.tasks.sample import Sample
from floatscope.tasks.sample_files import read_samples
from floatscope.tasks.scores import normalise

RECORD = "corpus.json"
MIN_CHARACTERS, MAX_CHARACTERS = 200, 900  # of a paragraph that can be a passage
MIN_TOKENS = 2048  # of the text
TOKENIZE_TOGETHER = 2000  # paragraphs
GAP = re.compile(r"(?<=[a-z,;] )(?:[A-Z][\w’'-]+(?: (?:of |the )?[A-Z][\w’'-]+)*|\d[\d,.]*\d|\d+)(?=[ ,.;])")
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


@dataclass(frozen=True)
class TrainingFiles:
    """The files to train on, and the files held out for evaluation."""

    text: Sequence[Path] = ()
    data: Sequence[Path] = ()
    held_out_text: Sequence[Path] = ()
    held_out_data: Sequence[Path] = ()

    @property
    def digests(self) -> dict[str, dict[str, str]]:
        """The sha256 of each file by its kind and name; two files of the same name are refused."""
        kinds = {
            "text": self.text,
            "data": self.data,
            "held_out_text": self.held_out_text,
            "held_out_data": self.held_out_data,
        }
        names = Counter(path.name for paths in kinds.values() for path in paths)
        if duplicates := [name for name, count in names.items() if count > 1]:
            raise UserError(f"two files are named {duplicates[0]}; rename one, as the card lists files by name")
        return {kind: {path.name: sha256_file(path) for path in paths} for kind, paths in kinds.items()}


@dataclass(frozen=True)
class QuestionFormat:
    """How a question becomes tokens."""

    tokenizer: ModelTokenizer
    chat: bool  # through the chat template
    end_id: int  # after an answer
    pad_id: int


class CorpusFacts(Record):
    """The type of corpus.json."""

    base: str | None  # fingerprint of its weights
    files: dict[str, dict[str, str]]  # kind → name → sha256
    tokens: int
    paragraphs: int
    questions: int
    excluded: int
    chat: bool
    end_id: int
    pad_id: int


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus."""

    folder: Path
    facts: CorpusFacts

    def question_format(self) -> QuestionFormat:
        """Open the tokenizer with the settings for questions."""
        tokenizer = open_tokenizer(self.folder)
        assert tokenizer is not None  # `prepare_corpus` wrote it
        return QuestionFormat(tokenizer, self.facts.chat, self.facts.end_id, self.facts.pad_id)

    def ids(self, name: str = "text") -> np.ndarray:
        """Return the token ids of the text, or of the held-out text ("held_out")."""
        with self._explain_read_errors(f"{name}.npy") as path:
            ids: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        return ids

    def lines(self, name: str) -> list[str]:
        """Return the lines of "paragraphs" or "questions"."""
        with self._explain_read_errors(f"{name}.jsonl") as path:
            return path.read_text(encoding="utf-8").split("\n")[:-1]  # a line may contain other line breaks

    @contextmanager
    def _explain_read_errors(self, name: str) -> Iterator[Path]:
        try:
            yield self.folder / name
        except (OSError, EOFError, ValueError) as error:
            raise UserError(
                f"{self.folder / name} is missing or damaged; remove {self.folder} and run the same command again"
            ) from error


def prepare_corpus(folder: Path, model: Model, training_files: TrainingFiles) -> Corpus:
    """Prepare the corpus once, or read it back; refuse files other than the first time, and held-out files."""
    is_prepared = (folder / RECORD).is_file()
    train, held_out = (
        [*training_files.text, *training_files.data],
        [*training_files.held_out_text, *training_files.held_out_data],
    )
    if not is_prepared:
        refuse_held_out(train, held_out)
    digests = training_files.digests
    if is_prepared:
        stored = read_facts(folder)
        if stored.base != model.spec.weights:
            raise UserError(f"{folder} was prepared for another base; use another --out")
        if any(digests.values()) and stored.files != digests:
            names = ", ".join(name for by_name in stored.files.values() for name in by_name)
            raise UserError(f"{folder} was prepared from {names}; give those, or another --out")
        return Corpus(folder, stored)
    if not training_files.text:
        raise UserError(NO_TEXT)
    questions, excluded = _read_questions(training_files)
    with explain_write_errors("the corpus", folder):
        folder.mkdir(parents=True, exist_ok=True)
        require_tokenizer(model).hf.save_pretrained(str(folder))
        paragraphs = [p for path in training_files.text for p in read_text(path).splitlines() if p.strip()]
        tokens = _save_ids(folder / "text.npy", model, paragraphs)
        held_out_paragraphs = [p for path in training_files.held_out_text for p in read_text(path).splitlines()]
        held_out_tokens = _save_ids(folder / "held_out.npy", model, held_out_paragraphs)
        passages = [p for p in paragraphs if MIN_CHARACTERS <= len(p) <= MAX_CHARACTERS and find_gaps(p)]
        _save_lines(folder / "paragraphs.jsonl", (json.dumps(p, ensure_ascii=False) for p in passages))
        _save_lines(folder / "questions.jsonl", _question_lines(questions))
        if tokens < MIN_TOKENS:
            raise UserError(f"the text has {tokens:,} tokens, but training needs at least {MIN_TOKENS:,}; give more")
        needed = min(LENGTH, model.spec.context or LENGTH)
        if training_files.held_out_text and held_out_tokens < needed:
            raise UserError(
                f"the held-out text has {held_out_tokens:,} tokens, but measuring needs at least {needed}; give more of"
                " it, or none"
            )
        facts = CorpusFacts(
            base=model.spec.weights,
            files=digests,
            tokens=tokens,
            paragraphs=len(passages),
            questions=len(questions),
            excluded=excluded,
            **_question_settings(model),
        )
        write_json(folder / RECORD, to_builtins(facts))
    return Corpus(folder, facts)


def read_facts(folder: Path) -> CorpusFacts:
    """Read the corpus.json of a prepared corpus."""
    return read_typed(folder / RECORD, CorpusFacts, f"remove {folder} and run the same command again")


def _read_questions(training_files: TrainingFiles) -> tuple[list[Sample], int]:
    """Return the questions to train on, and how many were excluded because they are held out."""
    samples = [sample for path in training_files.data for sample in read_samples(path)]
    usable = [s for s in samples if s.answers and any(p.gold for p in s.passages)]
    held_out = [sample for path in training_files.held_out_data for sample in read_samples(path)]
    questions, excluded = exclude_held_out(usable, held_out)
    if training_files.data and not questions:
        raise UserError("none of the questions can be trained on; each needs an answer and a passage marked as gold")
    return questions, excluded


def _question_settings(model: Model) -> dict[str, Any]:
    spec, chat = model.spec, prompting.uses_chat_template(model, None)
    if not spec.stop_ids:
        raise UserError(f"{spec.name} has no token that ends a text, which an answer needs; give a base that has one")
    end_id = spec.eot_id if chat and spec.eot_id is not None else spec.stop_ids[0]
    return {"chat": chat, "end_id": end_id, "pad_id": spec.stop_ids[0] if spec.pad_id is None else spec.pad_id}


def _save_ids(path: Path, model: Model, paragraphs: Sequence[str]) -> int:
    """Save all paragraphs as one array of token ids, separated by line breaks; return its length."""
    tokenizer, arrays = require_tokenizer(model).hf, []
    for start in range(0, len(paragraphs), TOKENIZE_TOGETHER):
        lines = [f"{p}\n" for p in paragraphs[start : start + TOKENIZE_TOGETHER]]
        encoded = tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"]
        arrays += [np.array(ids, np.int32) for ids in encoded]
    ids = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
    np.save(path, ids.astype(np.uint16 if model.vocab_size <= 1 << 16 else np.int32))
    return len(ids)


def _question_lines(samples: Sequence[Sample]) -> Iterator[str]:
    for number, sample in enumerate(samples):
        content = sample.as_json()
        fields = {name: content[name] for name in ("question", "answers", "passages")}
        yield json.dumps({"id": str(number), **fields}, ensure_ascii=False)


def _save_lines(path: Path, lines: Iterator[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def find_gaps(paragraph: str) -> list[tuple[str, list[str]]]:
    """Return the sentences of 31 to 299 characters that contain names or numbers, each with those."""
    sentences = [(s, GAP.findall(s)) for s in SENTENCE.split(paragraph)]
    return [(s, gaps) for s, gaps in sentences if gaps and 30 < len(s) < 300]


def refuse_held_out(train: Sequence[Path], held_out: Sequence[Path]) -> None:
    """Refuse a training file with the content of a held-out file; the twins' question files are always held out."""
    shipped = Path(str(files("floatscope"))) / "assets" / "questions"
    digests = {content_digest(path): path for path in [*sorted(shipped.glob("*.jsonl")), *held_out]}
    for path in train:
        if (other := digests.get(content_digest(path))) is not None:
            raise UserError(
                f"{path} has the same content as {other.name}, which is held out for evaluation; do not train on it"
            )


def content_digest(path: Path) -> str:
    """Return the sha256 of a file's content, decompressed if it is compressed."""
    try:
        with OPENERS.get(path.suffix, open)(require_regular_file(path), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def exclude_held_out(samples: Sequence[Sample], held_out: Sequence[Sample]) -> tuple[list[Sample], int]:
    """Return the samples that share no question and no gold passage with a held-out one, and how many do.

    Case, punctuation and articles are ignored.
    """
    questions = {normalise(sample.question) for sample in held_out}
    passages = {normalise(p.text) for sample in held_out for p in sample.passages if p.gold}

    def is_held_out(sample: Sample) -> bool:
        return normalise(sample.question) in questions or any(normalise(p.text) in passages for p in sample.passages)

    remaining = [sample for sample in samples if not is_held_out(sample)]
    return remaining, len(samples) - len(remaining)
