"""Masked-token accuracy, compared with a count over single masks."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from floatscope.errors import UserError
from floatscope.lab.adapt.scores import draw_masks, estimate_accuracies, row_accuracies, split_text
from floatscope.lab.twins.examples import build_prompt
from floatscope.models.loader import load
from floatscope.tasks.sample_files import read_samples


@pytest.mark.parametrize(("name", "shift"), [("twin:mdm", 0), ("twin:mdm-adapted", 1)])
def test_masked_accuracy_is_the_share_of_correct_masks(name, shift):
    model = load(name)
    text = " ".join(build_prompt(sample) for sample in read_samples("twin:reading-5", 3))
    ids = np.array(model.tokenizer.encode(text)[:200])
    rows = split_text(ids, 40)
    found = row_accuracies(model, rows, draw_masks(rows, 0.4)).tolist()
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
    assert found == pytest.approx(shares)
    assert 0 < np.mean(found) < 1


def test_scores_are_means_over_rows_with_intervals():
    rows = [(ratio, str(row), row / 4 + ratio / 10) for ratio in (0.3, 0.15) for row in range(4)]
    table = pd.DataFrame(rows, columns=["ratio", "sample", "accuracy"])
    first, second = estimate_accuracies(table.astype({"ratio": str}), length=40)
    assert (first.ratio, first.accuracy, first.n, first.length) == (0.3, pytest.approx(0.405), 4, 40)
    assert (second.ratio, second.accuracy) == (0.15, pytest.approx(0.39))
    assert first.low < first.accuracy < first.high


def test_short_text_is_refused():
    with pytest.raises(UserError, match="has 3 tokens, but measuring needs at least 512"):
        split_text(np.zeros(3, int), 512)
