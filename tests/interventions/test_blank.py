"""`blank` hides a region from all rows outside it; its control hides random positions."""

from __future__ import annotations

import pytest
import torch

import floatscope as fs
from floatscope.canvas import CanvasState, Regions
from floatscope.interventions.edits import Anchors, Bias, RandomSameCount, RegionKeys
from floatscope.interventions.key_selection import SelectionContext, select_keys
from floatscope.interventions.recipes import build_control, parse_edits
from floatscope.pipelines.canvas_layout import CanvasLayout
from floatscope.pipelines.prompting import batch_regions, encode_samples
from floatscope.schema import State
from floatscope.tasks.sample_files import read_samples

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
        regions=batch_regions(items, CanvasLayout(NEW)),
        edits=edits,
        stop=False,
    )
    return torch.cat([step.commits.confidence for step in out])


def replace_tokens(ids, at):
    return [[(token + 7) % 4000 if place in at else token for place, token in enumerate(ids)]]


def test_the_tokens_of_a_blank_region_have_no_effect(model):
    items = encode_samples(model, read_samples("twin:reading-5", 1), None, CanvasLayout(NEW))
    prompt_ids, at = [items[0].ids], items[0].tokens["gold"]
    plain = confidences(model, prompt_ids, items, ())
    assert not torch.allclose(confidences(model, replace_tokens(prompt_ids[0], at), items, ()), plain, atol=1e-5)
    edits = parse_edits("blank(region='gold')")
    hidden = confidences(model, prompt_ids, items, edits)
    torch.testing.assert_close(
        confidences(model, replace_tokens(prompt_ids[0], at), items, edits), hidden, atol=1e-5, rtol=1e-4
    )
    assert not torch.allclose(hidden, plain, atol=1e-5)


def test_the_control_of_blank_hides_the_same_positions_in_every_layer_head_and_step(model):
    items = encode_samples(model, read_samples("twin:reading-5", 1), None, CanvasLayout(NEW))
    prompt_ids = [items[0].ids]
    edits = build_control(parse_edits("blank(region='gold')"), "random", draw=1)
    canvas = CanvasState(
        torch.tensor(prompt_ids),
        torch.full((1, len(prompt_ids[0])), int(State.PROMPT)),
        regions=batch_regions(items, CanvasLayout(0)),
    )
    selected = select_keys(edits[0].keys, None, SelectionContext(canvas, 0, 2, [items[0].sample.id]))
    at = set(selected[0, 0].tolist())
    assert len(at) == len(items[0].tokens["gold"])
    assert at != set(items[0].tokens["gold"])
    assert (selected == selected[:, :1]).all()
    hidden = confidences(model, prompt_ids, items, edits)
    torch.testing.assert_close(
        confidences(model, replace_tokens(prompt_ids[0], at), items, edits), hidden, atol=1e-5, rtol=1e-4
    )


def test_random_positions_come_from_the_prompt_first_whatever_the_padding():
    states = torch.full((2, 12), int(State.PROMPT))
    states[:, 8:], states[1, :3] = int(State.MASKED), int(State.PAD)
    member = torch.zeros(2, 12, 1, dtype=torch.bool)
    member[0, :5, 0], member[1, 3:, 0] = True, True
    canvas = CanvasState(torch.zeros(2, 12, dtype=torch.long), states, regions=Regions(("r",), member))
    keys = RandomSameCount(RegionKeys("r"))
    selected = select_keys(keys, None, SelectionContext(canvas, 0, 1, ["a", "b"]))
    assert sorted(selected[1, 0].tolist()) == list(range(3, 12))  # all there are
    assert (selected[0, 0, 5:] == -1).all()
    assert selected[0, 0, :5].max() < 8
    alone = CanvasState(canvas.tokens[1:, 3:], states[1:, 3:], regions=Regions(("r",), member[1:, 3:]))
    assert (select_keys(keys, None, SelectionContext(alone, 5, 1, ["b"])) + 3).tolist() == selected[1:].tolist()


def test_queries_others_needs_keys_that_all_heads_share():
    with pytest.raises(fs.UserError, match="all heads share"):
        Bias(Anchors(2), 1.0, queries="others")
