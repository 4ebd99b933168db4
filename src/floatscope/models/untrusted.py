"""Files of a checkpoint that nobody vouches for: first opened in a child process with limits.

    check_untrusted(folder / "config.json", lambda: build(config), digest)      # a UserError if it exceeds the limits
    is_shipped(folder)                                                          # True: no need to

A few bytes can ask for 10^12 layers, or double a text 40 times. No list of such tricks is complete, so the same work is
done in a child first. What passed once in this process is not tried again.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files as package_files
from pathlib import Path

from floatscope.errors import UserError
from floatscope.models.bases import BASES, cache_folder
from floatscope.models.limited_process import LimitExceeded, Limits, run_limited

REMEDY = "download it again from a source that you trust"
_passed: set[str] = set()


def check_untrusted(path: Path, work: Callable[[], object], digest: str, limits: Limits | None = None) -> None:
    """Run `work` in a child process with limits.

    Args:
        path: the file that the error names.
        work: what this process does next; its `UserError` is raised here.
        digest: of everything that the work depends on.
        limits: default: 10 s of processor time and 1 GiB.
    """
    if digest in _passed:
        return
    try:
        run_limited(work, limits)
    except LimitExceeded as error:
        raise UserError(f"{path} cannot be opened ({error}); {REMEDY}") from error
    _passed.add(digest)


def is_shipped(path: Path) -> bool:
    """Tell whether a file or folder came with floatscope, or was fetched and compared with a digest in floatscope."""
    assets = Path(str(package_files("floatscope"))) / "assets"
    if path.suffix == ".gguf":
        return path in (cache_folder() / base.file_name for base in BASES.values())
    return path.resolve().is_relative_to(assets.resolve())
