"""`Output`: what a command says while a job runs, for people in a terminal, in a pipe, and for machines.

    output = Output(as_json)
    output.line("opening", "twin:mdm")
    notes = output.run("tracing", job)       # a progress bar, or lines, or JSON; returns the notes of the job
    output.finish(record)                    # --json: the result as one JSON object on stdout

| where                  | progress                                                  |
| ---------------------- | --------------------------------------------------------- |
| a terminal             | a bar                                                     |
| a pipe                 | a line now and then                                       |
| `--json`               | every event as a line of JSON on stderr                   |
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from floatscope.cli.console import LABEL, explain_interrupt, make_console, print_line, print_skipped

if TYPE_CHECKING:
    from floatscope.pipelines.job import BatchDone, Job
    from floatscope.tasks.sample_files import SampleFile

SECONDS_BETWEEN_LINES = 5.0  # of progress in a pipe

Show = Callable[[int, str], None]
"""Shows the number of finished samples and a text."""


class Output:
    """Where a command that runs jobs writes its lines, its progress and its result."""

    def __init__(self, as_json: bool) -> None:
        self.as_json, self.console = as_json, make_console(stderr=as_json)

    def line(self, label: str, text: str) -> None:
        """A labelled line; with --json an event with this name."""
        if self.as_json:
            self.write_event({"event": label, "text": text})
        else:
            print_line(self.console, label, text)

    def skipped(self, file: SampleFile | None) -> int:
        """Say what --skip-bad skipped, and return how many entries."""
        if file is None:
            return 0
        print_skipped(self.line, file)
        return len(file.errors)

    def recall(self, recall: float | None, k: int) -> None:
        """Say how many gold passages the index returned, if one was used."""
        if recall is not None:
            self.line("recall", f"{recall:.3f} of the gold passages are among the {k} retrieved")

    def run(self, label: str, job: Job) -> list[str]:
        """Run a job to its end, show its progress, and return its notes."""
        from floatscope.pipelines.job import BatchDone, Note, Started

        notes: list[str] = []
        finished = f"{{}} of {job.total} samples are finished"
        with explain_interrupt(lambda: finished.format(job.done)), self.progress(label, job.total) as show:
            for event in job:
                if isinstance(event, Note):
                    notes.append(event.text)
                if self.as_json:
                    self.write_event(event.as_json)
                elif isinstance(event, Note):
                    self.line("note", event.text)
                elif isinstance(event, Started) and event.done:
                    self.line("resuming", f"{event.done} of {event.total} samples are already finished")
                    show(event.done, "")
                elif isinstance(event, BatchDone):
                    show(event.done, _describe(event))
        return notes

    def finish(self, record: Mapping[str, Any]) -> None:
        """The result of the command as one JSON object."""
        typer.echo(json.dumps(record, indent=1))

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Show]:
        """A bar in a terminal, a line now and then in a pipe, nothing with --json, whose events say it."""
        if self.as_json:
            yield lambda done, text: None
        elif self.console.is_terminal:
            yield from self._bar(label, total)
        else:
            yield self._lines(label, total)

    def _bar(self, label: str, total: int) -> Iterator[Show]:
        from rich.markup import escape
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}", markup=False)
        with Progress(TextColumn(f"[bold]{escape(label):<{LABEL - 1}}[/]"), *columns, console=self.console) as bars:
            bar = bars.add_task("", total=total, text="")
            yield lambda done, text: bars.update(bar, completed=done, text=text)

    def _lines(self, label: str, total: int) -> Show:
        last = 0.0

        def show(done: int, text: str) -> None:
            nonlocal last
            if done == total or time.monotonic() - last >= SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                self.line(label, f"{done} of {total}{', ' if text else ''}{text}")

        return show

    def write_event(self, event: Mapping[str, Any]) -> None:
        """An event as a line of JSON on stderr."""
        typer.echo(json.dumps(event, ensure_ascii=False), err=True)


def _describe(event: BatchDone) -> str:
    """The part, its score so far, and the time left or taken."""
    acc = "" if event.acc is None else f" acc {100 * event.acc:.1f} %,"
    is_last = event.done == event.total
    clock = f"in {format_clock(event.seconds)}" if is_last else f"{format_clock(event.seconds_left)} left"
    return f"{event.part}:{acc} {clock}"


def format_clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
