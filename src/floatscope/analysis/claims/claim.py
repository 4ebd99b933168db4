"""`Claim`: a published claim with its test, the sources of the claims, and the names of the comparisons.

A comparison is written so that the claim says it is above zero; `results.COMPARISONS` computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from floatscope.analysis.claims.measures import Measure

AF = "Attention Floating (2601.07894)"
RULLI = "Attention Sinks in Diffusion Language Models (2510.15731)"
GUO = "Active-Dormant Attention Heads (2410.13835)"
PC = "PC-Sampler (2508.13021)"
PISKORZ = "Masks Can Be Distracting (2511.21338)"
LIU = "Lost in the Middle (2307.03172)"

MDM_ARM, ARM_MDM, MDM, MDM_UNTRAINED = "MDM − ARM", "ARM − MDM", "MDM", "MDM − untrained"
TRAINED_DIFFERENCE = "(MDM − untrained) − (ARM − untrained)"
TWICE = "MDM − 1.5 × ARM"


@dataclass(frozen=True)
class Claim:
    """A published claim and its test."""

    id: str
    statement: str
    source: str
    statistic: str  # what is measured, in words
    measure: Measure
    comparison: str  # a key of `comparisons.COMPARISONS`
    margin: float  # the smallest difference that matters, in the unit of the measure
    scale: float = 1.0  # the printed number is the measured one times this
    unit: str = ""
    short: str = ""  # what the demo calls it
