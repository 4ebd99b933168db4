"""TODO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

EPSILON = 0.01
"""Nats per token. A head is dormant by loss where the change without it is surely smaller; ours."""


NAMED = 3
"""Regions a sentence names."""


def sinks(table: pd.DataFrame) -> list[str]:
    return _costs(table, "masking {} anchor{}", "masking as many random keys")


def heads(table: pd.DataFrame) -> list[str]:
    return _costs(table, "zeroing {} retrieval head{}", "zeroing as many others of their layers")


def pin(table: pd.DataFrame) -> list[str]:
    told = []
    for model, some in _edited(table):
        worst = some.loc[some["acc_effect"].idxmin()]
        sure = int(((some["acc_effect_low"] > 0) | (some["acc_effect_high"] < 0)).sum())
        place = ", ".join(filter(None, (worst["arm"], worst["condition"])))
        told.append(
            f"pinning anchors costs {model} {_points(worst, 'acc_effect')} points more than pinning random keys where"
            f" it costs most ({place}); of {len(some)} such intervals {sure} leave out 0"
        )
    return told


def dormant(table: pd.DataFrame) -> list[str]:
    told = []
    for model, some in table[table["value"].notna()].groupby("model", sort=False):
        told.append(
            f"{int(is_dormant(some).sum())} of {len(some)} heads of {model} are dormant by loss: without one of them"
            f" the answer's likelihood changes by less than {EPSILON} nats per token, interval and all"
        )
    return told


def is_dormant(table: pd.DataFrame, epsilon: float = EPSILON) -> pd.Series:
    """Whether the interval of a head's change lies within ±ε."""
    return (table["nll_change_low"] > -epsilon) & (table["nll_change_high"] < epsilon)


def blank(table: pd.DataFrame) -> list[str]:
    told = []
    for model, some in _edited(table, "nll_effect"):
        first = some.sort_values("nll_effect", ascending=False).head(NAMED)
        parts = [f"{row['arm']} {_interval(row, 'nll_effect', 1.0, 2)}" for _, row in first.iterrows()]
        told.append(f"most missed by {model}: {', '.join(parts)} nats per token, beyond as many random positions")
    return told


def _costs(table: pd.DataFrame, done: str, instead: str) -> list[str]:
    told = []
    for model, some in _edited(table):
        counts = ", ".join(f"{value:g}" for value in some["value"])
        costs = ", ".join(_points(row, "acc_effect") for _, row in some.iterrows())
        told.append(
            f"{done.format(counts, '' if counts == '1' else 's')} costs {model} {costs} points more than {instead}"
        )
    return told


def _edited(table: pd.DataFrame, effect: str = "acc_effect") -> list[tuple[str, pd.DataFrame]]:
    """By model, the arms that have controls."""
    return [(str(model), some) for model, some in table[table[effect].notna()].groupby("model", sort=False)]


def _points(row: pd.Series, name: str) -> str:
    """What it costs, in percent points: the change the other way round."""
    return _interval(row, name, -100.0, 0)


def _interval(row: pd.Series, name: str, scale: float, digits: int) -> str:
    """With its interval, if it has one: a single sample gives none."""
    ends = sorted(scale * row[end] for end in (f"{name}_low", f"{name}_high"))
    mean, low, high = (f"{x + 0.0:.{digits}f}".replace("-", "−") for x in (scale * row[name], *ends))
    return mean if pd.isna(ends[0]) else f"{mean} [{low}, {high}]"


@dataclass(frozen=True)
class Study:
    title: str
    about: str
    axis: str  # what `Arm.value` counts
    nll_only: bool  # only the likelihood of the right answer is measured, nothing is decoded
    summarise: Callable[[pd.DataFrame], list[str]]  # the table of effects → a sentence per model


STUDIES = {
    "sinks": Study(
        "Anchors masked",
        "The first anchors of every head are hidden: does the model need them, or go on with others?",
        "keys masked",
        False,
        sinks,
    ),
    "pin": Study(
        "Anchors pinned",
        "What anchors get goes to those of the first step or the first layer: must they float?",
        "anchors pinned",
        False,
        pin,
    ),
    "heads": Study(
        "Retrieval heads zeroed",
        "The heads that copy evidence fall silent: does the model need them more than others of their layers?",
        "heads zeroed",
        False,
        heads,
    ),
    "dormant": Study(
        "Heads by their loss",
        "Every head falls silent alone: which does the answer not need?",
        "head",
        True,
        dormant,
    ),
    "blank": Study(
        "Regions hidden",
        "Each region of the prompt is hidden from the rest: whose absence moves the answer?",
        "document",
        True,
        blank,
    ),
}
