"""Masked-token accuracy, compared with a count over single masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from floatscope.errors import UserError
from floatscope.lab.adapt.scores import masked_accuracy
from floatscope.lab.twins.examples import build_prompt
from floatscope.models.loader import load
from floatscope.tasks.sample_files import read_samples


@pytest.mark.parametrize(("name", "shift"), [("twin:mdm", 0), ("twin:mdm-adapted", 1)])
def test_masked_accuracy_is_the_share_of_correct_masks(name, shift):
    model = load(name)
    text = " ".join(build_prompt(sample) for sample in read_samples("twin:reading-5", 3))
    ids = np.array(model.tokenizer.encode(text)[:200])
    (result,) = masked_accuracy(model, ids, ratios=(0.4,), rows=5, length=40)
    shares = []
    masked = torch.rand((5, 40), generator=torch.Generator().manual_seed(400)) < 0.4
    for row, start in enumerate(range(0, 161, 40)):
        row_ids = torch.from_numpy(ids[start : start + 40])
        positions = [p for p in range(1, 40) if masked[row, p]]
        canvas = row_ids.clone()
        canvas[positions] = model.spec.mask_id
        with torch.inference_mode():
            predictions = model.module(input_ids=canvas[None], is_causal=False).logits[0].argmax(-1)
        shares.append(np.mean([int(predictions[p - shift]) == int(row_ids[p]) for p in positions]))
    assert result["accuracy"] == pytest.approx(np.mean(shares), abs=1e-4)
    assert result["n"] == 5
    assert result["low"] <= result["accuracy"] <= result["high"]
    assert 0 < result["accuracy"] < 1


def test_missing_mask_or_short_text_is_refused():
    with pytest.raises(UserError, match="has no mask token; open it with mask_id="):
        masked_accuracy(load("twin:arm"), np.zeros(600, int))
    with pytest.raises(UserError, match="has 3 tokens, but measuring needs at least 512"):
        masked_accuracy(load("twin:mdm"), np.zeros(3, int))
