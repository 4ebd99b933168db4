"""The temporal map is drawn for small and large canvases, and shows the contents of the trace."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.lines import Line2D
from synthetic_decodings import decode_arm, decode_mdm, record_traces

from floatscope.errors import UserError
from floatscope.traces import Trace
from floatscope.traces.temporal_map import COMMIT, TOP
from pairs import every_pair, slow_except


def wide_trace(keys: int) -> Trace:
    """A small trace stretched to many keys."""
    trace = record_traces([decode_mdm(0, 6, 5, 4)], level="summary")[0]
    stretch = np.arange(keys) % 11
    arrays = {
        name: np.take(array, stretch, trace.axes[name].index("key")) if "key" in trace.axes[name] else array
        for name, array in trace.arrays.items()
    }
    return replace(trace, arrays=arrays)


@pytest.mark.parametrize("keys", slow_except([11, 200, 201, 1024], 11, 201))
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


def with_anchors(path: list[int]) -> Trace:
    """A trace whose anchor path is `path` in all layers; −1 is a step whose largest lift is 1.5, at key 1."""
    trace = record_traces([decode_mdm(0, 6, 5, len(path))])[0]
    trace.arrays["eligible"][:] = 1
    trace.arrays["received"][:] = trace.arrays["uniform"][:, trace.arrays["layer_visibility"]]
    for step, key in enumerate(path):
        trace.arrays["received"][step, :, :, max(key, 1)] *= 4 if key >= 0 else 1.5
    return trace


def top_line(trace: Trace, **options: object) -> Line2D:
    (line,) = (line for line in trace.plot(**options).axes[0].lines if line.get_color() == TOP)
    return line


@pytest.mark.parametrize("scale", ["lift", "percent", "visible"])
def test_commits_and_top_keys_are_drawn_at_their_positions(scale):
    trace = with_anchors([7, -1, 3, 7])
    commits, tops = trace.plot(layer=1, scale=scale).axes[0].lines
    np.testing.assert_array_equal(commits.get_xdata(), trace.arrays["commit_position"])
    np.testing.assert_array_equal(commits.get_ydata(), trace.arrays["commit_step"])
    assert tops.get_xdata().tolist() == [7, 3, 7]
    assert tops.get_ydata().tolist() == [0, 2, 3]
    assert trace.anchor_path(1).tolist() == [7, -1, 3, 7]


def test_a_key_that_is_not_eligible_at_one_step_is_marked_and_never_drawn():
    trace = with_anchors([7, 7, 3, 7])
    trace.arrays["eligible"][2, :, :, 7] = 0
    assert top_line(trace, layer=1).get_xdata().tolist() == [3]  # without key 7 no other step has an anchor
    bars = [line for line in trace.plot(layer=1).axes[0].lines if line.get_color() not in (TOP, COMMIT)]
    assert [bar.get_xdata().tolist() for bar in bars] == [pytest.approx([6.6, 7.4])]


@every_pair(group=["all", "predicting"], layer=[0, 1, 2, None], seed=range(3))
def test_the_line_is_the_anchor_path(seed, layer, group):
    trace = record_traces([decode_mdm(seed, 6, 5, 4)])[0]
    path = trace.anchor_path("mean" if layer is None else layer, group)
    line = top_line(trace, layer=layer, group=group)
    np.testing.assert_array_equal(line.get_ydata(), np.flatnonzero(path >= 0))
    np.testing.assert_array_equal(line.get_xdata(), path[path >= 0])


@pytest.mark.parametrize("view", ["row", "prefix"])
@pytest.mark.parametrize("head", [None, 1])
def test_the_line_of_a_growing_canvas_is_the_anchor_path(view, head):
    trace = record_traces([decode_arm(0, 20, 6)[0]], meta={"rows": "cache"})[0]
    path = trace.anchor_path(0, head=head, view=view)
    line = top_line(trace, layer=0, head=head, view=view)
    np.testing.assert_array_equal(line.get_ydata(), np.flatnonzero(path >= 0))
    np.testing.assert_array_equal(line.get_xdata(), path[path >= 0])


def test_without_uniform_attention_the_largest_value_is_drawn():
    trace = with_anchors([7, 2, 3, 7])
    arrays = {name: array for name, array in trace.arrays.items() if name not in ("uniform", "eligible")}
    line = top_line(replace(trace, arrays=arrays), layer=1, scale="mean")
    np.testing.assert_array_equal(line.get_xdata(), trace.received(1).argmax(1))


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
