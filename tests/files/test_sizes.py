"""Sizes in bytes: parsed with their units, formatted with three significant digits."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floatscope.errors import UserError
from floatscope.files.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 * 1024**3), ("500MB", 500_000_000), ("1.5 kb", 1500), (".5MiB", 512 * 1024), ("3 b", 3), (17, 17)],
)
def test_sizes_with_units_are_parsed(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["8", "8G", "GiB", "-1GB", "1e3MB", "", "8 gigs", "inf GB", "1.2.3GB"])
def test_other_text_is_refused(text):
    with pytest.raises(UserError, match=re.escape(f"'{text}' is not a size; write a number and a unit, such as 8GiB")):
        parse_size(text)


@pytest.mark.parametrize("size", [0, -5, "0GB"])
def test_a_size_must_be_above_zero(size):
    with pytest.raises(UserError, match="a size must be above zero"):
        parse_size(size)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 1024, "10.0 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (8 * 1024**3, "8.00 GiB"),
    ],
)
def test_sizes_are_formatted_with_three_digits(size, text):
    assert format_size(size) == text


@given(st.integers(1, 2**60))
def test_a_formatted_size_is_parsed_to_three_digits(size):
    assert parse_size(format_size(size)) == pytest.approx(size, rel=6e-3)
