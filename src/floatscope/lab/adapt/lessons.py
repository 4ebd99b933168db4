"""Rows to learn from: stretches of text, and questions with passages and the room for an answer behind them.

    batch = Maker(material, recipe)(17)         # batch 17 is the same whoever makes it
    batch.text                                  # [row, length]
    batch.tokens, batch.roles                   # [row, length]: a question to a row, PAD behind it

Questions are those of the data files (half of them with another answer put into their passages), gaps in sentences of
the text (the passage still holds what is missing), and those of invented worlds. Passages of other questions stand
among the right ones, in any order. They are asked as `floatscope eval` asks them, through the chat template where there
is one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

import numpy as np

from floatscope.errors import UserError
from floatscope.lab.adapt.gaps import GAP, gaps
from floatscope.lab.adapt.mask import refuse_mask
from floatscope.lab.adapt.material import Material, Source
from floatscope.lab.adapt.recipe import Recipe
from floatscope.lab.twins.world import World, reading, two_hop
from floatscope.pipelines.likelihood import continuation
from floatscope.tasks.formats import named
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.template import template

PAD, PROMPT, ANSWER, TAIL = range(4)
"""What a token is: none, of the question and its passages, of the answer with the end behind it, a further end."""

SHARES = {"data": 0.35, "gap": 0.45, "world": 0.2}
TEMPLATES = {"instruct": 0.8, "default": 0.2}
ROOMS = (8, 16, 24, 32)  # tokens of an answer and the ends behind it
TRIES = 100
MOST = 8  # passages of others
SWAPPED = 0.5  # how often another answer is put into the passages of such a question, so that it must be read there
CLOSED = 0.05  # how often a question of the data files is asked without any passage
CHARACTERS = 3.5  # to a token, so that a prompt is seldom longer than was thought


@dataclass(frozen=True)
class Batch:
    text: np.ndarray  # [row, length]
    tokens: np.ndarray  # [row, length]
    roles: np.ndarray  # [row, length] uint8


@dataclass
class Maker:
    """Batch after batch of a material; it travels to other processes and opens its files there."""

    material: Material
    recipe: Recipe

    def __call__(self, number: int) -> Batch:
        rng, recipe = Random(f"batch {self.recipe.seed} {number}"), self.recipe
        starts = [rng.randrange(max(1, len(self._ids) - recipe.length)) for _ in range(recipe.tokens // recipe.length)]
        text = np.stack([self._ids[start : start + recipe.length] for start in starts]).astype(np.int32)
        length = rng.choice(recipe.lengths)
        rows = [self._row(rng, length) for _ in range(max(1, recipe.tokens // length))]
        return Batch(text, np.stack([tokens for tokens, _ in rows]), np.stack([roles for _, roles in rows]))

    def _row(self, rng: Random, length: int) -> tuple[np.ndarray, np.ndarray]:
        """A question that fits; one that does not is left for another."""
        for _ in range(TRIES):
            prompt, answer = self._lesson(rng, length)
            room = rng.choice([r for r in ROOMS if r > len(answer)] or [len(answer) + 1])
            if len(prompt) + room <= length:
                break
        else:
            raise UserError(
                f"of {TRIES} questions none fits into a row of {length} tokens with its right passages; give questions"
                " with shorter ones, or a base with fewer tokens to a word"
            )
        ids = [*prompt, *answer, *[self._source.end] * (room - len(answer))]
        if self.recipe.mask_id in ids:
            refuse_mask(self._source.text, self.recipe.mask_id, "in the questions or around them")
        tokens, roles = np.full(length, self._source.fill, np.int32), np.full(length, PAD, np.uint8)
        tokens[: len(ids)] = ids
        roles[: len(prompt)] = PROMPT
        roles[len(prompt) : len(prompt) + len(answer) + 1] = ANSWER
        roles[len(prompt) + len(answer) + 1 : len(ids)] = TAIL
        return tokens, roles

    def _lesson(self, rng: Random, length: int) -> tuple[list[int], list[int]]:
        """The ids of a prompt and of its answer."""
        kinds = {"data": self._samples, "gap": self._paragraphs, "world": True}
        able = [kind for kind in SHARES if kinds[kind]]
        kind = rng.choices(able, [SHARES[k] for k in able])[0]
        sample = KINDS[kind](self, rng)
        if kind == "data" and rng.random() < CLOSED:
            sample = replace(sample, passages=())
        else:
            sample = self._among(sample, rng, rng.uniform(0.3, 0.95) * length * CHARACTERS)
            if kind == "data" and rng.random() < SWAPPED:  # now that no stranger tells the old answer
                sample = swapped(sample, rng.choice(self._alike[shape(answer_of(sample))]))
        text, names = self._source.text, list(TEMPLATES)
        asked = template(rng.choices(names, list(TEMPLATES.values()))[0]).prompt(sample).text
        prompt = text.encode(asked, chat=self._source.chat)
        return prompt, continuation(text, prompt, answer_of(sample))

    def _among(self, sample: Sample, rng: Random, characters: float) -> Sample:
        """The sample with as many passages as there is room for: its right ones, others of its own, strangers."""
        told = [p for p in sample.passages if p.gold]
        own = [p for p in sample.passages if not p.gold]
        rng.shuffle(own)
        for other in [*own, *rng.sample(self._strangers, min(len(self._strangers), MOST))]:
            if sum(len(p.text) for p in [*told, other]) > characters:
                break
            if other in own or not any(_has(other, answer) for answer in sample.answers):
                told.append(other)
        rng.shuffle(told)
        return replace(sample, passages=tuple(told))

    def _data(self, rng: Random) -> Sample:
        return rng.choice(self._samples)

    def _gap(self, rng: Random) -> Sample:
        """A sentence of a paragraph with a name or a number taken out."""
        paragraph = rng.choice(self._paragraphs)
        sentence, found = rng.choice(gaps(paragraph))
        missing = rng.choice(found)
        question = "What is missing here? " + GAP.sub(lambda m: "____" if m[0] == missing else m[0], sentence)
        return Sample("", question, (missing,), (Passage("", paragraph, gold=True),))

    def _world(self, rng: Random) -> Sample:
        world = World.fresh(rng.getrandbits(64), people=8)
        return (two_hop if rng.random() < 0.3 else reading)(world, rng, "", rng.randint(2, 5))

    @cached_property
    def _source(self) -> Source:
        return self.material.source()

    @cached_property
    def _ids(self) -> np.ndarray:
        return self.material.ids()

    @cached_property
    def _samples(self) -> list[Sample]:
        own = named("own")
        lines = (json.loads(line) for line in self.material.lines("questions"))
        return [own.read(line, line["id"]) for line in lines]

    @cached_property
    def _paragraphs(self) -> list[str]:
        return [json.loads(line) for line in self.material.lines("paragraphs")]

    @cached_property
    def _alike(self) -> dict[tuple[bool, int], list[str]]:
        """The answers by their shape."""
        found: dict[tuple[bool, int], list[str]] = {}
        for sample in self._samples:
            found.setdefault(shape(answer_of(sample)), []).append(answer_of(sample))
        return found

    @cached_property
    def _strangers(self) -> list[Passage]:
        """Passages that are right for no question asked of them."""
        asked = [replace(p, gold=False, evidence=()) for sample in self._samples for p in sample.passages]
        return asked + [Passage("", text) for text in self._paragraphs[: max(1000, len(asked))]]


KINDS: dict[str, Callable[[Maker, Random], Sample]] = {"data": Maker._data, "gap": Maker._gap, "world": Maker._world}


def answer_of(sample: Sample) -> str:
    """The answer as the right passage has it, where several are right."""
    gold = [p for p in sample.passages if p.gold]
    return next((a for a in sample.answers if any(_has(p, a) for p in gold)), sample.answers[0])


def shape(answer: str) -> tuple[bool, int]:
    """Whether it has digits, and how many words, as far as that tells one kind of answer from another; yes and no have
    none, for no passage tells them in a word."""
    return any(c.isdigit() for c in answer), 0 if answer.casefold() in ("yes", "no") else min(4, len(answer.split()))


def swapped(sample: Sample, other: str) -> Sample:
    """The sample as if the answer were another one: so its passages tell it. Only whole words are changed."""
    answer = answer_of(sample)
    old = re.compile(rf"(?<!\w){re.escape(answer)}(?!\w)", re.IGNORECASE)
    found = any(old.search(p.text) for p in sample.passages if p.gold)
    if not shape(answer)[1] or not found or old.search(sample.question):
        return sample
    told = tuple(replace(p, text=old.sub(lambda _: other, p.text), evidence=()) for p in sample.passages)
    return replace(sample, answers=(other,), passages=told)


def _has(passage: Passage, answer: str) -> bool:
    return answer.casefold() in passage.text.casefold()
