"""Studies: the fixed experiments of `floatscope study`, and a sentence per model about their results.

    STUDIES["sinks"].title                           # "Anchors masked"
    STUDIES["sinks"].summarise(effects([folder]))    # ["masking 1 anchor costs twin:arm 12 [0, 25] points more than …"]

`pipelines.studies` plans and runs them; this module reads their tables of effects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

DORMANT_NATS = 0.01
"""A head is dormant by loss if the interval of the change without it lies within ± this many nats per token; ours."""
MAX_REGIONS = 3
"""The number of regions that a sentence names."""


@dataclass(frozen=True)
class Study:
    """What a study is about and how its effects are summarised."""

    title: str
    description: str
    axis: str  # what `value` of a condition counts
    nll_only: bool  # only the likelihood of the right answer is measured, nothing is decoded
    summarise: Callable[[pd.DataFrame], list[str]]  # a table of effects → a sentence per model


def summarise_sinks(table: pd.DataFrame) -> list[str]:
    """Return what masking anchors costs."""
    return _summarise_costs(table, "masking {} anchor{}", "masking as many random keys")


def summarise_heads(table: pd.DataFrame) -> list[str]:
    """Return what zeroing retrieval heads costs."""
    return _summarise_costs(table, "zeroing {} retrieval head{}", "zeroing as many other heads of their layers")


def summarise_pin(table: pd.DataFrame) -> list[str]:
    """Return what pinning anchors costs where it costs most, and how many intervals exclude 0."""
    sentences = []
    for model, rows in _controlled_conditions(table):
        worst = rows.loc[rows["acc_effect"].idxmin()]
        count = int(((rows["acc_effect_low"] > 0) | (rows["acc_effect_high"] < 0)).sum())
        where = ", ".join(filter(None, (worst["condition"], worst["subset"])))
        sentences.append(
            f"pinning anchors costs {model} {_format_points(worst, 'acc_effect')} points more than pinning random keys"
            f" where it costs most ({where}); {count} of {len(rows)} such intervals exclude 0"
        )
    return sentences


def summarise_dormant(table: pd.DataFrame) -> list[str]:
    """Return how many heads are dormant by loss."""
    sentences = []
    for model, rows in table[table["value"].notna()].groupby("model", sort=False):
        sentences.append(
            f"{int(is_dormant(rows).sum())} of {len(rows)} heads of {model} are dormant by loss: the 95 % CI of the"
            f" change of the answer's likelihood without the head lies within ±{DORMANT_NATS} nats per token"
        )
    return sentences


def is_dormant(table: pd.DataFrame, epsilon: float = DORMANT_NATS) -> pd.Series:
    """Return whether the interval of a head's change lies within ±epsilon."""
    return (table["nll_change_low"] > -epsilon) & (table["nll_change_high"] < epsilon)


def summarise_blank(table: pd.DataFrame) -> list[str]:
    """Return the regions whose absence costs most."""
    sentences = []
    for model, rows in _controlled_conditions(table, "nll_effect"):
        first = rows.sort_values("nll_effect", ascending=False).head(MAX_REGIONS)
        regions = [f"{row['condition']} {_format_interval(row, 'nll_effect', 1.0, 2)}" for _, row in first.iterrows()]
        sentences.append(
            f"most missed by {model}: {', '.join(regions)} nats per token, more than as many random positions"
        )
    return sentences


def _summarise_costs(table: pd.DataFrame, edit: str, control: str) -> list[str]:
    sentences = []
    for model, rows in _controlled_conditions(table):
        counts = ", ".join(f"{value:g}" for value in rows["value"])
        costs = ", ".join(_format_points(row, "acc_effect") for _, row in rows.iterrows())
        subject = edit.format(counts, "" if counts == "1" else "s")
        sentences.append(f"{subject} costs {model} {costs} points more than {control}")
    return sentences


def _controlled_conditions(table: pd.DataFrame, effect: str = "acc_effect") -> list[tuple[str, pd.DataFrame]]:
    """The conditions with controls, by model."""
    return [(str(model), rows) for model, rows in table[table[effect].notna()].groupby("model", sort=False)]


def _format_points(row: pd.Series, name: str) -> str:
    """The cost in percentage points: the change with the opposite sign."""
    return _format_interval(row, name, -100.0, 0)


def _format_interval(row: pd.Series, name: str, scale: float, digits: int) -> str:
    """The mean with its interval, if there is one: a single sample has none."""
    ends = sorted(scale * row[end] for end in (f"{name}_low", f"{name}_high"))
    mean, low, high = (f"{x + 0.0:.{digits}f}".replace("-", "−") for x in (scale * row[name], *ends))
    return mean if pd.isna(ends[0]) else f"{mean} [{low}, {high}]"


STUDIES = {
    "sinks": Study(
        "Anchors masked",
        "The first anchors of every head are hidden: does the model need them, or does it use others?",
        "keys masked",
        False,
        summarise_sinks,
    ),
    "pin": Study(
        "Anchors pinned",
        "The attention on anchors goes to the anchors of the first step or the first layer: do anchors need to float?",
        "anchors pinned",
        False,
        summarise_pin,
    ),
    "heads": Study(
        "Retrieval heads zeroed",
        "The heads that copy evidence are zeroed: does the model need them more than other heads of their layers?",
        "heads zeroed",
        False,
        summarise_heads,
    ),
    "dormant": Study(
        "Heads by their loss",
        "Every head is zeroed alone: which heads does the answer not need?",
        "head",
        True,
        summarise_dormant,
    ),
    "blank": Study(
        "Regions hidden",
        "Each region of the prompt is hidden from the rest: which region does the answer need?",
        "document",
        True,
        summarise_blank,
    ),
}
