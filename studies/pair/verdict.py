"""What may be said of a claim, by a rule: a number with its interval in, a verdict out.

    table = pd.DataFrame({"arm": […], "mdm": […]})                       # a row per question
    told = of_means(table, lambda m: m["mdm"] - m["arm"])                # Told(mean=…, low=…, high=…, n=…)
    verdict(told, margin=0.05)                                           # "holds"

What is tested is always written so that the claim says it is above zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isnan

import numpy as np
import pandas as pd

DRAWS = 2000
CEILING, FLOOR = 0.97, 0.05
HOLDS, NOT, OPEN = "holds", "does not", "cannot be told at this size"

Stat = Callable[[pd.DataFrame], pd.Series]
"""Of means over questions, a column each, a row per draw."""


@dataclass(frozen=True)
class Told:
    mean: float
    low: float
    high: float
    n: int


def of_means(table: pd.DataFrame, stat: Stat) -> Told:
    """A number that follows from means over questions, with its 95 % interval, bootstrapped over the questions that
    have all of them."""
    whole = table.dropna().sort_index()  # in whatever order they come
    n = len(whole)
    if not n:
        return Told(np.nan, np.nan, np.nan, 0)
    chosen = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), DRAWS)
    drawn = pd.DataFrame(chosen @ whole.to_numpy(float) / n, columns=whole.columns)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = float(stat(whole.mean().to_frame().T).iloc[0])
        draws = stat(drawn).replace([np.inf, -np.inf], np.nan).dropna()
    low, high = np.quantile(draws, [0.025, 0.975]) if n > 1 and len(draws) else (np.nan, np.nan)
    return Told(mean, float(low), float(high), n)


def verdict(told: Told, margin: float, blocked: str = "", least: bool = False) -> str:
    """`margin` is what would matter; `blocked` says why the numbers cannot tell, whatever they are. `least`: what is
    tested is that a number reaches some least one, and one that stays below is no opposite."""
    if blocked:
        return f"{OPEN}: {blocked}"
    if isnan(told.low):
        return f"{OPEN}: not measured" if isnan(told.mean) else f"{OPEN}: there is no interval"
    if told.low == told.high:
        return f"{OPEN}: all questions say the same"
    if told.low > 0:
        return HOLDS if told.high >= margin else f"{HOLDS}, by less than would matter"
    if told.high < 0:
        opposite = f"{NOT}: the opposite" if told.low <= -margin else f"{NOT}: the opposite, by less than would matter"
        return NOT if least else opposite
    if told.high >= margin:
        return OPEN
    return f"{NOT}: no difference that would matter" if told.low > -margin else f"{NOT}: no gain that would matter"


def stuck(means: pd.Series) -> str:
    """Why scores cannot show a change; empty if they can. Columns are called `arm …` and `mdm …`, those after a change
    `… after` or `… edited`."""
    changed = [name for name in means.index if name.endswith(("after", "edited"))]
    if means[changed or means.index].min() > CEILING:
        return "both are at the ceiling"
    for who in ("arm", "mdm"):
        if means[[name for name in means.index if name.startswith(who)]].max() < FLOOR:
            return f"the {who.upper()} is at the floor"
    return ""
