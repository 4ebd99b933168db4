"""`floatscope index …`: a collection of passages on the disk, searched by any question."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from floatscope.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from floatscope.tasks.index import Added, Index, PassageFile

index = typer.Typer(no_args_is_help=True, help="Passages to retrieve from: an index on the disk, by BM25.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the index.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@index.command(epilog="Example: floatscope index add wiki passages.jsonl.gz")
def add(
    folder: Folder,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE…", help="JSON lines or a JSON list, also .gz and .xz.", show_default=False),
    ],
    as_json: AsJson = False,
) -> None:
    """Add the passages of files: objects with a "text", and if you like an "id" and a "title".

    A passage without an id is known by its title and text, so adding a file twice adds nothing.

    One with an id that is there is replaced. Broken off, the same command goes on where it stopped.
    """
    from dataclasses import asdict

    from rich.console import Console

    from floatscope.tasks.index import Added, Index, PassageFile

    given = [PassageFile(file) for file in files]
    opened, counts = Index.create(folder, exist_ok=True), Added()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    before = len(opened)
    try:
        counts = _added(console, opened, given)
    except KeyboardInterrupt as error:
        kept = len(Index.open(folder))
        said = f"{kept} passages are in {folder}, {kept - before} of them new, and the same command adds the others"
        typer.echo(f"floatscope: interrupted; {said}", err=True)
        raise typer.Exit(130) from error
    if names := list(dict.fromkeys(name for file in given for name in file.passed_over)):
        _note(console, f"only id, title and text are kept of a passage, and not {', '.join(map(repr, names[:5]))}")
    held = len(opened)
    if as_json:
        typer.echo(json.dumps({"index": str(folder), **asdict(counts), "passages": held}, indent=1))
        return
    typer.echo(
        f"{folder}: {counts.added} added, {counts.replaced} replaced, {counts.unchanged} there already; {held} passages"
    )


def _added(console: Console, opened: Index, files: list[PassageFile]) -> Added:
    """A bar over the bytes of all files, with the time left."""
    from functools import partial

    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from floatscope.tasks.index import Added

    def tell(before: Added, bytes: int, file: PassageFile, counts: Added, read: float) -> None:
        said = f"{before.passages + counts.passages} passages"
        bars.update(bar, completed=bytes + read * file.bytes, said=said)

    total, bytes = Added(), 0
    columns = TextColumn("[bold]adding[/]"), BarColumn(), TextColumn("{task.fields[said]}"), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("", total=sum(file.bytes for file in files), said="")
        for file in files:
            total += opened.add_file(file, told=partial(tell, total, bytes, file))
            bytes += file.bytes
    return total


@index.command(epilog="Example: floatscope index remove wiki q-7 q-8")
def remove(
    folder: Folder,
    ids: Annotated[list[str], typer.Argument(metavar="ID…", help="As search tells them.", show_default=False)],
) -> None:
    """Remove passages by their ids; if one is not there, none is removed."""
    from floatscope.tasks.index import Index

    opened = Index.open(folder)
    if absent := [id for id in ids if opened.get(id) is None]:
        more = f" (nor {len(absent) - 1} others)" if len(absent) > 1 else ""
        raise UserError(f"{folder} holds no passage '{_shown(absent[0])}'{more}; nothing was removed")
    removed = opened.remove(ids)
    typer.echo(f"{folder}: {removed} removed; {len(opened)} passages")


@index.command(epilog='Example: floatscope index search wiki "Where does Mira live?" -k 3')
def search(
    folder: Folder,
    question: Annotated[str, typer.Argument(help="In any words; punctuation says nothing.", show_default=False)],
    k: Annotated[int, typer.Option("-k", help="How many passages.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Print the best passages for a question, best first."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.markup import escape

    from floatscope.tasks.index import Index

    hits = Index.open(folder).search(question, k)
    if as_json:
        told = {"question": question, "hits": [asdict(hit) for hit in hits]}
        typer.echo(json.dumps(told, indent=1))
        return
    console = Console(highlight=False)
    if not hits:
        console.print("no passage has a word of the question")
    for place, hit in enumerate(hits, 1):
        title = f"[bold]{escape(_shown(hit.title))}[/]  " if hit.title else ""
        console.print(f"{place}  {title}[dim]{escape(_shown(hit.id))}  {hit.score:.2f}[/]", soft_wrap=True)
        console.print(escape(_shown(hit.text)) + "\n")


@index.command(epilog="Example: floatscope index stat wiki --check")
def stat(
    folder: Folder,
    check: Annotated[bool, typer.Option("--check", help="Also compare every file with its checksum.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what an index holds and what was added to it."""
    from floatscope.files.sizes import format_size
    from floatscope.tasks.index import Index

    opened = Index.open(folder)
    if check:
        opened.check()
    told = opened.stat()
    if as_json:
        typer.echo(json.dumps(told.as_json, indent=1))
        return
    typer.echo(f"{folder}: {told.passages} passages, {format_size(told.bytes)}{', every file whole' if check else ''}")
    typer.echo(f"digest {told.digest}")
    typer.echo(f"format {told.format}, made by floatscope {told.floatscope} with tantivy {told.tantivy}")
    for file in told.files:
        typer.echo(f"{_shown(file['name'])}: {file['passages']} passages, added {file['when']}")


def _note(console: Console, text: str) -> None:
    from rich.markup import escape

    console.print(f"[bold]note[/] {escape(text)}")


def _shown(text: str) -> str:
    """Passages come from anywhere: no control character of theirs reaches the terminal."""
    text = " ".join(text.split())
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
