"""Sizes in bytes as people write them.

parse_size("8GiB")        # 8589934592
parse_size("500 MB")      # 500000000
format_size(8589934592)   # "8.00 GiB"
"""

from __future__ import annotations

import re

from floatscope.errors import UserError

BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
UNITS = {unit.lower(): 1024**i for i, unit in enumerate(BINARY_UNITS)}
UNITS |= {unit.lower(): 1000**i for i, unit in enumerate(("B", "kB", "MB", "GB", "TB", "PB"))}


def parse_size(size: int | str) -> int:
    """Return a number of bytes, given as a number or as text with a unit; text needs the unit."""
    if isinstance(size, str):
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]+)", size.strip().lower())
        if match is None or match[2] not in UNITS:
            raise UserError(f"'{size}' is not a size; write a number and a unit, such as 8GiB, 500MB or 1.5TiB")
        count = int(float(match[1]) * UNITS[match[2]])
    else:
        count = size
    if count <= 0:
        raise UserError(f"a size must be above zero, got '{size}'")
    return count


def format_size(size: int) -> str:
    """Return a number of bytes with three significant digits and a binary unit."""
    unit = min((max(size, 1).bit_length() - 1) // 10, len(BINARY_UNITS) - 1)
    value = size / 1024**unit
    if f"{value:.0f}" == "1024" and unit < len(BINARY_UNITS) - 1:  # 1023.9 KiB is easier to read as 1.00 MiB
        value, unit = value / 1024, unit + 1
    digits = 0 if unit == 0 else max(0, 2 - len(f"{value:.0f}") + 1)
    return f"{value:.{digits}f} {BINARY_UNITS[unit]}"
