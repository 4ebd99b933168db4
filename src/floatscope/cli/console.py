"""What commands print: labelled lines, tables, progress bars, and the sentence of an interrupt."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from floatscope.tasks.sample_files import SampleFile

LABEL = 11  # characters


def make_console(*, stderr: bool = False) -> Console:
    """A console that neither wraps nor colours values; with --json it writes to stderr."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True)


def print_line(console: Console, label: str, text: str) -> None:
    """A bold label and a text, whose brackets are not markup."""
    from rich.markup import escape

    console.print(f"[bold]{label:<{LABEL}}[/]{escape(text)}")


def print_notes(console: Console, notes: Sequence[str]) -> None:
    """One line for each note."""
    for note in notes:
        print_line(console, "note", note)


def print_skipped(console: Console, reading: SampleFile) -> None:
    """What --skip-bad skipped, if anything."""
    if reading.errors:
        (number, reason), count, unit = reading.errors[0], len(reading.errors), reading.unit
        entries = f"1 {unit}" if count == 1 else f"{count} {unit}s"
        print_line(console, "skipped", f"{entries} that cannot be read; the first is {unit} {number}: {reason}")


def print_recall(console: Console, recall: float | None, k: int) -> None:
    """How many gold passages the index returned, if one was used."""
    if recall is not None:
        print_line(console, "recall", f"{recall:.3f} of the gold passages are among the {k} retrieved")


def print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[object]], wrap: bool = False) -> None:
    """A plain table; columns of words are aligned left, columns of numbers right. `wrap` breaks long cells."""
    from rich.table import Table
    from rich.text import Text

    cells = [[str(cell) for cell in row] for row in rows]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for i, column in enumerate(columns):
        is_text = i == 0 or all(row[i][:1].isalpha() for row in cells)
        table.add_column(column, justify="left" if is_text else "right", no_wrap=not wrap)
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def show_status(text: str) -> AbstractContextManager[object]:
    """A spinner on stderr while something takes its time; nothing where stderr is not a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    return console.status(text) if console.is_terminal else nullcontext()


@contextmanager
def show_progress(console: Console, label: str, total: int, done: int) -> Iterator[Callable[[int, str], None]]:
    """A progress bar; yields `update(done, text)`."""
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}", markup=False)
    with Progress(TextColumn(f"[bold]{escape(label):<{LABEL - 1}}[/]"), *columns, console=console) as bars:
        bar = bars.add_task("", total=total, completed=done, text="")
        yield lambda done, text: bars.update(bar, completed=done, text=text)


@contextmanager
def explain_interrupt(describe: Callable[[], str]) -> Iterator[None]:
    """Ctrl-C ends a job with one sentence that says what is finished, and with status 130."""
    try:
        yield
    except KeyboardInterrupt as error:
        typer.echo(f"floatscope: interrupted; {describe()}; run the same command to resume", err=True)
        raise typer.Exit(130) from error


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """The texts of the warnings of a block, each once; they are there when the block ends."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        yield texts
    texts += dict.fromkeys(str(warning.message) for warning in caught)


def format_time(event: Any) -> str:
    """The time left of a job, or the time it took: "0:01:20 left", "in 0:02:05"."""
    if event.done < event.total:
        return f"{format_clock(event.seconds_left)} left"
    return f"in {format_clock(event.seconds)}"


def format_clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
