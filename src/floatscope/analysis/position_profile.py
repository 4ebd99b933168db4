"""The position profile: which parts of the prompt receive attention, on an axis that prompts of any length share.

    position_profile(run)      # a row per layer and bin: its share of the attention on the prompt

Profiles of two tasks can be compared although their prompts differ: does the place of attention depend on the task?
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from floatscope.analysis.trace_view import TraceView, per_sample
from floatscope.schema import State

BINS = 20


@per_sample
def position_profile(view: TraceView) -> pd.DataFrame:
    """The `share` of the attention on the prompt that each `bin` of it receives: a row per layer and bin.

    Bin 0 is the first twentieth of the prompt's tokens. All rows, mean over heads and over the steps that count.
    """
    received = np.nan_to_num(view.received[view.steps_with_commits])  # [step, layer, key]
    in_prompt = view.trace.arrays["states"][0] == State.PROMPT
    prompt = np.flatnonzero(in_prompt)
    bins = np.arange(len(prompt)) * BINS // max(1, len(prompt))
    members = (bins[:, None] == np.arange(BINS)).astype(np.float64)  # [prompt key, bin]
    mass = (received[..., prompt] @ members).mean(0)  # [layer, bin]
    total = mass.sum(-1, keepdims=True)
    share = mass / np.where(total > 0, total, np.nan)
    return pd.DataFrame(
        {
            "sample": view.sample,
            "layer": np.repeat(view.layers, BINS),
            "depth": np.repeat(view.depth, BINS),
            "bin": np.tile(np.arange(BINS), len(view.layers)),
            "share": share.ravel(),
        }
    )
