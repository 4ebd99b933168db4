"""The twins' training data: text files, a tokenizer trained on them and on the worlds, and endless batches of rows.

corpus = prepare_corpus(folder, ["enwik8_clean.txt.xz"], recipe)    # prepared once; later calls read it back
for rows in batches(corpus, recipe, start=0, workers=8): ...        # batch i does not depend on the workers
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from msgspec import to_builtins

from floatscope.errors import UserError
from floatscope.files.digests import sha256_file
from floatscope.files.json_files import write_json
from floatscope.files.records import Record, read_typed
from floatscope.lab.training.prefetch import prefetch
from floatscope.lab.training.text import NO_TEXT, read_text
from floatscope.lab.twins.examples import Rows, build_prompt, make_rows
from floatscope.lab.twins.tokenizer import WordTokenizer, train_tokenizer
from floatscope.lab.twins.train import Recipe
from floatscope.lab.twins.world import (
    World,
    make_biography,
    make_dated,
    make_few_shot,
    make_reading,
    make_two_hop,
)

RECORD = "corpus.json"
FIXED_WORLD = ("fixed", 400)  # seed and size
TOKENIZER_CHARACTERS = 8_000_000  # of the text, for the tokenizer's training
TOKENIZER_PROMPTS = 6000  # of the worlds, for the same
MAX_PASSAGES = 8  # of one example; `examples.MANY_PASSAGES_FACTOR` times as many are allowed at times


class CorpusFacts(Record):
    """The type of corpus.json."""

    text: dict[str, str]  # file → sha256
    vocabulary: int
    characters: int
    tokens: int


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus."""

    folder: Path
    facts: CorpusFacts

    def open(self) -> tuple[Any, np.ndarray]:
        """Return the transformers tokenizer, and the text as one array of token ids."""
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(self.folder))
        return tokenizer, np.load(self.folder / "text.npy", mmap_mode="r", allow_pickle=False)


def fixed_world() -> World:
    """Return the world that is the same throughout training."""
    return World.generate(*FIXED_WORLD)


def prepare_corpus(folder: Path, files: Sequence[Path], recipe: Recipe) -> Corpus:
    """Train the tokenizer and tokenize the text, or read them back; refuse files other than the first time."""
    record = folder / RECORD
    digests = {path.name: sha256_file(path) for path in files}
    if record.is_file():
        stored = read_typed(record, CorpusFacts, f"remove {folder} and run the same command again")
        if stored.vocabulary != recipe.vocabulary:
            raise UserError(
                f"{folder} was prepared for a vocabulary of {stored.vocabulary}, not {recipe.vocabulary}; give the"
                " settings it was started with, or another --out"
            )
        if digests and stored.text != digests:
            raise UserError(f"{folder} was prepared from {', '.join(stored.text)}; give those, or another --out")
        return Corpus(folder, stored)
    if not files:
        raise UserError(NO_TEXT)
    text = "\n".join(read_text(path) for path in files)
    tokenizer = train_tokenizer(_tokenizer_texts(text), recipe.vocabulary)
    if len(tokenizer) != recipe.vocabulary:
        raise UserError(
            f"the text yields {len(tokenizer)} tokens, not {recipe.vocabulary}; give more text or a smaller vocabulary"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(str(folder))
        ids = np.array(WordTokenizer(tokenizer).encode(text), np.uint16)
        np.save(folder / "text.npy", ids)
        facts = CorpusFacts(text=digests, vocabulary=recipe.vocabulary, characters=len(text), tokens=len(ids))
        write_json(record, to_builtins(facts))
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error
    return Corpus(folder, facts)


def batches(corpus: Corpus, recipe: Recipe, start: int, workers: int) -> Generator[Rows, None, None]:
    """Yield the batches from number `start` on, prefetched by worker processes if there are any."""
    return prefetch(_BatchMaker(corpus, recipe), start, workers)


@dataclass
class _BatchMaker:
    """Makes batches by number; it opens the corpus on the first call, in the process that calls it."""

    corpus: Corpus
    recipe: Recipe

    def __call__(self, number: int) -> Rows:
        tokenizer, text, world = self._inputs
        r = self.recipe
        return make_rows(tokenizer, text, world, f"{r.seed} {number}", r.batch, r.length, MAX_PASSAGES)

    @cached_property
    def _inputs(self) -> tuple[WordTokenizer, np.ndarray, World]:
        tokenizer, text = self.corpus.open()
        return WordTokenizer(tokenizer), text, fixed_world()


def _tokenizer_texts(text: str) -> Iterator[str]:
    for start in range(0, min(len(text), TOKENIZER_CHARACTERS), 20000):
        yield text[start : start + 20000]
    for i in range(TOKENIZER_PROMPTS):
        rng, world = Random(f"words {i}"), World.generate(f"words {i}", 9)
        make = {0: make_two_hop, 3: make_biography, 6: make_dated, 5: make_two_hop}.get(i % 10, make_reading)
        sample = make(world, rng, "")
        yield f"{build_prompt(sample)} {sample.answers[0]}"
        if i % 20 == 0:
            yield build_prompt(make_few_shot(rng, ""))
