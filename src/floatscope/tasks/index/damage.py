"""Files of the engine that are missing, cut short, or not what their checksum says."""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path

from floatscope.errors import UserError
from floatscope.tasks.index.folder import ENGINE

SEGMENT = ("store", "term", "idx", "pos", "fieldnorm", "fast")  # the files of a segment


def damaged(path: Path, found: list[str]) -> UserError:
    return UserError(f"{path} is damaged: {', '.join(found)}; restore it from a copy, or make it anew")


def damage(path: Path) -> list[str]:
    """Files that are missing, cut short, or not what their checksum says."""
    folder = path / ENGINE
    while True:
        try:
            before = (folder / "meta.json").read_bytes()
            told = json.loads(before)["segments"]
            segments = [(each["segment_id"].replace("-", ""), each["deletes"]) for each in told]
        except OSError as error:
            return [f"{ENGINE}/meta.json is {_gone(error)}"]
        except (ValueError, LookupError, TypeError, AttributeError):
            return [f"{ENGINE}/meta.json is no JSON of tantivy's"]
        names = [f"{segment}.{part}" for segment, _ in segments for part in SEGMENT]
        names += [f"{segment}.{deletes['opstamp']}.del" for segment, deletes in segments if deletes]
        found = [f"{ENGINE}/{name} is {state}" for name in names if (state := _state(folder / name)) != "whole"]
        try:
            json.loads((folder / ".managed.json").read_bytes())
        except OSError:
            pass  # it is only what the engine sweeps by
        except ValueError:
            found.append(f"{ENGINE}/.managed.json is no JSON")
        if not found or (folder / "meta.json").read_bytes() == before:  # else a writer has put others in their place
            return found


def _state(file: Path) -> str:
    """Of a file of the engine: a body, a footer in JSON with the body's CRC-32, the footer's length, and 1337."""
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - 8))
            length, magic = struct.unpack("<II", opened.read(8))
            if magic != 1337 or length > size - 8:
                return "cut short"
            opened.seek(size - 8 - length)
            crc, left, now = json.loads(opened.read(length))["crc"], size - 8 - length, 0
            opened.seek(0)
            while left:
                chunk = opened.read(min(left, 1 << 20))
                left, now = left - len(chunk), zlib.crc32(chunk, now)
    except OSError as error:
        return _gone(error)
    except struct.error:
        return "cut short"
    except (ValueError, LookupError, TypeError):
        return "damaged"
    return "whole" if now == crc else "damaged"


def _gone(error: OSError) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else f"not to be read ({error.strerror})"
