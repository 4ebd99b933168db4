"""What the answer reads when the gold passage stands first, in the middle, last."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from floatscope.analysis.asked import PLACES
from floatscope.analysis.measure import RunTables
from floatscope.reports.charts import Chart, Lines, Map, Section
from floatscope.reports.compared import Compared
from floatscope.reports.paper.parts import Read, notes
from floatscope.reports.sections.parts import lines, listed, region_order, section

WHERE = {"first": "first", "middle": "in the middle", "last": "last"}


def region_flow(read: Sequence[Read]) -> Section:
    """Where the answer looks, by the place of the gold passage; and whether the rows that decide it follow the gold."""
    those = [each for each in read if each.run.has("flow")]
    tables = [(each.run, place, _answer_flow(each, place)) for place in PLACES for each in those]
    filled = [(run, place, table) for run, place, table in tables if table["ratio"].notna().any()]
    highest = max((float(table["ratio"].max()) for *_, table in filled), default=0.0)
    charts: list[Chart] = [_map_of_flow(run.label, place, table, highest) for run, place, table in filled]
    charts += [_lines_of_gold(read, place) for place in PLACES]
    left_out = "".join(f" {sentence}" for sentence in _unplaced(those))
    return section(
        "region-flow",
        "Flow between regions, by the place of the gold passage",
        "What the rows of the answer look at, layer by layer, when the gold passage stands first, in the middle or"
        f" last. A model that reads follows it wherever it stands; one that is drawn to a place does not.{left_out}"
        + notes(
            "**In the paper** regions are pooled before attention is followed through the layers, and their mass is"
            " summed; here each layer stands alone and mass is over the even share, because a sum favours long passages"
            " and a causal mask early ones. Rollouts of both kinds are on the ordinary page.",
            "Of an autoregressive model a token is decided by the row before it, so that the rows of the answer leave"
            " out the one which decides its first token. The lines are of the deciding rows, of every model.",
        ),
        "Maps: what an average row of the answer gives a region over what uniform attention would give it under the"
        " same mask, mean over heads, steps and the samples of a group; one scale of colours for all. Lines: what the"
        " rows that decide new tokens give the gold passage, each at the step that commits its token, over its share of"
        " the canvas.",
        [each.run for each in read],
        charts,
        "flow",
    )


def _answer_flow(read: Read, place: str) -> pd.DataFrame:
    """What the rows of the answer give each region, in the samples whose gold passage stands there."""
    table = read.run.table("flow", {"region": "answer"})
    return table[table["sample"].isin(read.at(place))]


def _lines_of_gold(read: Sequence[Read], place: str) -> Lines:
    """What the deciding rows give the gold passage, in those samples."""
    there = [each for each in read if each.run.has("answer_rows") and each.at(place)]
    runs = [_only(each.run, "answer_rows", each.at(place)) for each in there]
    title, over = f"Gold {WHERE[place]}: what deciding rows give it", "over that of uniform attention"
    return lines(runs, title, over, "answer_rows", "ratio", {"region": "gold"}, 1.0, log=True)


def _only(run: Compared, name: str, samples: Collection[str]) -> Compared:
    """The run as if it had these samples and this table alone."""

    def cut(measured: RunTables) -> RunTables:
        table = measured.tables[name]
        return RunTables({name: table[table["sample"].isin(samples)]}, {})

    controls = [cut(control) for control in run.controls if name in control.tables]
    return replace(run, measured=cut(run.measured), controls=controls)


def _map_of_flow(label: str, place: str, table: pd.DataFrame, highest: float) -> Map:
    """Regions down, layers across."""
    ratio = table.groupby(["key_region", "layer"])["ratio"].mean().unstack("layer")
    ratio = ratio.reindex(sorted(ratio.index, key=region_order))
    values = [[None if np.isnan(v) else round(float(v), 2) for v in row] for row in ratio.to_numpy()]
    n = table["sample"].nunique()
    title = f"{label}: gold {WHERE[place]}, {n} sample{'s' if n > 1 else ''}"
    x, y = [float(layer) for layer in ratio.columns], [str(name) for name in ratio.index]
    return Map(title, "layer", "key region", values, x, y, [], "over the even share", label, log=True,
               bounds=(0.1, max(10.0, highest)))  # fmt: skip


def _unplaced(read: Sequence[Read]) -> Iterator[str]:
    """Groups without a sample, samples without a group; what is true of several runs is said once."""
    found: dict[str, list[str]] = {}
    for each in read:
        for sentence in _lacking(each):
            found.setdefault(sentence, []).append(each.run.label)
    return (sentence.format(listed(labels)) for sentence, labels in found.items())


def _lacking(read: Read) -> Iterator[str]:
    places = read.asked["gold"]
    if read.run.table("flow", {"region": "answer"})["ratio"].isna().all():
        yield "Not shown for {}: what uniform attention would give an answer under such a mask is not known."
    elif places.isna().all():
        yield "No sample of {} has one gold passage among several; mark it in the task file and trace it again."
    else:
        if empty := [WHERE[place] for place in PLACES if not (places == place).any()]:
            yield f"No sample of {{}} has its gold passage {' or '.join(empty)}."
        if missing := int(places.isna().sum()):
            yield f"Left out of {{}}: {missing} of {len(places)} samples, which have no one gold passage among several."
