"""The one error a person can fix.

`UserError` carries one sentence: what was given, what is allowed, what helps. The command line prints it without a
traceback and exits with status 2. Everything else that escapes is a bug and may crash loudly.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the caller can mend; the message says how."""


def unknown(kind: str, given: str, allowed: Iterable[str]) -> UserError:
    """`unknown("keep level", "sumary", KEEP)` → "unknown keep level 'sumary' (did you mean 'summary'?); allowed: …"."""
    names = list(allowed)
    near = difflib.get_close_matches(given, names, n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    return UserError(f"unknown {kind} '{given}'{hint}; allowed: {', '.join(names)}")
