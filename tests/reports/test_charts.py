"""Charts are plain values: they survive JSON, and reject what cannot be drawn."""

from __future__ import annotations

import json

import pytest

from floatscope.reports.charts import (
    Dots,
    Lines,
    Map,
    Model,
    Report,
    Section,
    Series,
    Table,
    chart_to_json,
    from_json,
    to_json,
)
from floatscope.schema import Paradigm


def test_report_survives_json(report):
    assert from_json(json.loads(json.dumps(to_json(report), allow_nan=False))) == report


def test_missing_values_become_null():
    data = chart_to_json(Lines("", "", "", [0.0, 1.0], [Series("s", "m", [float("nan"), float("inf")])]))
    assert data["kind"] == "lines"
    assert data["series"][0]["y"] == [None, None]


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: Series("s", "m", [1.0], low=[0.5]), "one end of its interval"),
        (lambda: Series("s", "m", [1.0], low=[0.5, 1], high=[1.5, 2]), "1 values and 2 in `low`"),
        (lambda: Lines("t", "", "", [0, 1], [Series("s", "m", [1.0])]), "series 's' has 1 of 2 values"),
        (lambda: Lines("t", "", "", [0, 1], [], reference=[1.0]), "the reference has 1 of 2"),
        (lambda: Map("t", "", "", [[1.0]], [0, 1], [0]), "not 1 rows of 2"),
        (lambda: Map("t", "", "", [[1.0]], [0], [0], [(0, 1, "top")]), "cannot place a mark 'top' at row 0, column 1"),
        (lambda: Map("t", "", "", [[1.0]], [0], [0], [(0, 0, "star")]), "cannot place a mark 'star'"),
        (lambda: Dots("t", ["a", "b"], "", [Series("s", "m", [1.0])]), "1 values for 2 categories"),
        (lambda: Table(["a", "b"], [[1]]), "1 cells for 2 columns"),
    ],
)
def test_inconsistent_charts_are_rejected(build, reason):
    with pytest.raises(ValueError, match=reason):
        build()


def test_series_may_have_its_own_x():
    Lines("t", "", "", [0, 1], [Series("s", "m", [1.0, 2.0, 3.0], x=[0.0, 0.5, 1.0])])


def test_labels_are_the_labels_of_the_models():
    assert Report(
        "", [], [Model("a", Paradigm.MDM, 1), Model("b", Paradigm.ARM, 1)], [Section("s", "", "", "")]
    ).labels == ["a", "b"]
