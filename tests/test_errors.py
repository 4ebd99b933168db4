"""Sentences for people: control characters are spelled out, and a hint is near to what was written."""

from __future__ import annotations

import unicodedata

import pytest

from floatscope.cli.console import make_console, print_line, print_table, print_text
from floatscope.errors import escape_controls, find_similar, printable

BIDIRECTIONAL = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def test_every_control_character_is_spelled_out_and_nothing_else():
    """The restatement: categories Cc (control) and Cs (surrogate), and the bidirectional classes of Unicode."""
    directions = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    for code in [*range(0x3000), *range(0xD7FF, 0xE001), *range(0xFE00, 0x10200), 0x1F600]:
        c = chr(code)
        must = unicodedata.category(c) in ("Cc", "Cs") or unicodedata.bidirectional(c) in directions
        escaped = escape_controls(c)
        if c in "\n\t":
            assert escaped == c
        elif must or c in BIDIRECTIONAL:
            assert escaped.isascii()
            assert escaped == ascii(c)[1:-1]
        elif escaped != c:
            assert unicodedata.category(c) in ("Cf", "Zl", "Zp"), hex(code)


@pytest.mark.parametrize("text", ["Größe", "日本語", "שלום", "نص", "👩‍🚀", "a\u00a0b", "की", "x\ny\tz"])
def test_text_of_any_language_stays_as_it_is(text):
    assert escape_controls(text) == text


def test_a_phrase_has_no_line_breaks():
    assert printable("a\nb\t\u202ec") == "a\\nb\\t\\u202ec"


@pytest.mark.parametrize("c", BIDIRECTIONAL + "\x07\x1b\x7f\x9b")
def test_the_terminal_never_gets_a_control_character(c, capsys):
    console = make_console()
    print_line(console, "sample", f"[b]{c}x")
    print_text(console, f"[/b]{c}x")
    print_table(console, ["a", "b"], [[f"{c}x", f"[b]{c}"]])
    out = capsys.readouterr().out
    assert c not in out
    assert out.count(ascii(c)[1:-1]) == 4
    assert "[b]" in out
    assert "[/b]" in out


@pytest.mark.parametrize(
    ("name", "similar"),
    [("sumary", "summary"), ("head", "heads"), ("fulll", "full"), ("sunday", None), ("rowboat", None), ("", None)],
)
def test_a_hint_is_a_slip_away(name, similar):
    assert find_similar(name, ["summary", "heads", "rows", "full"]) == similar
