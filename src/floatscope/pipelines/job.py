"""A job: a plan of work items, those that are missing done batch by batch, events on the way, a status read from disk.

    job = plan_trace(model, samples, "runs/mdm")     # or plan_evaluation, plan_stress, plan_intervention, plan_study
    job.done, job.total                              # the samples on disk now, and all
    for event in job: print(event)                   # Started, Note, BatchDone, …, Finished
    run_job(job, on_event=print)                     # the same, to the end

A job has parts, each with a run folder: a model and its untrained controls, the points of a stress test, the conditions
of an experiment. Iterating a job works on what is missing, and iterating it again resumes. A batch is on disk when its
event comes, so whatever happens later, it is not lost.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from floatscope.interventions.notes import EditNote, merge_notes
from floatscope.traces.run_record import FINISHED, RECORD_FILE, read_record

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """Something that happened in a job."""

    kind: ClassVar[str]

    @property
    def as_json(self) -> dict[str, Any]:
        """The event as JSON values: its kind, and its fields."""
        return {"event": self.kind, **asdict(self)}


@dataclass(frozen=True)
class Started(Event):
    """The work begins; `done` of `total` samples are on disk already."""

    kind: ClassVar[str] = "started"
    done: int
    total: int


@dataclass(frozen=True)
class BatchDone(Event):
    """A batch of a part has been written to disk."""

    kind: ClassVar[str] = "batch done"
    part: str
    samples: tuple[str, ...]
    acc: float | None  # mean over the part so far; None if nothing is scored
    done: int  # samples of all parts, with those of earlier starts
    total: int
    seconds: float  # since this start
    seconds_left: float  # for the remaining samples, at the present rate


@dataclass(frozen=True)
class Note(Event):
    """A sentence about what a result lacks, or what an edit did not do."""

    kind: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True)
class Finished(Event):
    """All samples are on disk."""

    kind: ClassVar[str] = "finished"
    total: int
    seconds: float


@dataclass(frozen=True)
class Batch:
    """What a part has written."""

    samples: tuple[str, ...]
    acc: float | None


class Part(ABC):
    """One run folder of a job, and the work that fills it."""

    path: Path

    @property
    def name(self) -> str:
        """The name of the part in events."""
        return self.path.name

    @property
    def subject(self) -> str:
        """The subject of notes. Parts with the same one, such as the draws of a control, share their notes."""
        return self.name

    @property
    @abstractmethod
    def total(self) -> int:
        """The number of samples."""

    @abstractmethod
    def count_done(self) -> int:
        """Return the number of samples on disk now."""

    @abstractmethod
    def work(self) -> Iterator[Batch]:
        """Do what is missing and set the status; a batch is on disk when it is yielded."""

    def read_notes(self) -> list[EditNote]:
        """Return the notes about edits that are on disk."""
        return []

    @property
    def is_finished(self) -> bool:
        """Whether everything is on disk and the folder says so."""
        has_record = (self.path / RECORD_FILE).exists()
        return has_record and read_record(self.path)["status"] == FINISHED and self.count_done() == self.total


@dataclass(frozen=True, eq=False, repr=False)
class Job:
    """A checked plan. Iterating it does what is missing, part by part; iterating it again resumes."""

    path: Path
    parts: Sequence[Part]
    notes: Sequence[str] = ()  # known before the work begins

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.done} of {self.total} samples, in {self.path})"

    @property
    def total(self) -> int:
        """The number of samples over all parts."""
        return sum(part.total for part in self.parts)

    @property
    def done(self) -> int:
        """The number of samples that are on disk now."""
        return sum(part.count_done() for part in self.parts)

    def __iter__(self) -> Iterator[Event]:
        began, done, total = time.monotonic(), self.done, self.total
        worked = 0
        yield Started(done, total)
        yield from map(Note, self.notes)
        for part in self.parts:
            if part.is_finished:
                logger.info("%s: all %d samples are on disk", part.name, part.total)
                continue
            for batch in part.work():
                done, worked = done + len(batch.samples), worked + len(batch.samples)
                seconds = time.monotonic() - began
                left = seconds / max(1, worked) * (total - done)
                yield BatchDone(part.name, batch.samples, batch.acc, done, total, seconds, left)
        edit_notes = dict[str, list[EditNote]]()
        for part in self.parts:  # from the folders, so that a resumed job has the notes of an uninterrupted one
            edit_notes.setdefault(part.subject, []).extend(part.read_notes())
        for subject, notes in edit_notes.items():
            yield from (Note(note.describe(subject)) for note in merge_notes(notes))
        yield Finished(total, time.monotonic() - began)


def run_job(job: Job, on_event: Callable[[Event], None] | None = None) -> None:
    """Run a job to its end."""
    for event in job:
        if on_event is not None:
            on_event(event)
