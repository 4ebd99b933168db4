"""Edits and key rules are checked when they are made, and the message says what is missing or allowed."""

from __future__ import annotations

import math

import pytest

from floatscope.errors import UserError
from floatscope.interventions.edits import Edit, Keys


def test_every_primitive_can_be_written_down():
    Edit("bias", keys=Keys("anchors", 5), amount=-math.inf)
    Edit("move", keys=Keys("anchors"), to=Keys("first"), layers=(3,))
    Edit("scale", operand="value", keys=Keys("positions", positions=(0,)), amount=0.5)
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
    ("primitive", "fields", "missing"),
    [
        ("bias", {"keys": Keys("first")}, "amount"),
        ("bias", {"amount": 1.0}, "keys"),
        ("move", {"to": Keys("first")}, "keys"),
        ("scale", {"keys": Keys("first"), "amount": 2.0}, "operand"),
        ("scale", {"keys": Keys("first"), "operand": "key"}, "amount"),
        ("zero", {}, "heads"),
        ("sink", {}, "amount"),
        ("freeze", {}, "steps"),
        ("replace", {"keys": Keys("first")}, "token"),
    ],
)
def test_a_missing_field_is_named(primitive, fields, missing):
    with pytest.raises(UserError, match=f"edit '{primitive}' needs `{missing}`"):
        Edit(primitive, **fields)


def test_an_unknown_operand_is_refused():
    with pytest.raises(UserError, match=r"unknown operand of an edit 'query'.*; allowed: key, value"):
        Edit("scale", keys=Keys("first"), operand="query", amount=1.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rule": "anchor"}, r"unknown rule for keys 'anchor' \(did you mean 'anchors'\?\)"),
        ({"rule": "anchors", "k": 0}, "k must be a number of keys, 1 or more, got 0"),
        ({"rule": "anchors", "k": 0.5}, "k must be a number of keys, 1 or more, got 0.5"),
        ({"rule": "anchors", "of": "after"}, "unknown step of anchors 'after'"),
        ({"rule": "anchors", "rows": "prompt"}, "unknown rows of anchors 'prompt'"),
    ],
)
def test_a_rule_for_keys_is_checked(fields, message):
    with pytest.raises(UserError, match=message):
        Keys(**fields)


def test_move_needs_a_fixed_number_of_keys():
    with pytest.raises(UserError, match="move needs a fixed number of keys, and 'region' does not have one"):
        Edit("move", keys=Keys("region", region="gold"))
