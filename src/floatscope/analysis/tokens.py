"""Token classes: their share among anchors is compared with their share in the canvas.

    classify_tokens(trace)                   # [step, key], indices into CLASSES
    CLASSES[classify_tokens(trace)[0, 0]]    # "bos"

Structure is everything that carries form: the beginning of the text, masks, special tokens, the words of the template,
line breaks and punctuation. The rest is content.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from floatscope.errors import UserError
from floatscope.traces import Trace

CLASSES = ("bos", "mask", "special", "template", "newline", "punctuation", "content")
STRUCTURE = CLASSES[:-1]
TEMPLATE = "template"
"""The region with the words of the template itself."""


def classify_tokens(trace: Trace) -> Int[np.ndarray, "step key"]:
    """Return the first of CLASSES that fits each token, as an index; −1 beyond a step's canvas."""
    tokens = trace.tokens
    class_of_id = _class_table(trace)
    classes = np.full(tokens.shape, -1)
    on_canvas = tokens >= 0
    classes[on_canvas] = class_of_id[tokens[on_canvas]]
    later = classes[:, 1:]
    later[later == CLASSES.index("bos")] = CLASSES.index("special")  # it is a bos only at the beginning
    if "region_member" in trace.arrays and TEMPLATE in trace.coords["region"]:
        member = trace.arrays["region_member"][:, trace.coords["region"].index(TEMPLATE)]
        is_text = classes >= CLASSES.index("newline")
        classes[on_canvas & member[: tokens.shape[1]] & is_text] = CLASSES.index("template")
    return classes


def require_pieces(trace: Trace) -> dict[int, str]:
    """Return token id → text; refuse a trace that does not store the texts."""
    pieces = trace.pieces
    if pieces is None:
        raise UserError(
            f"the trace of '{trace.sample}' does not store the text of its tokens; `floatscope trace` stores it"
        )
    return pieces


def starts_with_bos(trace: Trace) -> bool:
    """Return whether the first key is a beginning-of-text token, as far as the trace knows."""
    bos = trace.meta.get("special", {}).get("bos")
    return bos is not None and int(trace.tokens[0, 0]) == bos


def _class_table(trace: Trace) -> np.ndarray:
    """Token id → class, from the text of the token."""
    pieces = require_pieces(trace)
    special, special_ids = trace.meta.get("special", {}), set(trace.meta.get("special_ids", ()))
    table = np.full(max(pieces, default=0) + 1, CLASSES.index("content"))
    for i, text in pieces.items():
        if i == special.get("bos"):
            name = "bos"
        elif i == special.get("mask"):
            name = "mask"
        elif i in special_ids:
            name = "special"
        elif not text.strip():
            name = "newline"
        elif not any(character.isalnum() for character in text):
            name = "punctuation"
        else:
            name = "content"
        table[i] = CLASSES.index(name)
    return table
