"""Scores by the published SQuAD rules."""

from __future__ import annotations

import pytest

from floatscope.tasks.scores import acc, em, f1, normalise


@pytest.mark.parametrize(
    ("text", "expected"),
    [("The  Eiffel Tower!", "eiffel tower"), ("an apple, a pear", "apple pear"), ("U.S.A.", "usa"), ("Thea", "thea")],
)
def test_normalising_removes_case_articles_punctuation_and_spaces(text, expected):
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("prediction", "golds", "scores"),
    [
        ("It was Paris.", ["Paris"], (1, 0, 0.5)),
        ("paris", ["The Paris"], (1, 1, 1)),
        ("London", ["Paris", "london"], (1, 1, 1)),
        ("Rome", ["Paris"], (0, 0, 0)),
        ("", ["Paris"], (0, 0, 0)),
        ("new york city", ["york new"], (0, 0, 0.8)),
        ("the", ["the", "x"], (0, 0, 0)),
        ("a b b", ["b b c"], (0, 0, 0.8)),
    ],
)
def test_the_best_gold_answer_counts(prediction, golds, scores):
    assert (acc(prediction, golds), em(prediction, golds), pytest.approx(f1(prediction, golds))) == scores
