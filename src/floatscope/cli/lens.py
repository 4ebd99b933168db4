"""`floatscope lens`: what the residual stream reads as at the anchors, layers down and steps across."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floatscope.cli import options as o
from floatscope.cli.console import print_line, print_skipped, show_status
from floatscope.errors import UserError, escape_controls
from floatscope.files.atomic import explain_write_errors
from floatscope.schema import Paradigm

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    from rich.table import Table
    from rich.text import Text

    from floatscope.models.model import Model
    from floatscope.tasks.sample import Sample

STEP_WIDTH, TOKEN_WIDTH = 22, 11  # characters of a step's column, and of a token in it
VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥"}


@o.expand_groups
def lens(
    model: o.ModelName,
    *,
    anchors: Annotated[int, o.Opt(metavar="N", min=1, help="Keys of largest lift to read per layer.")] = 1,
    top_tokens: Annotated[int, o.Opt(metavar="N", min=1, help="Most likely tokens to report for each key.")] = 3,
    out: Annotated[Path | None, o.Opt(metavar="FILE", help="Also write all rows to this .csv file.")] = None,
    as_json: o.AsJson = False,
    data: o.OptionalData = None,
    prompt: Annotated[str | None, o.DataOpt(metavar="TEXT", help="A text to answer or continue.")] = None,
    reading: o.DataOptions,
    chat: o.Chat = None,
    sampling: o.SamplingOptions,
    loading: o.ModelOptions,
) -> None:
    """Read the residual stream at the anchors through the final norm and the output embedding (the logit lens).

    A cell shows the key of largest lift, its position and lift; below it the token that the lens reads there and its
    probability. The table shows the first sample, and as many steps as fit, from the first to the last.
    """
    from rich.console import Console

    if (data is None) == (prompt is None):
        raise UserError("give either --data FILE or --prompt TEXT")
    if data is None and reading.are_set:
        raise UserError("--limit, --format and --skip-bad apply to --data; leave them out with --prompt")
    if out is not None and (out.suffix != ".csv" or not out.parent.is_dir()):
        raise UserError(f"--out must be a .csv file in a folder that exists, got {out}")
    o.check_model(model)
    file = None if data is None else reading.read(data)
    console = Console(stderr=as_json, highlight=False)
    with show_status(f"opening {model}"):
        loaded = loading.load(model)
    samples: list[Sample | str] = [str(prompt)] if file is None else [*file.samples]
    table = _read_lens(loaded, samples, chat, anchors, top_tokens, **sampling.settings)
    if out is not None:
        with explain_write_errors("the rows", out):
            table.to_csv(out, index=False)
    if as_json:
        typer.echo(json.dumps({"model": loaded.metadata, "rows": table.to_dict("records")}, ensure_ascii=False))
        return
    print_line(console, "model", repr(loaded))
    if file is not None:
        print_skipped(partial(print_line, console), file)
    first, count = table["sample"].iloc[0], table["sample"].nunique()
    if count > 1:
        print_line(console, "sample", f"'{first}', one of {count}")
    console.print(_draw_table(table[table["sample"] == first], loaded, console.width))
    if out is not None:
        print_line(console, "rows", f"{len(table)} in {out}")


def _read_lens(
    model: Model, samples: Sequence[Sample | str], chat: bool | None, anchors: int, top_tokens: int, **settings: Any
) -> pd.DataFrame:
    """The samples batch by batch; the rows in the order of the samples."""
    import pandas as pd

    from floatscope.pipelines.batching import limit_threads, make_batches
    from floatscope.pipelines.canvas_layout import plan_layout
    from floatscope.pipelines.lens import lens as read_lens
    from floatscope.pipelines.prompting import encode_samples
    from floatscope.sampling.settings import resolve_sampling

    new_tokens = resolve_sampling(
        model.spec.paradigm, block_size=model.spec.block_size, canvas_size=model.spec.canvas_size, **settings
    ).new_tokens
    items = encode_samples(model, samples, chat, plan_layout(model, new_tokens))
    parts = []
    with limit_threads(model):
        for batch in make_batches(model, items):
            ids, names = [item.ids for item in batch], [item.sample.id for item in batch]
            parts.append(read_lens(model, ids, anchors=anchors, top_tokens=top_tokens, samples=names, **settings))
    order = {item.sample.id: number for number, item in enumerate(items)}
    rows = pd.concat(parts, ignore_index=True)
    return rows.sort_values("sample", key=lambda names: names.map(order), kind="stable", ignore_index=True)


def _draw_table(rows: pd.DataFrame, model: Model, width: int) -> Table:
    """Layers down; across as many steps as fit, evenly spread from the first to the last."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    steps, room = sorted(set(rows["step"])), max(2, (width - 7) // STEP_WIDTH)
    if len(steps) > room:
        steps = [steps[round(i * (len(steps) - 1) / (room - 1))] for i in range(room)]
    caption = "Key of largest lift @ its position, lift; → the token that the lens reads there, its probability."
    if rows["predicted_position"].gt(rows["key"]).all():
        caption += " A row of this model predicts the next position."
    if model.spec.paradigm is Paradigm.ARM and model.spec.supports_cache:
        caption += " Step 0 has the rows of the prompt, later steps the newest row."
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", pad_edge=False)
    table.add_column("layer", justify="right")
    for step in steps:
        table.add_column(f"step {step}", width=STEP_WIDTH - 2, no_wrap=True)
    for layer, layer_rows in rows.groupby("layer"):
        cells = [_draw_cell(layer_rows[layer_rows["step"] == step]) for step in steps]
        table.add_row(Text(str(layer)), *cells)
    return table


def _draw_cell(rows: pd.DataFrame) -> Text:
    from rich.text import Text

    from floatscope.cli.view import MASK

    lines = []
    for row in rows.itertuples():
        piece = MASK if row.state == "masked" else _shorten(str(row.token))
        style = {"masked": "bright_black", "committed": "bold"}.get(str(row.state), "")
        lines += [Text.assemble((piece, style), (f" @{row.key} {row.lift:.1f}×", "dim"))]
        lines += [Text.assemble("→ ", (_shorten(str(row.token_1)), "cyan"), (f" {row.p_1:.2f}", "dim"))]
    return Text("\n").join(lines)


def _shorten(piece: str) -> str:
    """A token in a few characters; spaces and newlines are made visible."""
    visible = escape_controls("".join(VISIBLE.get(c, c) for c in piece))
    return visible if len(visible) <= TOKEN_WIDTH else f"{visible[: TOKEN_WIDTH - 1]}…"
