"""`floatscope decode`: watch a canvas being filled in the terminal."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floatscope.cli import options as o
from floatscope.cli.console import show_status
from floatscope.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from floatscope.pipelines.decoding import Decoding


@o.expand_groups
def decode(
    model: o.ModelName,
    *,
    prompt: Annotated[
        str, o.Opt(metavar="TEXT", help="The text to answer or continue; - reads it from stdin.", show_default=False)
    ],
    infill: Annotated[bool, o.Opt("--infill", help="Fill the masks inside the prompt instead of appending.")] = False,
    chat: Annotated[
        bool | None, o.Opt("--chat/--no-chat", help="Use the chat template. Default: if there is one.")
    ] = None,
    layer: Annotated[int | None, o.Opt(metavar="N", min=0, help="Underline the anchors of this layer.")] = None,
    as_json: Annotated[
        bool, o.Opt("--json", help="Print one JSON object: the text, the tokens, the commits of every step.")
    ] = False,
    sampling: o.SamplingOptions,
    loading: o.ModelOptions,
) -> None:
    """Decode a prompt and show the canvas at every step: masks, new commits coloured by confidence, anchors underlined.

    In a pipe only the text is printed.
    """
    from rich.console import Console

    o.check_model(model)
    text = _read_stdin() if prompt == "-" else prompt
    console = Console(highlight=False)
    is_live = console.is_terminal and not as_json
    with show_status(f"opening {model}"):
        from floatscope.capture.watcher import Watch
        from floatscope.pipelines.decode import decode as start_decoding

        loaded = loading.load(model)
    out = start_decoding(
        loaded,
        text,
        watch=Watch(fields=("received", "uniform", "eligible")) if layer is not None else None,
        chat=chat,
        infill=infill,
        **sampling.settings,
    )
    if layer is not None:
        next(iter(out))
        out.lift(layer)  # refuses a layer that does not exist before the rest is decoded
    if is_live:
        _show_steps(console, out, layer)
    elif as_json:
        typer.echo(json.dumps(_record(out, layer), ensure_ascii=False))
    else:
        typer.echo(out.text if loaded.tokenizer is not None else " ".join(map(str, out.generated_ids[0])))


def _read_stdin() -> str:
    """The text that is piped in, without its last newline."""
    if sys.stdin is None or sys.stdin.closed:
        raise UserError("--prompt - reads the prompt from stdin, which is closed; give the text itself")
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt on stdin is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _show_steps(console: Console, out: Decoding, layer: int | None) -> None:
    """Draw step after step in place, no higher than the terminal; at the end the whole canvas once."""
    from rich.live import Live

    from floatscope.cli.view import CanvasView

    view, last = CanvasView(out, layer, console), None
    with Live(console=console, auto_refresh=False, transient=True) as screen:
        for step in out:
            view.count(step)
            last = step
            screen.update(view.render(step, console.height), refresh=True)
    if last is not None:
        console.print(view.render(last))


def _record(out: Decoding, layer: int | None) -> dict[str, Any]:
    """The decoding as JSON values."""
    from floatscope.cli.view import CanvasView

    view, steps = CanvasView(out, layer), []
    for step in out:
        view.count(step)
        steps.append(view.record(step))
    before = out.steps[0].before
    prompt = before.tokens[0][before.valid[0]].tolist()[: out.answer_start - int(before.valid[0].int().argmax())]
    text = out.text if out.model.tokenizer is not None else None
    answer = {"text": text, "tokens": out.generated_ids[0], "prompt_tokens": prompt}
    speed = {"seconds": round(view.seconds, 3), "tokens_per_second": round(view.tokens_per_second, 2)}
    return {**answer, **speed, "steps": steps, "run": out.meta}
