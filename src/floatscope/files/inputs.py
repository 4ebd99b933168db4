"""Files that a person names: only regular files are read, since a pipe or a device may never end.

require_regular_file(Path("questions.jsonl"))
"""

from __future__ import annotations

import stat
from pathlib import Path

from floatscope.errors import UserError


def require_regular_file(path: Path) -> Path:
    """Return the path of a regular file, or of one that does not exist; refuse a folder, a pipe and a device."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return path  # whoever opens it says why it cannot be read
    if stat.S_ISDIR(mode):
        raise UserError(f"{path} is a folder; give a file")
    if not stat.S_ISREG(mode):
        raise UserError(
            f"{path} is a pipe or a device, which may never end; write its contents to a file and give that"
        )
    return path
