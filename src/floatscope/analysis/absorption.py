"""Absorption: how much of a layer's attention a few keys take, beside what uniform attention would give them.

    absorption(run)                      # a row per sample, layer and set of keys, mean over steps
    absorption(run, per_step=True)       # and per step

Sets: `first` key (whether or not it is a bos), the `top` key by lift, the `top 5`, and the `anchors` a detector finds.
`bos` says whether the first key is one. `percent` is of all attention (mean over heads and rows), `uniform` the same
were it uniform, `lift` their ratio. `moved` is the percent of what the attention moves: each probability times the norm
its value adds to the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Bool

from floatscope.analysis.look import TraceView, trace_views
from floatscope.analysis.tokens import starts_with_bos
from floatscope.errors import UserError
from floatscope.traces import Trace

SETS = ("first", "top", "top 5", "anchors")
Chosen = Bool[np.ndarray, "step layer key"]


def absorption(traces: Iterable[Trace], detector: str = "zscore", per_step: bool = False) -> pd.DataFrame:
    tables = [of(look, per_step) for look in trace_views(traces, detector)]
    if not tables:
        raise UserError("there is no finished trace to look at")
    return pd.concat(tables, ignore_index=True)


def of(look: TraceView, per_step: bool = False, sets: Sequence[str] = SETS) -> pd.DataFrame:
    """Of one sample. The lift of a layer is that of its percentages, not a mean of lifts."""
    tables = []
    for name in sets:
        chosen = _CHOOSE[name](look)
        percent = 100 * np.nansum(np.where(chosen, look.received, 0), -1)  # [step, layer]
        uniform = 100 * np.nansum(np.where(chosen, look.uniform, 0), -1)
        moved = 100 * np.where(chosen, look.moved, 0).sum(-1)
        steps = np.arange(look.steps)
        if not per_step:
            percent, uniform, moved = (each.mean(0, keepdims=True) for each in (percent, uniform, moved))
            steps = steps[:1]
        tables.append(
            pd.DataFrame(
                {
                    "sample": look.sample,
                    "step": np.repeat(steps, len(look.layers)),
                    "layer": np.tile(look.layers, len(steps)),
                    "depth": np.tile(look.depth, len(steps)),
                    "set": name,
                    "bos": starts_with_bos(look.trace),
                    "percent": percent.ravel(),
                    "uniform": uniform.ravel(),
                    "moved": moved.ravel(),
                }
            )
        )
    table = pd.concat(tables, ignore_index=True)
    table["lift"] = (table["percent"] / table["uniform"]).where(table["uniform"] > 0)
    return table if per_step else table.drop(columns="step")


def of_detectable(look: TraceView) -> pd.DataFrame:
    """The same, without anchors where the detector cannot fire: the other sets do not need it."""
    try:
        return of(look)
    except UserError:
        return of(look, sets=SETS[:-1])


def _top_5(look: TraceView) -> Chosen:
    ranked = np.where(np.isnan(look.lift), -np.inf, look.lift)
    five = np.zeros(ranked.shape, bool)
    for _ in range(5):  # the next largest, of equal ones the first; sorting all keys takes twenty times as long
        np.put_along_axis(five, np.where(five, -np.inf, ranked).argmax(-1)[..., None], True, -1)
    return five & np.isfinite(look.lift)


_CHOOSE: dict[str, Callable[[TraceView], Chosen]] = {
    "first": lambda look: np.broadcast_to(np.arange(look.lift.shape[-1]) == 0, look.lift.shape),
    "top": lambda look: np.arange(look.lift.shape[-1]) == look.top[..., None],
    "top 5": _top_5,
    "anchors": lambda look: look.anchors,
}
