"""Check the options of a sweep or study: names, numbers, and single values.

parse_names("layout", ("adjacent", "split"), LAYOUTS)       # ["adjacent", "split"]
parse_counts("counts", (0, 8, 64), default=(0, 1, 2))       # [0, 8, 64]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from floatscope.errors import UserError, unknown_choice

Number = int | float
OptionValue = object
"""The value a user gives to an option: one, several, or None for the default. The functions here check it."""

T = TypeVar("T")


def parse_names(kind: str, value: OptionValue, allowed: Iterable[str]) -> list[str]:
    """Return the names that the user gave, one or several; None: all that are allowed."""
    allowed_names = list(allowed)
    if value is None:
        return allowed_names
    names = [str(name) for name in _as_list(value)]
    for name in names:
        if name not in allowed_names:
            raise unknown_choice(kind, name, allowed_names)
    return _require_distinct(kind, names)


def parse_numbers(option: str, value: OptionValue, minimum: Number, maximum: Number | None = None) -> list[Number]:
    """Return numbers in rising order; they are whole numbers unless there is a `maximum`."""
    numbers: list[Number] = _as_list(value)
    for number in numbers:
        has_type = type(number) is int or (maximum is not None and isinstance(number, float))
        if not has_type or not minimum <= number or (maximum is not None and number > maximum):
            span = f"whole numbers from {minimum} on" if maximum is None else f"numbers from {minimum} to {maximum}"
            raise UserError(f"{option} must be {span}, got {number!r}")
    return sorted(_require_distinct(option, numbers))


def parse_counts(option: str, value: OptionValue, default: Iterable[int], minimum: int = 0) -> list[int]:
    """Return whole numbers in rising order; None: the default."""
    return [int(number) for number in parse_numbers(option, default if value is None else value, minimum)]


def limit_counts(option: str, counts: Sequence[int], is_explicit: bool, available: int, items: str) -> list[int]:
    """Return the counts up to what is available; a count that the user gave and that is too large is an error."""
    if is_explicit and counts[-1] > available:
        raise UserError(
            f"{option} goes up to {counts[-1]}, and there are {available} {items}; give smaller counts or more samples"
        )
    return [count for count in counts if count <= available]


def require_one(option: str, values: Sequence[T]) -> T:
    """Return the only value of an option that takes one."""
    if len(values) != 1:
        raise UserError(f"{option} takes one value, got {len(values)}: {', '.join(map(str, values))}")
    return values[0]


def _as_list(value: OptionValue) -> list[Any]:
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def _require_distinct(option: str, values: list[T]) -> list[T]:
    if not values:
        raise UserError(f"no {option} is given; give one or more")
    if repeated := [value for number, value in enumerate(values) if value in values[:number]]:
        raise UserError(f"{option} {repeated[0]} is given twice; give it once")
    return values
