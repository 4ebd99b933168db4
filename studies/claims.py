"""What the twins' runs say of published claims: each claim a difference of differences, question by question.

    rows = claims(Path("runs/results"), ["arm", "mdm", "mdm-adapted"])      # Markdown

A claim compares what a change does to the MDM with what it does to the ARM: (MDM changed − MDM) − (ARM changed − ARM),
on the questions both were asked, with its 95 % interval. It holds where the interval lies above zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from shown import markdown

from floatscope.analysis.estimate import difference, estimate
from floatscope.analysis.evaluations import open_evaluation

ARM = "arm"
CEILING = 0.97


@dataclass(frozen=True)
class Claim:
    says: str
    changed: tuple[str, ...]  # folders whose mean is taken, the twin's name to be put at {}
    plain: tuple[str, ...]
    measured: str


CLAIMS = [
    Claim("MDMs gain more from passages", ("reading-5-5/{}",), ("reading-5-0/{}",), "five passages − none"),
    Claim("MDMs bear more distractors", ("noise/{}/random-8",), ("noise/{}/random-0",), "8 random distractors − none"),
    Claim(
        "MDMs bear contradicting passages",
        ("noise/{}/counterfactual-2",),
        ("noise/{}/random-0",),
        "2 counterfactual − none",
    ),
    Claim(
        "MDMs mind the place of the gold passage less",
        ("position/{}/gold-2",),
        ("position/{}/gold-0", "position/{}/gold-4"),
        "middle − mean of first and last",
    ),
    Claim(
        "MDMs mind the order of hops less", ("layout/{}/reversed",), ("layout/{}/adjacent",), "reversed − adjacent hops"
    ),
    Claim(
        "MDMs mind the place of the question less",
        ("query/{}/middle",),
        ("query/{}/after",),
        "question amid the passages − after",
    ),
    Claim("MDMs bear typos better", ("dirty/{}/typos-0.1",), ("reading-5-5/{}",), "a letter in ten wrong − none"),
]


def claims(out: Path, names: Sequence[str]) -> Iterator[str]:
    others = [name for name in names if name != ARM]
    if ARM not in names or not others:
        return
    heads = ["claim", "measured as", *names, *(f"{name} − {ARM}" for name in others), "verdict"]
    lines = [heads]
    for claim in CLAIMS:
        moved = {name: change(out, claim, name) for name in names}
        apart = [difference(moved[name], moved[ARM], "change").iloc[0] for name in others]
        means = [100 * estimate(moved[name], "change").iloc[0]["mean"] for name in names]
        cells = [f"{100 * a['mean']:+.1f} [{100 * a['low']:.1f}, {100 * a['high']:.1f}]" for a in apart]
        flat = all(moved[name][["before", "after"]].mean().min() > CEILING for name in names)
        lines.append([claim.says, claim.measured, *(f"{m:+.1f}" for m in means), *cells, verdict(apart, others, flat)])
    yield markdown(lines)


def change(out: Path, claim: Claim, name: str) -> pd.DataFrame:
    """A row per question: right before, right after, and the difference."""
    after, before = (
        pd.concat([open_evaluation(out / folder.format(name)).table for folder in folders])
        .groupby("sample")["acc"]
        .mean()
        for folders in (claim.changed, claim.plain)
    )
    table = pd.DataFrame({"before": before, "after": after}).dropna().reset_index()
    return table.assign(change=table["after"] - table["before"])


def verdict(apart: Sequence[pd.Series], names: Sequence[str], flat: bool) -> str:
    if flat:
        return "cannot be told: all are at the ceiling"
    told = [_sign(each) for each in apart]
    if len(set(told)) == 1:
        return told[0]
    return "; ".join(f"{name}: {each}" for name, each in zip(names, told, strict=True))


def _sign(apart: pd.Series) -> str:
    if apart["low"] > 0:
        return "holds"
    return "the opposite" if apart["high"] < 0 else "not told apart"
