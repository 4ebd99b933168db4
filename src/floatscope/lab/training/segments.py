"""One segment of a training: steps until its time is over, with a checkpoint at least every two minutes.

    segment = Segment.start(folder, minutes=8, workers=0, command="…", licence="…")
    progress = yield from run_segment(training, batches, steps, segment, tokens_per_step=16384)

Ctrl-C ends a segment in the same way as its time does; KeyboardInterrupt is raised once everything is saved.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from floatscope.errors import UserError
from floatscope.lab.training.checkpoint import Training, restore_checkpoint, save_checkpoint
from floatscope.lab.training.progress import Progress, ProgressEvent

SAVE_EVERY = 120.0  # seconds
CORPUS = "corpus"  # the folder of the prepared data, inside a training's folder

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Segment:
    """The settings of one call, which do not change the result of the training."""

    folder: Path
    deadline: float  # on the monotonic clock
    workers: int
    command: str
    licence: str

    @classmethod
    def start(cls, folder: Path, minutes: float, workers: int, command: str, licence: str) -> Segment:
        """Begin a segment that ends in `minutes` from now."""
        return cls(folder, time.monotonic() + 60 * minutes, workers, command, licence)

    @property
    def is_over(self) -> bool:
        """Whether the time of the segment is used up."""
        return time.monotonic() > self.deadline


def refuse_old_folder(folder: Path) -> None:
    """Refuse to resume a training that floatscope 0.6 began: its checkpoints have other names and keys."""
    if (folder / "material").is_dir():
        raise UserError(
            f"{folder} holds a training that floatscope 0.6 began; finish it with that version, or start again with"
            " another --out"
        )


def run_segment(
    training: Training,
    batches: Callable[[int], Generator[Batch, None, None]],
    steps: Callable[[Iterator[Batch], Progress, Callable[[], bool]], Iterator[object]],
    segment: Segment,
    tokens_per_step: int,
) -> Generator[ProgressEvent, None, Progress]:
    """Resume from the last checkpoint, train at least one step, save, and return the progress.

    `batches(start)` yields the batches from step `start` on. `steps(batches, progress, is_over)` trains until `is_over`
    returns true.
    """
    progress = restore_checkpoint(training) or Progress(0, [])
    began, first_step, earlier = time.monotonic(), progress.step, progress.seconds
    saved = began
    with closing(batches(first_step)) as rows, catch_interrupts() as interrupts:
        for _ in steps(rows, progress, lambda: bool(interrupts) or (segment.is_over and progress.step > first_step)):
            progress.seconds = earlier + time.monotonic() - began
            if time.monotonic() - saved > SAVE_EVERY:
                save_checkpoint(training, progress)
                saved = time.monotonic()
            rate = (progress.step - first_step) * tokens_per_step / (progress.seconds - earlier)
            yield ProgressEvent.from_progress(training.kind, progress, training.recipe, rate)
        progress.seconds = earlier + time.monotonic() - began
    if progress.step > first_step:
        save_checkpoint(training, progress)
    if interrupts:
        raise KeyboardInterrupt
    return progress


@contextmanager
def catch_interrupts() -> Iterator[list[int]]:
    """Collect the first Ctrl-C in the yielded list, so that the running step can finish; raise on a second one."""
    caught: list[int] = []

    def handle(number: int, _: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield caught
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)
