"""The figures show the numbers of the charts in the colours of the page."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from example_charts import DOTS, LINES, MAP, NAMED_LINES, TABLE, WIDE_MAP
from matplotlib.colors import to_hex

from floatscope.errors import UserError
from floatscope.reports import palette
from floatscope.reports.figures import draw

CHARTS = {"lines": LINES, "named": NAMED_LINES, "dots": DOTS, "map": MAP, "wide": WIDE_MAP}


@pytest.mark.parametrize(
    ("name", "format"),
    [
        pytest.param(name, format, marks=() if format == "svg" or name == "lines" else pytest.mark.slow)
        for name in CHARTS
        for format in ("png", "pdf", "svg")
    ],
)
def test_every_chart_draws_the_same_bytes_in_every_format(name, format, tmp_path):
    first, second = tmp_path / f"a.{format}", tmp_path / f"b.{format}"
    draw(CHARTS[name], first)
    draw(CHARTS[name], second)
    assert first.stat().st_size > 3000
    assert first.read_bytes() == second.read_bytes()


def test_lines_show_the_numbers_and_dash_the_controls():
    figure = draw(LINES, models=["arm", "mdm"])
    lines = figure.axes[0].get_lines()
    assert np.array_equal(lines[0].get_ydata(), [1.234, 2.5, np.nan, 4.75], equal_nan=True)
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-", ":"]
    assert to_hex(lines[0].get_color()) == palette.MODELS[1].light
    assert to_hex(lines[2].get_color()) == palette.MODELS[0].light
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["mdm", "arm", "untrained", "uniform"]
    assert len(figure.axes[0].collections) == 1  # only one series has an interval


def test_dots_show_the_numbers_and_intervals():
    figure = draw(DOTS)
    axes = figure.axes[0]
    values = [line.get_xdata().tolist() for line in axes.get_lines() if line.get_marker() == "o"]
    assert values[0] == [0.25, 0.5]
    ends = [segment[:, 0].tolist() for segment in axes.collections[0].get_segments()]
    assert ends == [[0.2, 0.3], [0.4, 0.6]]
    assert [text.get_text() for text in axes.get_yticklabels()] == DOTS.categories


def test_maps_show_the_numbers_and_marks():
    axes = draw(MAP).axes[0]
    assert np.array_equal(axes.images[0].get_array().filled(np.nan), [[1, 2, np.nan], [4, 8, 16]], equal_nan=True)
    assert axes.images[0].get_clim() == (1.0, 16.0)
    assert {line.get_label() for line in axes.get_lines()} == {"top key", "anchor", "committed"}
    flat = draw(replace(MAP, values=[[2.0] * 3] * 2, bounds=None))
    assert np.diff(flat.axes[0].images[0].get_clim())[0] > 0


def test_undrawable_charts_and_unwritable_paths_are_refused(tmp_path):
    with pytest.raises(UserError, match="cannot draw a table as a figure"):
        draw(TABLE)
    with pytest.raises(UserError, match="unknown figure format 'pgn'"):
        draw(MAP, tmp_path / "map.pgn")
    with pytest.raises(UserError, match="cannot write the figure"):
        draw(MAP, tmp_path / "absent" / "map.png")
