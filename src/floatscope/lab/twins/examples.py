"""Training rows of the twins: plain text, passages with questions, questions without passages, few-shot rules.

    rows = make_rows(tokenizer, text_ids, fixed_world, seed=0, count=1000, length=512, max_passages=6)
    rows.tokens, rows.roles                     # [1000, 512] each: token ids, and the role of each token

All three twins train on the same rows. A row is filled with examples; most have a few passages about fresh people and
several questions on them, some have many passages. Each answer is followed by a random number of end-of-text tokens, so
that an MDM cannot infer the length of the answer from the space left for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from floatscope.lab.twins.tokenizer import WordTokenizer
from floatscope.lab.twins.world import (
    SECOND_HOPS,
    World,
    make_biography,
    make_closed_book,
    make_contradicted,
    make_dated,
    make_few_shot,
    make_passage,
    make_reading,
    make_two_hop,
    make_unanswerable,
    sample_relations,
    write_question,
)
from floatscope.tasks.sample import Sample
from floatscope.tasks.template import load_template

TEXT, CONTEXT, ANSWER, TAIL = range(4)
"""Roles of a token: plain text, prompt of a question, answer with its end of text, further ends of text after it."""

SHARES = {
    "text": 0.15,
    "passages": 0.42,
    "biography": 0.10,
    "dated": 0.08,
    "prose": 0.03,
    "closed-book": 0.07,
    "contradicted": 0.06,
    "few-shot": 0.09,
}
"""Probability of each kind of example."""

TEXT_LIMIT = 512  # tokens of one stretch of text
MANY_PASSAGES_RATE = 0.15  # share of the passages examples that may have up to four times as many passages
MANY_PASSAGES_FACTOR = 4
MAX_VERSIONS = 6  # of a passage with a date
PASSAGE_TOKENS = 31  # of an average passage with its number

TAIL_LIMIT, LONG_TAIL_LIMIT = 10, 33  # a tail has fewer tokens than this
LONG_TAIL_RATE = 0.15
QUESTION_FIRST_RATE = 0.12  # share of questions that come before their passages


@dataclass(frozen=True)
class Rows:
    """A batch of training rows."""

    tokens: np.ndarray  # [row, length] uint16
    roles: np.ndarray  # [row, length] uint8


def build_prompt(sample: Sample, question_first: bool = False) -> str:
    """Return the prompt of a question, the same in training and evaluation."""
    return load_template("question-first" if question_first else "default").prompt(sample).text


class RowWriter:
    """One row while it is filled."""

    def __init__(self, tokenizer: WordTokenizer, rng: Random, length: int) -> None:
        self.tokenizer, self.rng, self.length = tokenizer, rng, length
        self.tokens: list[int] = []
        self.roles: list[int] = []

    @property
    def is_full(self) -> bool:
        """Whether the row has all its tokens."""
        return len(self.tokens) >= self.length

    def append(self, ids: list[int], role: int) -> None:
        """Append tokens of one role."""
        self.tokens += ids
        self.roles += [role] * len(ids)

    def append_text(self, text: str, role: int) -> None:
        """Tokenize and append a text."""
        self.append(self.tokenizer.encode(text), role)

    def append_answer(self, text: str) -> None:
        """Append an answer, its end of text, and a tail of random length."""
        self.append([*self.tokenizer.encode(f" {text}"), self.tokenizer.eos_id], ANSWER)
        limit = LONG_TAIL_LIMIT if self.rng.random() < LONG_TAIL_RATE else TAIL_LIMIT
        self.append([self.tokenizer.eos_id] * self.rng.randrange(limit), TAIL)

    def append_question(self, sample: Sample, question_first: bool = False) -> None:
        """Append the prompt of a sample and its answer."""
        self.append_text(build_prompt(sample, question_first), CONTEXT)
        self.append_answer(sample.answers[0])


def make_rows(
    tokenizer: WordTokenizer,
    text: np.ndarray,
    fixed_world: World,
    seed: object,
    count: int,
    length: int,
    max_passages: int,
) -> Rows:
    """Make `count` rows of `length` tokens; `text` is one long array of token ids."""
    rng = Random(f"rows {seed}")
    tokens, roles = np.zeros((count, length), np.uint16), np.zeros((count, length), np.uint8)
    kinds, weights = list(SHARES), list(SHARES.values())
    for row in range(count):
        writer = RowWriter(tokenizer, rng, length)
        while not writer.is_full:
            writer.append([tokenizer.bos_id], CONTEXT)
            EXAMPLE_WRITERS[rng.choices(kinds, weights)[0]](writer, text, fixed_world, max_passages)
        tokens[row], roles[row] = writer.tokens[:length], writer.roles[:length]
    return Rows(tokens, roles)


def _write_text(writer: RowWriter, text: np.ndarray, fixed_world: World, max_passages: int) -> None:
    """Write a random stretch of the text files."""
    limit = min(TEXT_LIMIT, writer.length)
    room = min(writer.length - len(writer.tokens), writer.rng.randint(min(64, limit), limit))
    start = writer.rng.randrange(max(1, len(text) - room))
    writer.append(text[start : start + room].tolist(), TEXT)


def _write_passages(writer: RowWriter, text: np.ndarray, fixed_world: World, max_passages: int) -> None:
    """Write passages of a fresh world with questions; some take two hops, some cannot be answered."""
    rng = writer.rng
    make = rng.choices((make_reading, make_two_hop, make_unanswerable), (0.7, 0.2, 0.1))[0]
    passages = rng.randint(min(2, max_passages) if make is make_two_hop else 1, max_passages)
    fitting = min(MANY_PASSAGES_FACTOR * max_passages, (writer.length - len(writer.tokens)) // PASSAGE_TOKENS)
    if rng.random() < MANY_PASSAGES_RATE and fitting > max_passages:
        passages = rng.randint(max_passages, fitting)
    world = World.generate(rng.getrandbits(64), people=passages + 3)
    _write_question_series(writer, world, make(world, rng, "", passages))


def _write_biography(writer: RowWriter, text: np.ndarray, fixed_world: World, max_passages: int) -> None:
    """Write passages of a fresh world, a question for all facts of a person, and further questions."""
    rng = writer.rng
    world = World.generate(rng.getrandbits(64), people=max_passages + 3)
    _write_question_series(writer, world, make_biography(world, rng, "", rng.randint(1, max_passages)))


def _write_dated(writer: RowWriter, text: np.ndarray, fixed_world: World, max_passages: int) -> None:
    """Write passages of a fresh world, of which several are versions of one, and questions on the newest."""
    rng = writer.rng
    world = World.generate(rng.getrandbits(64), people=max_passages + 3)
    passages = rng.randint(min(2, max_passages), max_passages)
    versions = rng.randint(1, min(MAX_VERSIONS, passages))
    _write_question_series(writer, world, make_dated(world, rng, "", passages, versions))


def _write_question_series(writer: RowWriter, world: World, first: Sample) -> None:
    """Write a sample, then further questions that its passages answer."""
    rng = writer.rng
    writer.append_question(first, rng.random() < QUESTION_FIRST_RATE)
    relations: dict[str, dict[str, None]] = {}
    for passage in first.passages:
        relations.setdefault(passage.title, {}).update(dict.fromkeys(passage.relations))
    questions = [(world.person(name), relation, name) for name in relations for relation in relations[name]]
    for name in relations:
        if "teacher" in relations[name]:
            teacher = world.person(world.person(name).facts["teacher"])
            hops = (relation for relation in relations.get(teacher.name, ()) if relation in SECOND_HOPS)
            questions += [(teacher, relation, f"the teacher of {name}") for relation in hops]
    rng.shuffle(questions)
    for person, relation, reference in questions[: rng.randint(1, 8)]:
        if writer.is_full:
            return
        question = write_question(person, relation, rng, reference)
        writer.append_question(Sample("", question, (person.facts[relation],)))


def _write_prose(writer: RowWriter, text: np.ndarray, fixed_world: World, max_passages: int) -> None:
    """Write facts of the fixed world as prose."""
    people = writer.rng.sample(fixed_world.people, max_passages)
    passages = (make_passage(person, sample_relations(writer.rng, at_most=5), writer.rng).text for person in people)
    writer.append_text("\n".join(passages), TEXT)


def _write_closed_book(writer: RowWriter, text: np.ndarray, fixed_world: World, max_passages: int) -> None:
    """Write questions on the fixed world, without passages."""
    for _ in range(writer.rng.randint(1, 12)):
        if not writer.is_full:
            writer.append_question(make_closed_book(fixed_world, writer.rng, ""))


def _write_contradicted(writer: RowWriter, text: np.ndarray, fixed_world: World, max_passages: int) -> None:
    """Write a question whose passage contradicts the fixed world."""
    writer.append_question(make_contradicted(fixed_world, writer.rng, "", writer.rng.randint(1, max_passages)))


def _write_few_shot(writer: RowWriter, text: np.ndarray, fixed_world: World, max_passages: int) -> None:
    """Write examples of a rule, then several cases of it."""
    rng = writer.rng
    first = make_few_shot(rng, "", rng.randint(1, 6))
    writer.append_question(first)
    for _ in range(rng.randrange(7)):
        if not writer.is_full:
            writer.append_question(make_few_shot(rng, "", shots=0, rule=first.meta["rule"]))


EXAMPLE_WRITERS: dict[str, Callable[[RowWriter, np.ndarray, World, int], None]] = {
    "text": _write_text,
    "passages": _write_passages,
    "biography": _write_biography,
    "dated": _write_dated,
    "prose": _write_prose,
    "closed-book": _write_closed_book,
    "contradicted": _write_contradicted,
    "few-shot": _write_few_shot,
}
