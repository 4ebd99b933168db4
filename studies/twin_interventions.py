"""The named studies on the twins, as a part of docs/results.md.

    parts = write_interventions(Path("runs/results/studies"), models)      # runs what is missing, yields Markdown

`floatscope study NAME MODEL --data F` runs one of these for any model and file, with its own report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from markdown_tables import effect_table, head_table
from runs import study_once

import floatscope as fs
from floatscope.analysis.experiments import effects
from floatscope.analysis.studies import STUDIES
from floatscope.tasks.sample_files import read_shipped

PARTS: list[tuple[str, tuple[str, ...], int, dict[str, Any], str]] = [
    ("sinks", ("arm", "mdm", "mdm-adapted"), 24, {"draws": 1}, "Anchors masked"),
    ("pin", ("arm", "mdm"), 12, {"counts": 5}, "Anchors pinned to the first step or the first layer"),
    ("heads", ("arm", "mdm", "mdm-adapted"), 64, {"counts": (2, 5)}, "Retrieval heads zeroed"),
    ("dormant", ("arm",), 12, {}, "Each head zeroed alone"),
    ("blank", ("arm", "mdm"), 12, {"draws": 1}, "Regions hidden"),
]
"""Study, twins, number of questions, options, title."""

SETTINGS = {"new_tokens": 8}


def write_interventions(out: Path, models: Mapping[str, fs.Model]) -> Iterator[str]:
    """Run the missing studies and yield their section."""
    yield INTRODUCTION
    for name, twins, limit, options, title in PARTS:
        samples = read_shipped("reading-5")[:limit]
        folders = [
            study_once(name, models[twin], samples, out / name / twin, options, SETTINGS)
            for twin in twins
            if twin in models
        ]
        if not folders:
            continue
        table = effects(folders)
        questions, study = int(table["n"].max()), STUDIES[name]
        yield f"### {title}\n\n`floatscope study {name}`, {questions} questions. {study.description}\n"
        yield head_table(table) if name == "dormant" else effect_table(table)
        yield "".join(f"- {sentence}\n" for sentence in study.summarise(table))


INTRODUCTION = """## Interventions on the twins

`reading-5`, five passages. *Effect* is an edited condition minus the mean of its controls (the same number of random
keys, or other heads of the same layers), paired by question, with its 95 % CI. NLL is in nats per token of the gold
answer, decoded in the model's own order. *Floating* is the share of steps whose top key is not the most frequent one.

An anchor is the key of largest lift of a head. In a head that reads, this key is the evidence, so masking anchors hides
more than sinks; the `middle` keys are a comparison, and the hidden regions below show which parts of a prompt are
needed. The number of questions is small; the intervals show how much can be concluded.
"""
