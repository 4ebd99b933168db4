"""`floatscope decode`: watch a canvas being filled in the terminal."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floatscope.cli import options as o
from floatscope.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from floatscope.pipelines.decode import Decoding

Opt = typer.Option


def decode(
    model: o.Name,
    prompt: Annotated[str, Opt(help="The text to answer or continue; - reads it from stdin.")],
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
    infill: Annotated[bool, Opt("--infill", help="Fill the masks inside the prompt instead of appending.")] = False,
    chat: o.Chat = None,
    layer: Annotated[int | None, Opt(help="Watch, and underline the anchors of this layer.")] = None,
    mask_id: o.MaskId = None,
    shift: o.Shift = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    revision: o.Revision = None,
    trust_remote_code: o.TrustRemoteCode = False,
    as_json: Annotated[bool, Opt("--json", help="Print one JSON object: text, tokens, every step's commits.")] = False,
) -> None:
    """Watch a canvas being denoised: masks, fresh commits coloured by confidence, anchors of a layer underlined.

    In a pipe only the text is printed.
    """
    from rich.console import Console

    from floatscope.capture.watcher import Watch
    from floatscope.pipelines.decode import decode as start

    console = Console(highlight=False)
    live = console.is_terminal and not as_json
    opened = o.opened(
        model,
        live,
        device=device,
        dtype=dtype,
        mask_id=mask_id,
        shift=shift,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    out = start(
        opened,
        _stdin() if prompt == "-" else prompt,
        watch=Watch(fields=("received", "uniform", "eligible")) if layer is not None else None,
        preset=preset,
        chat=chat,
        infill=infill,
        sampler=sampler,
        new_tokens=new_tokens,
        steps=steps,
        block=block,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        guidance=guidance,
        eos=eos,
        stop=stop,
        seed=seed,
    )
    if layer is not None:
        next(iter(out))
        out.lift(layer)  # refuses a layer that is not there, before the rest is decoded
    if live:
        _show(console, out, layer)
    elif as_json:
        typer.echo(json.dumps(_told(out, layer), ensure_ascii=False))
    else:
        typer.echo(out.text if opened.tokenizer is not None else " ".join(map(str, out.generated[0])))


def _stdin() -> str:
    """What is piped in, without the newline that ends it."""
    if sys.stdin is None or sys.stdin.closed:
        raise UserError("--prompt - reads the prompt from stdin, which is closed")
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt on stdin is no UTF-8 text ({error.reason} at byte {error.start})") from error


def _show(console: Console, out: Decoding, layer: int | None) -> None:
    """Step by step in place, no higher than the terminal; then the whole canvas once."""
    from rich.live import Live

    from floatscope.cli.view import View

    view, last = View(out, layer, console), None
    with Live(console=console, auto_refresh=False, transient=True) as screen:
        for step in out:
            view.count(step)
            last = step
            screen.update(view.after(step, console.height), refresh=True)
    if last is not None:
        console.print(view.after(last))


def _told(out: Decoding, layer: int | None) -> dict[str, Any]:
    from floatscope.cli.view import View

    view, steps = View(out, layer), []
    for step in out:
        view.count(step)
        steps.append(view.told(step))
    before = out.steps[0].before
    prompt = before.tokens[0][before.valid[0]].tolist()[: out.answer_start - int(before.valid[0].int().argmax())]
    text = out.text if out.model.tokenizer is not None else None
    answer = {"text": text, "tokens": out.generated[0], "prompt_tokens": prompt}
    speed = {"seconds": round(view.seconds, 3), "tokens_per_second": round(view.speed, 2)}
    return {**answer, **speed, "steps": steps, "run": out.meta}
