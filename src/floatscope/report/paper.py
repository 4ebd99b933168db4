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

import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from jaxtyping import Float

from floatscope.analysis.asked import PLACES
from floatscope.analysis.detectors import Detector
from floatscope.analysis.estimate import difference, estimate
from floatscope.analysis.look import Look, argmax
from floatscope.analysis.measure import Measured
from floatscope.analysis.qk import COMPARED, key_z
from floatscope.analysis.retrieval import THRESHOLD
from floatscope.errors import UserError
from floatscope.report.charts import Chart, Lines, Map, Mark, Section, Table
from floatscope.report.compared import Compared, Interval
from floatscope.report.sections.absorption import absorption as of_absorption
from floatscope.report.sections.floating import map_of_lift, map_of_steps
from floatscope.report.sections.heads import map_of_heads
from floatscope.report.sections.heads import retrieval as of_retrieval
from floatscope.report.sections.parts import INTERVALS, LIFT, Cells, having, lines, listed, region_order, section
from floatscope.report.sections.qk import qk as of_qk

TITLE = "Revealing the Attention Floating Mechanism in Masked Diffusion Models"
ARXIV = "2601.07894"
FAMILIES = {"arm": "autoregressive", "mdm": "masked diffusion"}
WHERE = {"first": "first", "middle": "in the middle", "last": "last"}
NAMED = 3  # anchors named in a title
FAR = 4.0  # standard deviations at which the colours of z-scores end
PUBLISHED = {"Llama": (28.89, 36.25), "Qwen": (28.09, 37.74), "Dream": (26.16, 39.39), "LLaDA": (22.52, 48.20)}
"""The paper's Table 1: mean of Acc and F1, without passages and with five."""
SCORES = {"acc": "acc", "f1": "F1", "both": "mean of both"}


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


@dataclass(frozen=True)
class Read:
    """A run whose traces were read once more, for what its tables do not hold."""

    run: Compared
    means: list[Map]  # the first and the last layer, over the samples of the most frequent length

    @staticmethod
    def of(run: Compared) -> Read:
        sums: dict[tuple[int, ...], dict[int, np.ndarray]] = {}
        times: Counter[tuple[int, ...]] = Counter()
        for trace in run.run if run.has("tops") else ():
            shape = trace.arrays["tokens"].shape
            times[shape] += 1
            total = sums.setdefault(shape, {})
            for layer in _ends(trace.arrays["layers"]):
                total[layer] = total.get(layer, 0) + trace.received(layer, scale="lift", eligible=True)
        shape, n = times.most_common(1)[0] if times else ((), 0)
        means = [_mean_map(run.label, layer, total / n, n) for layer, total in sums[shape].items()] if n > 1 else []
        return Read(run, means)

    @property
    def asked(self) -> pd.DataFrame:
        return self.run.table("asked")

    def at(self, place: str) -> set[str]:
        """The samples whose gold passage stands there."""
        return set(self.asked.loc[self.asked["gold"] == place, "sample"])

    @property
    def model(self) -> str:
        """The model itself; a label may add the run's folder."""
        return str(self.run.run.settings.get("model", self.run.label))


def temporal_drift(read: Sequence[Read], detector: Detector) -> Section:
    """The canvas of the first shared sample over time, and the mean of canvases of one length."""
    runs, charts = [each.run for each in read], list[Chart]()
    sample = _shared(runs)
    for each in read:
        if each.run.has("tops"):
            look = Look(each.run.run.trace(sample or each.run.run.done[0]), detector)
            charts += [_with_anchors(look, each.run.label, layer) for layer in _ends(look.layers)]
            charts += each.means
    lone = [each.run.label for each in read if not each.means and each.run.has("tops")]
    single = f" No two samples of {listed(lone)} have the same length, so there is no mean of theirs." if lone else ""
    return section(
        "temporal-drift",
        "Temporal drift of attention",
        "Steps run down, keys run right. Triangles are the top key of each step, frames the anchors, dots the commits."
        f" A vertical line is a sink, a wandering one floats. A mean shows what is left where texts differ.{single}"
        + _notes(
            "**In the paper** anchors are keys three standard deviations above the mean of what keys receive; here maps"
            f" show lift, and anchors are found by {detector}, because under a causal mask early keys are seen by more"
            " rows: perfectly uniform attention over 512 keys already puts the first of them at z = 5.9. Their rule is"
            " --detector \"zscore(k=3, scale='mean')\"."
            if detector.scale == "lift"
            else "**In the paper** maps show what keys receive; here they show lift, because under a causal mask early"
            f" keys are seen by more rows. Anchors are found by {detector}.",
            "**In the paper's scripts** Dream is analysed in one forward over the finished sequence, and what the plot"
            " reads is written by none of them; here every model is watched in the forwards that decoded it, because in"
            " a finished text no time passes.",
        ),
        "Lift of the mean over heads, each map on logarithmic colours of its own; the first and the last layer of the"
        " first sample all runs have. Of a model with a cache each step shows its whole prefix. Means are over samples"
        " of equal length, the most frequent one, and of keys that enough rows see.",
        runs,
        charts,
        "tops",
    )


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
        + _notes(
            "**In the paper's script** the threshold for an anchor never fires, so that it takes the single largest key"
            f" of a masked model and the first key of an autoregressive one; {ours}",
            "**In the paper** absorption is in percent; here lift and the untrained control stand beside it, because a"
            " causal mask gives the first key a large share before anything is learnt.",
        ),
        "Received attention of all rows, mean over heads and steps. The top key is that of largest lift among keys seen"
        f" by at least 16 rows. Anchors: {detector}. Lift is percent over the percent of uniform attention under the"
        " same mask.",
        runs,
        _filled(charts),
        "absorption",
    )


