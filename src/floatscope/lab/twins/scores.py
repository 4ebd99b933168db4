"""Accuracy of a twin on the held-out questions.

    score_model(model, read_shipped("reading-5"))           # Score(acc=0.91, low=0.88, high=0.93, n=500)
    for event in evaluate_twin(Path("twins/models/mdm")):   # all files, into scores.json beside the weights
        event.answered, event.questions

Prompts are those of the training; decoding uses the default sampler of the paradigm at temperature 0, with eight new
tokens, 48 for a biography. A file that is already scored is skipped, unless the weights have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from msgspec import field, to_builtins

from floatscope.analysis.statistics import wilson
from floatscope.files.atomic import explain_write_errors
from floatscope.files.digests import sha256_file
from floatscope.files.json_files import write_json
from floatscope.files.records import Record, read_typed
from floatscope.lab.training.record import device_name
from floatscope.lab.twins.examples import build_prompt
from floatscope.lab.twins.held_out import SIZES
from floatscope.lab.twins.world import FAMILY_NAMES, GIVEN_NAMES, RELATIONS, RULES, VALUES
from floatscope.models.checkpoint import WEIGHTS_FILE
from floatscope.models.loader import load
from floatscope.models.model import Model
from floatscope.pipelines.decode import decode
from floatscope.tasks.sample import Sample
from floatscope.tasks.sample_files import read_shipped
from floatscope.tasks.scores import acc, f1, normalise

SCORES = "scores.json"
NEW_TOKENS = 8
LONG_ANSWER_TOKENS = {"biography": 48}  # kind of the samples → new tokens
BATCH = {"cpu": 32, "cuda": 128}


@dataclass(frozen=True)
class Score:
    """Share of correct answers, with its 95 % CI (Wilson)."""

    acc: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.acc:.3f} [{self.low:.3f}, {self.high:.3f}]"


class FileScore(Record, omit_defaults=True):
    """The entry of a question file in scores.json: its score, and what else the file measures."""

    acc: float
    low: float
    high: float
    n: int
    by_gold: list[Score] = field(default_factory=list)  # `reading-5`: by the position of the gold passage
    f1: float | None = None  # `biography`: the mean, and that of the share of the facts that an answer states
    facts: float | None = None


class TwinScores(Record):
    """The type of scores.json."""

    weights: str  # sha256 of their file
    device: str
    dtype: str
    files: dict[str, FileScore]


@dataclass(frozen=True)
class EvaluationEvent:
    """What the evaluation of a twin reports after each question."""

    kind: str
    answered: int
    questions: int  # in all
    file: str  # the question file, or "attention"


def generate_answers(model: Model, samples: Sequence[Sample], batch: int = 32) -> Iterator[tuple[int, str]]:
    """Yield (index of the sample, answer) as they are decoded; prompts of similar length share a batch."""
    order = sorted(range(len(samples)), key=lambda i: len(build_prompt(samples[i])))
    new_tokens = max((count_new_tokens(sample) for sample in samples), default=NEW_TOKENS)
    for start in range(0, len(order), batch):
        indices = order[start : start + batch]
        prompts = [build_prompt(samples[i]) for i in indices]
        out = decode(model, prompts, chat=False, new_tokens=new_tokens, samples=[samples[i].id for i in indices])
        yield from zip(indices, out.texts, strict=True)


def count_new_tokens(sample: Sample) -> int:
    """Return the number of new tokens for the answer of a sample."""
    return LONG_ANSWER_TOKENS.get(sample.meta.get("kind", ""), NEW_TOKENS)


def share_of_facts(answer: str, sample: Sample) -> float:
    """Return the share of the facts of a biography that the answer states, in any order and with any name."""
    values = [p.text[start:stop] for p in sample.passages if p.gold for start, stop in p.evidence]
    statements = [RELATIONS[relation].statements[0] for relation in sample.meta["relations"]]
    facts = [text.replace("{who}", "").replace("{what}", value) for text, value in zip(statements, values, strict=True)]
    stated = f" {normalise(answer)} "
    return float(np.mean([f" {normalise(fact)} " in stated for fact in facts]))


def score_model(model: Model, samples: Sequence[Sample], batch: int = 32) -> Score:
    """Let the model answer the samples and return its score."""
    answers = dict(generate_answers(model, samples, batch))
    return wilson_score([acc(answers[i], sample.answers) for i, sample in enumerate(samples)])


def wilson_score(correct: Sequence[float]) -> Score:
    """Return the score of answers that are correct (1) or not (0), with Wilson's interval."""
    n = len(correct)
    low, high = wilson(np.array(sum(correct)), np.array(n))
    mean, low, high = (round(float(x), 4) for x in (sum(correct) / n, low, high))
    return Score(mean, low, high, n)


