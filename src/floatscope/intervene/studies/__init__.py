"""Studies: experiments with a name. Samples in; the conditions they are asked under and the arms they are asked in out.

made = plan("sinks", Asked(model, samples, Path("runs/sinks/mdm")), counts=(1, 5))
made.conditions, made.arms, made.told            # what `intervening.experiment` takes, and what is left out
STUDIES["sinks"].read(effects)                   # a sentence per model
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from floatscope.errors import UserError, unknown
from floatscope.intervene.studies import reading
from floatscope.intervene.studies.anchors import pin, sinks
from floatscope.intervene.studies.heads import dormant, heads
from floatscope.intervene.studies.plan import Asked, Plan
from floatscope.intervene.studies.regions import blank

__all__ = ["STUDIES", "Asked", "Plan", "Study", "check", "plan"]


@dataclass(frozen=True)
class Study:
    title: str
    about: str
    axis: str  # what `Arm.value` counts
    nll_only: bool  # only the likelihood of the right answer is measured, nothing is decoded
    make: Callable[..., Plan]
    read: Callable[[pd.DataFrame], list[str]]  # the table of effects → a sentence per model

    @property
    def options(self) -> list[str]:
        """The names it takes."""
        return [name for name in inspect.signature(self.make).parameters if name != "asked"]


STUDIES = {
    "sinks": Study(
        "Anchors masked",
        "The first anchors of every head are hidden: does the model need them, or go on with others?",
        "keys masked",
        False,
        sinks,
        reading.sinks,
    ),
    "pin": Study(
        "Anchors pinned",
        "What anchors get goes to those of the first step or the first layer: must they float?",
        "anchors pinned",
        False,
        pin,
        reading.pin,
    ),
    "heads": Study(
        "Retrieval heads zeroed",
        "The heads that copy evidence fall silent: does the model need them more than others of their layers?",
        "heads zeroed",
        False,
        heads,
        reading.heads,
    ),
    "dormant": Study(
        "Heads by their loss",
        "Every head falls silent alone: which does the answer not need?",
        "head",
        True,
        dormant,
        reading.dormant,
    ),
    "blank": Study(
        "Regions hidden",
        "Each region of the prompt is hidden from the rest: whose absence moves the answer?",
        "document",
        True,
        blank,
        reading.blank,
    ),
}


def plan(name: str, asked: Asked, **options: Any) -> Plan:
    """What is to be asked of whom. `heads` traces some samples first, into `asked.out`."""
    check(name, options)
    if not asked.samples:
        raise UserError("there are no samples to study; give one or more")
    return STUDIES[name].make(asked, **options)


def check(name: str, options: Iterable[str]) -> None:
    """Refuse a study or an option that there is not."""
    if name not in STUDIES:
        raise unknown("study", name, STUDIES)
    for option in options:
        if option not in STUDIES[name].options:
            raise unknown(f"option of {name}", option, STUDIES[name].options)
