"""`floatscope index …`: a collection of passages on disk, searched by questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from floatscope.cli import options as o
from floatscope.cli.console import explain_interrupt, make_console, print_text
from floatscope.cli.help_text import help_for
from floatscope.errors import UserError, escape_controls

if TYPE_CHECKING:
    from rich.console import Console

    from floatscope.tasks.index import AddCounts, Index, PassageFile

index = typer.Typer(no_args_is_help=True, help="Add, search and remove passages of an index on disk (BM25).")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the index.", show_default=False)]


def add(
    folder: Folder,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE…", help="JSON lines or a JSON list, also .gz and .xz.", show_default=False),
    ],
    as_json: o.AsJson = False,
) -> None:
    """Add the passages of files: objects with a "text", and optionally an "id" and a "title".

    A passage without an id is identified by its title and text, so adding a file twice adds nothing. A passage whose id
    is already there replaces the old one.

    An interrupted command is resumed by running it again.
    """
    from dataclasses import asdict

    from floatscope.tasks.index import Index, PassageFile

    passage_files = [PassageFile(file) for file in files]
    passage_index = Index.create(folder, exist_ok=True)
    before = len(passage_index)

    def describe() -> str:
        now = len(Index.open(folder))
        return f"{folder} has {now} passages, {now - before} of them new"

    console = make_console(stderr=True)
    with explain_interrupt(describe):
        counts = _add_files(console, passage_index, passage_files)
    if names := list(dict.fromkeys(name for file in passage_files for name in file.ignored_fields)):
        listed = ", ".join(map(repr, names[:5]))
        print_text(console, f"note: only id, title and text of a passage are stored, not {listed}")
    total = len(passage_index)
    if as_json:
        typer.echo(json.dumps({"index": str(folder), **asdict(counts), "passages": total}, indent=1))
        return
    changes = f"{counts.added} added, {counts.replaced} replaced, {counts.unchanged} unchanged"
    typer.echo(f"{folder}: {changes}; {total} passages")


def _add_files(console: Console, passage_index: Index, files: list[PassageFile]) -> AddCounts:
    """Add file after file, with one progress bar over the bytes of all."""
    from functools import partial

    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from floatscope.tasks.index import AddCounts

    def update(before: AddCounts, bytes: int, file: PassageFile, counts: AddCounts, share: float) -> None:
        text = f"{before.passages + counts.passages} passages"
        bars.update(bar, completed=bytes + share * file.bytes, text=text)

    total, bytes = AddCounts(), 0
    columns = TextColumn("[bold]adding[/]"), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("", total=sum(file.bytes for file in files), text="")
        for file in files:
            total += passage_index.add_file(file, on_progress=partial(update, total, bytes, file))
            bytes += file.bytes
    return total


def remove(
    folder: Folder,
    ids: Annotated[list[str], typer.Argument(metavar="ID…", help="Ids that search prints.", show_default=False)],
) -> None:
    """Remove passages by their ids; if one id is unknown, nothing is removed."""
    from floatscope.tasks.index import Index

    passage_index = Index.open(folder)
    if unknown := [id for id in ids if passage_index.get(id) is None]:
        more = f" (nor {len(unknown) - 1} others)" if len(unknown) > 1 else ""
        raise UserError(f"{folder} has no passage '{_printable(unknown[0])}'{more}; nothing was removed")
    removed = passage_index.remove(ids)
    typer.echo(f"{folder}: {removed} removed; {len(passage_index)} passages")


def search(
    folder: Folder,
    question: Annotated[str, typer.Argument(help="Any words; punctuation is ignored.", show_default=False)],
    k: Annotated[int, o.Opt("-k", metavar="N", min=1, help="How many passages to retrieve.")] = 5,
    as_json: o.AsJson = False,
) -> None:
    """Print the best passages for a question, the best first."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.markup import escape

    from floatscope.tasks.index import Index

    hits = Index.open(folder).search(question, k)
    if as_json:
        typer.echo(json.dumps({"question": question, "hits": [asdict(hit) for hit in hits]}, indent=1))
        return
    console = Console(highlight=False)
    if not hits:
        console.print("no passage has a word of the question")
    for rank, hit in enumerate(hits, 1):
        title = f"[bold]{escape(_printable(hit.title))}[/]  " if hit.title else ""
        console.print(f"{rank}  {title}[dim]{escape(_printable(hit.id))}  {hit.score:.2f}[/]", soft_wrap=True)
        console.print(escape(_printable(hit.text)) + "\n")


def stat(
    folder: Folder,
    check: Annotated[bool, o.Opt("--check", help="Also compare every file with its checksum.")] = False,
    as_json: o.AsJson = False,
) -> None:
    """Describe an index: its size and the files that were added."""
    from floatscope.files.sizes import format_size
    from floatscope.tasks.index import Index

    passage_index = Index.open(folder)
    if check:
        passage_index.check()
    stats = passage_index.stats()
    if as_json:
        typer.echo(json.dumps(stats.as_json, indent=1))
        return
    checked = ", all checksums are right" if check else ""
    typer.echo(f"{folder}: {stats.passages} passages, {format_size(stats.bytes)}{checked}")
    typer.echo(f"digest {stats.digest}")
    typer.echo(f"format {stats.format}, written by floatscope {stats.floatscope} with tantivy {stats.tantivy}")
    for file in stats.files:
        typer.echo(f"{_printable(file['name'])}: {file['passages']} passages, added {file['when']}")


def _printable(text: str) -> str:
    """The text on one line, without control characters: passages come from anywhere."""
    return escape_controls(" ".join(text.split()))


for command in (add, remove, search, stat):
    index.command(**help_for(f"index {command.__name__}", command))(command)
