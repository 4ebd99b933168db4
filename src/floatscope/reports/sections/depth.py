"""Structure and content by depth, and where the rows that write the answer look."""

from __future__ import annotations

from collections.abc import Sequence

from floatscope.analysis.depth import crossing
from floatscope.analysis.detectors import Detector
from floatscope.reports.charts import Chart, Section, Table
from floatscope.reports.compared import Compared
from floatscope.reports.sections.parts import Cells, having, lines, section


def depth(runs: Sequence[Compared], detector: Detector) -> Section:
    charts: list[Chart] = [
        lines(runs, f"Attention on {name}", "over the even share", "structure", "ratio", {"set": name}, 1.0)
        for name in ("structure", "content")
    ]
    rows: list[Cells] = [[run.label, _crossed(run)] for run in having(runs, "structure")]
    charts.append(Table(["model", "content is ahead"], rows, "Where content is ahead of structure"))
    return section(
        "depth",
        "Structure or content, by depth",
        "If shallow layers build structure and deep ones read content, structure falls with depth and content rises"
        " above it.",
        "Structure: the beginning, masks, special tokens, the template's words, line breaks, punctuation. Content: the"
        " rest. Share of the received attention over the share uniform attention would give, mean over steps.",
        runs,
        charts,
        "structure",
    )


def _crossed(run: Compared) -> str:
    layer = crossing(run.table("structure"))
    if layer is None:
        return "nowhere: structure is ahead in the last layer"
    return "in every layer" if layer == int(run.table("structure")["layer"].min()) else f"from layer {layer} on"


def reading(runs: Sequence[Compared], detector: Detector) -> Section:
    names = ("evidence", "gold", "other documents", "question", "template")
    known = [name for name in names if any(_has_region(run, name) for run in runs)]
    charts: list[Chart] = [
        lines(
            [run for run in runs if _has_region(run, name)],
            f"Deciding rows look at: {name}",
            "attention over the even share",
            "answer_rows",
            "ratio",
            {"region": name},
            1.0,
            log=True,
        )
        for name in known
    ]
    return section(
        "reading",
        "Where the rows that write the answer look",
        "The row that decides a token of the answer must find it: in the gold passage, if the model reads.",
        "Mean over the predicting rows of all new tokens and over heads, each taken at the step it commits; over"
        " what uniform attention would give.",
        runs,
        charts,
        "answer_rows",
    )


def _has_region(run: Compared, name: str) -> bool:
    return run.has("answer_rows") and not run.table("answer_rows", {"region": name}).empty
