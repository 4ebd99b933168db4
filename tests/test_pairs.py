"""The quick rows of a parametrisation contain every pair of values."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from pairs import choose_rows, every_pair


@pytest.mark.parametrize("sizes", [(2, 3), (4, 4, 2, 3), (2, 2, 2, 2, 2), (5, 1, 3)])
def test_every_pair_is_in_a_chosen_row(sizes):
    rows = list(product(*map(range, sizes)))
    chosen = choose_rows(rows)
    assert chosen <= set(rows)
    for a, b in combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in chosen} == set(product(range(sizes[a]), range(sizes[b])))


def test_few_rows_are_chosen():
    assert len(choose_rows(list(product(*map(range, (4, 4, 2, 3)))))) <= 20  # of 96; 16 are the least


def test_the_other_rows_are_slow_and_none_is_lost():
    mark = every_pair(a="xyz", b=[0, 1, 2], c=[True, False])
    names, params = mark.args
    assert names == ("a", "b", "c")
    assert [param.values for param in params] == list(product("xyz", [0, 1, 2], [True, False]))
    assert sum(not param.marks for param in params) < len(params)
