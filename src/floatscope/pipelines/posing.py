"""How questions are posed: with which passages, shots and template, and what of these a model's context has room for.

ask = Ask(template("default"), passages=5, shots=2)
items, told = posed(model, samples, ask, chat=None, new=8, seed=0)     # cut by whole passages where they must be
too_long(model, samples, ask, chat=None, new=8, seed=0)                # the ids of those that would be cut
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from floatscope.errors import UserError
from floatscope.models.model import Model
from floatscope.pipelines import prompts
from floatscope.pipelines.asking import PromptItem, encode_samples, require_tokenizer
from floatscope.tasks.fit import Length, fit
from floatscope.tasks.prompt import Prompt
from floatscope.tasks.sample import Sample
from floatscope.tasks.template import Template

Passages = int | str
"""How many of a sample's passages are shown, its gold ones always among them; `gold`: those alone; `all`."""


@dataclass(frozen=True)
class PromptConfig:
    """How questions are asked, besides the sampling."""

    template: Template
    passages: Passages = "all"
    shots: int = 0
    placement: str | None = None  # of the question among the passages
    extra_masks: int = 0  # behind the answer; they are never filled
    filler: str = ""  # a text behind the answer
    attention: bool = False  # watch how much the rows that decide the answer give to gold and other passages

    @property
    def as_json(self) -> dict[str, Any]:
        told = {"passages": self.passages, "shots": self.shots, "placement": self.placement}
        told |= {"extra_masks": self.extra_masks, "filler": self.filler, "attention": self.attention}
        return {"prompt": self.template.name, "prompt_sha256": self.template.sha256, **told}

    def write(self, sample: Sample, shots: Sequence[Sample]) -> Prompt:
        return self.template.prompt(sample, shots, self.placement)

    def suffix_ids(self, model: Model) -> list[int]:
        """The tokens that stand behind the answer."""
        filler = require_tokenizer(model).encode(self.filler, chat=False) if self.filler else []
        return [*([model.spec.mask_id or 0] * self.extra_masks), *filler]


def choose(sample: Sample, passages: Passages) -> Sample:
    """The sample with so many of its passages: its gold ones and the first of the others, in their order."""
    if passages == "all":
        return sample
    if passages == "gold":
        return replace(sample, passages=tuple(p for p in sample.passages if p.gold))
    if not isinstance(passages, int) or passages < 0:
        raise UserError(f"passages are a number, gold or all, got {passages!r}")
    gold = [i for i, p in enumerate(sample.passages) if p.gold][:passages]
    others = [i for i, p in enumerate(sample.passages) if not p.gold][: passages - len(gold)]
    return replace(sample, passages=tuple(sample.passages[i] for i in sorted([*gold, *others])))


def build_items(
    model: Model, samples: Sequence[Sample], asked: PromptConfig, chat: bool | None, new: int, seed: int
) -> tuple[list[PromptItem], list[str]]:
    """The questions as they will be asked, cut by whole passages where they are too long; and what was cut."""
    shots, room = _all_shots(samples, asked.shots, seed), _room(model, asked, new)
    length, kept, cut = _length(model, asked, chat), list(samples), 0
    if room is not None:
        for at, sample in enumerate(samples):
            fitted = fit(sample, shots[sample.id], room, length)
            kept[at], shots[sample.id] = fitted.sample, fitted.shots
            cut += fitted.dropped > 0
    told = [f"{cut} of {len(samples)} prompts were longer than {room} tokens and lost passages or shots"] if cut else []
    behind = new + len(asked.suffix_ids(model))
    return encode_samples(model, kept, chat, behind, lambda sample: asked.write(sample, shots[sample.id])), told


def too_long(
    model: Model, samples: Sequence[Sample], asked: PromptConfig, chat: bool | None, new: int, seed: int
) -> set[str]:
    """The ids of the samples that the model's context does not hold whole."""
    shots, room = _all_shots(samples, asked.shots, seed), _room(model, asked, new)
    length = _length(model, asked, chat)
    return set() if room is None else {s.id for s in samples if length(s, shots[s.id]) > room}


def _room(model: Model, asked: PromptConfig, new: int) -> int | None:
    """How many tokens a prompt may have; None if nobody knows."""
    if model.spec.context is None:
        return None
    suffix = require_tokenizer(model).suffix if model.spec.paradigm == "mdm" else ()
    return model.spec.context - new - len(asked.suffix_ids(model)) - len(suffix)


def _length(model: Model, asked: PromptConfig, chat: bool | None) -> Length:
    text, used = require_tokenizer(model), prompts.uses_template(model, chat)
    return lambda sample, shots: len(text.encode(asked.write(sample, shots).text, chat=used))


def _all_shots(samples: Sequence[Sample], count: int, seed: int) -> dict[str, list[Sample]]:
    return {sample.id: _shots_of(sample, samples, count, seed) for sample in samples}


def _shots_of(sample: Sample, samples: Sequence[Sample], count: int, seed: int) -> list[Sample]:
    if not count:
        return []
    others = [other for other in samples if other.id != sample.id and other.answers]
    if count > len(others):
        raise UserError(
            f"{count} shots need as many other samples with an answer, and there are {len(others)} beside"
            f" '{sample.id}'; give fewer shots, or more samples"
        )
    drawn = random.Random(f"{seed} {sample.id}").sample(others, count)
    shown: Passages = "gold" if sample.passages else 0
    return [choose(other, shown) for other in drawn]
