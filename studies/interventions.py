"""The named studies on the twins, as a part of docs/results.md.

    parts = interventions(Path("runs/results/studies"), models)      # runs what is not there, and writes Markdown

`floatscope study NAME MODEL --data F` is one of these for any model and file, with a page of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runs import studied
from shown import heads, rows

import floatscope as fs
from floatscope.analysis.experiments import effects
from floatscope.analysis.studies import STUDIES
from floatscope.lab.twins.heldout import read

PARTS: list[tuple[str, tuple[str, ...], int, dict[str, Any], str]] = [
    ("sinks", ("arm", "mdm", "mdm-adapted"), 24, {"draws": 1}, "Anchors masked"),
    ("pin", ("arm", "mdm"), 12, {"counts": 5}, "Anchors pinned to the first step, or to the first layer"),
    ("heads", ("arm", "mdm", "mdm-adapted"), 64, {"counts": (2, 5)}, "Retrieval heads zeroed"),
    ("dormant", ("arm",), 12, {}, "Every head zeroed alone"),
    ("blank", ("arm", "mdm"), 12, {"draws": 1}, "Regions hidden"),
]
HOW = {"new_tokens": 8}


def interventions(out: Path, models: Mapping[str, fs.Model]) -> Iterator[str]:
    yield HEAD
    for name, twins, limit, options, title in PARTS:
        samples, able = read("reading-5")[:limit], [twin for twin in twins if twin in models]
        folders = [studied(name, models[twin], samples, out / name / twin, options, HOW) for twin in able]
        if not folders:
            continue
        table = effects(folders)
        yield f"### {title}\n\n`floatscope study {name}`, {int(table['n'].max())} questions. {STUDIES[name].about}\n"
        if name == "dormant":
            yield heads(table)
        else:
            yield rows(table)
        yield "".join(f"- {sentence}\n" for sentence in STUDIES[name].summarise(table))


HEAD = """## What interventions do to the twins

`reading-5`, five passages. *Effect* is an edited run less the mean of its controls (as many random keys, or other heads
of the same layers), question by question, with its 95 % interval; NLL is nats per token of the right answer, written in
the model's own order; *floating* is the share of steps in which the top key is not the usual one.

An anchor is the key of largest lift of a head. In a head that reads, that is the evidence, so that masking anchors
hides more than sinks; `middle` keys stand beside them, and the regions hidden below say which parts of a prompt are
missed. Questions are few; the intervals say how much that settles.
"""
