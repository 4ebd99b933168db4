"""`floatscope …`: the commands, and how each of them ends.

    0     done
    1     `doctor` found something wrong
    2     the caller can mend it: one sentence on stderr, no traceback
    130   interrupted; whatever was finished is kept

Torch and transformers are loaded by the command that needs them, so `--help` answers at once.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from floatscope import __version__
from floatscope.cli.adapt import adapt
from floatscope.cli.data import data
from floatscope.cli.decode import decode
from floatscope.cli.demo import demo
from floatscope.cli.doctor import doctor
from floatscope.cli.eval import compare, evaluate
from floatscope.cli.fetch import fetch
from floatscope.cli.index import index
from floatscope.cli.intervene import intervene
from floatscope.cli.lens import lens
from floatscope.cli.models import models
from floatscope.cli.report import report
from floatscope.cli.stress import stress
from floatscope.cli.study import study
from floatscope.cli.trace import trace
from floatscope.cli.twins import twins
from floatscope.errors import UserError

MISUSED: type[Exception] = typer.BadParameter.__bases__[0]
"""What click raises at a wrong command, option or value; typer brings a click of its own."""


class Commands(TyperGroup):
    """The one place where errors become words and exit codes."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with worded():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with worded():
            return super().invoke(ctx)


@contextmanager
def worded() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        typer.echo(f"floatscope: {error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        typer.echo("floatscope: interrupted; whatever was finished is kept", err=True)
        raise typer.Exit(130) from error
    except MISUSED as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command tells its commands
            raise
        typer.echo(f"floatscope: {misused(error)}", err=True)
        raise typer.Exit(2) from error


def misused(error: Any) -> str:
    """click's words as one sentence, and where the right ones are told."""
    said = " ".join(error.format_message().split()).rstrip(".?").replace(". Did", "; did")
    command = error.ctx.command_path if error.ctx else "floatscope"
    return f"{said[:1].lower()}{said[1:]}; {command} --help tells what can be given"


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command(epilog="Example: floatscope demo --out demo")(demo)
app.command(epilog='Example: floatscope decode GSAI-ML/LLaDA-8B-Instruct --prompt "What floats?" --layer 16')(decode)
app.command(epilog='Example: floatscope lens twin:mdm --prompt "What floats?" --out lens.csv')(lens)
app.command(epilog="Example: floatscope data hotpot_dev_distractor_v1.json --model twin:mdm")(data)
app.command(epilog="Example: floatscope trace twin:mdm --data questions.jsonl --out runs/mdm")(trace)
app.command(epilog="Example: floatscope report runs/arm runs/mdm --out report.html")(report)
app.command("eval", epilog="Example: floatscope eval twin:mdm --data reading-5.jsonl --passages 5 --out runs/mdm-5")(
    evaluate
)
app.command(epilog="Example: floatscope compare runs/mdm-0 runs/mdm-5 --out table.md")(compare)
app.command(
    epilog="Example: floatscope stress twin:arm twin:mdm --data reading-5.jsonl --kind position --out runs/place"
)(stress)
app.command(
    epilog="Example: floatscope intervene twin:mdm --edit 'mask_anchors(k=5)' --data reading-5.jsonl --out runs/mask"
)(intervene)
app.command(epilog="Example: floatscope study sinks twin:arm twin:mdm --data reading-5.jsonl --out runs/sinks")(study)
app.command(epilog="Example: floatscope adapt base.gguf --text wiki.txt.xz --data train.jsonl --out sibling")(adapt)
app.command(epilog="Example: floatscope doctor --json > doctor.json")(doctor)
app.command(epilog="Example: floatscope models GSAI-ML/LLaDA-8B-Instruct")(models)
app.command(epilog="Example: floatscope fetch smollm2")(fetch)

app.add_typer(index, name="index")
app.add_typer(twins, name="twins")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"floatscope {__version__}")
        raise typer.Exit


@app.callback(epilog="Example: floatscope demo --out demo")
def floatscope(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A microscope for attention in masked diffusion language models."""


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character gets a question mark
    app()
