"""Edits and key rules are checked when they are made, and the message says what is missing or allowed."""

from __future__ import annotations

import math

import pytest

from floatscope.errors import UserError
from floatscope.interventions.edits import (
    HIDE,
    Anchors,
    Bias,
    FirstKey,
    Freeze,
    LeastKeys,
    Move,
    PositionKeys,
    RandomKeys,
    RegionKeys,
    ReplaceToken,
    ScaleKeys,
    VirtualSink,
    ZeroHeads,
)

INVALID = [
    (lambda: Anchors(0), "k must be a number of keys, 1 or more, got 0"),
    (lambda: Anchors(True), "k must be a number of keys, 1 or more, got True"),
    (lambda: RandomKeys(-1), "k must be a number of keys, 1 or more, got -1"),
    (lambda: FirstKey(0), "count must be a number of keys, 1 or more, got 0"),
    (lambda: LeastKeys(1.0), "keep must be a number of keys, 1 or more, or a share between 0 and 1, got 1.0"),
    (lambda: Anchors(of="after"), "unknown step of anchors 'after'"),
    (lambda: Anchors(rows="prompt"), "unknown rows of anchors 'prompt'"),
    (lambda: Anchors(only="mask"), "unknown type of anchors 'mask'"),
    (lambda: LeastKeys(3, layer=-1), "layer of a key rule must be whole numbers of at least 0, got -1"),
    (lambda: PositionKeys((-1,)), r"positions of a key rule must be whole numbers of at least 0, got \(-1,\)"),
    (lambda: ZeroHeads(layers=(1,)), "edit 'zero heads' needs `heads`"),
    (lambda: ZeroHeads(layers=(True,), heads=(0,)), r"layers of an edit must be whole numbers .* got \(True,\)"),
    (lambda: ZeroHeads(heads=()), r"heads of an edit must be whole numbers of at least 0, got \(\)"),
    (lambda: Freeze(-1), "step of an edit must be a whole number of at least 0, got -1"),
    (lambda: Freeze(0, steps=(1,)), "edit 'freeze' sets its own steps; leave steps out"),
    (lambda: Bias(FirstKey(), math.inf), "edit 'bias' takes a finite amount, got inf"),
    (lambda: ScaleKeys(FirstKey(), math.nan), "edit 'scale keys' takes a finite amount, got nan"),
    (lambda: VirtualSink(-math.inf), "edit 'virtual sink' takes a finite amount, got -inf"),
    (lambda: ReplaceToken(FirstKey(), True), "token of an edit must be a text or a token id, got True"),
    (lambda: Move(FirstKey(2)), "move can take the mass of a key only once"),
    (lambda: Move(PositionKeys((1, 1))), "move can take the mass of a key only once"),
    (lambda: Move(RegionKeys("gold")), "move needs a fixed number of keys, and RegionKeys does not have one"),
    (lambda: Move(Anchors(), to=RegionKeys("gold")), "move needs a fixed number of keys, and RegionKeys"),
    (lambda: Move(LeastKeys(2)), "move needs a fixed number of keys, and LeastKeys does not have one"),
    (lambda: Bias(Anchors(2), 1.0, queries="others"), "queries='others' needs keys that all heads share"),
]


@pytest.mark.parametrize(("build", "message"), INVALID)
def test_edits_and_key_rules_are_checked_when_they_are_made(build, message):
    with pytest.raises(UserError, match=message):
        build()


def test_the_same_target_twice_is_allowed():
    Move(Anchors(2), to=PositionKeys((0, 0)))


def test_an_edit_is_called_by_its_recipe_or_by_what_it_does():
    assert str(Bias(Anchors(5), HIDE, name="mask_anchors(k=5)")) == "mask_anchors(k=5)"
    assert str(ScaleKeys(Anchors(5), 2.0)) == "scale keys"
