"""One rule for every verdict: an interval, a margin and Holm's correction become a word.

    judge(estimate, margin=0.05)                             # "supported"
    judge(estimate, margin=0.05, limit="both are at the ceiling")   # "inconclusive: both are at the ceiling"

Every tested number is written so that the claim says it is above zero.
"""

from __future__ import annotations

from math import isnan

from floatscope.analysis.statistics import BootstrapEstimate

SUPPORTED, CONTRADICTED, INCONCLUSIVE = "supported", "contradicted", "inconclusive"
SMALLER = "supported, smaller than the margin"
NO_EFFECT = "no effect larger than the margin"
VERDICTS = (SUPPORTED, SMALLER, CONTRADICTED, NO_EFFECT, INCONCLUSIVE)
LEVEL = 0.05


def judge(interval: BootstrapEstimate, margin: float, limit: str = "", corrected_p: float | None = None) -> str:
    """Return the verdict on a claim.

    Args:
        interval: The tested number with its 95 % CI and p-value; the claim says that it is above zero.
        margin: The smallest difference that matters.
        limit: Why the numbers cannot decide, whatever they are, such as a ceiling; empty if they can.
        corrected_p: The p-value after Holm's correction; None judges by the interval alone.

    Returns:
        `supported` if the interval is above 0, with the addition `smaller than the margin` if all of it is below the
        margin; `contradicted` if it is below 0 and reaches beyond minus the margin; `no effect larger than the margin`
        if it excludes effects of that size in the claimed direction; otherwise `inconclusive` with a reason.
    """
    if limit:
        return f"{INCONCLUSIVE}: {limit}"
    if isnan(interval.mean):
        return f"{INCONCLUSIVE}: not measured"
    if isnan(interval.low) or interval.low == interval.high:
        return f"{INCONCLUSIVE}: no variation between samples"
    is_corrected_away = corrected_p is not None and corrected_p >= LEVEL
    if interval.low > 0:
        if is_corrected_away:
            return f"{INCONCLUSIVE}: not after Holm's correction"
        return SUPPORTED if interval.high >= margin else SMALLER
    if interval.high < 0 and interval.low <= -margin:
        return f"{INCONCLUSIVE}: not after Holm's correction" if is_corrected_away else CONTRADICTED
    if interval.high < margin:
        return NO_EFFECT
    return f"{INCONCLUSIVE}: n"


def verdict_word(verdict: str) -> str:
    """Return the verdict without its reason."""
    return INCONCLUSIVE if verdict.startswith(INCONCLUSIVE) else verdict
