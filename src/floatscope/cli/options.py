"""The options commands have in common, how they open a model and how they speak."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floatscope.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from floatscope.models.model import Model
    from floatscope.tasks.read import Reading

Opt = typer.Option

Name = Annotated[str, typer.Argument(help="A hub id, a folder, a .gguf file, twin:NAME, smollm2:NAME or BASE+ADAPTER.")]
Names = Annotated[
    list[str],
    typer.Argument(metavar="MODEL…", help="Hub ids, folders, .gguf files, twin:NAME, smollm2:NAME or BASE+ADAPTER."),
]
Questions = Annotated[
    Path, Opt("--data", help="Questions; what a file holds is told by floatscope data.", show_default=False)
]
Template = Annotated[str, Opt("--prompt", help="default, question-first, instruct, af-llada, af-others, or a file.")]
Limit = Annotated[int | None, Opt(help="Only the first so many of the data.")]
Format = Annotated[str | None, Opt(help="Of the data, where it is not told by its shape.")]
SkipBad = Annotated[bool, Opt("--skip-bad", help="Leave out what cannot be read of the data, and say so.")]
NewTokens = Annotated[int | None, Opt(help="Tokens to write. Default: 32, or the preset's.")]
Steps = Annotated[int | None, Opt(help="Forwards. Default: one per token.")]
Block = Annotated[int | None, Opt(help="Fill this many tokens before the next. Default: all at once.")]
Sampler = Annotated[
    str | None, Opt(help="Which positions a step commits: confidence, margin, entropy, threshold(tau=0.9), …")
]
Preset = Annotated[str | None, Opt(help="The authors' settings: llada or dream.")]
Temperature = Annotated[float | None, Opt(help="0: the most likely token.")]
TopP = Annotated[float | None, Opt(help="Draw from the fewest tokens that hold this much probability.")]
TopK = Annotated[int | None, Opt(help="Draw from this many tokens.")]
Guidance = Annotated[float | None, Opt(help="Classifier-free guidance.")]
Eos = Annotated[str | None, Opt(help="free, never, or last.")]
Stop = Annotated[bool | None, Opt("--stop/--no-stop", help="End when the text has ended.")]
Seed = Annotated[int, Opt(help="Of whatever is drawn.")]
Chat = Annotated[bool | None, Opt("--chat/--raw", help="Use the chat template. Default: if there is one.")]
Batch = Annotated[int | None, Opt(help="Samples decoded together. Default: 8, on a GPU 32.")]
MaskId = Annotated[int | None, Opt(help="The mask token, where the checkpoint does not tell.")]
Shift = Annotated[bool | None, Opt("--shift/--no-shift", help="Whether row p decides position p + 1.")]
Device = Annotated[str | None, Opt(help="cpu, cuda, cuda:1, or auto for all GPUs.")]
Dtype = Annotated[str | None, Opt(help="float32, bf16 or fp16.")]
Revision = Annotated[str | None, Opt(help="Of a hub checkpoint.")]
TrustRemoteCode = Annotated[bool, Opt("--trust-remote-code", help="Run the checkpoint's own code; it can do anything.")]


Retrieve = Annotated[Path | None, Opt(help="Passages from this index instead of the file's.")]
K = Annotated[int, Opt("-k", help="How many to retrieve.")]


def opened(name: str, live: bool, **settings: Any) -> Model:
    """`fs.load`, with a word on the terminal while it takes its time."""
    from rich.console import Console

    from floatscope.models.load import load

    with Console(stderr=True).status("loading") if live else nullcontext():
        return load(name, **settings)


def folders(models: list[str], out: Path) -> list[Path]:
    """A folder for each model."""
    paths = [out / re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-") for name in models]
    for place, path in enumerate(paths):
        if path in paths[:place]:
            raise UserError(f"two models would be kept in {path}; give each model once")
    return paths


def options(given: list[str]) -> dict[str, object]:
    """Words as numbers, lists or text."""
    found: dict[str, object] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set takes name=value, such as documents=10, got '{text}'")
        name = name.replace("-", "_")
        if name in found:
            raise UserError(f"--set {name} is given twice; several values are written as {name}=1,2")
        found[name] = _value(value)
    return found


def _value(text: str) -> object:
    if "," in text:
        return tuple(_value(part) for part in text.split(","))
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def say(console: Console, what: str, text: str) -> None:
    from rich.markup import escape

    console.print(f"[bold]{what:<11}[/]{escape(text)}")


def say_bad(console: Console, reading: Reading) -> None:
    """What --skip-bad left out, if anything."""
    if reading.bad:
        (number, why), count, unit = reading.bad[0], len(reading.bad), reading.unit
        many = f"1 {unit} that" if count == 1 else f"{count} {unit}s that"
        say(console, "left out", f"{many} cannot be read; the first is {unit} {number}: {why}")


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def retrieved(folder: Path, samples: list[Any], k: int) -> tuple[list[Any], float | None, dict[str, Any]]:
    """The samples with other passages, the recall, and what the run says of the index."""
    from floatscope.tasks.index import Index
    from floatscope.tasks.index import retrieved as found_in

    index = Index.open(folder)
    given, recall = found_in(index, samples, k)
    held = index.stat()
    about = {"index": folder.name, "index_passages": held.passages, "index_sha256": held.digest, "retrieved": k}
    return given, recall, about


def say_recall(console: Console, recall: float | None, k: int) -> None:
    if recall is not None:
        say(console, "recall", f"{recall:.3f} of the gold passages are among the {k} retrieved")
