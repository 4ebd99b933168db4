"""Whose absence moves the answer: each region of the prompt hidden in turn.

blank(asked)                         # bos, template, question, gold, evidence, each document
"""

from __future__ import annotations

import re

from floatscope.errors import UserError
from floatscope.interventions.arm import BASELINE, Condition
from floatscope.pipelines.studies.plan import StudyInput, StudyPlan, against, number
from floatscope.tasks.stress.point import Choice

USUAL = ("bos", "template", "question", "gold", "evidence")


def blank(asked: StudyInput, *, draws: Choice = 3) -> StudyPlan:
    """No row outside a region sees it; as control as many random positions of the prompt."""
    regions = [item.tokens for item in asked.posed(asked.samples)]
    names = list(dict.fromkeys(name for each in regions for name in each))
    shared = [name for name in names if all(each.get(name) for each in regions)]
    if not shared:
        raise UserError(f"no region is in the prompts of all {len(regions)} samples; give samples with passages")
    told, arms, times = [], [Condition(BASELINE)], number("draws", draws)
    if left := [name for name in names if name not in shared]:
        told.append(f"without {', '.join(left)}: not all samples have them")
    for name in sorted(shared, key=_order):
        place = _number(name) if name.startswith("document ") else None  # others have none on the axis
        lines = ("document", "random") if place else (name, f"{name}: random")
        arms += against(f"blank(region={name!r})", name.replace(" ", "-"), lines, times, place)
    return StudyPlan({"": list(asked.samples)}, arms, told)


def _order(name: str) -> tuple[int, str, int]:
    """What most prompts have, then documents by their numbers."""
    place = USUAL.index(name) if name in USUAL else len(USUAL)
    return place, name.rstrip("0123456789"), _number(name)


def _number(name: str) -> int:
    found = re.search(r"\d+$", name)
    return int(found[0]) if found else 0
