"""How well masks are filled: the share that is right, by how much is masked, on text that was held apart.

    masked_accuracy(model, ids, ratios=(0.15, 0.5))[0]     # {"ratio": 0.15, "accuracy": 0.55, "low": …, "high": …, …}

The most likely token counts, in one forward; an interval is 95 %, bootstrapped over rows of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from floatscope.analysis.estimate import estimate
from floatscope.canvas import CanvasState
from floatscope.errors import UserError
from floatscope.models.model import Model
from floatscope.schema import State

RATIOS = (0.15, 0.3, 0.5, 0.7, 0.85)
ROWS, LENGTH, TOGETHER = 128, 512, 16


def masked_accuracy(
    model: Model, ids: np.ndarray, ratios: Sequence[float] = RATIOS, rows: int = ROWS, length: int = LENGTH
) -> list[dict[str, Any]]:
    """Rows that lie evenly over `ids`; the same masks for every model."""
    if model.spec.mask_id is None:
        raise UserError(f"{model.spec.name} has no mask token; open it with mask_id=")
    length = min(length, model.spec.context or length)
    rows = min(rows, len(ids) // length)
    if not rows:
        raise UserError(f"the held-out text has {len(ids):,} tokens, and {length} are the least to measure on")
    starts = np.linspace(0, len(ids) - length, rows).astype(int)
    tokens = torch.from_numpy(np.stack([ids[s : s + length] for s in starts]).astype("int64"))
    found = []
    for ratio in ratios:
        draw = torch.Generator().manual_seed(round(1000 * ratio))
        masked = torch.rand(tokens.shape, generator=draw) < ratio
        masked[:, 0] = False  # what no row decides where rows decide the next
        right = torch.cat(
            [_right(model, *part) for part in zip(tokens.split(TOGETHER), masked.split(TOGETHER), strict=True)]
        )
        share = (right & masked).sum(1) / masked.sum(1).clamp_min(1)
        table = pd.DataFrame({"sample": list(map(str, range(rows))), "accuracy": share.tolist()})
        told = estimate(table, "accuracy").iloc[0]
        numbers = {
            name: round(float(told[key]), 4) for name, key in (("accuracy", "mean"), ("low", "low"), ("high", "high"))
        }
        found.append({"ratio": ratio, **numbers, "n": rows, "length": length})
    return found


@torch.inference_mode()
def _right(model: Model, tokens: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """Where the most likely token is the one that stood there."""
    states = torch.where(masked, int(State.MASKED), int(State.PROMPT))
    canvas = CanvasState(torch.where(masked, model.spec.mask_id or 0, tokens), states).to(model.device)
    said = model.forward(canvas).argmax(-1).cpu()
    if model.spec.shift:
        said = torch.cat([tokens[:, :1], said[:, :-1]], 1)
    return said == tokens
