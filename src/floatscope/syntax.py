"""`name(argument=value, …)` as people write it on a command line, read without evaluating anything.

spelled("threshold(tau=0.95)")       # ("threshold", {"tau": 0.95})
spelled("confidence")                # ("confidence", {})
"""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Mapping
from typing import Any

from floatscope.errors import UserError, unknown_choice


def parse_call(text: str, example: str = "threshold(tau=0.95)") -> tuple[str, dict[str, Any]]:
    """The name and its arguments; values are literals: numbers, text, lists, True, None."""
    try:
        with warnings.catch_warnings(action="ignore"):
            node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            given = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords if k.arg is not None}
            if len(given) == len(node.keywords):  # else one is given twice, or by **
                return node.func.id, given
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    shown = text if len(text) <= 80 else f"{text[:77]}…"
    raise UserError(f"cannot read {shown!r}: write a name, or a name with arguments, as in {example}")


def merge_arguments(kind: str, name: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`defaults` with what was given; an argument must be known, and a number where its default is one."""
    known = dict(defaults)
    for argument, value in given.items():
        if argument not in defaults:
            if not defaults:
                raise UserError(f"{kind} '{name}' takes no arguments, got {argument}={value!r}")
            raise unknown_choice(f"argument of {kind} '{name}'", argument, defaults)
        wanted = type(defaults[argument])
        if wanted in (int, float):
            number = isinstance(value, int | wanted) and not isinstance(value, bool) and math.isfinite(value)
            if not number:
                what = "a whole number" if wanted is int else "a number"
                raise UserError(f"{kind} '{name}' takes {what} for {argument}, got {value!r}")
            value = wanted(value)
        known[argument] = value
    return known
