"""What is kept apart: files a model will be asked must not be among those it learns from.

refuse_held([Path("nq-train.jsonl")], [Path("nq-held.jsonl.gz")])     # by digest, of what is inside a .gz or .xz
kept, left_out = apart(samples, held)                                 # and question by question
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from floatscope.errors import UserError
from floatscope.lab.training.text import OPENERS
from floatscope.tasks.sample import Sample
from floatscope.tasks.score import normalise


def refuse_held(given: Sequence[Path], held: Sequence[Path]) -> None:
    """No file to learn from is one to be asked; the twins' held-out files are always among these."""
    own = Path(str(files("floatscope"))) / "assets" / "questions"
    kept = {content_digest(path): path for path in [*sorted(own.glob("*.jsonl")), *held]}
    for path in given:
        if (other := kept.get(content_digest(path))) is not None:
            raise UserError(
                f"{path} is the same as {other.name}, which is for evaluation: what a model is asked it must not have"
                " learnt; leave it out"
            )


def content_digest(path: Path) -> str:
    """sha256 of what a file holds, compressed or not."""
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def apart(samples: Sequence[Sample], held: Sequence[Sample]) -> tuple[list[Sample], int]:
    """The samples that share neither a question nor a right passage with one that is held, and how many do.

    Case, punctuation and articles make no difference."""
    questions = {normalise(sample.question) for sample in held}
    passages = {normalise(p.text) for sample in held for p in sample.passages if p.gold}

    def is_held(sample: Sample) -> bool:
        return normalise(sample.question) in questions or any(normalise(p.text) in passages for p in sample.passages)

    kept = [sample for sample in samples if not is_held(sample)]
    return kept, len(samples) - len(kept)
