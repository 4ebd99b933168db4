"""The conditions of an experiment: a baseline, one or more edits, and the controls of those edits.

conditions = [Condition(BASELINE), *build_conditions("mask_anchors(k=5)", "random", draws=3)]
[condition.name for condition in conditions]     # baseline, edited, edited-random-0, edited-random-1, …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from floatscope.interventions.edits import Edit
from floatscope.interventions.recipes import build_control, parse_edits

BASELINE = "baseline"


@dataclass(frozen=True)
class Condition:
    """One condition of an experiment: the edits that are active while its samples are answered."""

    name: str  # also the name of its folder
    edits: tuple[Edit, ...] = ()
    control_of: str = ""  # the condition it is a control of
    subset: str = ""  # the samples it runs on, in an experiment with several subsets
    value: float | None = None  # its x value in the experiment's figure
    series: str = ""  # its line in the experiment's figure


def build_conditions(
    edits: str | Edit | Sequence[str | Edit],
    control: str | None = "random",
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
        control: "random", "middle" or None for no control.
        draws: the number of random controls; there is only one "middle" control.
        heads: the number of heads in a layer, for controls of `zero_heads`.
        name: the name of the edited condition; controls are named `{name}-{control}-{draw}`.
        subset, value, series: fields of every `Condition`.
    """
    parsed = parse_edits(edits)
    conditions = [Condition(name, parsed, subset=subset, value=value, series=series)]
    for draw in range(draws if control == "random" else int(control is not None)):
        control_edits = build_control(parsed, str(control), draw, heads)
        control_name = f"{name}-{control}-{draw}"
        conditions.append(Condition(control_name, control_edits, name, subset, value, series))
    return conditions
