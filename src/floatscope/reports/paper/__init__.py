"""The figures of "Revealing the Attention Floating Mechanism in Masked Diffusion Models" (arXiv 2601.07894), drawn from
our runs, each with a note where ours differs from theirs and why.

    paper(runs, detector("zscore"))      # list of Section; their ids name the figures
    foreword(runs)                       # the sentences that stand before those of any report

| section | figure |
|---|---|
| `temporal-drift` | what each key receives, step by step |
| `absorption` | what a few keys absorb, layer by layer |
| `qk-decomposition` | score, angle and norm of each key |
| `retrieval-heads` | which heads read the evidence |
| `region-flow` | what the answer reads when the gold passage stands first, in the middle, last |
| `scores` | are the answers right, with and without passages |
"""

from __future__ import annotations

from collections.abc import Sequence

from floatscope.analysis.detectors import Detector
from floatscope.reports.charts import Section
from floatscope.reports.compared import Compared
from floatscope.reports.paper.answers import scores
from floatscope.reports.paper.drift import temporal_drift
from floatscope.reports.paper.flow import region_flow
from floatscope.reports.paper.keys import decomposition
from floatscope.reports.paper.layers import absorption, retrieval_heads
from floatscope.reports.paper.parts import Read

__all__ = [
    "Read",
    "absorption",
    "decomposition",
    "foreword",
    "paper",
    "region_flow",
    "retrieval_heads",
    "scores",
    "temporal_drift",
]

TITLE = "Revealing the Attention Floating Mechanism in Masked Diffusion Models"
ARXIV = "2601.07894"
FAMILIES = {"arm": "autoregressive", "mdm": "masked diffusion"}


def paper(runs: Sequence[Compared], detector: Detector) -> list[Section]:
    read = [Read.of(run) for run in runs]
    return [
        temporal_drift(read, detector),
        absorption(runs, detector),
        decomposition(runs, detector),
        retrieval_heads(runs, detector),
        region_flow(read),
        scores(read),
    ]


def foreword(runs: Sequence[Compared]) -> list[str]:
    """What the page is, and which family is missing for the comparison the paper makes."""
    told = [
        f"The figures of “{TITLE}” (arXiv {ARXIV}), drawn anew from these runs. Each says where it differs and why."
    ]
    there = {run.family for run in runs}
    for family in FAMILIES.keys() - there:
        told.append(
            "**The comparison is not complete.** The paper sets masked diffusion models against autoregressive ones,"
            f" and no {FAMILIES[family]} model is among these runs. Trace one, such as twin:{family}, with the same"
            " --data, --limit, --new-tokens and --steps, and give its run as well."
        )
    return told
