"""What the twins learn from: text files, a tokenizer made for them and for the worlds, and rows without end.

material = prepare(folder, ["enwik8_clean.txt.xz"], recipe)        # once; later calls read it back
for rows in batches(material, recipe, start=0, workers=8): ...      # batch i is the same whoever makes it
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from floatscope.errors import UserError
from floatscope.files.records import digest
from floatscope.lab.training.ahead import ahead
from floatscope.lab.training.text import NO_TEXT, read_text
from floatscope.lab.twins.lessons import Rows, make_rows, prompt_of
from floatscope.lab.twins.train import Recipe
from floatscope.lab.twins.words import Words, train_tokenizer
from floatscope.lab.twins.world import World, few_shot, reading, two_hop

FIXED = ("fixed", 400)  # the seed and the size of the world that is known by heart
LEARNT_FROM = 8_000_000  # characters of text the tokenizer is made from
TOLD = 6000  # and prompts of worlds
PASSAGES = 8  # the most a lesson has


@dataclass(frozen=True)
class Material:
    folder: Path
    facts: dict[str, Any]  # the text files and their digests, the vocabulary

    def open(self) -> tuple[Any, np.ndarray]:
        """The tokenizer and the text as one array of token ids."""
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(self.folder))
        return tokenizer, np.load(self.folder / "text.npy", mmap_mode="r", allow_pickle=False)


def fixed_world() -> World:
    return World.fresh(*FIXED)


def prepare(folder: Path, files: Sequence[Path], recipe: Recipe) -> Material:
    """Tokenizer and token ids of the text, made once and then read back; other files than before are refused."""
    record = folder / "material.json"
    digests = {path.name: digest(path) for path in files}
    facts = {"text": digests, "vocabulary": recipe.vocabulary}
    if record.is_file():
        then = json.loads(record.read_text())
        if then["vocabulary"] != recipe.vocabulary:
            raise UserError(
                f"{folder} was prepared for a vocabulary of {then['vocabulary']}, not {recipe.vocabulary}; give the"
                " settings it was begun with, or another --out"
            )
        if digests and then["text"] != digests:
            raise UserError(f"{folder} was prepared from {', '.join(then['text'])}; use those, or another --out")
        return Material(folder, then)
    if not files:
        raise UserError(NO_TEXT)
    text = "\n".join(read_text(path) for path in files)
    tokenizer = train_tokenizer(_to_learn_from(text), recipe.vocabulary)
    if len(tokenizer) != recipe.vocabulary:
        raise UserError(
            f"the text gives {len(tokenizer)} tokens, not {recipe.vocabulary}; give more text or a smaller vocabulary"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(str(folder))
        ids = np.array(Words(tokenizer)(text), np.uint16)
        np.save(folder / "text.npy", ids)
        told = {**facts, "characters": len(text), "tokens": len(ids)}
        record.write_text(json.dumps(told, indent=1))
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error
    return Material(folder, told)


def batches(material: Material, recipe: Recipe, start: int, workers: int) -> Generator[Rows, None, None]:
    """Batch after batch from number `start` on, made ahead by other processes if there are workers."""
    return ahead(_Maker(material, recipe), start, workers)


@dataclass
class _Maker:
    material: Material
    recipe: Recipe

    def __call__(self, number: int) -> Rows:
        words, text, fixed = self._opened
        r = self.recipe
        return make_rows(words, text, fixed, f"{r.seed} {number}", r.batch, r.length, PASSAGES)

    @cached_property
    def _opened(self) -> tuple[Words, np.ndarray, World]:
        tokenizer, text = self.material.open()
        return Words(tokenizer), text, fixed_world()


def _to_learn_from(text: str) -> Iterator[str]:
    for start in range(0, min(len(text), LEARNT_FROM), 20000):
        yield text[start : start + 20000]
    for i in range(TOLD):
        rng, world = Random(f"words {i}"), World.fresh(f"words {i}", 9)
        yield prompt_of((two_hop if i % 5 == 0 else reading)(world, rng, ""))
        if i % 20 == 0:
            yield prompt_of(few_shot(rng, ""))
