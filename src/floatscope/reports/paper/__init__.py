"""The figures of "Revealing the Attention Floating Mechanism in Masked Diffusion Models" (arXiv 2601.07894), drawn from
our runs. Each section says how our figure differs from the paper's, and why.

    build_paper_sections(runs, parse_detector("zscore"))      # list of Section; their ids name the figures
    build_paper_introduction(runs)                            # the sentences before the summary

| section | figure |
|---|---|
| `temporal-drift` | the attention on each key, step by step |
| `absorption` | how much attention a few keys absorb, by layer |
| `qk-decomposition` | score, angle and norm of each key |
| `retrieval-heads` | which heads retrieve the evidence |
| `region-flow` | what the answer attends to when the gold passage is first, in the middle, last |
| `scores` | scores with and without passages |
"""

from __future__ import annotations

from collections.abc import Sequence

from floatscope.analysis.detectors import Detector
from floatscope.reports.charts import Section
from floatscope.reports.paper.canvases import build_decomposition_section, build_drift_section
from floatscope.reports.paper.layers import build_absorption_section, build_retrieval_heads_section
from floatscope.reports.paper.passages import build_flow_section, build_scores_section
from floatscope.reports.paper.runs import PaperRun
from floatscope.reports.report_runs import ReportRun
from floatscope.schema import Paradigm

TITLE = "Revealing the Attention Floating Mechanism in Masked Diffusion Models"
ARXIV = "2601.07894"


def build_paper_sections(runs: Sequence[ReportRun], detector: Detector) -> list[Section]:
    """One section per figure of the paper."""
    paper_runs = [PaperRun.read(run) for run in runs]
    return [
        build_drift_section(paper_runs, detector),
        build_absorption_section(runs, detector),
        build_decomposition_section(runs, detector),
        build_retrieval_heads_section(runs, detector),
        build_flow_section(paper_runs),
        build_scores_section(paper_runs),
    ]


def build_paper_introduction(runs: Sequence[ReportRun]) -> list[str]:
    """What the page shows, and which paradigm is missing for the paper's comparison."""
    sentences = [
        f"The figures of “{TITLE}” (arXiv {ARXIV}), redrawn from these runs. Each section says how its figure differs"
        " from the paper's, and why."
    ]
    for paradigm in set(Paradigm) - {run.paradigm for run in runs}:
        sentences.append(
            "**The comparison is incomplete.** The paper compares masked diffusion models with autoregressive models,"
            f" and no {paradigm.label} model is among these runs. Trace one, such as twin:{paradigm}, with the"
            " same --data, --limit, --new-tokens and --steps, and add its run."
        )
    return sentences
