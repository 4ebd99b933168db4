"""One leg of a training: steps until the time is over, saved on the way, so that no kill loses more than two minutes.

    now = Leg.of(folder, minutes=8, workers=0, command="…", licence="…")
    progress = yield from run(training, batches, steps, now, tokens=16384)

Ctrl-C ends a leg as its time does, and is heard again when all is saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from floatscope.lab.training.checkpoint import Training, restore, save
from floatscope.lab.training.interrupts import interrupts
from floatscope.lab.training.progress import Progress, Told, told

SAVE_EVERY = 120.0  # seconds

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Leg:
    """What one call is given, beside the files and the recipe."""

    folder: Path
    ends: float  # by the monotonic clock
    workers: int
    command: str
    licence: str

    @classmethod
    def of(cls, folder: Path, minutes: float, workers: int, command: str, licence: str) -> Leg:
        return cls(folder, time.monotonic() + 60 * minutes, workers, command, licence)

    @property
    def over(self) -> bool:
        return time.monotonic() > self.ends


def run(
    training: Training,
    batches: Callable[[int], Generator[Batch, None, None]],
    steps: Callable[[Iterator[Batch], Progress, Callable[[], bool]], Iterator[object]],
    now: Leg,
    tokens: int,
) -> Generator[Told, None, Progress]:
    """From the last checkpoint on, and at least one step; `batches` begin at a step, `steps` end when they are told,
    each with `tokens`."""
    progress = restore(training) or Progress(0, [])
    began, start, earlier = time.monotonic(), progress.step, progress.seconds
    saved = began
    with closing(batches(start)) as rows, interrupts() as interrupted:
        for _ in steps(rows, progress, lambda: bool(interrupted) or (now.over and progress.step > start)):
            progress.seconds = earlier + time.monotonic() - began
            if time.monotonic() - saved > SAVE_EVERY:
                save(training, progress)
                saved = time.monotonic()
            rate = (progress.step - start) * tokens / (progress.seconds - earlier)
            yield told(training.kind, progress, training.recipe, rate)
        progress.seconds = earlier + time.monotonic() - began
    if progress.step > start:  # else there is nothing new, and perhaps nothing at all
        save(training, progress)
    if interrupted:
        raise KeyboardInterrupt
    return progress
