"""Published claims, tested on the twins' runs: each claim is a difference in differences, paired by question.

    rows = write_claims(Path("runs/results"), ["arm", "mdm", "mdm-adapted"])      # Markdown

A claim compares the effect of a change on the MDM with its effect on the ARM: (MDM changed − MDM) − (ARM changed − ARM)
on the questions that both answered, with its 95 % CI. It is supported if the interval lies above zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from markdown_tables import markdown_table

from floatscope.analysis.evaluations import open_evaluation
from floatscope.analysis.statistics import difference, estimate

ARM = "arm"
CEILING = 0.97


@dataclass(frozen=True)
class Claim:
    """A claim and the runs that test it."""

    statement: str
    changed: tuple[str, ...]  # folders with {} for the twin's name; the mean over them is used
    unchanged: tuple[str, ...]
    measure: str


CLAIMS = [
    Claim("MDMs gain more from passages", ("reading-5-5/{}",), ("reading-5-0/{}",), "five passages − none"),
    Claim(
        "MDMs are more robust to distractors",
        ("noise/{}/random-8",),
        ("noise/{}/random-0",),
        "8 random distractors − none",
    ),
    Claim(
        "MDMs are more robust to contradicting passages",
        ("noise/{}/counterfactual-2",),
        ("noise/{}/random-0",),
        "2 counterfactual − none",
    ),
    Claim(
        "MDMs are less sensitive to the position of the gold passage",
        ("position/{}/gold-2",),
        ("position/{}/gold-0", "position/{}/gold-4"),
        "middle − mean of first and last",
    ),
    Claim(
        "MDMs are less sensitive to the order of hops",
        ("layout/{}/reversed",),
        ("layout/{}/adjacent",),
        "reversed − adjacent hops",
    ),
    Claim(
        "MDMs are less sensitive to the position of the question",
        ("query/{}/middle",),
        ("query/{}/after",),
        "question between the passages − after them",
    ),
    Claim(
        "MDMs are more robust to typos", ("dirty/{}/typos-0.1",), ("reading-5-5/{}",), "one letter in ten wrong − none"
    ),
]


def write_claims(out: Path, names: Sequence[str]) -> Iterator[str]:
    """Yield the table of claims, if the ARM and another twin are among `names`."""
    others = [name for name in names if name != ARM]
    if ARM not in names or not others:
        return
    lines = [["claim", "measured as", *names, *(f"{name} − {ARM}" for name in others), "verdict"]]
    for claim in CLAIMS:
        changes = {name: read_changes(out, claim, name) for name in names}
        differences = [difference(changes[name], changes[ARM], "change").iloc[0] for name in others]
        means = [100 * estimate(changes[name], "change").iloc[0]["mean"] for name in names]
        cells = [f"{100 * d['mean']:+.1f} [{100 * d['low']:.1f}, {100 * d['high']:.1f}]" for d in differences]
        at_ceiling = all(changes[name][["before", "after"]].mean().min() > CEILING for name in names)
        verdict = judge_all(differences, others, at_ceiling)
        lines.append([claim.statement, claim.measure, *(f"{m:+.1f}" for m in means), *cells, verdict])
    yield markdown_table(lines)


def read_changes(out: Path, claim: Claim, name: str) -> pd.DataFrame:
    """Return a row per question: correct before, correct after, and the difference."""
    after, before = (
        pd.concat([open_evaluation(out / folder.format(name)).table for folder in folders])
        .groupby("sample")["acc"]
        .mean()
        for folders in (claim.changed, claim.unchanged)
    )
    table = pd.DataFrame({"before": before, "after": after}).dropna().reset_index()
    return table.assign(change=table["after"] - table["before"])


def judge_all(differences: Sequence[pd.Series], names: Sequence[str], at_ceiling: bool) -> str:
    """Return one verdict if all twins agree, else one for each."""
    if at_ceiling:
        return "inconclusive: all are at the ceiling"
    verdicts = [judge(difference) for difference in differences]
    if len(set(verdicts)) == 1:
        return verdicts[0]
    return "; ".join(f"{name}: {verdict}" for name, verdict in zip(names, verdicts, strict=True))


def judge(difference: pd.Series) -> str:
    """Return the verdict of one interval."""
    if difference["low"] > 0:
        return "supported"
    return "contradicted" if difference["high"] < 0 else "inconclusive"
