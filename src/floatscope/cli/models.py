"""`floatscope models`: which checkpoints can be opened, or what an architecture or a checkpoint is and can do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floatscope.cli import options as o
from floatscope.cli.console import show_status
from floatscope.errors import escape_controls

if TYPE_CHECKING:
    from rich.console import Console

    from floatscope.models.architectures import Architecture
    from floatscope.models.description import Description
    from floatscope.models.example_checkpoints import Example


def models(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="An architecture, a hub id, a folder, a .gguf file, twin:NAME, smollm2:NAME or BASE+ADAPTER.",
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
    """List what can be opened, or describe one architecture or checkpoint.

    No weights are read, and none are fetched from the hub.
    """
    from rich.console import Console

    from floatscope.models.architectures import ARCHITECTURES, REMOTE_CODE

    console = Console(highlight=False)
    architectures = {row.name: row for row in (*ARCHITECTURES, REMOTE_CODE)}
    if name is None:
        _print_architectures(console, list(architectures.values()), as_json)
        return
    if name in architectures and not Path(name).exists():
        _print_architecture(console, architectures[name], as_json)
        return
    o.check_model(name)
    with show_status(f"opening {name}"):
        from floatscope.models.description import describe

        description = describe(name, mask_id=mask_id, shift=shift, block_size=block_size, revision=revision)
    if as_json:
        typer.echo(json.dumps(description.as_json, indent=1))
    else:
        _print_description(console, description)


def _print_architectures(console: Console, rows: Sequence[Architecture], as_json: bool) -> None:
    """Print two or three lines per architecture: its facts in columns, and below them what it opens, in full width."""
    from rich.padding import Padding
    from rich.table import Table

    from floatscope.models.architectures import REFUSED
    from floatscope.models.example_checkpoints import EXAMPLES

    if as_json:
        refused = [{"name": refusal.name, "reason": refusal.reason} for refusal in REFUSED]
        typer.echo(json.dumps({"opened": [_architecture_facts(row) for row in rows], "refused": refused}, indent=1))
        return
    widths = {"architecture": 16, "paradigm": 9, "block": 12, "row p predicts": 15, "mask id": 19, "watched": 8}
    console.print("[bold]" + "".join(title.ljust(width) for title, width in widths.items()).rstrip())
    for row in rows:
        is_watched = "yes" if row.watched == "yes" else "some"
        cells = (row.name, row.paradigm, row.block_label, _predicts(row), row.mask_label, is_watched)
        line = "".join(cell.ljust(width) for cell, width in zip(cells, widths.values(), strict=True))
        console.print(line.rstrip(), soft_wrap=True)
        console.print(Padding(row.opens, (0, 0, 0, 2)))
        if examples := EXAMPLES.get(row.name):
            console.print(Padding(f"[dim]{_join_examples(examples)}[/dim]", (0, 0, 0, 2)))
        if row.watched != "yes":
            console.print(Padding(f"[dim]can be watched: {row.watched}[/dim]", (0, 0, 0, 2)))
    refused_table = Table("refused", "reason", box=None, pad_edge=False)
    for refusal in REFUSED:
        refused_table.add_row(refusal.name, refusal.reason)
    console.print("", refused_table, "")
    console.print("floatscope models NAME describes an architecture or a checkpoint, --json prints all facts.")


def _print_architecture(console: Console, row: Architecture, as_json: bool) -> None:
    from rich.table import Table

    facts = _architecture_facts(row)
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    table = Table("", "", box=None, pad_edge=False, show_header=False)
    table.add_row("architecture", row.name)
    table.add_row("opens", row.opens)
    for i, example in enumerate(facts["examples"]):
        table.add_row("" if i else "checkpoints", f"{example['name']} ({example['parameters']})")
    table.add_row("class", row.transformers_class if row.transformers_class.isidentifier() else "its own")
    table.add_row("paradigm", row.paradigm.label)
    table.add_row("attends", row.attends)
    table.add_row("row p predicts", f"position {_predicts(row)}")
    table.add_row("mask id", row.mask_source or "none")
    if row.has_experts:
        table.add_row("experts", "one tensor each in the files; `--experts` records them")
    table.add_row("can be watched", row.watched)
    if row.note:
        table.add_row("note", row.note)
    console.print(table)


def _architecture_facts(row: Architecture) -> dict[str, Any]:
    from floatscope.models.example_checkpoints import EXAMPLES

    return {
        "architecture": row.name,
        "opens": row.opens,
        "examples": [asdict(example) for example in EXAMPLES.get(row.name, ())],
        "class": row.transformers_class,
        "paradigm": row.paradigm,
        "shift": row.shift,
        "mask": row.mask_source,
        "mask_id": row.published.mask_id,
        "attends": row.attends,
        "block_size": row.published.block_size,
        "experts": row.has_experts,
        "watched": row.watched,
        "note": row.note,
    }


def _join_examples(examples: Sequence[Example]) -> str:
    """Examples with the same parameters share them: "a, b (8 B)"."""
    groups = groupby(examples, key=lambda example: example.parameters)
    return ", ".join(f"{', '.join(each.name for each in group)} ({parameters})" for parameters, group in groups)


def _predicts(row: Architecture) -> str:
    return "p + 1" if row.shift else "p"


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
