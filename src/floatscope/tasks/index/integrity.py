"""Check the files of the engine: which are missing, cut short, or differ from their checksum."""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path

from floatscope.errors import UserError
from floatscope.tasks.index.folder import ENGINE

SEGMENT_FILES = ("store", "term", "idx", "pos", "fieldnorm", "fast")


def damage_error(path: Path, damage: list[str]) -> UserError:
    """Return the error that lists the damaged files of an index."""
    return UserError(f"{path} is damaged: {', '.join(damage)}; restore it from a copy, or build it again")


def find_damage(path: Path) -> list[str]:
    """Return a phrase for each file of the engine that is missing, cut short, or differs from its checksum."""
    folder = path / ENGINE
    while True:
        try:
            before = (folder / "meta.json").read_bytes()
            records = json.loads(before)["segments"]
            segments = [(record["segment_id"].replace("-", ""), record["deletes"]) for record in records]
        except OSError as error:
            return [f"{ENGINE}/meta.json is {_describe_error(error)}"]
        except (ValueError, LookupError, TypeError, AttributeError):
            return [f"{ENGINE}/meta.json is not JSON of tantivy"]
        names = [f"{segment}.{part}" for segment, _ in segments for part in SEGMENT_FILES]
        names += [f"{segment}.{deletes['opstamp']}.del" for segment, deletes in segments if deletes]
        damage = [f"{ENGINE}/{name} is {state}" for name in names if (state := _check_file(folder / name)) != "intact"]
        try:
            json.loads((folder / ".managed.json").read_bytes())
        except OSError:
            pass  # the engine only uses it to delete old files
        except ValueError:
            damage.append(f"{ENGINE}/.managed.json is not JSON")
        if not damage or (folder / "meta.json").read_bytes() == before:  # else a writer has just replaced the files
            return damage


def _check_file(file: Path) -> str:
    """Return the state of a file: a body, a JSON footer with the body's CRC-32, the footer's length, and 1337."""
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - 8))
            length, magic = struct.unpack("<II", opened.read(8))
            if magic != 1337 or length > size - 8:
                return "cut short"
            opened.seek(size - 8 - length)
            expected, left, actual = json.loads(opened.read(length))["crc"], size - 8 - length, 0
            opened.seek(0)
            while left:
                chunk = opened.read(min(left, 1 << 20))
                left, actual = left - len(chunk), zlib.crc32(chunk, actual)
    except OSError as error:
        return _describe_error(error)
    except struct.error:
        return "cut short"
    except (ValueError, LookupError, TypeError):
        return "damaged"
    return "intact" if actual == expected else "damaged"


def _describe_error(error: OSError) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else f"not readable ({error.strerror})"
