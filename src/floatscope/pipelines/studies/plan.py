"""What a study is made from, and what it makes: samples by condition, and the arms they are asked in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from floatscope.interventions.arm import Condition, build_conditions
from floatscope.models.model import Model
from floatscope.pipelines.asking import PromptItem
from floatscope.pipelines.posing import PromptConfig, build_items
from floatscope.sampling.settings import resolve_sampling
from floatscope.tasks.sample import Sample
from floatscope.tasks.stress.point import Choice, one, whole
from floatscope.tasks.template import template


@dataclass(frozen=True)
class StudyInput:
    """Who is asked what, and how."""

    model: Model
    samples: tuple[Sample, ...]
    out: Path  # of this model
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)  # those of `evaluate`

    def posed(self, samples: Sequence[Sample]) -> list[PromptItem]:
        """The samples as the model will read them."""
        told = self.settings
        new = resolve_sampling(
            self.model.spec.paradigm, told.get("preset"), new_tokens=told.get("new_tokens")
        ).new_tokens
        ask = PromptConfig(template(told.get("prompt", "default")))
        return build_items(self.model, samples, ask, told.get("chat"), new, self.seed)[0]


@dataclass(frozen=True)
class StudyPlan:
    subsets: dict[str, list[Sample]]  # "": the only one
    conditions: list[Condition]  # asked in every condition; the first is the baseline
    notes: list[str]  # what is left out, in sentences


def number(option: str, given: Choice) -> int:
    return one(option, whole(option, given, (), least=1))


def against(
    edits: str, name: str, series: tuple[str, str], draws: int, value: int | None = None, heads: int | None = None
) -> list[Condition]:
    """The edited arm and its random controls, each on a line of their own."""
    place = None if value is None else float(value)
    edited, *controls = build_conditions(edits, "random", draws, heads, name, value=place)
    return [replace(edited, series=series[0]), *(replace(arm, series=series[1]) for arm in controls)]
