"""What a few keys absorb, layer by layer, and which heads read the evidence."""

from __future__ import annotations

from collections.abc import Sequence

from floatscope.analysis.detectors import Detector
from floatscope.analysis.retrieval import THRESHOLD
from floatscope.reports.charts import Chart, Map, Section
from floatscope.reports.compared import Compared
from floatscope.reports.paper.parts import filled, notes
from floatscope.reports.sections.absorption import absorption as of_absorption
from floatscope.reports.sections.heads import map_of_heads
from floatscope.reports.sections.heads import retrieval as of_retrieval
from floatscope.reports.sections.parts import LIFT, having, lines, section


def absorption(runs: Sequence[Compared], detector: Detector) -> Section:
    """The first key, the top key and the anchors, in percent and as lift."""
    where = {"set": "anchors"}
    firing = [run for run in having(runs, "absorption") if not run.table("absorption", where).empty]
    charts: list[Chart] = list(of_absorption(runs, detector).charts)
    if firing:
        named, percent = f"Attention on the anchors, {detector}", "percent of the layer's attention"
        charts.append(lines(firing, named, LIFT, "absorption", "lift", where, reference=1.0, log=True))
        charts.append(lines(firing, named, percent, "absorption", "percent", where))
    ours = (
        "here **the anchors are theirs, by that very rule**, and the first and the top key, chosen alike for every"
        " model, stand beside them, because two rules on one axis compare the rules."
        if detector.name == "af_absorption"
        else "here one rule holds for every model, because two rules on one axis compare the rules. Theirs is redrawn"
        " with --detector af_absorption."
    )
    return section(
        "absorption",
        "Absorption across layers",
        "How much of a layer's attention one key takes: the first, the top one wherever it is, and the anchors. A sink"
        " takes much at the first key; an anchor that floats takes less, and elsewhere."
        + notes(
            "**In the paper's script** the threshold for an anchor never fires, so that it takes the single largest key"
            f" of a masked model and the first key of an autoregressive one; {ours}",
            "**In the paper** absorption is in percent; here lift and the untrained control stand beside it, because a"
            " causal mask gives the first key a large share before anything is learnt.",
        ),
        "Received attention of all rows, mean over heads and steps. The top key is that of largest lift among keys seen"
        f" by at least 16 rows. Anchors: {detector}. Lift is percent over the percent of uniform attention under the"
        " same mask.",
        runs,
        filled(charts),
        "absorption",
    )


def retrieval_heads(runs: Sequence[Compared], detector: Detector) -> Section:
    """Maps of two scores, and how many heads are above the threshold."""
    those = having(runs, "retrieval")
    charts: list[Chart] = [map_of_heads(run, those, score) for score in ("wu_set", "mass") for run in those]
    charts += [chart for chart in of_retrieval(runs, detector).charts if not isinstance(chart, Map)]
    return section(
        "retrieval-heads",
        "Retrieval heads",
        "Layers down, heads across: how much of the evidence a head copies into the answer, and how much it looks at"
        f" it. The table counts the heads above {THRESHOLD}."
        + notes(
            "**In the paper** the formula behind the map of heads is not given, and no script draws it; here are two"
            " scores, because none can be told from a picture: wu_set counts copies, as the first work on retrieval"
            " heads did, and mass, the attention on the evidence, is likely nearest to theirs.",
        ),
        "wu_set: share of the evidence's different tokens that a head copied; a copy is a token whose deciding row has"
        " its largest key in the evidence, at that very token. Mass: attention of the deciding rows on the evidence. Of"
        " a masked model a row is taken at the step that commits its token. Maps of one score share their colours.",
        runs,
        filled(charts),
        "retrieval",
    )
