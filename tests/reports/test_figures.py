"""The figures show the numbers of the charts, in the colours of the page."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made_report import DOTS, LINES, MAP, NAMED, TABLE, WIDE
from matplotlib.colors import to_hex

from floatscope.errors import UserError
from floatscope.reports import palette
from floatscope.reports.figures import draw

CHARTS = {"lines": LINES, "named": NAMED, "dots": DOTS, "map": MAP, "wide": WIDE}


@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
@pytest.mark.parametrize("name", CHARTS)
def test_every_chart_is_drawn_in_every_format_the_same_each_time(name, kind, tmp_path):
    first, second = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
    draw(CHARTS[name], first)
    draw(CHARTS[name], second)
    assert first.stat().st_size > 3000
    assert first.read_bytes() == second.read_bytes()


def test_lines_hold_the_numbers_and_controls_are_dashed():
    figure = draw(LINES, models=["arm", "mdm"])
    lines = figure.axes[0].get_lines()
    assert np.array_equal(lines[0].get_ydata(), [1.234, 2.5, np.nan, 4.75], equal_nan=True)
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-", ":"]
    assert to_hex(lines[0].get_color()) == palette.MODELS[1].light
    assert to_hex(lines[2].get_color()) == palette.MODELS[0].light
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["mdm", "arm", "untrained", "uniform"]
    assert len(figure.axes[0].collections) == 1  # one interval was given


def test_dots_hold_the_numbers_and_their_intervals():
    figure = draw(DOTS)
    axes = figure.axes[0]
    drawn = [line.get_xdata().tolist() for line in axes.get_lines() if line.get_marker() == "o"]
    assert drawn[0] == [0.25, 0.5]
    ends = [segment[:, 0].tolist() for segment in axes.collections[0].get_segments()]
    assert ends == [[0.2, 0.3], [0.4, 0.6]]
    assert [text.get_text() for text in axes.get_yticklabels()] == DOTS.categories


def test_maps_hold_the_numbers_and_their_marks():
    axes = draw(MAP).axes[0]
    assert np.array_equal(axes.images[0].get_array().filled(np.nan), [[1, 2, np.nan], [4, 8, 16]], equal_nan=True)
    assert axes.images[0].get_clim() == (1.0, 16.0)
    assert {line.get_label() for line in axes.get_lines()} == {"top key", "anchor", "committed"}
    flat = draw(replace(MAP, values=[[2.0] * 3] * 2, bounds=None))
    assert np.diff(flat.axes[0].images[0].get_clim())[0] > 0


def test_what_cannot_be_drawn_or_written_is_said(tmp_path):
    with pytest.raises(UserError, match="a table has no figure"):
        draw(TABLE)
    with pytest.raises(UserError, match="unknown figure format 'pgn'"):
        draw(MAP, tmp_path / "map.pgn")
    with pytest.raises(UserError, match="cannot write the figure"):
        draw(MAP, tmp_path / "absent" / "map.png")
