"""Verdicts on claims, by a rule: an estimate with its interval in, a verdict out.

    table = pd.DataFrame({"arm": […], "mdm": […]})                              # a row per question
    estimate = bootstrap(table, lambda m: m["mdm"] - m["arm"])                  # Estimate(mean=…, low=…, high=…, n=…)
    judge(estimate, margin=0.05)                                                # "supported"

Every tested number is written so that the claim says it is above zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isnan

import numpy as np
import pandas as pd

RESAMPLES = 2000
CEILING, FLOOR = 0.97, 0.05
SUPPORTED, NOT_SUPPORTED, CONTRADICTED, INCONCLUSIVE = "supported", "not supported", "contradicted", "inconclusive"
VERDICTS = (SUPPORTED, NOT_SUPPORTED, CONTRADICTED, INCONCLUSIVE)

Statistic = Callable[[pd.DataFrame], pd.Series]
"""Means over questions, one column each and one row per resample → the statistic of each row."""


@dataclass(frozen=True)
class Estimate:
    """A statistic with its 95 % CI and the number of questions."""

    mean: float
    low: float
    high: float
    n: int


def bootstrap(table: pd.DataFrame, statistic: Statistic) -> Estimate:
    """Return a statistic of means over questions, with a 95 % CI from a bootstrap over the complete questions."""
    complete = table.dropna().sort_index()  # the result does not depend on the order of the rows
    n = len(complete)
    if not n:
        return Estimate(np.nan, np.nan, np.nan, 0)
    weights = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    means = pd.DataFrame(weights @ complete.to_numpy(float) / n, columns=complete.columns)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = float(statistic(complete.mean().to_frame().T).iloc[0])
        resampled = statistic(means).replace([np.inf, -np.inf], np.nan).dropna()
    low, high = np.quantile(resampled, [0.025, 0.975]) if n > 1 and len(resampled) else (np.nan, np.nan)
    return Estimate(mean, float(low), float(high), n)


def judge(estimate: Estimate, margin: float, blocked: str = "", is_threshold: bool = False) -> str:
    """Return the verdict on a claim.

    Args:
        estimate: The tested number.
        margin: The smallest difference that matters.
        blocked: Why the numbers cannot decide, whatever they are; empty if they can.
        is_threshold: The test is whether a number reaches a threshold; staying below it contradicts nothing.
    """
    if blocked:
        return f"{INCONCLUSIVE}: {blocked}"
    if isnan(estimate.low):
        return f"{INCONCLUSIVE}: not measured" if isnan(estimate.mean) else f"{INCONCLUSIVE}: no interval"
    if estimate.low == estimate.high:
        return f"{INCONCLUSIVE}: no variation between questions"
    if estimate.low > 0:
        return SUPPORTED if estimate.high >= margin else f"{SUPPORTED}, within the margin"
    if estimate.high < 0:
        if is_threshold:
            return NOT_SUPPORTED
        return CONTRADICTED if estimate.low <= -margin else f"{CONTRADICTED}, within the margin"
    if estimate.high >= margin:
        return INCONCLUSIVE
    is_equal = estimate.low > -margin
    return f"{NOT_SUPPORTED}: no {'difference' if is_equal else 'gain'} beyond the margin"


def find_limit(means: pd.Series) -> str:
    """Return why scores cannot show a change, empty if they can.

    Columns are named `arm …` and `mdm …`; those after a change end with `after` or `edited`.
    """
    changed = [name for name in means.index if name.endswith(("after", "edited"))]
    if means[changed or means.index].min() > CEILING:
        return "both are at the ceiling"
    for paradigm in ("arm", "mdm"):
        if means[[name for name in means.index if name.startswith(paradigm)]].max() < FLOOR:
            return f"the {paradigm.upper()} is at the floor"
    return ""
