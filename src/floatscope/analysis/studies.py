"""Studies: the fixed experiments of `floatscope study`, and a sentence per model about their results.

    STUDIES["sinks"].title                           # "Anchors masked"
    STUDIES["sinks"].summarise(effects([folder]))    # ["masking anchors instead of other keys …: twin:arm, 5: loses …"]

`pipelines.studies` plans and runs them; this module reads their tables of effects.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from floatscope.analysis.experiments import COUNT, MASS

DORMANT_NATS = 0.01
"""A head is dormant by loss if the interval of the change without it lies within ± this many nats per token; ours."""
CONTROLS = {
    MASS: "other keys that hold as much attention",
    COUNT: "as many random keys",
    "middle": "as many keys of middle rank",
}
"""What a control matches → how a sentence names it."""
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
    """Return what masking anchors costs, by their number and by their type."""
    numbers, types = _split_by_value(table)
    return [*_summarise_costs(numbers, "masking anchors"), *_summarise_costs(types, "masking anchors by type")]


def summarise_heads(table: pd.DataFrame) -> list[str]:
    """Return what zeroing retrieval heads costs."""
    return _summarise_costs(table, "zeroing retrieval heads", "as many other heads of their layers")


def summarise_pin(table: pd.DataFrame) -> list[str]:
    """Return what pinning anchors costs where it costs most, how many intervals exclude 0, and the cost by type."""
    sentences = []
    numbers, types = _split_by_value(table)
    for model, rows in _controlled_conditions(numbers):
        worst = rows.loc[rows["acc_effect"].idxmin()]
        count = int(((rows["acc_effect_low"] > 0) | (rows["acc_effect_high"] < 0)).sum())
        where = ", ".join(filter(None, (worst["condition"], worst["subset"])))
        sentences.append(
            f"pinning anchors instead of {_describe_control(worst)}: at worst {model} {_format_change(worst)}, in"
            f" {where}; {count} of {len(rows)} such intervals exclude 0"
        )
    return [*sentences, *_summarise_costs(types, "pinning anchors by type")]


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
        regions = [
            f"{row['condition']} {_format_interval(row, 'nll_effect', 1.0, 2)}{_format_doses(row)}"
            for _, row in first.iterrows()
        ]
        control = _describe_control(rows.iloc[0]).replace("keys", "positions")
        sentences.append(f"most missed by {model}: {', '.join(regions)}, in nats per token more than {control}")
    return sentences


def _summarise_costs(table: pd.DataFrame, edit: str, control: str = "") -> list[str]:
    """What each condition loses or gains against its controls, with the doses; against as many random keys as well."""
    sentences = []
    for model, rows in _controlled_conditions(table):
        each = [row for _, row in rows.iterrows()]
        changes = ", ".join(f"{_label(row)}: {_format_change(row)}" for row in each)
        sentence = f"{edit} instead of {control or _describe_control(each[0])}: {model}, {changes}"
        if each[0].get("control") == MASS and not pd.isna(each[0].get("acc_effect_count", math.nan)):
            changes = ", ".join(f"{_label(row)}: {_format_change(row, '_count')}" for row in each)
            sentence += f"; instead of {CONTROLS[COUNT]}: {changes}"
        sentences.append(sentence)
    return sentences


def _split_by_value(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The conditions by number, and those by type, which have no place on the axis."""
    return table[table["value"].notna()], table[table["value"].isna()]


def _label(row: pd.Series) -> str:
    """The number of a condition, or else its type."""
    return str(row["series"]) if pd.isna(row["value"]) else f"{row['value']:g}"


def _describe_control(row: pd.Series) -> str:
    return CONTROLS[row.get("control", COUNT)]


def _controlled_conditions(table: pd.DataFrame, effect: str = "acc_effect") -> list[tuple[str, pd.DataFrame]]:
    """The conditions with controls, by model."""
    return [(str(model), rows) for model, rows in table[table[effect].notna()].groupby("model", sort=False)]


def _format_change(row: pd.Series, suffix: str = "") -> str:
    """`loses 39 points [16, 59]` or `gains 3 points [−6, 12]`, the interval in the same direction; and the doses."""
    name = f"acc_effect{suffix}"
    effect = row[name]
    mean, *interval = _format_interval(row, name, 100.0 if effect > 0 else -100.0, 0).split(" ", 1)
    verb = "changes by" if mean == "0" else "gains" if effect > 0 else "loses"
    return " ".join([verb, mean, "point" if mean == "1" else "points", *interval]) + _format_doses(row, suffix)


def _format_doses(row: pd.Series, suffix: str = "") -> str:
    """The doses of an edit and of its control; nothing if they are not known."""
    doses = [row.get(name, math.nan) for name in ("dose", f"dose_control{suffix}")]
    return "" if any(map(pd.isna, doses)) else f" (dose {' against '.join(map(format_dose, doses))})"


def format_dose(share: float) -> str:
    """A dose in percent, with two digits or more; `–` if it is not known."""
    digits = 0 if share >= 0.1 or share == 0 else 1 if share >= 0.01 else 2
    return "–" if pd.isna(share) else f"{100 * share:.{digits}f} %"


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
