"""How well a twin answers the held-out questions.

    score(model, read("reading-5"))                  # Score(acc=0.91, low=0.88, high=0.93, n=500)
    for asked in examine(Path("twins/models/mdm")):  # all files, into scores.json beside the weights
        asked.answered, asked.questions

The prompt is the one it learnt with, decoding the default of its kind, temperature 0, eight new tokens. A file that was
scored is not asked again, unless the weights are others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from floatscope.files.atomic import writing
from floatscope.files.records import device_name, digest, read_json, write_json
from floatscope.lab.twins.heldout import SIZES, read
from floatscope.lab.twins.lessons import prompt_of
from floatscope.lab.twins.world import FAMILY, GIVEN, RULES, VALUES
from floatscope.models.files import WHOLE
from floatscope.models.load import load
from floatscope.models.model import Model
from floatscope.pipelines.decode import decode
from floatscope.tasks.sample import Sample
from floatscope.tasks.score import acc

SCORES = "scores.json"
NEW_TOKENS = 8
DRAWS = 2000
BATCH = {"cpu": 32, "cuda": 128}


@dataclass(frozen=True)
class Score:
    """Share of questions whose answer is right, with a bootstrap 95 % interval over questions."""

    acc: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.acc:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Asked:
    """How far the questions to a twin are."""

    kind: str
    answered: int
    questions: int
    file: str  # the one that is asked


def answers(model: Model, samples: Sequence[Sample], batch: int = 32) -> Iterator[tuple[int, str]]:
    """(which sample, what the model says), as they come; prompts of like length share a batch."""
    order = sorted(range(len(samples)), key=lambda i: len(prompt_of(samples[i])))
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        prompts = [prompt_of(samples[i]) for i in chosen]
        out = decode(model, prompts, chat=False, new_tokens=NEW_TOKENS, samples=[samples[i].id for i in chosen])
        yield from zip(chosen, out.texts, strict=True)


def score(model: Model, samples: Sequence[Sample], batch: int = 32) -> Score:
    said = dict(answers(model, samples, batch))
    return score_of([acc(said[i], sample.answers) for i, sample in enumerate(samples)])


def score_of(right: Sequence[float]) -> Score:
    """1 for every right answer, 0 for every other."""
    each = np.array(right)
    draws = np.random.default_rng(0).integers(0, len(each), (DRAWS, len(each)))
    low, high = np.quantile(each[draws].mean(1), [0.025, 0.975])
    mean, low, high = (round(float(x), 4) for x in (each.mean(), low, high))
    return Score(mean, low, high, len(each))


def examine(
    folder: Path, device: torch.device | None = None, over: Callable[[], bool] = lambda: False
) -> Iterator[Asked]:
    """Ask the twin in `folder` all questions it has not been asked; ends early after a file if the time is over."""
    scores = read_scores(folder)
    if not missing(scores) or over():
        return
    model = load(folder, device=device)
    scores |= {"device": device_name(model.device), "dtype": str(model.dtype).removeprefix("torch.")}
    answered, questions = sum(SIZES[name] for name in scores["files"]), sum(SIZES.values())
    for name in missing(scores):
        if over():
            return
        samples = read(name)
        right = [0.0] * len(samples)
        for i, said in answers(model, samples, BATCH.get(model.device.type, 32)):
            right[i] = acc(said, samples[i].answers)
            answered += 1
            yield Asked(folder.name, answered, questions, name)
        scores["files"][name] = asdict(score_of(right)) | _by_place(samples, right)
        with writing("the scores", folder):
            write_json(folder / SCORES, scores)


def read_scores(folder: Path) -> dict[str, Any]:
    """What is known of the weights that lie there: {"weights": digest, "files": {name: score}, …}."""
    weights = digest(folder / WHOLE)
    if (folder / SCORES).is_file():
        scores = read_json(folder / SCORES)
        if scores.get("weights") == weights:
            return scores
    return {"weights": weights, "device": "", "dtype": "", "files": {}}


def missing(scores: dict[str, Any]) -> list[str]:
    return [name for name in SIZES if name not in scores["files"]]


def chance(name: str) -> float | None:
    """What guessing scores on a held-out file, where that can be said: any value of the relation, any of the words."""
    if name == "few-shot":
        return 1 / len(RULES)
    if name == "closed-book-fresh":
        possible = {relation: len(values) for relation, values in VALUES.items()}
        possible["teacher"] = len(GIVEN) * len(FAMILY)
        return float(np.mean([1 / possible[sample.meta["relation"]] for sample in read(name)]))
    return None


def _by_place(samples: Sequence[Sample], right: Sequence[float]) -> dict[str, Any]:
    """The scores by the place of the gold passage, where it has several."""
    at = np.array([sample.meta.get("gold_at", -1) for sample in samples])
    places = np.unique(at)
    return {"by_gold": [asdict(score_of(np.array(right)[at == p].tolist())) for p in places]} if len(places) > 1 else {}
