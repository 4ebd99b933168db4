"""`floatscope lens`: what the stream reads as at the anchors, layers down and steps across."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floatscope.cli import options as o
from floatscope.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table
    from rich.text import Text

    from floatscope.models.model import Model
    from floatscope.tasks.sample import Sample

Opt = typer.Option
COLUMN, PIECE = 22, 11  # characters: of a step in the table, of a token in it
SEEN = {" ": "␣", "\n": "⏎", "\t": "⇥"}


def lens(
    model: o.Name,
    prompt: Annotated[str | None, Opt(help="The text to answer or continue.")] = None,
    data: Annotated[Path | None, Opt(help="Questions; what a file holds is told by floatscope data.")] = None,
    limit: Annotated[int | None, Opt(help="Only the first so many of the data.")] = None,
    k: Annotated[int, Opt("--k", help="Keys of largest lift, at each step and layer.")] = 1,
    top: Annotated[int, Opt(help="Tokens to tell of what the lens reads at each.")] = 3,
    new_tokens: o.NewTokens = None,
    steps: o.Steps = None,
    block: o.Block = None,
    sampler: o.Sampler = None,
    preset: o.Preset = None,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    guidance: o.Guidance = None,
    eos: o.Eos = None,
    stop: o.Stop = None,
    seed: o.Seed = 0,
    chat: o.Chat = None,
    out: Annotated[Path | None, Opt(help="Write all rows to this .csv file.")] = None,
    mask_id: o.MaskId = None,
    shift: o.Shift = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    revision: o.Revision = None,
    trust_remote_code: o.TrustRemoteCode = False,
    as_json: Annotated[bool, Opt("--json", help="Print one JSON object: the model and all rows.")] = False,
) -> None:
    """Read the residual stream at the anchors through the final norm and the output embedding.

    A cell of the table: the key of largest lift, its position and lift; below it the token the lens reads there and
    its probability. It shows the first sample, and as many steps as fit, from the first to the last.
    """
    from rich.console import Console

    from floatscope.tasks.read import read_samples

    if (data is None) == (prompt is None):
        raise UserError("give --data FILE or --prompt TEXT, one of the two")
    if data is None and limit is not None:
        raise UserError("--limit takes the first samples of --data; leave it out with --prompt")
    if out is not None and (out.suffix != ".csv" or not out.parent.is_dir()):
        raise UserError(f"--out must be a .csv file in a folder that is there, got {out}")
    samples = [str(prompt)] if data is None else read_samples(data, limit)
    console = Console(stderr=as_json, highlight=False)
    opened = o.opened(model, console.is_terminal, device=device, dtype=dtype, mask_id=mask_id, shift=shift,
                      revision=revision, trust_remote_code=trust_remote_code)  # fmt: skip
    table = _read(opened, samples, chat, k, top, preset=preset, sampler=sampler, new_tokens=new_tokens, steps=steps,
                  block=block, temperature=temperature, top_p=top_p, top_k=top_k, guidance=guidance, eos=eos, stop=stop,
                  seed=seed)  # fmt: skip
    if out is not None:
        table.to_csv(out, index=False)
    if as_json:
        typer.echo(json.dumps({"model": opened.metadata, "rows": table.to_dict("records")}, ensure_ascii=False))
        return
    o.say(console, "model", repr(opened))
    first, count = table["sample"].iloc[0], table["sample"].nunique()
    if count > 1:
        o.say(console, "sample", f"'{first}', one of {count}")
    console.print(_drawn(table[table["sample"] == first], opened, console.width))
    if out is not None:
        o.say(console, "rows", f"{len(table)} in {out}")


def _read(
    model: Model, samples: Sequence[Sample | str], chat: bool | None, k: int, top: int, **settings: Any
) -> pd.DataFrame:
    """The samples batch by batch, their rows in the order of the samples."""
    import pandas as pd

    from floatscope.pipelines.asking import batches, encode_samples, threads_for
    from floatscope.pipelines.lens import lens as read
    from floatscope.sampling.settings import resolve_sampling

    new = resolve_sampling(model.spec.paradigm, **settings).new_tokens
    items = encode_samples(model, samples, chat, new)
    with threads_for(model):
        parts = [
            read(model, [item.ids for item in batch], k=k, top=top, samples=[i.sample.id for i in batch], **settings)
            for batch in batches(model, items)
        ]
    order = {item.sample.id: number for number, item in enumerate(items)}
    whole = pd.concat(parts, ignore_index=True)
    return whole.sort_values("sample", key=lambda names: names.map(order), kind="stable", ignore_index=True)


def _drawn(rows: pd.DataFrame, model: Model, width: int) -> Table:
    """Layers down; across as many steps as fit, evenly spread from the first to the last."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    steps, room = sorted(set(rows["step"])), max(2, (width - 7) // COLUMN)
    if len(steps) > room:
        steps = [steps[round(i * (len(steps) - 1) / (room - 1))] for i in range(room)]
    caption = "The key of largest lift @ its position, lift; → what the lens reads there, probability."
    if rows["about"].gt(rows["key"]).all():
        caption += " A row of this model speaks about the next position."
    if model.spec.paradigm == "arm" and model.spec.cache:
        caption += " Step 0 has the rows of the prompt, the others the newest row."
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", pad_edge=False)
    table.add_column("layer", justify="right")
    for step in steps:
        table.add_column(f"step {step}", width=COLUMN - 2, no_wrap=True)
    for layer, of_layer in rows.groupby("layer"):
        cells = [_cell(of_layer[of_layer["step"] == step]) for step in steps]
        table.add_row(Text(str(layer)), *cells)
    return table


def _cell(rows: pd.DataFrame) -> Text:
    from rich.text import Text

    from floatscope.cli.view import MASK

    lines = []
    for row in rows.itertuples():
        piece = MASK if row.state == "masked" else _short(str(row.token))
        style = {"masked": "bright_black", "committed": "bold"}.get(str(row.state), "")
        lines += [Text.assemble((piece, style), (f" @{row.key} {row.lift:.1f}×", "dim"))]
        lines += [Text.assemble("→ ", (_short(str(row.token_1)), "cyan"), (f" {row.p_1:.2f}", "dim"))]
    return Text("\n").join(lines)


def _short(piece: str) -> str:
    """A token in a few characters, whatever it holds: spaces and newlines are seen."""
    shown = "".join(SEEN.get(c, c if c.isprintable() else f"\\x{ord(c):02x}") for c in piece)
    return shown if len(shown) <= PIECE else f"{shown[: PIECE - 1]}…"
