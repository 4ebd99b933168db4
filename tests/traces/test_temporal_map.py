"""The temporal map is drawn for small and large canvases, and shows the contents of the trace."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.image import imread
from synthetic_decodings import decode_arm, decode_mdm, record_traces

from floatscope.errors import UserError
from floatscope.traces import Trace


def wide_trace(keys: int) -> Trace:
    """A small trace stretched to many keys."""
    trace = record_traces([decode_mdm(0, 6, 5, 4)], level="summary")[0]
    stretch = np.arange(keys) % 11
    arrays = {
        name: np.take(array, stretch, trace.axes[name].index("key")) if "key" in trace.axes[name] else array
        for name, array in trace.arrays.items()
    }
    return replace(trace, arrays=arrays)


@pytest.mark.parametrize("keys", [11, 200, 201, 1024])
def test_a_picture_is_written(tmp_path, keys):
    path = tmp_path / "map.png"
    figure = wide_trace(keys).plot(path=path)
    picture = imread(path)
    assert picture.shape[0] > 400
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 50
    axes = figure.axes[0]
    assert axes.get_title() == "sample-0: mean over layers, rows: all"
    assert axes.get_ylabel() == "step"
    assert figure.axes[-1].get_ylabel() == "lift (1 = uniform attention)"


def test_commits_and_top_keys_are_drawn_at_their_positions():
    trace = record_traces([decode_mdm(0, 6, 5, 4)])[0]
    trace.arrays["eligible"][:] = 1
    trace.arrays["eligible"][2] = 0
    trace.arrays["eligible"][2, :, :, 3] = 1  # only key 3 is eligible at step 2
    commits, tops = trace.plot(layer=1, scale="percent").axes[0].lines
    np.testing.assert_array_equal(commits.get_xdata(), trace.arrays["commit_position"])
    np.testing.assert_array_equal(commits.get_ydata(), trace.arrays["commit_step"])
    expected = trace.received(1).argmax(1)
    expected[2] = 3
    np.testing.assert_array_equal(tops.get_xdata(), expected)
    np.testing.assert_array_equal(tops.get_ydata(), np.arange(4))


def test_masked_cells_are_outlined():
    trace = record_traces([decode_mdm(0, 6, 5, 4)])[0]
    states = np.full_like(trace.arrays["states"], 1)
    states[1, 3] = 2
    outline = replace(trace, arrays={**trace.arrays, "states": states}).plot().axes[0].collections[0]
    ends = {tuple(map(tuple, segment)) for segment in outline.get_segments()}
    assert ends == {
        ((2.5, 0.5), (3.5, 0.5)),
        ((2.5, 1.5), (3.5, 1.5)),
        ((2.5, 0.5), (2.5, 1.5)),
        ((3.5, 0.5), (3.5, 1.5)),
    }


@pytest.mark.parametrize("view", ["row", "prefix"])
def test_a_growing_canvas_is_drawn(view):
    trace = record_traces([decode_arm(0, 6, 5)[0]], meta={"rows": "cache"})[0]
    figure = trace.plot(layer=0, head=1, view=view)
    assert figure.axes[0].get_title().startswith("sample-0: layer 0, head 1, rows: all")
    assert figure.axes[0].get_xlim()[1] == 10.5  # the last commit lies beyond the last key


def test_a_flat_or_empty_map_is_drawn():
    trace = record_traces([decode_mdm(0, 6, 5, 4)])[0]
    for value in (0.0, 0.25, np.nan):
        received = np.full_like(trace.arrays["received"], value)
        replace(trace, arrays={**trace.arrays, "received": received}).plot(scale="mean")


def test_a_trace_without_commits_is_drawn():
    trace = record_traces([decode_mdm(0, 6, 5, 4)])[0]
    empty = {name: array[:0] for name, array in trace.arrays.items() if trace.axes[name][0] == "commit"}
    replace(trace, arrays={**trace.arrays, **empty}).plot()


def test_drawing_does_not_use_pyplot():
    wide_trace(11).plot()
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_an_unknown_format_or_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"unknown figure format 'pgn' \(did you mean 'png'\?\)"):
        wide_trace(11).plot(path=tmp_path / "map.pgn")
    with pytest.raises(UserError, match=r"cannot write the figure to .*map\.png: No such file or directory"):
        wide_trace(11).plot(path=tmp_path / "nowhere" / "map.png")
