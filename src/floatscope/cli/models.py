"""`floatscope models`: which checkpoints can be opened, or what one of them is and can do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from floatscope.cli import options as o
from floatscope.cli.console import show_status
from floatscope.errors import escape_controls

if TYPE_CHECKING:
    from rich.console import Console

    from floatscope.models.description import Description


def models(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A hub id, a folder, a .gguf file, twin:NAME, smollm2:NAME or BASE+ADAPTER.",
            show_default=False,
        ),
    ] = None,
    mask_id: Annotated[
        int | None, o.Opt(metavar="N", min=0, help="Id of the mask token, if the checkpoint names none.")
    ] = None,
    shift: Annotated[bool | None, o.Opt("--shift/--no-shift", help="Row p predicts position p + 1, or p.")] = None,
    block_size: Annotated[
        int | None,
        o.Opt(metavar="N", min=1, help="Size of the blocks of a block-causal checkpoint, if it names none."),
    ] = None,
    revision: Annotated[str | None, o.Opt(help="Branch, tag or commit of a hub checkpoint.")] = None,
    as_json: o.AsJson = False,
) -> None:
    """List what can be opened, or describe one checkpoint.

    No weights are read, and none are fetched from the hub.
    """
    from rich.console import Console

    console = Console(highlight=False)
    if name is None:
        _print_architectures(console, as_json)
        return
    o.check_model(name)
    with show_status(f"opening {name}"):
        from floatscope.models.description import describe

        description = describe(name, mask_id=mask_id, shift=shift, block_size=block_size, revision=revision)
    if as_json:
        typer.echo(json.dumps(description.as_json, indent=1))
    else:
        _print_description(console, description)


def _print_architectures(console: Console, as_json: bool) -> None:
    from rich.table import Table

    from floatscope.models.architectures import ARCHITECTURES, REFUSED, REMOTE_CODE

    rows = [*ARCHITECTURES, REMOTE_CODE]
    if as_json:
        opened = [
            {
                "architecture": row.name,
                "opens": row.opens,
                "paradigm": row.paradigm,
                "shift": row.shift,
                "mask": row.mask_source,
                "attends": row.attends,
                "watched": row.watched,
            }
            for row in rows
        ]
        refused = [{"name": refusal.name, "reason": refusal.reason} for refusal in REFUSED]
        typer.echo(json.dumps({"opened": opened, "refused": refused}, indent=1))
        return
    columns = ("architecture", "opens", "paradigm", "attends", "row p predicts", "mask id from", "can be watched")
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        predicts = "p + 1" if row.shift else "p"
        table.add_row(row.name, row.opens, row.paradigm, row.attends, predicts, row.mask_source, row.watched)
    console.print(table, "")
    refused_table = Table("refused", "reason", box=None, pad_edge=False)
    for refusal in REFUSED:
        refused_table.add_row(refusal.name, refusal.reason)
    console.print(refused_table)


def _label_canvas(size: int) -> str:
    return f"on canvases of {size}: to the canvas, and to the text before it"


def _print_description(console: Console, description: Description) -> None:
    from rich.table import Table

    spec, table = description.spec, Table("", "", box=None, pad_edge=False, show_header=False)

    def format_token(role: str, token_id: int | None) -> str:
        name = description.tokens.get(role)
        return "none" if token_id is None else f"{token_id} {name}" if name else str(token_id)

    grouped = "" if description.heads == description.kv_heads else f", {description.kv_heads} for keys and values"
    obstacle = description.capture_obstacle
    facts = {
        "model": spec.name + (f" at {spec.revision}" if spec.revision else ""),
        "architecture": f"{spec.architecture}, opened as {description.transformers_class}",
        "paradigm": spec.paradigm.label,
        "parameters": f"{description.parameters:,}" + (f", {description.dtype}" if description.dtype else ""),
        "network": f"{description.layers} layers, {description.heads} heads of {description.head_dim}{grouped}",
        "vocabulary": str(description.vocab_size),
        "context": str(spec.context),
        "mask": "none, its noise is uniform" if spec.noise == "uniform" else format_token("mask", spec.mask_id),
        "attends": spec.visibility.label if spec.canvas_size is None else _label_canvas(spec.canvas_size),
        "row p predicts": "position p + 1" if spec.shift else "position p",
        "bos, eos": f"{format_token('bos', spec.bos_id)}, {format_token('eos', spec.eos_id)}",
        "end of turn": format_token("eot", spec.eot_id),
        "chat template": "yes" if description.has_chat_template else "no",
        "samplers": ", ".join(description.samplers),
        "can be watched": f"no: {obstacle}" if obstacle else "yes",
    }
    for fact, value in facts.items():
        table.add_row(fact, _printable(value))
    for warning in description.warnings:
        table.add_row("note", _printable(warning))
    console.print(table)


def _printable(text: str) -> str:
    """Names come from the checkpoint: neither markup nor control characters in them reach the terminal."""
    from rich.markup import escape

    return escape(escape_controls(text, keep=""))
