"""Calls as people write them on a command line, `name(argument=value, …)`, parsed without evaluating anything.

parse_call("threshold(tau=0.95)")       # ("threshold", {"tau": 0.95})
parse_call("confidence")                # ("confidence", {})
format_call("threshold", {"tau": 0.95}) # "threshold(tau=0.95)"
"""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Mapping
from typing import Any

from floatscope.errors import UserError, unknown_choice


def parse_call(text: str, example: str = "threshold(tau=0.95)") -> tuple[str, dict[str, Any]]:
    """Return the name and the keyword arguments; values are literals such as numbers, strings, lists, True and None.

    `example` is the call that the error message shows.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            arguments = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords if k.arg is not None}
            if len(arguments) == len(node.keywords):  # else one is repeated, or is a **mapping
                return node.func.id, arguments
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    excerpt = text if len(text) <= 80 else f"{text[:77]}…"
    raise UserError(f"cannot read {excerpt!r}: write a name, or a name with arguments, as in {example}")


def format_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the text that `parse_call` reads back as this name and these arguments."""
    return f"{name}({', '.join(f'{argument}={value!r}' for argument, value in arguments.items())})"


def merge_arguments(kind: str, name: str, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return `defaults` updated with `arguments`, which must be known, and numbers where the default is a number.

    `kind` and `name` are for the error message: `merge_arguments("sampler", "threshold", {"tau": 1}, {"tau": 0.9})`.
    """
    merged = dict(defaults)
    for argument, value in arguments.items():
        if argument not in defaults:
            if not defaults:
                raise UserError(f"{kind} '{name}' takes no arguments, got {argument}={value!r}")
            raise unknown_choice(f"argument of {kind} '{name}'", argument, defaults)
        default_type = type(defaults[argument])
        if default_type in (int, float):
            is_number = isinstance(value, int | default_type) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number:
                expected = "a whole number" if default_type is int else "a number"
                raise UserError(f"{kind} '{name}' takes {expected} for {argument}, got {value!r}")
            value = default_type(value)
        merged[argument] = value
    return merged
