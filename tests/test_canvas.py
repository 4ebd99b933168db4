"""The frozen values refuse what could only be a mistake, and say what would be right."""

from __future__ import annotations

import pytest
import torch

from floatscope.canvas import CanvasState, Commits, Groups, Regions
from floatscope.errors import UserError, unknown_choice
from floatscope.interventions.edits import Edit, Keys
from floatscope.schema import State


def canvas(states: list[list[int]]) -> CanvasState:
    return CanvasState(torch.zeros(len(states), len(states[0]), dtype=torch.long), torch.tensor(states))


# --- regions ----------------------------------------------------------------------------------------------------------


def test_spans_become_membership_with_names_in_the_order_met():
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
    said = rf"region 'gold' spans {span[0]}:{span[1]}, outside a canvas of 8 positions"
    with pytest.raises(UserError, match=said):
        Regions.from_spans([{"gold": [span]}], 8)


def test_every_column_needs_a_name_of_its_own():
    member = torch.zeros(1, 4, 2, dtype=torch.bool)
    with pytest.raises(UserError, match="1 region names for 2 columns of membership; give one name per column"):
        Regions(("a",), member)
    with pytest.raises(UserError, match="2 region names for 0 columns"):
        Regions(("a", "b"))
    with pytest.raises(UserError, match="region names must differ, got a, a"):
        Regions(("a", "a"), member)
    assert Regions().member is None


# --- canvases, groups, commits ----------------------------------------------------------------------------------------


def test_a_canvas_knows_its_padding_and_its_masks():
    c = canvas([[State.PAD, State.PROMPT, State.MASKED, State.COMMITTED]])
    assert c.valid.tolist() == [[False, True, True, True]]
    assert c.masked.tolist() == [[False, False, True, False]]


def test_groups_of_a_canvas_count_each_row_where_it_belongs():
    groups = Groups.from_canvas(canvas([[0, 1, 2, 3], [1, 1, 2, 2]]))
    assert groups.names == ("all", "masked", "committed")
    assert groups.weights[0].tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 0, 1]]
    assert groups.count.tolist() == [[3, 1, 1], [4, 2, 0]]


def test_no_commits_are_empty():
    none = Commits.none()
    assert len(none) == 0
    assert none.confidence.dtype == torch.float32


def test_values_are_frozen():
    with pytest.raises(AttributeError):
        canvas([[1]]).step = 3


def test_shapes_are_checked_in_the_tests():
    """The import hook of conftest.py is at work: a canvas of three axes does not pass."""
    with pytest.raises(TypeError):
        CanvasState(torch.zeros(1, 2, 3, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long))


# --- edits ------------------------------------------------------------------------------------------------------------


def test_every_primitive_can_be_written_down():
    Edit("bias", keys=Keys("anchors", 5), amount=-torch.inf)
    Edit("move", keys=Keys("anchors"), to=Keys("first"), layers=(3,))
    Edit("scale", what="value", keys=Keys("positions", positions=(0,)), amount=0.5)
    Edit("zero", heads=(1, 2), steps=(0,))
    Edit("sink", amount=0.0)
    Edit("freeze", steps=(0,))
    Edit("replace", keys=Keys("region", region="gold"), token="mask")
    Edit("drop")


def test_an_unknown_primitive_suggests_the_nearest():
    with pytest.raises(
        UserError, match=r"unknown edit primitive 'biass' \(did you mean 'bias'\?\); allowed: bias, move"
    ):
        Edit("biass", amount=1.0)


@pytest.mark.parametrize(
    ("primitive", "given", "needed"),
    [
        ("bias", {"keys": Keys("first")}, "amount"),
        ("bias", {"amount": 1.0}, "keys"),
        ("move", {"to": Keys("first")}, "keys"),
        ("scale", {"keys": Keys("first"), "amount": 2.0}, "what"),
        ("scale", {"keys": Keys("first"), "what": "key"}, "amount"),
        ("zero", {}, "heads"),
        ("sink", {}, "amount"),
        ("freeze", {}, "steps"),
        ("replace", {"keys": Keys("first")}, "token"),
    ],
)
def test_an_edit_says_what_it_needs(primitive, given, needed):
    with pytest.raises(UserError, match=f"edit '{primitive}' needs `{needed}`"):
        Edit(primitive, **given)


def test_an_unknown_operand_is_refused():
    with pytest.raises(UserError, match=r"unknown operand of an edit 'query'.*; allowed: key, value"):
        Edit("scale", keys=Keys("first"), what="query", amount=1.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rule": "anchor"}, r"unknown rule for keys 'anchor' \(did you mean 'anchors'\?\)"),
        ({"rule": "anchors", "k": 0}, "k is how many keys, 1 or more, got 0"),
        ({"rule": "anchors", "k": 0.5}, "k is how many keys, 1 or more, got 0.5"),
        ({"rule": "anchors", "of": "after"}, "unknown step of anchors 'after'"),
        ({"rule": "anchors", "rows": "prompt"}, "unknown rows of anchors 'prompt'"),
    ],
)
def test_a_rule_for_keys_is_checked(given, said):
    with pytest.raises(UserError, match=said):
        Keys(**given)


def test_mass_is_moved_between_counted_keys():
    with pytest.raises(UserError, match="mass is moved between counted keys, not between all of 'region'"):
        Edit("move", keys=Keys("region", region="gold"))


def test_unknown_without_a_neighbour_only_lists_what_is_allowed():
    assert (
        str(unknown_choice("keep level", "xyz", ("summary", "full")))
        == "unknown keep level 'xyz'; allowed: summary, full"
    )
