"""What a token is: the classes whose share among anchors is compared with their share in the canvas.

    classes_of(trace)                   # [step, key], numbers into CLASSES
    CLASSES[classes_of(trace)[0, 0]]    # "bos"

Structure is everything that carries form: the beginning, masks, special tokens, the words of the template, line breaks
and punctuation. The rest is content.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from floatscope.errors import UserError
from floatscope.traces import Trace

CLASSES = ("bos", "mask", "special", "template", "newline", "punctuation", "content")
STRUCTURE = CLASSES[:-1]
TEMPLATE = "template"
"""The region that holds the template's own words."""


def classes_of(trace: Trace) -> Int[np.ndarray, "step key"]:
    """The first of CLASSES that fits, in their order; −1 beyond a step's canvas."""
    tokens = trace.arrays["tokens"]
    table = _table(trace)
    known = np.full(tokens.shape, -1)
    there = tokens >= 0
    known[there] = table[tokens[there]]
    later = known[:, 1:]
    later[later == CLASSES.index("bos")] = CLASSES.index("special")  # it begins a text only where one begins
    plain = CLASSES.index("newline")
    if "region_member" in trace.arrays and TEMPLATE in trace.coords["region"]:
        member = trace.arrays["region_member"][:, trace.coords["region"].index(TEMPLATE)]
        known[there & member[: tokens.shape[1]] & (known >= plain)] = CLASSES.index("template")
    return known


def pieces_of(trace: Trace) -> dict[int, str]:
    """Token id → its text."""
    if "pieces" not in trace.meta:
        raise UserError(
            f"the trace of '{trace.sample}' does not say what its tokens are; make it with floatscope trace, which does"
        )
    return {int(i): text for i, text in trace.meta["pieces"].items()}


def starts_with_bos(trace: Trace) -> bool:
    """Whether the first key is a beginning-of-text token, as far as the trace knows."""
    bos = trace.meta.get("special", {}).get("bos")
    return bos is not None and int(trace.arrays["tokens"][0, 0]) == bos


def _table(trace: Trace) -> np.ndarray:
    """Token id → class, from the token's own text."""
    pieces = pieces_of(trace)
    special, specials = trace.meta.get("special", {}), set(trace.meta.get("special_ids", ()))
    table = np.full(max(pieces, default=0) + 1, CLASSES.index("content"))
    for i, text in pieces.items():
        if i == special.get("bos"):
            kind = "bos"
        elif i == special.get("mask"):
            kind = "mask"
        elif i in specials:
            kind = "special"
        elif not text.strip():
            kind = "newline"
        elif not any(character.isalnum() for character in text):
            kind = "punctuation"
        else:
            kind = "content"
        table[i] = CLASSES.index(kind)
    return table
