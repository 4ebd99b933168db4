"""Masks filled, against a count mask by mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from floatscope.errors import UserError
from floatscope.lab.adapt.scores import masked_accuracy
from floatscope.lab.twins.heldout import read
from floatscope.lab.twins.lessons import prompt_of
from floatscope.models.load import load


@pytest.mark.parametrize(("name", "shift"), [("twin:mdm", 0), ("twin:mdm-adapted", 1)])
def test_the_share_of_masks_that_are_filled_right(name, shift):
    model = load(name)
    ids = np.array(model.tokenizer.encode(" ".join(prompt_of(sample) for sample in read("reading-5")[:3]))[:200])
    (told,) = masked_accuracy(model, ids, ratios=(0.4,), rows=5, length=40)
    shares = []
    masked = torch.rand((5, 40), generator=torch.Generator().manual_seed(400)) < 0.4
    for row, start in enumerate(range(0, 161, 40)):
        text = torch.from_numpy(ids[start : start + 40])
        places = [p for p in range(1, 40) if masked[row, p]]
        canvas = text.clone()
        canvas[places] = model.spec.mask_id
        with torch.inference_mode():
            said = model.module(input_ids=canvas[None], is_causal=False).logits[0].argmax(-1)
        shares.append(np.mean([int(said[p - shift]) == int(text[p]) for p in places]))
    assert told["accuracy"] == pytest.approx(np.mean(shares), abs=1e-4)
    assert told["n"] == 5
    assert told["low"] <= told["accuracy"] <= told["high"]
    assert 0 < told["accuracy"] < 1


def test_what_cannot_be_measured_is_said():
    with pytest.raises(UserError, match="has no mask token; open it with mask_id="):
        masked_accuracy(load("twin:arm"), np.zeros(600, int))
    with pytest.raises(UserError, match="has 3 tokens, and 512 are the least to measure on"):
        masked_accuracy(load("twin:mdm"), np.zeros(3, int))
