"""Sentences one can take a name or a number out of.

gaps("The town is old. That winter the river froze at Oslo.")     # [("That winter the … Oslo.", ["Oslo"])]
"""

from __future__ import annotations

import re

GAP = re.compile(r"(?<=[a-z,;] )(?:[A-Z][\w’'-]+(?: (?:of |the )?[A-Z][\w’'-]+)*|\d[\d,.]*\d|\d+)(?=[ ,.;])")
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def gaps(paragraph: str) -> list[tuple[str, list[str]]]:
    """The sentences of a paragraph that are neither short nor long, each with what can be taken out of it."""
    sentences = [(s, GAP.findall(s)) for s in SENTENCE.split(paragraph)]
    return [(s, found) for s, found in sentences if found and 30 < len(s) < 300]
