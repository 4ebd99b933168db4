"""The sections of a report: each analysis with its charts, what it shows, how it was computed.

    sections(runs, detector="zscore")        # list of Section, one per question
    summary(runs)                            # the sentences that stand first

A section whose tables no run has says why instead of showing nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from floatscope.analysis.depth import crossing
from floatscope.analysis.detectors import Detector
from floatscope.analysis.floating import FRONTIERS, LIVES, THIRDS
from floatscope.analysis.tokens import CLASSES
from floatscope.report.charts import Chart, Dots, Lines, Map, Section, Series, Table
from floatscope.report.compared import Category, Compared, Number, dots
from floatscope.trace import Trace

INTERVALS = "Intervals are 95 %, bootstrapped over samples; for the untrained control over its seeds as well."
LIFT = "lift (1 = uniform attention)"
STRINGS = 5  # tokens shown for each model
Cells = list[str | float | int | None]


def sections(runs: Sequence[Compared], detector: Detector) -> list[Section]:
    made = [_absorption, _anchors, _floating, _maps, _depth, _reading]
    shared = set.intersection(*(set(run.run.done) for run in runs))
    return [make(runs, detector) for make in ([_between, *made] if len(runs) > 1 and shared else made)]


def summary(runs: Sequence[Compared]) -> list[str]:
    """What carries the report, by question, each number beside its control."""
    sentences = []
    if having := _having(runs, "absorption"):
        first = listed(_first_key(run) for run in having)
        sentences.append(f"**One sink?** Where it takes most, the first key has {first}.")
    if having := _having(runs, "floating"):
        within, across = (listed(_away(run, kind) for run in having) for kind in ("within", "across"))
        sentences.append(
            f"**Does the anchor move?** While a text is decoded, a layer's top key is away from its usual place in"
            f" {within}. Over all texts it is away from the layer's usual position in {across}."
        )
        sentences += [sentence for run in having if (sentence := _verdict(run))]
    if bare := [run.label for run in runs if not run.controls]:
        sentences.append(
            f"There is no untrained control beside {listed(bare)}: what architecture alone would show cannot be told"
            f" from what was learnt. Trace it with --control untrained."
        )
    return sentences


def _first_key(run: Compared) -> str:
    """In the layer where it takes most."""
    mean = run.table("absorption", {"set": "first"}).groupby("layer")["percent"].mean()
    where = {"set": "first", "layer": int(mean.idxmax())}
    percent, lift = (run.number("absorption", value, where) for value in ("percent", "lift"))
    beside = "" if lift.control is None else f", untrained {lift.control.mean:.1f}"
    return (
        f"**{percent.own.mean:.1f} %** of the attention of layer {where['layer']} in {run.label} (lift"
        f" {lift.own.said(1)}{beside})"
    )


def _away(run: Compared, kind: str) -> str:
    number = run.number("floating", kind)
    beside = "" if number.control is None else f" (untrained {100 * number.control.mean:.0f} %)"
    return f"**{100 * number.own.mean:.0f} %** of the steps in {run.label}{beside}"


def _verdict(run: Compared) -> str | None:
    """Whether the movement within a text is more than architecture alone gives."""
    apart = run.number("floating", "within").apart
    if apart is None:
        return None
    if not apart.sure:
        return f"Within a text the top key of {run.label} moves no more and no less than its control's."
    more = "more" if apart.mean > 0 else "less"
    return f"Within a text the top key of {run.label} moves {more} than its control's: {apart.said(2, sign=True)}."


def listed(parts: Iterable[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


CARRYING: list[Category] = [
    ("lift of the first key", "absorption", "lift", {"set": "first"}),
    ("lift of the top key", "absorption", "lift", {"set": "top"}),
    ("row entropy (1 = uniform)", "concentration", "row_entropy", {}),
    ("heads with a sink at the first key", "sinks", "first", {}),
    ("floating within a text", "floating", "within", {}),
    ("floating across texts", "floating", "across", {}),
    ("Jaccard of anchors, step to step", "drift", "jaccard_next", {}),
]


def _between(runs: Sequence[Compared], detector: Detector) -> Section:
    """Every number that carries the report: each model, its control, and the models against the first."""
    rows: list[Cells] = []
    for name, table, value, where in CARRYING:
        if all(run.has(table) for run in runs):
            cells = [_cell(run.number(table, value, where)) for run in runs]
            rows.append([name, *cells, *(run.apart(runs[0], table, value, where).said(2, True) for run in runs[1:])])
    labels = [run.label for run in runs]
    columns = ["", *labels, *(f"{label} − {labels[0]}" for label in labels[1:])]
    return Section(
        "models",
        "The models side by side",
        "One rule for every model. Differences are taken sample by sample; an interval that leaves out zero is a"
        " difference that would likely be seen again on other samples like these.",
        f"Means over layers and steps. Anchors: {detector}. {INTERVALS}",
        [Table(columns, rows)],
    )


def _absorption(runs: Sequence[Compared], detector: Detector) -> Section:
    charts: list[Chart] = []
    for name, what in (("first", "the first key"), ("top", "the top key, wherever it is")):
        where = {"set": name}
        charts.append(_lines(runs, f"Attention on {what}", LIFT, "absorption", "lift", where, reference=1.0, log=True))
        charts.append(
            _lines(runs, f"Attention on {what}", "percent of the layer's attention", "absorption", "percent", where)
        )
    rows: list[Cells] = []
    for run in _having(runs, "absorption"):
        for name in run.table("absorption")["set"].unique():
            percent, even, lift = (run.number("absorption", v, {"set": name}) for v in ("percent", "uniform", "lift"))
            control = "" if lift.control is None else lift.control.said()
            rows.append([run.label, name, percent.own.said(), f"{even.own.mean:.2f}", lift.own.said(), control])
    columns = ["model", "keys", "percent", "uniform", "lift", "lift, untrained"]
    charts.append(Table(columns, rows, "Mean over layers and steps"))
    return _section(
        "absorption",
        "How much a few keys absorb",
        "A sink takes the same large share everywhere; an anchor that floats takes a smaller one, and not at the first"
        " key. Percentages of models with different masks cannot be compared: under a causal mask early keys are seen"
        " by more rows. Lift can. The top key is the one of largest lift, which need not have the largest percentage.",
        f"Received attention of all rows, mean over heads and steps. The top key is that of largest lift among keys"
        f" seen by at least 16 rows. Anchors: {detector}. Lift is percent over the percent of uniform attention under"
        f" the same mask.",
        runs,
        charts,
        "absorption",
    )


def _anchors(runs: Sequence[Compared], detector: Detector) -> Section:
    charts: list[Chart] = [
        _lines(runs, "Anchors by layer", "anchors per step (mean over heads)", "anchors", "anchors"),
        _lines(runs, "Anchors of a single head", "anchors per step and head", "anchors", "per_head"),
        _dots(
            runs,
            "What anchors are",
            "share among anchors over share in the canvas",
            [(name, "identity", "ratio", {"class": name}) for name in CLASSES],
            reference=1.0,
            reference_label="as often as in the canvas",
        ),
        _lines(runs, "Concentration", "row entropy (1 = uniform)", "concentration", "row_entropy"),
        _lines(runs, "Keys that are no anchors", "share of keys", "sweep", "share", along="eps", x_label="eps on lift"),
        _dots(
            runs,
            "Heads with a sink",
            "share of (layer, head) where a key gets more than .3 of the rows that see it",
            [("at the first key", "sinks", "first", {}), ("at any key", "sinks", "anywhere", {})],
        ),
    ]
    charts.append(_strings(runs))
    return _section(
        "anchors",
        "Anchors: how many, and what they are",
        "Anchors are keys that stand out from the others of their layer. What they are is told beside how often such"
        " tokens stand in the canvas: a class that fills the canvas is found often without being sought.",
        f"Detector {detector} on the mean over heads; in single heads among the 16 keys of largest lift, at steps whose"
        f" forward had all rows. The sweep counts keys above the mean of the others plus eps.",
        runs,
        charts,
        "anchors",
    )


def _strings(runs: Sequence[Compared]) -> Table:
    """The tokens that are anchors most often; a sample without one counts as none."""
    rows: list[Cells] = []
    for run in _having(runs, "tokens"):
        mean = run.table("tokens").groupby("token")[["share", "base"]].sum() / len(run.run.done)
        for token, row in mean.nlargest(STRINGS, "share").iterrows():
            rows.append([run.label, json.dumps(token, ensure_ascii=False), f"{row['share']:.3f}", f"{row['base']:.3f}"])
    return Table(["model", "token", "share among anchors", "share in the canvas"], rows, "The most frequent anchors")


def _floating(runs: Sequence[Compared], detector: Detector) -> Section:
    index = [
        (f"{kind}, {third}" if third else f"{kind}, all layers", "floating", kind, {"third": third} if third else {})
        for kind in ("within", "across")
        for third in ("", *THIRDS)
    ]
    lives: list[Category] = [(life, "lifetimes", life, {}) for life in LIVES]
    fronts: list[Category] = [(name, "drift", name, {}) for name in FRONTIERS]
    charts: list[Chart] = [
        _dots(runs, "Floating index", "share of steps", index),
        _lines(runs, "Within a text, by layer", "share of steps away from the usual key", "floating", "within"),
        _dots(runs, "Lives of anchors", "runs per sample and layer", lives),
        _lines(runs, "Do anchors stay?", "Jaccard of the anchors of two steps in a row", "drift", "jaccard_next"),
        _dots(runs, "Does the top key follow the frontier?", "correlation over steps", fronts, reference=0.0),
        _lines(
            runs, "Movement of the centroid", "variance over steps / length²", "drift", "temporal_variance_relative"
        ),
    ]
    return _section(
        "floating",
        "Floating: does the anchor move?",
        "Within: does the top key move while one canvas is decoded? Across: is it at the same place in every text? A"
        " model may be high in one and low in the other, and an untrained bidirectional model is high in both: only the"
        " difference from the control means anything.",
        f"The top key of a step is the eligible key of largest lift, mean over heads. Within = 1 − share of steps at"
        f" the most usual key of that sample and layer; across = the same with the most usual key of the layer over all"
        f" samples. Lives are runs of steps in which a key stays an anchor by {detector}: static at least 90 % of the"
        f" steps, flash one, vanishing with no anchor after it, moving the rest.",
        runs,
        charts,
        "floating",
    )


def _maps(runs: Sequence[Compared], detector: Detector) -> Section:
    """The first and the last layer of the first sample all runs have."""
    shared = [name for name in runs[0].run.done if all(name in run.run.done for run in runs)]
    charts: list[Chart] = []
    for run in runs:
        trace = run.run.trace(shared[0] if shared else run.run.done[0])
        layers = trace.arrays["layers"]
        charts += [_map(trace, run.label, int(layer)) for layer in sorted({int(layers[0]), int(layers[-1])})]
    return Section(
        "maps",
        "One canvas over time",
        "Steps run down, keys run right. The triangles are the top key of each step: a vertical line is a sink, a"
        " wandering one floats. Dots are commits.",
        "Lift of the mean over heads, logarithmic colours. Of a model with a cache each step shows its whole prefix.",
        charts,
    )


def _map(trace: Trace, label: str, layer: int) -> Map:
    lift = trace.received(layer, scale="lift")
    steps, keys = lift.shape
    marks = [(t, int(k), "top") for t, k in enumerate(trace.top_key(layer)) if k >= 0]
    places = zip(trace.arrays["commit_step"].tolist(), trace.arrays["commit_position"].tolist(), strict=True)
    marks += [(t, k, "commit") for t, k in places if k < keys]
    values = [[None if np.isnan(v) else round(float(v), 2) for v in row] for row in lift]
    x, y = ([float(i) for i in range(n)] for n in (keys, steps))
    bounds = (1.0, max(1.1, float(np.nanmax(lift, initial=1.0))))
    title = f"{label}, layer {layer}: {trace.sample}"
    return Map(title, "key", "step", values, x, y, marks, unit="lift", model=label, log=True, bounds=bounds)


def _depth(runs: Sequence[Compared], detector: Detector) -> Section:
    charts: list[Chart] = [
        _lines(runs, name.capitalize(), "attention over the even share", "structure", "ratio", {"set": name}, 1.0)
        for name in ("structure", "content")
    ]
    rows: list[Cells] = [[run.label, _crossed(run)] for run in _having(runs, "structure")]
    charts.append(Table(["model", "content is ahead"], rows))
    return _section(
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


def _reading(runs: Sequence[Compared], detector: Detector) -> Section:
    names = ("evidence", "gold", "other documents", "question", "template")
    known = [name for name in names if any(_has_region(run, name) for run in runs)]
    charts: list[Chart] = [
        _lines(
            [run for run in runs if _has_region(run, name)],
            name.capitalize(),
            "attention over the even share",
            "answer_rows",
            "ratio",
            {"region": name},
            1.0,
            log=True,
        )
        for name in known
    ]
    return _section(
        "reading",
        "Where the rows that write the answer look",
        "The row that decides a token of the answer must find it: in the gold passage, if the model reads.",
        "Mean over the predicting rows of all new tokens and over heads, each taken at the step it commits; over the"
        " region's share of the canvas.",
        runs,
        charts,
        "answer_rows",
    )


def _has_region(run: Compared, name: str) -> bool:
    return run.has("answer_rows") and not run.table("answer_rows", {"region": name}).empty


def _section(
    id: str, title: str, shows: str, computed: str, runs: Sequence[Compared], charts: Sequence[Chart], table: str
) -> Section:
    """Empty charts are left out; what a run lacks is said."""
    reasons = {f"{run.label}: {run.measured.lacking[table]}" for run in runs if table in run.measured.lacking}
    lacking = "".join(f"\n\nNot shown for {reason}." for reason in sorted(reasons))
    n = ", ".join(f"{run.label} {len(run.run.done)}" for run in runs)
    kept = [chart for chart in charts if not (isinstance(chart, Lines | Dots) and not chart.series)]
    return Section(id, title, shows + lacking, f"{computed} Samples: {n}. {INTERVALS}", kept, f"{table}.csv")


def _lines(
    runs: Sequence[Compared],
    title: str,
    y_label: str,
    table: str,
    value: str,
    where: Mapping[str, Any] | None = None,
    reference: float | None = None,
    log: bool = False,
    along: str = "layer",
    x_label: str = "layer",
) -> Lines:
    """By layer where all models have the same ones, else by relative depth."""
    having = _having(runs, table)
    places = [run.table(table, where)[along].drop_duplicates().tolist() for run in having]
    alike = all(each == places[0] for each in places)
    axis, label = (along, x_label) if alike else ("depth", "relative depth")
    series = [each for run in having for each in run.series(table, value, axis, where, own_x=not alike)]
    shown = [each for each in series if any(y is not None for y in each.y)]
    x = [float(place) for place in places[0]] if alike and places else [0.0, 1.0]
    said = "uniform" if reference == 1.0 else ""
    return Lines(title, label, y_label, x, shown, reference, said, log)


def _dots(
    runs: Sequence[Compared],
    title: str,
    x_label: str,
    categories: Sequence[Category],
    reference: float | None = None,
    reference_label: str = "",
) -> Dots:
    having = _having(runs, categories[0][1])
    series = list(dots(having, categories))
    kept = [i for i in range(len(categories)) if any(each.y[i] is not None for each in series)]
    shown = [_kept(each, kept) for each in series]
    return Dots(title, [categories[i][0] for i in kept], x_label, shown, reference, reference_label)


def _kept(series: Series, at: Sequence[int]) -> Series:
    y, low, high = ([values[i] for i in at] if values else None for values in (series.y, series.low, series.high))
    return Series(series.name, series.model, y or [], low, high, series.control)


def _having(runs: Sequence[Compared], table: str) -> list[Compared]:
    return [run for run in runs if run.has(table)]


def _cell(number: Number) -> str:
    return number.own.said() if number.control is None else f"{number.own.said()} · untrained {number.control.said()}"
