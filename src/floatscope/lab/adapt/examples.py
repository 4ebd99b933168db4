"""Training rows of an adaptation: stretches of text, and questions with passages followed by space for an answer.

    batch = BatchMaker(corpus, recipe)(17)      # batch 17 does not depend on the process that makes it
    batch.text                                  # [row, length]
    batch.tokens, batch.roles                   # [row, length]: one question per row, padded

Questions come from the data files (half of them with a swapped answer), from sentences of the text with a gap (the
passage still contains what is missing), and from invented worlds. Passages of other questions are mixed with the gold
ones. Prompts are those of `floatscope eval`, with the chat template if there is one.
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
from floatscope.lab.adapt.corpus import GAP, Corpus, QuestionFormat, find_gaps
from floatscope.lab.adapt.recipe import Recipe, refuse_mask
from floatscope.lab.twins.world import World, make_reading, make_two_hop
from floatscope.pipelines.likelihood import encode_continuation
from floatscope.tasks.formats import get_format
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.template import load_template

PAD, PROMPT, ANSWER, TAIL = range(4)
"""Roles of a token: padding, the prompt, the answer with its end of text, further ends of text after it."""

SHARES = {"data": 0.35, "gap": 0.45, "world": 0.2}
"""Probability of each kind of question."""

TEMPLATES = {"instruct": 0.8, "default": 0.2}
ANSWER_LENGTHS = (8, 16, 24, 32)  # tokens of an answer with its ends of text
MAX_TRIES = 100
MAX_OTHER_PASSAGES = 8
SWAP_RATE = 0.5  # share of data questions whose answer is swapped in the passages, so that it must be read there
CLOSED_BOOK_RATE = 0.05  # share of data questions without passages
CHARACTERS_PER_TOKEN = 3.5  # a low estimate, so that few prompts are too long


@dataclass(frozen=True)
class Batch:
    """The rows of one step."""

    text: np.ndarray  # [row, length]
    tokens: np.ndarray  # [row, length]
    roles: np.ndarray  # [row, length] uint8


@dataclass
class BatchMaker:
    """Makes the batches of a corpus by number; it opens its files on first use, in the process that uses them."""

    corpus: Corpus
    recipe: Recipe

    def __call__(self, number: int) -> Batch:
        rng, recipe = Random(f"batch {self.recipe.seed} {number}"), self.recipe
        starts = [rng.randrange(max(1, len(self._ids) - recipe.length)) for _ in range(recipe.tokens // recipe.length)]
        text = np.stack([self._ids[start : start + recipe.length] for start in starts]).astype(np.int32)
        length = rng.choice(recipe.lengths)
        rows = [self._make_row(rng, length) for _ in range(max(1, recipe.tokens // length))]
        return Batch(text, np.stack([tokens for tokens, _ in rows]), np.stack([roles for _, roles in rows]))

    def _make_row(self, rng: Random, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and roles of a question that fits into `length`; draw again while it does not."""
        for _ in range(MAX_TRIES):
            prompt, answer = self._make_question(rng, length)
            room = rng.choice([n for n in ANSWER_LENGTHS if n > len(answer)] or [len(answer) + 1])
            if len(prompt) + room <= length:
                break
        else:
            raise UserError(
                f"of {MAX_TRIES} questions none fits into a row of {length} tokens with its gold passages; give"
                " questions with shorter passages, or a base with fewer tokens per word"
            )
        ids = [*prompt, *answer, *[self._format.end_id] * (room - len(answer))]
        if self.recipe.mask_id in ids:
            refuse_mask(self._format.tokenizer, self.recipe.mask_id, "in the questions or their template")
        tokens, roles = np.full(length, self._format.pad_id, np.int32), np.full(length, PAD, np.uint8)
        tokens[: len(ids)] = ids
        roles[: len(prompt)] = PROMPT
        roles[len(prompt) : len(prompt) + len(answer) + 1] = ANSWER
        roles[len(prompt) + len(answer) + 1 : len(ids)] = TAIL
        return tokens, roles

    def _make_question(self, rng: Random, length: int) -> tuple[list[int], list[int]]:
        """Return the token ids of a prompt and of its answer."""
        sources = {"data": self._samples, "gap": self._paragraphs, "world": True}
        kinds = [kind for kind in SHARES if sources[kind]]
        kind = rng.choices(kinds, [SHARES[k] for k in kinds])[0]
        sample = QUESTION_MAKERS[kind](self, rng)
        if kind == "data" and rng.random() < CLOSED_BOOK_RATE:
            sample = replace(sample, passages=())
        else:
            sample = self._add_passages(sample, rng, rng.uniform(0.3, 0.95) * length * CHARACTERS_PER_TOKEN)
            if kind == "data" and rng.random() < SWAP_RATE:  # after other passages with the old answer are left out
                sample = swap_answer(sample, rng.choice(self._answers_by_shape[answer_shape(gold_answer(sample))]))
        tokenizer, names = self._format.tokenizer, list(TEMPLATES)
        template = load_template(rng.choices(names, list(TEMPLATES.values()))[0])
        prompt = tokenizer.encode(template.prompt(sample).text, chat=self._format.chat)
        return prompt, encode_continuation(tokenizer, prompt, gold_answer(sample))

    def _add_passages(self, sample: Sample, rng: Random, max_characters: float) -> Sample:
        """Return the sample with passages up to `max_characters`: its gold ones, its other ones, unrelated ones."""
        passages = [p for p in sample.passages if p.gold]
        own = [p for p in sample.passages if not p.gold]
        rng.shuffle(own)
        unrelated = rng.sample(self._unrelated, min(len(self._unrelated), MAX_OTHER_PASSAGES))
        for other in [*own, *unrelated]:
            if sum(len(p.text) for p in [*passages, other]) > max_characters:
                break
            if other in own or not any(_contains(other, answer) for answer in sample.answers):
                passages.append(other)
        rng.shuffle(passages)
        return replace(sample, passages=tuple(passages))

    def _make_data_question(self, rng: Random) -> Sample:
        return rng.choice(self._samples)

    def _make_gap_question(self, rng: Random) -> Sample:
        """Return a sentence of a paragraph with a name or a number taken out."""
        paragraph = rng.choice(self._paragraphs)
        sentence, gaps = rng.choice(find_gaps(paragraph))
        missing = rng.choice(gaps)
        question = "What is missing here? " + GAP.sub(lambda m: "____" if m[0] == missing else m[0], sentence)
        return Sample("", question, (missing,), (Passage("", paragraph, gold=True),))

    def _make_world_question(self, rng: Random) -> Sample:
        world = World.generate(rng.getrandbits(64), people=8)
        return (make_two_hop if rng.random() < 0.3 else make_reading)(world, rng, "", rng.randint(2, 5))

    @cached_property
    def _format(self) -> QuestionFormat:
        return self.corpus.question_format()

    @cached_property
    def _ids(self) -> np.ndarray:
        return self.corpus.ids()

    @cached_property
    def _samples(self) -> list[Sample]:
        own = get_format("own")
        lines = (json.loads(line) for line in self.corpus.lines("questions"))
        return [own.read(line, line["id"]) for line in lines]

    @cached_property
    def _paragraphs(self) -> list[str]:
        return [json.loads(line) for line in self.corpus.lines("paragraphs")]

    @cached_property
    def _answers_by_shape(self) -> dict[tuple[bool, int], list[str]]:
        answers: dict[tuple[bool, int], list[str]] = {}
        for sample in self._samples:
            answers.setdefault(answer_shape(gold_answer(sample)), []).append(gold_answer(sample))
        return answers

    @cached_property
    def _unrelated(self) -> list[Passage]:
        """Passages to mix in, none of them marked as gold."""
        passages = [replace(p, gold=False, evidence=()) for sample in self._samples for p in sample.passages]
        return passages + [Passage("", text) for text in self._paragraphs[: max(1000, len(passages))]]


