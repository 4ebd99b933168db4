"""`floatscope models`: which checkpoints open as what, or what one of them is and can do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from floatscope.models.describe import Description


def models(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A hub id, a folder, a .gguf file, twin:NAME, smollm2:NAME or BASE+ADAPTER.", show_default=False
        ),
    ] = None,
    mask_id: Annotated[
        int | None, typer.Option(help="Its mask token, where the files are silent or wrong.", show_default=False)
    ] = None,
    shift: Annotated[
        bool | None,
        typer.Option("--shift/--no-shift", help="Row p decides position p + 1, or p.", show_default=False),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """List what can be opened, or say what one checkpoint is and can do.

    No weights are read, and of a hub checkpoint none are fetched.
    """
    from rich.console import Console

    console = Console(highlight=False)
    if name is None:
        _print_table(console, as_json)
        return
    from floatscope.models.describe import describe

    found = describe(name, mask_id=mask_id, shift=shift, revision=revision)
    if as_json:
        typer.echo(json.dumps(found.as_json, indent=1))
    else:
        _print(console, found)


def _print_table(console: Console, as_json: bool) -> None:
    from rich.table import Table

    from floatscope.models.families import ARCHITECTURES, REFUSED, REMOTE

    rows = [*ARCHITECTURES, REMOTE]
    if as_json:
        opened = [
            {"layout": r.name, "opens": r.opens, "family": r.paradigm, "shift": r.shift, "mask": r.mask_comes_from}
            for r in rows
        ]
        closed = [{"name": name, "why": why} for name, why in REFUSED.values()]
        typer.echo(json.dumps({"opened": opened, "refused": closed}, indent=1))
        return
    table = Table("layout", "opens", "family", "decides", "mask id from", box=None, pad_edge=False)
    for r in rows:
        table.add_row(r.name, r.opens, r.paradigm, "the next" if r.shift else "its own", r.mask_comes_from)
    console.print(table, "")
    refused = Table("refused", "because", box=None, pad_edge=False)
    for name, why in REFUSED.values():
        refused.add_row(name, why)
    console.print(refused)


def _shown(text: str) -> str:
    """Names come from the checkpoint: no markup in them is obeyed, and no control character reaches the terminal."""
    from rich.markup import escape

    return escape(text if text.isprintable() else ascii(text))


def _print(console: Console, found: Description) -> None:
    from rich.table import Table

    spec, table = found.spec, Table("", "", box=None, pad_edge=False, show_header=False)

    def token(role: str, token_id: int | None) -> str:
        name = found.tokens.get(role)
        return "none" if token_id is None else f"{token_id} {name}" if name else str(token_id)

    grouped = "" if found.heads == found.kv_heads else f", {found.kv_heads} for keys and values"
    facts = {
        "model": spec.name + (f" at {spec.revision}" if spec.revision else ""),
        "layout": f"{spec.architecture}, opened as {found.opened_as}",
        "family": "masked diffusion" if spec.paradigm == "mdm" else "autoregressive",
        "parameters": f"{found.parameters:,}" + (f", {found.dtype}" if found.dtype else ""),
        "network": f"{found.layers} layers of {found.heads} heads of {found.head_dim}{grouped}",
        "vocabulary": str(found.vocabulary),
        "context": str(spec.context),
        "mask": token("mask", spec.mask_id),
        "a row decides": "the next position" if spec.shift else "its own position",
        "bos, eos": f"{token('bos', spec.bos_id)}, {token('eos', spec.eos_id)}",
        "end of turn": token("eot", spec.eot_id),
        "chat template": "yes" if found.template else "no",
        "samplers": ", ".join(found.samplers),
        "watched": "no: " + found.not_watched if found.not_watched else "yes",
    }
    for fact, value in facts.items():
        table.add_row(fact, _shown(value))
    for warning in found.warnings:
        table.add_row("note", _shown(warning))
    console.print(table)
