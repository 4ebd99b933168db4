"""`floatscope decode`: watch a canvas being filled in the terminal."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floatscope.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from floatscope.decoding import Decoding

Opt = typer.Option


def decode(
    model: Annotated[str, typer.Argument(help="A hub id, a folder, a .gguf file, or twin:NAME.")],
    prompt: Annotated[str, Opt(help="The text to answer or continue; - reads it from stdin.")],
    new_tokens: Annotated[int | None, Opt(help="Tokens to write. Default: 32, or the preset's.")] = None,
    steps: Annotated[int | None, Opt(help="Forwards. Default: one per token.")] = None,
    block: Annotated[int | None, Opt(help="Fill this many tokens before the next. Default: all at once.")] = None,
    sampler: Annotated[
        str | None, Opt(help="Which positions a step commits: confidence, margin, entropy, threshold(tau=0.9), …")
    ] = None,
    preset: Annotated[str | None, Opt(help="The authors' settings: llada or dream.")] = None,
    temperature: Annotated[float | None, Opt(help="0: the most likely token.")] = None,
    top_p: Annotated[float | None, Opt(help="Draw from the fewest tokens that hold this much probability.")] = None,
    top_k: Annotated[int | None, Opt(help="Draw from this many tokens.")] = None,
    guidance: Annotated[float | None, Opt(help="Classifier-free guidance.")] = None,
    eos: Annotated[str | None, Opt(help="free, never, or last.")] = None,
    stop: Annotated[bool | None, Opt("--stop/--no-stop", help="End when the text has ended.")] = None,
    seed: Annotated[int, Opt(help="Of whatever is drawn.")] = 0,
    infill: Annotated[bool, Opt("--infill", help="Fill the masks inside the prompt instead of appending.")] = False,
    chat: Annotated[bool | None, Opt("--chat/--raw", help="Use the chat template. Default: if there is one.")] = None,
    layer: Annotated[int | None, Opt(help="Watch, and underline the anchors of this layer.")] = None,
    mask_id: Annotated[int | None, Opt(help="The mask token, where the checkpoint does not tell.")] = None,
    shift: Annotated[bool | None, Opt("--shift/--no-shift", help="Whether row p decides position p + 1.")] = None,
    device: Annotated[str | None, Opt(help="cpu, cuda, cuda:1, or auto for all GPUs.")] = None,
    dtype: Annotated[str | None, Opt(help="float32, bf16 or fp16.")] = None,
    revision: Annotated[str | None, Opt(help="Of a hub checkpoint.")] = None,
    trust_remote_code: Annotated[
        bool, Opt("--trust-remote-code", help="Run the checkpoint's own code; it can do anything.")
    ] = False,
    as_json: Annotated[bool, Opt("--json", help="Print one JSON object: text, tokens, every step's commits.")] = False,
) -> None:
    """Watch a canvas being denoised: masks, fresh commits coloured by confidence, anchors of a layer underlined.

    In a pipe only the text is printed.
    """
    from rich.console import Console

    from floatscope.capture.watcher import Watch
    from floatscope.decoding import decode as start
    from floatscope.models import load

    console = Console(highlight=False)
    live = console.is_terminal and not as_json
    with Console(stderr=True).status("loading") if live else nullcontext():
        opened = load(
            model,
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
        typer.echo(out.text if opened.text is not None else " ".join(map(str, out.generated[0])))


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
    text = out.text if out.model.text is not None else None
    answer = {"text": text, "tokens": out.generated[0], "prompt_tokens": prompt}
    speed = {"seconds": round(view.seconds, 3), "tokens_per_second": round(view.speed, 2)}
    return {**answer, **speed, "steps": steps, "run": out.meta}
