"""Parametrisation by pairs: `make test` sees every pair of values, `make test-slow` the rest of the product.

@every_pair(kind=["full", "causal"], seed=range(4), by=["topk", "gu"])
def test_detectors(kind, seed, by): ...
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def every_pair(**values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise a test by the product of `values`, of which few rows are quick and the others are marked slow.

    For any two arguments, every pair of their values is in some quick row. So a fault that one value or two values
    together cause is found by the quick rows; one that needs three may be found only by the slow ones.
    """
    lists = [list(each) for each in values.values()]
    rows = list(product(*(range(len(each)) for each in lists)))
    quick, params = choose_rows(rows), []
    for row in rows:
        marks = () if row in quick else pytest.mark.slow
        params.append(pytest.param(*(each[i] for each, i in zip(lists, row, strict=True)), marks=marks))
    return pytest.mark.parametrize(tuple(values), params)


def choose_rows(rows: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Choose rows until they contain every pair, always the first of those that contain the most new pairs."""
    pairs = {row: frozenset(combinations(enumerate(row), 2)) for row in rows}
    missing = set().union(*pairs.values())
    chosen = set()
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen


def slow_except(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values of a parametrisation, all marked slow but those named: `slow_except(KINDS, "mdm")`."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
