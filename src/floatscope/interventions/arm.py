"""The arms of an experiment: the same samples asked as they are, under edits, and under the controls of those edits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from floatscope.interventions.edits import Edit
from floatscope.interventions.recipes import build_control, parse_edits

BASELINE = "baseline"


@dataclass(frozen=True)
class Condition:
    """One way of asking. `condition` names the samples it is asked on, where an experiment has several sorts."""

    name: str  # also the name of its folder
    edits: tuple[Edit, ...] = ()
    control_of: str = ""  # the arm it is a control of
    subset: str = ""
    value: float | None = None  # its place on the axis of the experiment
    series: str = ""  # the line it lies on


def build_conditions(
    edits: str | Edit | Sequence[str | Edit],
    control: str | None = "random",
    draws: int = 3,
    heads: int | None = None,
    name: str = "edited",
    **more: object,
) -> list[Condition]:
    """The edited arm and its controls; mid-rank keys are drawn once, random ones `draws` times."""
    made = parse_edits(edits)
    arms = [Condition(name, made, **more)]  # type: ignore[arg-type]
    for draw in range(draws if control == "random" else int(control is not None)):
        other = build_control(made, str(control), draw, heads)
        arms.append(Condition(f"{name}-{control}-{draw}", other, control_of=name, **more))  # type: ignore[arg-type]
    return arms
