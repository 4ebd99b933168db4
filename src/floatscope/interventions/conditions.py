"""The conditions of an experiment: a baseline, one or more edits, and the controls of those edits.

conditions = [Condition(BASELINE), *build_conditions("mask_anchors(k=5)", draws=3)]
[condition.name for condition in conditions]     # baseline, edited, edited-mass-0, …, edited-random-0, …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from floatscope.interventions.edits import Edit
from floatscope.interventions.recipes import build_control, can_match_mass, parse_edits

BASELINE = "baseline"
BOTH = "both"
"""Controls of equal mass, where edits have them, and of equal count."""


@dataclass(frozen=True)
class Condition:
    """One condition of an experiment: the edits that are active while its samples are answered."""

    name: str  # also the name of its folder
    edits: tuple[Edit, ...] = ()
    control_of: str = ""  # the condition it is a control of
    control: str = ""  # what a control matches: mass, random (the number of keys or heads) or middle
    subset: str = ""  # the samples it runs on, in an experiment with several subsets
    value: float | None = None  # its x value in the experiment's figure
    series: str = ""  # its line in the experiment's figure


def build_conditions(
    edits: str | Edit | Sequence[str | Edit],
    control: str | None = BOTH,
    draws: int = 3,
    heads: int | None = None,
    name: str = "edited",
    *,
    subset: str = "",
    value: float | None = None,
    series: str = "",
) -> list[Condition]:
    """Build an edited condition and its controls.

    Args:
        edits: recipes or `Edit`s; several act together.
        control: "mass", "random", "middle", "both" (mass, where the edits have it, and random) or None for no control.
        draws: the number of controls of each kind; there is only one "middle" control.
        heads: the number of heads in a layer, for controls of `zero_heads`.
        name: the name of the edited condition; controls are named `{name}-{control}-{draw}`.
        subset, value, series: fields of every `Condition`.
    """
    parsed = parse_edits(edits)
    kinds = [] if control is None else [control]
    if control == BOTH:
        kinds = ["mass", "random"] if can_match_mass(parsed) else ["random"]
    conditions = [Condition(name, parsed, subset=subset, value=value, series=series)]
    for kind in kinds:
        for draw in range(1 if kind == "middle" else draws):
            matched = build_control(parsed, kind, draw, heads)
            conditions.append(Condition(f"{name}-{kind}-{draw}", matched, name, kind, subset, value, series))
    return conditions
