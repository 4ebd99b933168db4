"""Studies: experiments with a name. Samples in; the conditions they are asked under and the arms they are asked in out.

made = plan("sinks", Asked(model, samples, Path("runs/sinks/mdm")), counts=(1, 5))
made.conditions, made.arms, made.told            # what `intervening.experiment` takes, and what is left out
STUDIES["sinks"].read(effects)                   # a sentence per model
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from floatscope.errors import UserError, unknown_choice
from floatscope.pipelines.studies.anchors import pin, sinks
from floatscope.pipelines.studies.heads import dormant, heads
from floatscope.pipelines.studies.plan import StudyInput, StudyPlan
from floatscope.pipelines.studies.regions import blank

__all__ = ["PLANS", "StudyInput", "StudyPlan", "check", "options_of", "plan"]


PLANS: dict[str, Callable[..., StudyPlan]] = {
    "sinks": sinks,
    "pin": pin,
    "heads": heads,
    "dormant": dormant,
    "blank": blank,
}
"""The name of a study → the function that plans it; its text and axis are in `analysis.studies`."""


def options_of(name: str) -> list[str]:
    """The options a study takes."""
    return [option for option in inspect.signature(PLANS[name]).parameters if option != "asked"]


def plan(name: str, asked: StudyInput, **options: Any) -> StudyPlan:
    """What is to be asked of whom. `heads` traces some samples first, into `asked.out`."""
    check(name, options)
    if not asked.samples:
        raise UserError("there are no samples to study; give one or more")
    return PLANS[name](asked, **options)


def check(name: str, options: Iterable[str]) -> None:
    """Refuse a study or an option that there is not."""
    if name not in PLANS:
        raise unknown_choice("study", name, PLANS)
    for option in options:
        if option not in options_of(name):
            raise unknown_choice(f"option of {name}", option, options_of(name))