def decomposition(runs: Sequence[Compared], detector: Detector) -> Section:
    """Score, angle and norm: key by key on one canvas, then anchors against other keys in every sample."""
    sample = _shared(runs)
    charts, short = list[Chart](), list[str]()
    for run in runs:
        look = Look(run.run.trace(sample or run.run.done[0]), detector)
        if "key_stats" in look.trace.arrays and run.has("tops"):
            maps = list(_maps_of_keys(look, run.label))
            charts += maps
            short += [] if maps else [run.label]
    few = (
        f" The first text of {listed(short)} is too short: too few of its keys are seen by enough rows."
        if short
        else ""
    )
    return section(
        "qk-decomposition",
        "QK decomposition: angle or norm?",
        "A key is looked at because queries point its way (cos) or because it is long (norm); the score (qk) is made of"
        " both. Dark is above the other keys, light below them. Where an anchor, framed, stands out in the score, what"
        f" stands out with it is the reason.{few}"
        + _notes(
            "**In the paper** middle layers of LLaDA raise their anchors by angle and norm together, deep ones by angle"
            " alone, where the norm is among the lowest; here the charts by layer say how far that holds, over all"
            " samples and head by head, because one canvas and a mean over heads are an example only.",
            "**In the paper** anchors are found in the mean of what keys receive, and what the plot reads is written by"
            f" no published script, so how its z-scores were taken is not known; here anchors are found by {detector}"
            " and z-scores are over the keys that enough rows see, because under a causal mask the last keys are means"
            " over a few rows.",
        ),
        "One canvas: the first sample all runs have, at its middle step (of a model with a cache the prompt), in the"
        " first, the middle and the last layer; σ·q·k, cosine and |q||k| after the rotary embedding, mean over the"
        " queries that see the key and over heads, as z-scores over the eligible keys. By layer: a head's anchors by"
        f" {detector} among its 16 keys of largest lift against its other keys, mean over steps and heads.",
        runs,
        _filled([*charts, *of_qk(runs, detector).charts]),
        "qk",
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
        + _notes(
            "**In the paper** the formula behind the map of heads is not given, and no script draws it; here are two"
            " scores, because none can be told from a picture: wu_set counts copies, as the first work on retrieval"
            " heads did, and mass, the attention on the evidence, is likely nearest to theirs.",
        ),
        "wu_set: share of the evidence's different tokens that a head copied; a copy is a token whose deciding row has"
        " its largest key in the evidence, at that very token. Mass: attention of the deciding rows on the evidence. Of"
        " a masked model a row is taken at the step that commits its token. Maps of one score share their colours.",
        runs,
        _filled(charts),
        "retrieval",
    )


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
        + _notes(
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


def scores(read: Sequence[Read]) -> Section:
    """Right answers by the number of passages, what passages add, and what was published."""
    title = "Scores with and without passages"
    told = pd.concat([each.asked.assign(run=each.run.label, model=each.model) for each in read], ignore_index=True)
    told = told[told["acc"].notna()]
    if told.empty:
        none = "No sample of these runs has answers, so nothing is right or wrong. Trace a task file that gives them."
        return Section("scores", title, none, "", [])
    charts: list[Chart] = [Table(["model", "passages", "n", *SCORES.values()], list(_scored(told)), "These runs")]
    columns = ["model", "passages", "score", "closed book", "with passages", "gain"]
    charts.append(Table(columns, list(_gains(told)), "What passages add"))
    charts.append(
        Table(["model", "closed book", "5 passages", "gain"], _published(), "As published: mean of Acc and F1")
    )
    kept = _filled(charts)
    need = "" if len(kept) == len(charts) else " That takes runs of one model with passages and without."
    return Section(
        "scores",
        title,
        f"Are the answers right, and how much do passages add?{need}"
        + _notes(
            "**In the paper** the prompt of LLaDA differs from that of the other three and Dream ran at temperature"
            " 0.2, so that prompt and temperature are confounded with the family; here one template and one temperature"
            " hold for all unless a run was asked otherwise, because else a gain cannot be told from its prompt.",
            "**In the paper** scores are means over NQ, TQA, MarcoQA, HotpotQA and T-REx with 32 new tokens; here they"
            " are of the samples that were traced, so only the direction of a gain can be compared.",
        ),
        "acc: a right answer, normalised, is part of the prediction. F1: words in common with the best answer. Both in"
        " percent. A gain is taken sample by sample where both runs asked the same questions, else it is the difference"
        f" of the means and has no interval. {INTERVALS}",
        kept,
    )


def _notes(*differences: str) -> str:
    """A paragraph for each."""
    return "".join(f"\n\n{text}" for text in differences)


def _filled(charts: Sequence[Chart]) -> list[Chart]:
    """Tables last, and none without rows."""
    kept = [chart for chart in charts if not (isinstance(chart, Table) and not chart.rows)]
    return sorted(kept, key=lambda chart: isinstance(chart, Table))


def _shared(runs: Sequence[Compared]) -> str | None:
    """The first sample all runs have."""
    return next((name for name in runs[0].run.done if all(name in run.run.done for run in runs)), None)


def _ends(layers: np.ndarray) -> list[int]:
    return sorted({int(layers[0]), int(layers[-1])})


def _mean_map(label: str, layer: int, lift: Float[np.ndarray, "step key"], n: int) -> Map:
    marks: list[Mark] = [(t, int(k), "top") for t, k in enumerate(argmax(lift)) if k >= 0]
    return map_of_lift(f"{label}, layer {layer}: mean of {n} samples", label, lift, marks)


def _with_anchors(look: Look, label: str, layer: int) -> Map:
    """The map of a canvas, and its anchors where the detector can fire."""
    drawn = map_of_steps(look.trace, label, layer)
    found = np.argwhere(_anchors(look)[:, look.layers.tolist().index(layer)])
    return replace(drawn, marks=[*((int(t), int(k), "anchor") for t, k in found), *drawn.marks])


def _anchors(look: Look) -> np.ndarray:
    """None where the detector cannot fire; why is said on the page."""
    try:
        return look.anchors
    except UserError:
        return np.zeros(look.lift.shape, bool)


def _maps_of_keys(look: Look, label: str) -> Iterator[Map]:
    """Keys across; score, angle and norm down, at the middle of the steps that have all rows: a map for the first, the
    middle and the last layer that has a z-score."""
    whole = np.flatnonzero(look.whole)
    step = int(whole[len(whole) // 2])
    z, anchors, keys = key_z(look, step), _anchors(look)[step], int(look.keys[step])
    x = [float(key) for key in range(keys)]
    for at in sorted({0, len(look.layers) // 2, len(look.layers) - 1}):
        if np.isnan(z[at]).all():
            continue
        found = np.flatnonzero(anchors[at])
        values = [[None if np.isnan(v) else round(float(v), 3) for v in row[:keys]] for row in z[at]]
        marks: list[Mark] = [(row, int(key), "anchor") for row in range(len(COMPARED)) for key in found]
        title = f"{label}, layer {look.layers[at]}, step {step}\n({_named(look, step, found)})"
        yield Map(title, "key", "z-score of", values, x, list(COMPARED), marks, "z", label, bounds=(-FAR, FAR))


def _named(look: Look, step: int, keys: np.ndarray) -> str:
    """The anchors by place and token, the first of many."""
    if not len(keys):
        return "no anchors"
    pieces, tokens = look.trace.meta.get("pieces", {}), look.trace.arrays["tokens"][step]
    words = [f"{k} {json.dumps(pieces.get(str(tokens[k]), '?'), ensure_ascii=False)}" for k in keys[:NAMED]]
    more = f" and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
    return f"anchor{'s' if len(keys) > 1 else ''} {', '.join(words)}{more}"


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

    def cut(measured: Measured) -> Measured:
        table = measured.tables[name]
        return Measured({name: table[table["sample"].isin(samples)]}, {})

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


def _scored(told: pd.DataFrame) -> Iterator[Cells]:
    for (run, passages), rows in told.groupby(["run", "passages"], sort=False, dropna=False):
        yield [run, _passages(passages), len(rows), *(_mean(rows, score).said(1) for score in SCORES)]


def _gains(told: pd.DataFrame) -> Iterator[Cells]:
    """With passages less without, for each model that has both."""
    for model, rows in told.groupby("model", sort=False):
        closed, given = rows[rows["passages"] == 0], rows[rows["passages"] > 0]
        if closed.empty:
            continue
        for passages, some in given.groupby("passages"):
            for score, called in SCORES.items():
                means = [_mean(each, score).said(1) for each in (closed, some)]
                yield [model, _passages(passages), called, *means, _gain(some, closed, score).said(1, sign=True)]


def _published() -> list[Cells]:
    return [
        [name, f"{closed:.2f}", f"{given:.2f}", f"{given - closed:+.2f}"] for name, (closed, given) in PUBLISHED.items()
    ]


def _gain(given: pd.DataFrame, closed: pd.DataFrame, score: str) -> Interval:
    if set(given["sample"]) & set(closed["sample"]):
        return Interval.of(difference(given, closed, score).iloc[0])
    return Interval(_mean(given, score).mean - _mean(closed, score).mean, np.nan, np.nan)


def _mean(rows: pd.DataFrame, score: str) -> Interval:
    return Interval.of(estimate(rows, score).iloc[0])


def _passages(count: float) -> str:
    return "not known" if np.isnan(count) else f"{count:.0f}" if count else "closed book"
