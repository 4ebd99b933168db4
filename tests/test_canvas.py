"""The shared values refuse mistakes with a helpful message, and print in one short line."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation

from floatscope.canvas import CanvasState, Commits, Groups, Reductions, Regions, Step
from floatscope.errors import UserError
from floatscope.schema import LEVELS, State, check_fields, fields_at_level


def make_canvas(states: list[list[int]]) -> CanvasState:
    return CanvasState(torch.zeros(len(states), len(states[0]), dtype=torch.long), torch.tensor(states))


# --- regions ----------------------------------------------------------------------------------------------------------


def test_from_spans_orders_names_by_first_appearance():
    regions = Regions.from_spans(
        [{"question": [(0, 2)], "gold": [(3, 4), (5, 6)]}, {"gold": [(1, 3)], "bos": [(0, 1)]}], 6
    )
    assert regions.names == ("question", "gold", "bos")
    assert regions.member.shape == (2, 6, 3)
    assert regions.member[0, :, 0].tolist() == [True, True, False, False, False, False]
    assert regions.member[0, :, 1].tolist() == [False, False, False, True, False, True]
    assert regions.member[1, :, 1].tolist() == [False, True, True, False, False, False]
    assert not regions.member[0, :, 2].any()  # a region of another sample


def test_regions_may_overlap_and_be_empty():
    regions = Regions.from_spans([{"a": [(0, 3)], "b": [(1, 2)], "c": [(2, 2)]}], 3)
    assert regions.member[0, 1].tolist() == [True, True, False]


@pytest.mark.parametrize("span", [(-1, 2), (2, 9), (3, 2)])
def test_a_span_outside_the_canvas_is_refused_by_name(span):
    message = rf"region 'gold' spans {span[0]}:{span[1]}, outside a canvas of 8 positions"
    with pytest.raises(UserError, match=message):
        Regions.from_spans([{"gold": [span]}], 8)


def test_every_column_needs_a_unique_name():
    member = torch.zeros(1, 4, 2, dtype=torch.bool)
    with pytest.raises(UserError, match="1 region names for 2 columns of membership; give one name per column"):
        Regions(("a",), member)
    with pytest.raises(UserError, match="2 region names for 0 columns"):
        Regions(("a", "b"))
    with pytest.raises(UserError, match="region names must differ, got a, a"):
        Regions(("a", "a"), member)
    assert Regions().member is None


# --- canvases, groups, commits ----------------------------------------------------------------------------------------


def test_valid_and_masked_follow_the_states():
    c = make_canvas([[State.PAD, State.PROMPT, State.MASKED, State.COMMITTED]])
    assert c.valid.tolist() == [[False, True, True, True]]
    assert c.masked.tolist() == [[False, False, True, False]]


def test_groups_of_a_canvas_follow_the_states():
    groups = Groups.from_canvas(make_canvas([[0, 1, 2, 3], [1, 1, 2, 2]]))
    assert groups.names == ("all", "masked", "committed")
    assert groups.weights[0].tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 0, 1]]
    assert groups.count.tolist() == [[3, 1, 1], [4, 2, 0]]


def test_empty_commits():
    commits = Commits.empty()
    assert len(commits) == 0
    assert commits.confidence.dtype == torch.float32


def test_values_are_frozen():
    with pytest.raises(AttributeError):
        make_canvas([[1]]).step = 3


def test_shapes_are_checked_in_the_tests():
    """The import hook of conftest.py is active: a canvas with three axes raises."""
    with pytest.raises(BeartypeCallHintViolation):
        CanvasState(torch.zeros(1, 2, 3, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long))


def test_values_print_in_one_short_line_without_tensors():
    before = make_canvas([[State.PAD, State.PROMPT, State.MASKED, State.MASKED]] * 2)
    commits = Commits(*(torch.tensor([0, 1]) for _ in range(4)), torch.rand(2))
    one = Commits(*(torch.tensor([0]) for _ in range(4)), torch.rand(1))
    regions = Regions.from_spans([{"question": [(0, 4)], "gold": [(6, 8)]}], 20)
    assert repr(before) == "CanvasState(2 × 4 positions, step 0, 4 masked)"
    assert repr(commits) == "Commits(2 commits)"
    assert repr(Step(replace(before, step=3), before, commits)) == "Step(3: 2 commits)"
    assert repr(Step(before, before, one)) == "Step(0: 1 commit)"
    assert repr(Groups.from_canvas(before)) == "Groups(all, masked, committed; 2 × 4 queries)"
    assert repr(Reductions(7, {"received": torch.rand(2, 4, 9)})) == "Reductions(layer 7: received)"
    assert repr(regions) == "Regions(question, gold; 1 × 20 positions)"
    assert repr(Regions()) == "Regions()"


# --- the fields -------------------------------------------------------------------------------------------------------


def test_each_level_includes_the_one_before():
    fields = [set(fields_at_level(level)) for level in LEVELS]
    assert all(smaller < larger for smaller, larger in itertools.pairwise(fields))


def test_an_unknown_level_lists_the_known_ones():
    with pytest.raises(
        UserError, match=r"unknown level 'sumary' \(did you mean 'summary'\?\); allowed: summary, heads"
    ):
        fields_at_level("sumary")


def test_an_unknown_level_without_a_close_match_has_no_hint():
    with pytest.raises(UserError, match="unknown level 'xyz'; allowed: summary, heads, rows, full"):
        fields_at_level("xyz")


def test_fields_are_checked():
    assert check_fields(("received", "uniform")) == ("received", "uniform")
    with pytest.raises(UserError, match=r"unknown field 'recieved' \(did you mean 'received'\?\)"):
        check_fields(("recieved",))
    with pytest.raises(UserError, match="no fields to capture: name at least one of received"):
        check_fields(())
