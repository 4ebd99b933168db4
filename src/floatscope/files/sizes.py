"""Amounts of bytes as people write them.

parse_size("8GiB")        # 8589934592
parse_size("500 MB")      # 500000000
format_size(8589934592)   # "8.00 GiB"
"""

from __future__ import annotations

import re

from floatscope.errors import UserError

BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
UNITS = {unit.lower(): 1024**i for i, unit in enumerate(BINARY)}
UNITS |= {unit.lower(): 1000**i for i, unit in enumerate(("B", "kB", "MB", "GB", "TB", "PB"))}


def parse_size(given: int | str) -> int:
    """Bytes from a number or from text with a unit; the unit is required where a bare number could mean anything."""
    if isinstance(given, str):
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]+)", given.strip().lower())
        if match is None or match[2] not in UNITS:
            raise UserError(f"'{given}' is not a size; write a number and a unit, such as 8GiB, 500MB or 1.5TiB")
        size = int(float(match[1]) * UNITS[match[2]])
    else:
        size = given
    if size <= 0:
        raise UserError(f"a size must be above zero, got '{given}'")
    return size


def format_size(size: int) -> str:
    """Three figures and a binary unit."""
    unit = min((max(size, 1).bit_length() - 1) // 10, len(BINARY) - 1)
    value = size / 1024**unit
    if f"{value:.0f}" == "1024" and unit < len(BINARY) - 1:  # 1023.9 KiB is read more easily as 1.00 MiB
        value, unit = value / 1024, unit + 1
    digits = 0 if unit == 0 else max(0, 2 - len(f"{value:.0f}") + 1)
    return f"{value:.{digits}f} {BINARY[unit]}"
