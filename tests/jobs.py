"""Jobs in tests: the batches that a job writes, and interrupts in the middle of one."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from floatscope.pipelines.job import BatchDone, Event, Finished, Job, Note, Started
from floatscope.traces.run import Run


def run_batches(job: Job) -> list[BatchDone]:
    """Run a job to its end and return the events of its batches; the other events must be as they should."""
    events = list(job)
    batches = [event for event in events if isinstance(event, BatchDone)]
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert events[0].total == events[-1].total == job.total == job.done
    assert [event.done for event in batches] == count_up(events[0].done, batches)
    assert all(event.done <= event.total for event in batches)
    return batches


def count_up(done: int, batches: Iterable[BatchDone]) -> list[int]:
    counts = []
    for batch in batches:
        done += len(batch.samples)
        counts.append(done)
    return counts


def read_notes(events: Iterable[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


def interrupt_after(traces: int, job: Job) -> None:
    """Run a job until so many traces are written, then interrupt it, in the middle of a batch or at its end."""
    written, write = [], Run.write

    def write_or_stop(run, trace):
        if len(written) == traces:
            raise KeyboardInterrupt
        write(run, trace)
        written.append(trace.sample)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "write", write_or_stop)
        with pytest.raises(KeyboardInterrupt):
            list(job)
