"""Accuracy of filling masks on held-out text, by the share of tokens that is masked.

    masked_accuracy(model, ids, ratios=(0.15, 0.5))[0]     # {"ratio": 0.15, "accuracy": 0.55, "low": …, "high": …, …}

A mask counts as correct if the most likely token of one forward is the right one; intervals are 95 % CIs from a
BCa bootstrap over rows of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from floatscope.analysis.statistics import estimate
from floatscope.canvas import CanvasState
from floatscope.errors import UserError
from floatscope.models.model import Model
from floatscope.schema import State

RATIOS = (0.15, 0.3, 0.5, 0.7, 0.85)
ROWS, LENGTH, BATCH = 128, 512, 16


def masked_accuracy(
    model: Model, ids: np.ndarray, ratios: Sequence[float] = RATIOS, rows: int = ROWS, length: int = LENGTH
) -> list[dict[str, Any]]:
    """Measure on `rows` rows spread evenly over the token ids; the masks are the same for every model."""
    if model.spec.mask_id is None:
        raise UserError(f"{model.spec.name} has no mask token; open it with mask_id=")
    length = min(length, model.spec.context or length)
    rows = min(rows, len(ids) // length)
    if not rows:
        raise UserError(f"the held-out text has {len(ids):,} tokens, but measuring needs at least {length}; give more")
    starts = np.linspace(0, len(ids) - length, rows).astype(int)
    tokens = torch.from_numpy(np.stack([ids[s : s + length] for s in starts]).astype("int64"))
    results = []
    for ratio in ratios:
        rng = torch.Generator().manual_seed(round(1000 * ratio))
        masked = torch.rand(tokens.shape, generator=rng) < ratio
        masked[:, 0] = False  # no row predicts the first position if the model has a shift
        parts = zip(tokens.split(BATCH), masked.split(BATCH), strict=True)
        correct = torch.cat([_correct_predictions(model, *part) for part in parts])
        accuracy = (correct & masked).sum(1) / masked.sum(1).clamp_min(1)
        table = pd.DataFrame({"sample": list(map(str, range(rows))), "accuracy": accuracy.tolist()})
        row = estimate(table, "accuracy").iloc[0]
        numbers = {
            name: round(float(row[key]), 4) for name, key in (("accuracy", "mean"), ("low", "low"), ("high", "high"))
        }
        results.append({"ratio": ratio, **numbers, "n": rows, "length": length})
    return results


@torch.inference_mode()
def _correct_predictions(model: Model, tokens: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """Return where the most likely token is the original one."""
    states = torch.where(masked, int(State.MASKED), int(State.PROMPT))
    canvas = CanvasState(torch.where(masked, model.spec.mask_id or 0, tokens), states).to(model.device)
    predictions = model.forward(canvas).argmax(-1).cpu()
    if model.spec.shift:
        predictions = torch.cat([tokens[:, :1], predictions[:, :-1]], 1)
    return predictions == tokens
