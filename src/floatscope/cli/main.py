"""`floatscope …`: the commands, and how each of them ends.

    0     success
    1     `doctor` found a problem
    2     a mistake the caller can correct: one sentence on stderr, no traceback
    130   interrupted; everything finished is kept

A command imports torch and transformers itself, after its arguments are checked, so `--help` and mistakes answer at
once.
"""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from floatscope import __version__
from floatscope.cli.adapt import adapt
from floatscope.cli.compare import compare
from floatscope.cli.console import show_log
from floatscope.cli.data import data
from floatscope.cli.decode import decode
from floatscope.cli.demo import demo
from floatscope.cli.doctor import doctor
from floatscope.cli.eval import evaluate
from floatscope.cli.fetch import fetch
from floatscope.cli.help_text import help_for
from floatscope.cli.index import index
from floatscope.cli.intervene import intervene
from floatscope.cli.lens import lens
from floatscope.cli.models import models
from floatscope.cli.report import report
from floatscope.cli.stress import stress
from floatscope.cli.study import study
from floatscope.cli.trace import trace
from floatscope.cli.twins import twins
from floatscope.errors import UserError, escape_controls, find_similar, printable

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""What click raises for a wrong command, option or value; typer ships its own copy of click."""

RENAMED_OPTIONS = {
    "adapt": {
        "--control": "--autoregressive",
        "--held-data": "--held-out-data",
        "--held-text": "--held-out-text",
        "--mask": "--mask-token",
        "--peak": "--lr",
        "--steps": "--train-steps",
        "--tokens": "--batch-tokens",
    },
    "decode": {"--raw": "--no-chat"},
    "eval": {"--batch": "--batch-size", "--prompt": "--template", "--raw": "--no-chat", "--trace": "--trace-samples"},
    "intervene": {"--batch": "--batch-size", "--prompt": "--template", "--raw": "--no-chat"},
    "lens": {"--k": "--anchors", "--raw": "--no-chat", "--top": "--top-tokens"},
    "report": {"--format": "--figure-format"},
    "stress": {"--batch": "--batch-size", "--prompt": "--template", "--raw": "--no-chat"},
    "study": {"--batch": "--batch-size", "--prompt": "--template", "--raw": "--no-chat"},
    "trace": {
        "--batch": "--batch-size",
        "--control": "--untrained-controls",
        "--control-seeds": "--untrained-controls",
        "--keep": "--level",
        "--raw": "--no-chat",
    },
}
"""Options of 0.6 → their names now, for the hint of the error."""


ARGUMENTS = re.compile(
    r"\b(mask_id|shift|block_size|device|dtype|revision|trust_remote_code|chat|infill|new_tokens|redo_damaged)=('[^']*'|\w+)?"
)
"""Arguments of Python as messages write them."""


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ENAMETOOLONG)
"""What a disk may say at any write, also to stdout."""


class Commands(TyperGroup):
    """The group of all commands; the one place where errors become sentences and exit codes."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments of the group."""
        with explain_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        with explain_errors():
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result


@contextmanager
def explain_errors() -> Iterator[None]:
    """Print what the caller can correct as one sentence on stderr, and exit with its status."""
    try:
        yield
    except UserError as error:
        typer.echo(f"floatscope: {escape_controls(name_flags(str(error)))}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        typer.echo("floatscope: interrupted; everything finished is kept", err=True)
        raise typer.Exit(130) from error
    except (BrokenPipeError, SystemExit) as error:  # `floatscope data FILE | head`: the reader has seen enough
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise  # rich turns the first into the second
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(128 + signal.SIGPIPE) from error
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        if error.filename is None:  # stdout; what it still holds cannot be written either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        typer.echo(f"floatscope: {escape_controls(describe_disk_error(error))}", err=True)
        raise typer.Exit(2) from error
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command prints its help
            raise
        typer.echo(f"floatscope: {escape_controls(describe_usage_error(error))}", err=True)
        raise typer.Exit(2) from error


def describe_disk_error(error: OSError) -> str:
    """A disk that takes nothing more, or a name that no disk takes, as one sentence."""
    if error.errno == errno.ENAMETOOLONG:
        return f"{printable(error.filename)} is too long for a file name; give a shorter one"
    place = printable(error.filename or "the output")
    return f"cannot write {place} ({error.strerror}); everything finished is kept, make room and run it again"


def name_flags(message: str) -> str:
    """The message with flags in place of Python's arguments: device='cpu' → --device cpu, chat=False → --no-chat."""

    def flag(argument: re.Match[str]) -> str:
        name, value = argument[1].replace("_", "-"), (argument[2] or "").strip("'")
        if value in ("True", "False"):
            return f"--{name}" if value == "True" else f"--no-{name}"
        return f"--{name} {value}".strip()

    return ARGUMENTS.sub(flag, message)


def describe_usage_error(error: Any) -> str:
    """click's message as one sentence, with a hint and the help that lists what is allowed."""
    command = error.ctx.command_path if error.ctx else "floatscope"
    message = " ".join(error.format_message().split()).rstrip(".?").replace(": Input should", ": it should")
    similar = None
    if type(error).__name__ == "NoSuchOption":
        message, options = error.message, {option.lstrip("-"): option for option in error.possibilities or []}
        renamed = RENAMED_OPTIONS.get(command.split()[-1], {}).get(error.option_name)
        similar = renamed or options.get(find_similar(error.option_name.lstrip("-"), options) or "")
        if error.option_name in ("-v", "--verbose"):
            program = error.ctx.find_root().command_path
            similar = f"{program} -v{command.removeprefix(program)}"
    elif unknown := re.match(r"No such command '(.*?)'", message):
        message, similar = unknown[0], find_similar(unknown[1], error.ctx.command.commands)
    message += f" (did you mean {similar}?)" if similar else ""
    return f"{message[:1].lower()}{message[1:]}; see {command} --help"


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
COMMANDS = (
    demo, decode, lens, data, trace, report, evaluate, compare, stress, intervene, study, adapt, doctor, models, fetch,
)  # fmt: skip
for command in COMMANDS:
    name = "eval" if command is evaluate else command.__name__
    app.command(name, **help_for(name, command))(command)
app.add_typer(index, name="index")
app.add_typer(twins, name="twins")


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"floatscope {__version__}")
        raise typer.Exit


def floatscope(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, metavar="", help="Log to stderr; -vv logs more.")
    ] = 0,
) -> None:
    """A microscope for attention in masked diffusion language models."""

    if verbose:
        context.call_on_close(show_log(verbose))


app.callback(**help_for("", floatscope))(floatscope)


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character gets a question mark
    app()