QUESTION_MAKERS: dict[str, Callable[[BatchMaker, Random], Sample]] = {
    "data": BatchMaker._make_data_question,
    "gap": BatchMaker._make_gap_question,
    "world": BatchMaker._make_world_question,
}


def gold_answer(sample: Sample) -> str:
    """Return the answer that a gold passage contains, if several answers are correct."""
    gold = [p for p in sample.passages if p.gold]
    return next((a for a in sample.answers if any(_contains(p, a) for p in gold)), sample.answers[0])


def answer_shape(answer: str) -> tuple[bool, int]:
    """Return whether an answer has digits, and its number of words up to 4: answers of one shape can be swapped.

    The number is 0 for yes and no, which no passage states as a word.
    """
    return any(c.isdigit() for c in answer), 0 if answer.casefold() in ("yes", "no") else min(4, len(answer.split()))


def swap_answer(sample: Sample, other: str) -> Sample:
    """Return the sample with `other` as its answer, also in the passages; only complete words are replaced."""
    answer = gold_answer(sample)
    old = re.compile(rf"(?<!\w){re.escape(answer)}(?!\w)", re.IGNORECASE)
    is_stated = any(old.search(p.text) for p in sample.passages if p.gold)
    if not answer_shape(answer)[1] or not is_stated or old.search(sample.question):
        return sample
    passages = tuple(replace(p, text=old.sub(lambda _: other, p.text), evidence=()) for p in sample.passages)
    return replace(sample, answers=(other,), passages=passages)


def _contains(passage: Passage, answer: str) -> bool:
    return answer.casefold() in passage.text.casefold()