def evaluate_twin(
    folder: Path, device: torch.device | None = None, is_over: Callable[[], bool] = lambda: False
) -> Iterator[EvaluationEvent]:
    """Score the twin in `folder` on every file that has no score yet; stop after a file once `is_over()`."""
    scores = read_scores(folder)
    if not missing_files(scores) or is_over():
        return
    model = load(folder, device=device)
    scores.device, scores.dtype = device_name(model.device), str(model.dtype).removeprefix("torch.")
    answered, questions = sum(SIZES[name] for name in scores.files), sum(SIZES.values())
    for name in missing_files(scores):
        if is_over():
            return
        samples = read_shipped(name)
        answers: dict[int, str] = {}
        for i, answer in generate_answers(model, samples, BATCH.get(model.device.type, 32)):
            answers[i] = answer
            answered += 1
            yield EvaluationEvent(folder.name, answered, questions, name)
        scores.files[name] = score_answers(name, samples, [answers[i] for i in range(len(samples))])
        with explain_write_errors("the scores", folder):
            write_json(folder / SCORES, to_builtins(scores))


def score_answers(name: str, samples: Sequence[Sample], answers: Sequence[str]) -> FileScore:
    """Return the entry of a file in scores.json."""
    pairs = list(zip(answers, samples, strict=True))
    correct = [acc(answer, sample.answers) for answer, sample in pairs]
    entry = FileScore(**asdict(wilson_score(correct)))
    if name == "reading-5":
        entry.by_gold = _score_by_gold_position(samples, correct)
    if name == "biography":
        entry.f1 = round(float(np.mean([f1(answer, sample.answers) for answer, sample in pairs])), 4)
        entry.facts = round(float(np.mean([share_of_facts(answer, sample) for answer, sample in pairs])), 4)
    return entry


def read_scores(folder: Path) -> TwinScores:
    """Return the scores of the weights in `folder`, without files if there are none yet."""
    weights = sha256_file(folder / WEIGHTS_FILE)
    if (folder / SCORES).is_file():
        scores = read_typed(folder / SCORES, TwinScores)
        if scores.weights == weights:
            return scores
    return TwinScores(weights=weights, device="", dtype="", files={})


def missing_files(scores: TwinScores) -> list[str]:
    """Return the question files that have no score yet."""
    return [name for name in SIZES if name not in scores.files]


def chance_accuracy(name: str) -> float | None:
    """Return the accuracy of guessing on a held-out file; None where it is not defined.

    A guess is any value of the relation, or any of the words of a few-shot case.
    """
    if name == "few-shot":
        return 1 / len(RULES)
    if name == "closed-book-fresh":
        possible = {relation: len(values) for relation, values in VALUES.items()}
        possible["teacher"] = len(GIVEN_NAMES) * len(FAMILY_NAMES)
        return float(np.mean([1 / possible[sample.meta["relation"]] for sample in read_shipped(name)]))
    return None


def _score_by_gold_position(samples: Sequence[Sample], correct: Sequence[float]) -> list[Score]:
    """Return the scores by the position of the gold passage."""
    position = np.array([sample.meta["gold_at"] for sample in samples])
    by_position = (np.array(correct)[position == p].tolist() for p in np.unique(position))
    return [wilson_score(part) for part in by_position]
