"""What commands print: labelled lines, tables, and the sentence of an interrupt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import typer

from floatscope.errors import escape_controls

if TYPE_CHECKING:
    from rich.console import Console

    from floatscope.tasks.sample_files import SampleFile

LABEL = 11  # characters


def make_console(*, stderr: bool = False) -> Console:
    """A console that neither wraps nor colours values; with --json it writes to stderr."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True)


def print_text(console: Console, text: str) -> None:
    """A text whose brackets are not markup and whose control characters are spelled out."""
    console.print(escape_controls(text), markup=False, soft_wrap=True)


def print_line(console: Console, label: str, text: str) -> None:
    """The same after a bold label."""
    from rich.markup import escape

    console.print(f"[bold]{label:<{LABEL}}[/]{escape(escape_controls(text))}")


def print_skipped(print_text: Callable[[str, str], None], reading: SampleFile) -> None:
    """Print what --skip-bad skipped, if anything, with a function of a label and a text."""
    if reading.errors:
        (number, reason), count, unit = reading.errors[0], len(reading.errors), reading.unit
        entries = f"1 {unit}" if count == 1 else f"{count} {unit}s"
        print_text("skipped", f"{entries} that cannot be read; the first is {unit} {number}: {reason}")


def print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[object]], wrap: bool = False) -> None:
    """A plain table; columns of words are aligned left, columns of numbers right. `wrap` breaks long cells."""
    from rich.table import Table
    from rich.text import Text

    cells = [[escape_controls(str(cell)) for cell in row] for row in rows]
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


def show_log(verbosity: int) -> Callable[[], None]:
    """Show the log of floatscope on stderr, from INFO on, or with 2 from DEBUG on; return what undoes it."""
    logger, handler = logging.getLogger("floatscope"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbosity == 1 else logging.DEBUG)

    def hide() -> None:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)

    return hide


@contextmanager
def explain_interrupt(describe: Callable[[], str]) -> Iterator[None]:
    """Ctrl-C ends a job with one sentence that says what is finished, and with status 130."""
    try:
        yield
    except KeyboardInterrupt as error:
        typer.echo(f"floatscope: interrupted; {describe()}; run the same command to resume", err=True)
        raise typer.Exit(130) from error
