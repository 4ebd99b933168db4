"""What a study is made from, and what it makes: samples by condition, and the arms they are asked in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from floatscope.interventions.arm import Arm, arms_of
from floatscope.models.model import Model
from floatscope.pipelines.asking import Item
from floatscope.pipelines.posing import Ask, posed
from floatscope.sampling.settings import resolve_sampling
from floatscope.tasks.sample import Sample
from floatscope.tasks.stress.point import Choice, one, whole
from floatscope.tasks.template import template


@dataclass(frozen=True)
class Asked:
    """Who is asked what, and how."""

    model: Model
    samples: tuple[Sample, ...]
    out: Path  # of this model
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)  # those of `evaluate`

    def posed(self, samples: Sequence[Sample]) -> list[Item]:
        """The samples as the model will read them."""
        told = self.settings
        new = resolve_sampling(self.model.spec.family, told.get("preset"), new_tokens=told.get("new_tokens")).new_tokens
        ask = Ask(template(told.get("prompt", "default")))
        return posed(self.model, samples, ask, told.get("chat"), new, self.seed)[0]


@dataclass(frozen=True)
class Plan:
    conditions: dict[str, list[Sample]]  # "": the only one
    arms: list[Arm]  # asked in every condition; the first is the baseline
    told: list[str]  # what is left out, in sentences


def number(option: str, given: Choice) -> int:
    return one(option, whole(option, given, (), least=1))


def against(
    edits: str, name: str, series: tuple[str, str], draws: int, value: int | None = None, heads: int | None = None
) -> list[Arm]:
    """The edited arm and its random controls, each on a line of their own."""
    place = None if value is None else float(value)
    edited, *controls = arms_of(edits, "random", draws, heads, name, value=place)
    return [replace(edited, series=series[0]), *(replace(arm, series=series[1]) for arm in controls)]
