"""Reading training text.

text = read_text(Path("enwik8_clean.txt.xz"))       # plain text or JSON lines with a "text" field, compressed or not
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

from floatscope.errors import UserError
from floatscope.files.inputs import require_regular_file

NO_TEXT = "there is no training text; give --text FILE, once per file (plain or .jsonl, .gz, .xz or .bz2)"
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


def read_text(path: Path) -> str:
    """Read a text file: plain or JSON lines with a "text" field, compressed or not."""
    suffix = path.with_suffix("").suffix if path.suffix in OPENERS else path.suffix
    try:
        opener: Callable[..., Any] = OPENERS.get(path.suffix, open)
        with opener(require_regular_file(path), "rt", encoding="utf-8") as file:
            text: str = file.read()
            if suffix == ".jsonl":
                text = "\n".join(json.loads(line)["text"] for line in text.split("\n") if line.strip())
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f'{path} is not a file of JSON lines with a "text" field each: {error!r}') from error
    if "\0" in text:
        raise UserError(f"{path} is binary: it contains zero bytes; give plain text")
    if not text.strip():
        raise UserError(f"{path} is empty; give a file with text")
    return text
