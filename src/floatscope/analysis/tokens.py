"""Token classes: their share among anchors is compared with their share in the canvas.

    classify_tokens(trace)                   # [step, key], indices into CLASSES
    CLASSES[classify_tokens(trace)[0, 0]]    # "bos"

`models/token_classes.py` defines the classes.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from floatscope.errors import UserError
from floatscope.models.token_classes import CLASSES, STRUCTURE, TEMPLATE, classify_token
from floatscope.traces import Trace

__all__ = ["CLASSES", "STRUCTURE", "TEMPLATE", "classify_tokens", "require_pieces", "starts_with_bos"]


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
        name = classify_token(i, text, bos=special.get("bos"), mask=special.get("mask"), special_ids=special_ids)
        table[i] = CLASSES.index(name)
    return table
