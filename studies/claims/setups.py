"""The pairs of models that the claims are tested on: their questions, prompts and settings.

    setup = open_twins(limit=None)                      # twin:arm, twin:mdm, twin:mdm-adapted on their worlds
    setup = open_smollm2(arm, mdm, data, limit=None)    # an ARM and an MDM from the same base, on real questions

Settings were chosen before the MDMs were run: of the harder prompts, those at which the ARM gives 70 to 90 % right
answers, so that there is room to fall and to rise. twin:arm on 60 to 100 questions: 62, 98, 98 % with the gold passage
first, in the middle and last of 35; 88 % among 37 random passages; 84 % beside 8 of an older date; 78 to 95 % with two
hops among 24 passages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from floatscope.lab.twins.world import make_few_shot
from floatscope.tasks.sample import Sample
from floatscope.tasks.sample_files import read_samples, read_shipped
from floatscope.tasks.stress import build_points

EXAMPLES = (1, 6)
FEW_SHOT_QUESTIONS = 200


@dataclass(frozen=True)
class Setup:
    """A comparison: models by role, questions, and the settings of its runs."""

    name: str
    title: str
    pairs: dict[str, tuple[str, str]]  # column of the page → roles of the ARM and the MDM
    models: dict[str, str]  # role → name of the model
    main: Sequence[Sample]
    second: Sequence[Sample]
    traced: Sequence[Sample]
    settings: dict[str, Any]  # of every evaluation
    trace_settings: dict[str, Any]
    stress: dict[str, tuple[str, Sequence[Sample], dict[str, Any]]]  # folder → kind, questions, options
    points: dict[str, str]  # purpose of a stress point → the point that serves it
    edited: Sequence[Sample]  # questions of the interventions
    few_shot: dict[int, list[Sample]] = field(default_factory=dict)
    prompts: bool = False  # compare prompts and temperatures


def open_twins(limit: int | None = None) -> Setup:
    """Return the comparison of the twins."""
    reading, two_hop = (list(read_shipped(name)) for name in ("reading-5", "two-hop"))
    return Setup(
        "twins",
        "7M twins",
        {"7M twins: mdm − arm": ("arm", "mdm"), "7M twins: mdm-adapted − arm": ("arm", "mdm-adapted")},
        {role: f"twin:{role}" for role in ("arm", "mdm", "mdm-adapted")},
        main=reading[: _at_most(500, limit)],
        second=two_hop[: _at_most(300, limit)],
        traced=list(read_shipped("biography"))[: _at_most(60, limit)],
        settings={"new_tokens": 8},
        trace_settings={"new_tokens": 40},
        stress={
            "position": ("needle", reading[: _at_most(200, limit)],
                         {"counts": 35, "keys": ("first", "middle", "last")}),
            "noise": ("noise", reading[: _at_most(200, limit)],
                      {"distractors": "random", "counts": (0, 37), "lengths": "growing"}),
            "dated": ("noise", reading[: _at_most(200, limit)],
                      {"distractors": "dated", "counts": (0, 8), "lengths": "growing"}),
            "layout": ("layout", two_hop[: _at_most(200, limit)], {"documents": 24}),
            "query": ("query", reading[: _at_most(200, limit)], {}),
            "masks": ("masks", reading[: _at_most(200, limit)], {"counts": (64,)}),
            "dirty": ("dirty", reading[: _at_most(200, limit)], {"transforms": "typos", "levels": (0, 0.1)}),
        },
        points={
            "stress/position/{}/first": "stress/position/{}/first-35",
            "stress/position/{}/middle": "stress/position/{}/middle-35",
            "stress/position/{}/last": "stress/position/{}/last-35",
            "stress/noise/{}/random-many": "stress/noise/{}/random-37",
            "stress/noise/{}/random-none": "stress/noise/{}/random-0",
            "stress/dated/{}/dated-many": "stress/dated/{}/dated-8",
            "stress/dated/{}/dated-none": "stress/dated/{}/dated-0",
            "stress/masks/{}/masks-many": "stress/masks/{}/masks-64",
            "stress/masks/{}/filler-many": "stress/masks/{}/filler-64",
            "stress/dirty/{}/typos": "stress/dirty/{}/typos-0.1",
            "stress/dirty/{}/clean": "stress/dirty/{}/typos-0",
        },
        edited=reading[: _at_most(48, limit)],
        few_shot=_few_shot(limit),
    )  # fmt: skip


def open_smollm2(arm: str, mdm: str, data: Path, limit: int | None = None) -> Setup:
    """Return the comparison of an ARM and an MDM from one base on the held-out files of studies/pair/split.py."""
    nq, xquad = (add_distractors(read_samples(data / f"{name}.jsonl")) for name in ("nq", "xquad"))
    with_evidence = [sample for sample in nq if any(passage.evidence for passage in sample.passages)]
    many = spread(nq, _at_most(200, limit))
    return Setup(
        "smollm2",
        "SmolLM2 pair",
        {"SmolLM2 pair: MDM − ARM": ("arm", "mdm")},
        {"arm": arm, "mdm": mdm},
        main=nq[: _at_most(len(nq), limit)],
        second=xquad[: _at_most(len(xquad), limit)],
        traced=spread(with_evidence, _at_most(64, limit)),
        settings={"template": "instruct", "new_tokens": 16},
        trace_settings={"template": "instruct", "new_tokens": 16},
        stress={
            "position": ("needle", many, {"counts": 8, "keys": ("first", "middle", "last")}),
            "noise": ("noise", many, {"distractors": "random", "counts": (0, 8), "lengths": "growing"}),
            "dated": ("noise", many, {"distractors": "dated", "counts": (0, 2), "lengths": "growing"}),
            "query": ("query", many, {}),
            "masks": ("masks", many, {"counts": (64,)}),
            "dirty": ("dirty", many, {"transforms": "typos", "levels": (0, 0.1)}),
        },
        points={
            "stress/position/{}/first": "stress/position/{}/first-8",
            "stress/position/{}/middle": "stress/position/{}/middle-8",
            "stress/position/{}/last": "stress/position/{}/last-8",
            "stress/noise/{}/random-many": "stress/noise/{}/random-8",
            "stress/noise/{}/random-none": "stress/noise/{}/random-0",
            "stress/dated/{}/dated-many": "stress/dated/{}/dated-2",
            "stress/dated/{}/dated-none": "stress/dated/{}/dated-0",
            "stress/masks/{}/masks-many": "stress/masks/{}/masks-64",
            "stress/masks/{}/filler-many": "stress/masks/{}/filler-64",
            "stress/dirty/{}/typos": "stress/dirty/{}/typos-0.1",
            "stress/dirty/{}/clean": "stress/dirty/{}/typos-0",
        },
        edited=spread(with_evidence, _at_most(48, limit)),
        few_shot=_few_shot(limit),
        prompts=True,
    )


def add_distractors(samples: Sequence[Sample], passages: int = 5) -> tuple[Sample, ...]:
    """Return every question with its gold passage and passages of other questions, in random order."""
    return build_points("position", samples, documents=passages)[-1].samples


def spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Return `count` samples, spread evenly over the file."""
    count = min(count, len(samples))
    return [samples[i * len(samples) // count] for i in range(count)]


def _few_shot(limit: int | None) -> dict[int, list[Sample]]:
    """Return fresh questions with few and with many examples of a rule; the same cases for both."""
    count = _at_most(FEW_SHOT_QUESTIONS, limit)
    full = [make_few_shot(Random(i), f"rule-{i}", max(EXAMPLES)) for i in range(count)]
    return {shots: [keep_examples(sample, shots) for sample in full] for shots in EXAMPLES}


def keep_examples(sample: Sample, shots: int) -> Sample:
    """Return a few-shot question with its last `shots` examples."""
    sentences = sample.question.split(". ")
    return replace(sample, question=". ".join(sentences[-shots - 1 :]))


def _at_most(count: int, limit: int | None) -> int:
    return count if limit is None else min(count, limit)
