"""Regions nobody outside them sees, and the random positions that are their control."""

from __future__ import annotations

import pytest
import torch

import floatscope as fs
from floatscope.canvas import CanvasState, Regions
from floatscope.interventions.edits import Edit, Keys
from floatscope.interventions.picking import Scene, pick
from floatscope.interventions.recipes import build_control, parse_edits
from floatscope.lab.twins.heldout import read
from floatscope.pipelines.asking import batch_regions, encode_samples
from floatscope.schema import State

NEW = 4


@pytest.fixture(scope="module", params=["twin:mdm", "twin:arm"])
def model(request):
    return fs.load(request.param, device="cpu")


def confidences(model, ids, items, edits):
    out = fs.decode(
        model,
        ids,
        new_tokens=NEW,
        samples=[item.sample.id for item in items],
        regions=batch_regions(items, NEW, 0),
        edits=edits,
        stop=False,
    )
    return torch.cat([step.commits.confidence for step in out])


def changed(ids, at):
    return [[(token + 7) % 4000 if place in at else token for place, token in enumerate(ids)]]


def test_what_stands_in_a_blank_region_changes_nothing(model):
    items = encode_samples(model, read("reading-5")[:1], None, NEW)
    told, at = [items[0].ids], items[0].tokens["gold"]
    plain = confidences(model, told, items, ())
    assert not torch.allclose(confidences(model, changed(told[0], at), items, ()), plain, atol=1e-5)
    edits = parse_edits("blank(region='gold')")
    hidden = confidences(model, told, items, edits)
    torch.testing.assert_close(confidences(model, changed(told[0], at), items, edits), hidden, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(hidden, plain, atol=1e-5)


def test_its_control_hides_the_same_positions_from_every_layer_head_and_step(model):
    items = encode_samples(model, read("reading-5")[:1], None, NEW)
    told = [items[0].ids]
    edits = build_control(parse_edits("blank(region='gold')"), "random", draw=1)
    canvas = CanvasState(
        torch.tensor(told), torch.full((1, len(told[0])), int(State.PROMPT)), regions=batch_regions(items, 0, 0)
    )
    drawn = pick(edits[0].keys, None, Scene(canvas, 0, 2, [items[0].sample.id]))
    at = set(drawn[0, 0].tolist())
    assert len(at) == len(items[0].tokens["gold"])
    assert at != set(items[0].tokens["gold"])
    assert (drawn == drawn[:, :1]).all()
    hidden = confidences(model, told, items, edits)
    torch.testing.assert_close(confidences(model, changed(told[0], at), items, edits), hidden, atol=1e-5, rtol=1e-4)


def test_random_positions_are_of_the_prompt_as_far_as_they_reach_whatever_the_padding():
    states = torch.full((2, 12), int(State.PROMPT))
    states[:, 8:], states[1, :3] = int(State.MASKED), int(State.PAD)
    member = torch.zeros(2, 12, 1, dtype=torch.bool)
    member[0, :5, 0], member[1, 3:, 0] = True, True
    canvas = CanvasState(torch.zeros(2, 12, dtype=torch.long), states, regions=Regions(("r",), member))
    keys = Keys("random", like=Keys("region", region="r"))
    drawn = pick(keys, None, Scene(canvas, 0, 1, ["a", "b"]))
    assert sorted(drawn[1, 0].tolist()) == list(range(3, 12))  # all there are
    assert (drawn[0, 0, 5:] == -1).all()
    assert drawn[0, 0, :5].max() < 8
    alone = CanvasState(canvas.tokens[1:, 3:], states[1:, 3:], regions=Regions(("r",), member[1:, 3:]))
    assert (pick(keys, None, Scene(alone, 5, 1, ["b"])) + 3).tolist() == drawn[1:].tolist()


def test_others_are_told_only_of_keys_that_all_heads_share():
    with pytest.raises(fs.UserError, match="all heads share"):
        Edit("bias", queries="others", keys=Keys("anchors", 2), amount=1.0)
