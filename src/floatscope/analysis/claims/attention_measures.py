"""What claims about attention measure: one number per sample and model, from the tables of its traces.

    MEASURES["first key, peak layer"](tables)       # sample → percent of the layer's attention
    MEASURES["attention moved, all rows"](tables)   # sample → attention moved per step, mean over layers

A measure is a mean over layers unless its name says otherwise. Commits and steps are those of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from floatscope.analysis.floating import depth_third
from floatscope.analysis.heads import dormant_share
from floatscope.errors import UserError

Tables = Mapping[str, pd.DataFrame]
"""The tables of one run by name; `RunTables` is one."""
Measure = Callable[[Tables], pd.Series]
"""The tables of a run → a number per sample."""


def mean_of(table: str, column: str, **where: str) -> Measure:
    """Return the mean of a column over the rows of a sample; `where` selects rows."""
    return lambda tables: _mean(tables[table], column, **where)


def peak_layer(table: str, column: str, **where: str) -> Measure:
    """Return the value in the layer whose mean over samples is largest."""

    def measure(tables: Tables) -> pd.Series:
        rows = _select(tables[table], **where)
        means = rows.groupby("layer")[column].mean()
        peak: pd.Series = rows[rows["layer"] == means.idxmax()].set_index("sample")[column]
        return peak

    return measure


def subtract(a: Measure, b: Measure) -> Measure:
    """Return a − b."""
    return lambda tables: a(tables) - b(tables)


def by_third(read: Callable[[Tables], pd.DataFrame], column: str, high: str, low: str) -> Measure:
    """Return the mean in one third of the layers minus that in another."""

    def measure(tables: Tables) -> pd.Series:
        rows = read(tables)
        return _mean(rows, column, third=high) - _mean(rows, column, third=low)

    return measure


def in_third(table: str, column: str, third: str, **where: str) -> Measure:
    """Return the mean in one third of the layers."""
    return lambda tables: _mean(tables[table], column, third=third, **where)


def content(tables: Tables) -> pd.DataFrame:
    """Return the attention on content relative to uniform attention, and the same for contributions, by layer.

    The first token counts as structure and is left out of both, as a sink there would dominate the result.
    """
    rows, first = _select(tables["structure"], set="content"), _select(tables["absorption"], set="first")
    both = rows.merge(first, on=["sample", "layer", "depth"], suffixes=("", "_first"))
    base = both["base"] / (1 - both["uniform"] / 100)
    attended = both["share"] / (1 - both["percent"] / 100) / base
    contributed = both["contribution"] / (1 - both["contribution_first"] / 100) / base
    return both.assign(attended=attended, contributed=contributed)


def gold_ratio(tables: Tables) -> pd.DataFrame:
    """Return the attention of the predicting rows on the gold passage relative to uniform, without the first token."""
    table = tables["predicting_rows"]
    rows, first = _select(table, region="gold"), _select(table, region="bos")
    both = rows.merge(first[["sample", "layer", "mass", "base"]], "left", ["sample", "layer"], suffixes=("", "_first"))
    outside, base = (1 - both[f"{column}_first"].fillna(0) for column in ("mass", "base"))
    return both.assign(ratio=both["mass"] / outside / (both["base"] / base))


def gold_preference(tables: Tables) -> pd.Series:
    """Return the gold passage's share of the attention on all passages, relative to uniform attention, minus 1."""
    mean = tables["predicting_rows"].groupby(["sample", "region"])[["mass", "base"]].mean().unstack("region")
    share, uniform = (
        mean[column]["gold"] / (mean[column]["gold"] + mean[column]["other documents"]) for column in ("mass", "base")
    )
    excess: pd.Series = share / uniform - 1
    return excess


def worst_place_preference(tables: Tables) -> pd.Series:
    """Return `gold_preference` of the samples at the place of the gold passage where its mean is smallest.

    The places are first, middle and last.
    """
    preference = gold_preference(tables)
    place = tables["samples"].set_index("sample")["gold_position"].reindex(preference.index)
    means = preference.groupby(place).mean().dropna()
    if means.empty:
        raise UserError("no sample has a gold passage among several passages; trace samples that do")
    worst: pd.Series = preference[place == means.idxmin()]
    return worst


def leader_changes_between_layers(tables: Tables) -> pd.Series:
    """Return the share of neighbouring layers, both with an anchor, whose top keys differ."""
    sums = tables["layer_drift"].groupby("sample")[["changes", "pairs"]].sum()
    return sums["changes"] / sums["pairs"].where(sums["pairs"] > 0)


def effective_heads(tables: Tables) -> pd.Series:
    """Return the effective number of heads that copy evidence, (Σs)² / Σs², as a share of all heads."""
    scores = tables["retrieval"].groupby("sample")["wu_set"]
    squares = (tables["retrieval"]["wu_set"] ** 2).groupby(tables["retrieval"]["sample"]).sum()
    share: pd.Series = scores.sum() ** 2 / squares.where(squares > 0) / scores.count()
    return share


def dormant_heads(tables: Tables) -> pd.Series:
    """Return the share of dormant heads in each sample."""
    return pd.Series({sample: dormant_share(rows) for sample, rows in tables["head_activity"].groupby("sample")})


def coupling_beyond_chance(tables: Tables) -> pd.Series:
    """Return how much more often the top key, where it is a mask, is filled next than a mask drawn at random."""
    rows = _select(tables["coupling"], lag=0)
    return (rows["hit"] - rows["hit_chance"]).groupby(rows["sample"]).mean()


def task_distance(tables: Tables) -> pd.Series:
    """Return how much farther a sample's positions of attention are from the mean of another task than from its own.

    The distance is attention moved between profiles over the relative position of the keys, mean over layers; the mean
    of its own task leaves the sample out. 0 means that the task makes no difference.
    """
    own, other = (_profiles(tables[name]) for name in ("position_profile", "position_profile_other_task"))
    others_mean = (own.sum() - own) / (len(own) - 1)
    distance = [(own - mean).abs().T.groupby("layer").sum().T.mean(axis=1) / 2 for mean in (other.mean(), others_mean)]
    return distance[0] - distance[1]


def _profiles(table: pd.DataFrame) -> pd.DataFrame:
    return table.pivot(index="sample", columns=["layer", "bin"], values="share")


def _select(rows: pd.DataFrame, **where: str | int) -> pd.DataFrame:
    if "third" in where and "third" not in rows:
        rows = rows.assign(third=[depth_third(depth) for depth in rows["depth"]])
    for name, value in where.items():
        rows = rows[rows[name] == value]
    return rows


def _mean(rows: pd.DataFrame, column: str, **where: str) -> pd.Series:
    return _select(rows, **where).replace([np.inf, -np.inf], np.nan).groupby("sample")[column].mean()


MEASURES: dict[str, Measure] = {
    "first key, peak layer": peak_layer("absorption", "percent", set="first"),
    "sinks at the first key": mean_of("sinks", "first"),
    "top key beyond uniform": subtract(
        mean_of("absorption", "percent", set="top"), mean_of("absorption", "uniform", set="top")
    ),
    "attention moved, all rows": mean_of("floating", "moved", group="all"),
    "attention moved, predicting rows": mean_of("floating", "moved", group="predicting"),
    "excess moved, all rows": mean_of("floating", "excess_moved", group="all"),
    "leader changes, all rows": mean_of("floating", "within", group="all"),
    "leader changes, predicting rows": mean_of("floating", "within", group="predicting"),
    "leader's place across texts": mean_of("floating", "across", group="all"),
    "slope of the top key": mean_of("drift", "slope"),
    "anchors, shallow − deep": by_third(lambda tables: tables["anchors"], "anchors", "shallow", "deep"),
    "attention moved between layers": mean_of("layer_drift", "moved"),
    "leader changes between layers": leader_changes_between_layers,
    "task distance": task_distance,
    "content, deep − shallow": by_third(content, "attended", "deep", "shallow"),
    "contribution of content, deep − shallow": by_third(content, "contributed", "deep", "shallow"),
    "norm share, middle − deep": by_third(lambda tables: tables["attribution"], "norm", "middle", "deep"),
    "angle − norm share, deep": subtract(
        in_third("attribution", "angle", "deep"), in_third("attribution", "norm", "deep")
    ),
    "gold ratio, deep − shallow": by_third(gold_ratio, "ratio", "deep", "shallow"),
    "gold preference": gold_preference,
    "gold preference at its worst place": worst_place_preference,
    "effective retrieval heads": effective_heads,
    "dormant heads": dormant_heads,
    "value norm of anchors": mean_of("norms", "value_norm", set="anchors"),
    "residual norm of the first key, peak layer": peak_layer("norms", "residual", set="first"),
    "ends first": mean_of("order", "u_shape"),
    "left to right": mean_of("order", "kendall"),
    "coupling beyond chance": coupling_beyond_chance,
}
"""Measures of attention by name."""
